from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_distplus.checkpoint import Manifest
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.cli.__main__ import main


def save(path: Path, step: int) -> Path:
    info = Manifest(global_step=step, epoch=0, strategy="test")
    commit(path, lambda stage: stage.write_bytes(b"weights of step %d" % step), info)
    return path


def test_a_folder_of_sound_checkpoints_is_a_table_by_step_and_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "step=10.ckpt", 10)
    save(tmp_path / "step=9.ckpt", 9)
    assert main(["verify", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.index("step=9.ckpt") < output.index("step=10.ckpt")
    assert output.count("valid") == 3
    assert output.splitlines()[-1] == "2 checkpoints, 0.0 MB: 2 valid"


def test_names_are_whole_and_json_is_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "-".join(["a-name-that-is-longer-than-a-terminal"] * 4) + ".ckpt"
    save(tmp_path / name, 3)
    assert main(["verify", str(tmp_path)]) == 0
    header, line, total = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["checkpoint", "verdict", "step"]
    assert line.split()[:3] == [name, "valid", "3"]
    assert total == "1 checkpoint, 0.0 MB: 1 valid"
    assert main(["verify", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["verdict"], found["global_step"], found["findings"]) == ("valid", 3, [])
    assert found["path"] == str(tmp_path / name)


def test_damaged_torn_and_foreign_checkpoints_are_named_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "damaged.ckpt", 1).write_bytes(b"weights of step 7")
    save(tmp_path / "torn.ckpt", 2)
    (tmp_path / ".distplus" / "torn.ckpt" / "commit").unlink()
    (tmp_path / "foreign.ckpt").write_bytes(b"x")
    (tmp_path / "config.yaml").write_text("not a checkpoint")
    assert main(["verify", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    for name, verdict in {"damaged": "damaged", "torn": "torn", "foreign": "unverified"}.items():
        row = next(line for line in output.splitlines() if f"{name}.ckpt" in line)
        assert verdict in row
    assert "config.yaml" not in output
    assert "expected XXH3 digest" in output


def test_quick_overlooks_what_only_reading_shows(tmp_path: Path) -> None:
    path = save(tmp_path / "one.ckpt", 1)
    path.write_bytes(b"weights of step 7")
    assert main(["verify", "--quick", str(path)]) == 0
    assert main(["verify", str(path)]) == 1


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_checkpoint_at_all_is_exit_code_1(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / name)]) == 1
    assert name in capsys.readouterr().err


def test_a_folder_of_runs_names_where_its_checkpoints_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "checkpoints" / "step=9.ckpt", 9)
    assert main(["verify", str(tmp_path)]) == 1
    assert f"There are some in {tmp_path / 'checkpoints'}." in capsys.readouterr().err


def test_deep_reads_the_crc_of_what_has_no_manifest_and_quarantine_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.ckpt").write_bytes(b"PK\x03\x04 torn")
    save(tmp_path / "bad.ckpt", 1).write_bytes(b"torn")
    save(tmp_path / "bad.ckpt", 2)
    assert main(["verify", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "BadZipFile" not in output
    assert "1 torn or damaged in quarantine" in output
    assert main(["verify", "--deep", str(tmp_path)]) == 1
    assert "BadZipFile" in capsys.readouterr().out
