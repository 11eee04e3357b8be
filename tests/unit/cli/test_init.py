from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_distplus.cli.__main__ import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_tinyllama_is_the_files_of_its_recipe_and_the_commands_that_use_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "tinyllama", "--strategy", "ddp"]) == 0
    told = capsys.readouterr().out
    assert "launch --nproc 2 -- fit --config tiny_cpu.yaml --config ddp.yaml" in told
    merged = OmegaConf.merge(OmegaConf.load(tmp_path / "tiny_cpu.yaml"), OmegaConf.load(tmp_path / "ddp.yaml"))
    assert merged.trainer.strategy.class_path == "lightning_distplus.ResilientDDP"
    assert main(["init", "tinyllama", "--size", "1.1b"]) == 0
    assert "launch --nnodes 2 --nproc 8 --rdzv HOST:29400 --job-id tinyllama -- fit" in capsys.readouterr().out
    assert (tmp_path / "tinyllama_1.1b.yaml").exists()
    assert (tmp_path / "fsdp.yaml").exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fsdp.yaml").write_text("mine")
    assert main(["init", "tinyllama"]) == 1
    assert "fsdp.yaml exists here" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp.yaml"]
    assert main(["init", "tinyllama", "--overwrite"]) == 0
    assert (tmp_path / "fsdp.yaml").read_text() != "mine"
