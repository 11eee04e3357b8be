from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_distplus.cli.__main__ import main
from lightning_distplus.events import EventLog
from lightning_distplus.timeouts import Calibration
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.verdict import judge


def a_run(folder: Path) -> Path:
    """A run whose deadlines were measured, and which has ended with a verdict."""
    home = folder / "distplus"
    calibration = Calibration()
    calibration.settle([{"step": 0.5}, {"step": 4.0, "validation": 0.25}])
    with EventLog(home, 0) as log:
        log.write("saved", path="a.ckpt", global_step=10)
        log.write("calibrated", **calibration.to_event())
        log.write("failed", error="RuntimeError: the first line\nthe second")
    ranks = [
        Evidence(rank=rank, host="node0", pid=7, state="running", answers=True, waits=rank == 0, operation="forward")
        for rank in range(2)
    ]
    judge(dict(enumerate(ranks)), "hang-1").write(home, "node0")
    return folder


def test_a_run_is_shown_with_its_errors_its_deadlines_and_their_reasons_and_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(a_run(tmp_path))]) == 0
    output = capsys.readouterr().out
    assert "1 checkpoint saved" in output
    assert "rank 0 failed at" in output
    assert "RuntimeError: the first line\n" in output
    assert "step              80 s   20 times the longest, 4.00 s on rank 1\n" in output
    assert "validation        60 s   20 times the longest, 0.25 s on rank 1; that is the least\n" in output
    assert "checkpoint      3600 s   the default: none in the first 50 steps\n" in output
    assert "RANK 1 HANGS" in output
    assert "verdict-hang-1-node0.json" in output


def test_all_saves_of_a_long_run_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(tmp_path, 0) as log:
        log.write("start", world_size=1)
        for step in range(60):
            log.write("saved", path=f"{step}.ckpt", global_step=step)
    assert main(["report", str(tmp_path)]) == 0
    assert "60 checkpoints saved" in capsys.readouterr().out


def test_a_verdict_of_another_version_is_named_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = a_run(tmp_path) / "distplus"
    (home / "verdict-later-node0.json").write_text(json.dumps({"version": 2}))
    assert main(["report", str(home)]) == 0
    output = capsys.readouterr().out
    assert "version 2 of a verdict; this program reads version 1." in output
    assert "RANK 1 HANGS" in output


def test_a_folder_without_a_run_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "neither events nor verdicts" in capsys.readouterr().err


def dumps_of_a_pair(folder: Path) -> Path:
    """Rank 0 waits in a call to which rank 1 has not come."""
    call = {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 3,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "state": "scheduled",
        "retired": False,
        "is_p2p": False,
        **{name: [] for name in ("input_dtypes", "output_dtypes", "output_sizes")},
        "input_sizes": [[4]],
    }
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for rank in range(2):
        dump = {"version": "2.10", "pg_config": config, "entries": [] if rank == 1 else [call]}
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
    return folder


def test_dumps_of_any_job_are_judged_in_words_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(dumps_of_a_pair(tmp_path))
    assert main(["report", "--dumps", folder]) == 0
    assert capsys.readouterr().out.startswith("RANK 1 HANGS\n  rank 0 waiting\n")
    assert main(["report", "--dumps", folder, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["culprits"], told["is_decided"], told["collectives"]["0"]["seq"]) == ([1], True, 3)


def test_a_wrong_folder_and_a_wrong_call_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--dumps", str(tmp_path)]) == 1
    assert "holds no dump of torch's Flight Recorder" in capsys.readouterr().err
    for wrong, says in (([], "name either RUN or --dumps"), ([str(tmp_path), "--mtbf", "soon"], "--mtbf")):
        with pytest.raises(SystemExit) as exit_:
            main(["report", *wrong])
        assert exit_.value.code == 2
        assert says in capsys.readouterr().err
