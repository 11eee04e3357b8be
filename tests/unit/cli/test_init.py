from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_distplus.cli.__main__ import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_of_forty_lines_trains_and_goes_on_where_it_was(tmp_path: Path) -> None:
    assert main(["init"]) == 0
    text = (tmp_path / "train.py").read_text()
    assert len(text.splitlines()) <= 42
    for steps, resumed in ((100, False), (150, True)):
        (tmp_path / "train.py").write_text(re.sub(r"max_steps=\d+", f"max_steps={steps}", text))
        ended = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=70)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        restored = re.search(r"Restored all states from the checkpoint at \S*/checkpoints/step=100\.ckpt", ended.stderr)
        assert (restored is not None) is resumed
        assert (tmp_path / "checkpoints" / f"step={steps}.ckpt").exists()


def test_tinyllama_is_the_files_of_its_recipe_and_the_commands_that_use_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "tinyllama", "--strategy", "ddp"]) == 0
    told = capsys.readouterr().out
    assert "launch --nproc 2 -- fit --config tiny_cpu.yaml --config ddp.yaml" in told
    merged = OmegaConf.merge(OmegaConf.load(tmp_path / "tiny_cpu.yaml"), OmegaConf.load(tmp_path / "ddp.yaml"))
    assert merged.trainer.strategy.class_path == "lightning_distplus.ResilientDDP"
    assert main(["init", "tinyllama", "--size", "1.1b"]) == 0
    assert (tmp_path / "tinyllama_1.1b.yaml").exists()
    assert (tmp_path / "fsdp.yaml").exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fsdp.yaml").write_text("mine")
    assert main(["init", "tinyllama"]) == 1
    assert "fsdp.yaml exists here" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp.yaml"]
    assert main(["init", "tinyllama", "--overwrite"]) == 0
    assert (tmp_path / "fsdp.yaml").read_text() != "mine"
