"""What a job has saved, told by the ledger: its fits are apart, and so are other jobs in the same folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_distplus.checkpoint import Manifest, gather_alone
from lightning_distplus.checkpoint.catalog import JobSaves, num_fits
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.errors import CheckpointCorrupt
from lightning_distplus.events import EventLog


def save(path: Path, step: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    info = Manifest(global_step=step, epoch=0, strategy="test")
    commit(path, lambda stage: stage.write_bytes(b"weights"), info=info, gather=gather_alone, rank=0)
    return path


def attempt(home: Path, number: int, *fits: list[Path], run_id: str = "job", rank: int = 0) -> None:
    """What the process of a rank writes: the begin of each fit, and the checkpoints that it has saved."""
    with EventLog(home, rank, attempt=number, run_id=run_id) as events:
        events.write("start", function="validate")
        for paths in fits:
            events.write("start", function="fit")
            for path in paths:
                events.write("saved", path=str(path), global_step=1)


def newest(home: Path, number: int | None = None) -> Path | None:
    return JobSaves.of_fit(home, "job", number).newest_valid()


def test_the_newest_valid_checkpoint_of_the_job_is_found_in_all_its_folders(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a" / "1.ckpt", 1), save(tmp_path / "b" / "2.ckpt", 2)
    attempt(tmp_path, 0, [first, second])
    assert newest(tmp_path) == second
    second.write_bytes(b"torn")
    assert newest(tmp_path) == first
    first.write_bytes(b"torn")
    with pytest.raises(CheckpointCorrupt, match=r"2 checkpoint\(s\) \(1.ckpt, 2.ckpt\).*none of them sound.*distplus"):
        newest(tmp_path)
    first.unlink()
    second.unlink()
    assert newest(tmp_path) is None


def test_a_checkpoint_that_nobody_has_lived_to_note_counts(tmp_path: Path) -> None:
    attempt(tmp_path, 0, [save(tmp_path / "1.ckpt", 1)])
    unnoted = save(tmp_path / "2.ckpt", 2)
    assert newest(tmp_path) == unnoted


def test_other_jobs_do_not_count(tmp_path: Path) -> None:
    older = save(tmp_path / "9.ckpt", 9)
    attempt(tmp_path, 0, [older], run_id="other")
    assert newest(tmp_path) is None
    time.sleep(0.01)
    attempt(tmp_path, 0, [])
    assert newest(tmp_path) is None
    attempt(tmp_path, 0, [save(tmp_path / "1.ckpt", 1)])
    assert newest(tmp_path) == tmp_path / "1.ckpt"
    assert JobSaves.of_fit(tmp_path, "job").passed_over(tmp_path) == [older]


def test_each_fit_of_a_script_has_its_own_checkpoints(tmp_path: Path) -> None:
    one, two, three = (save(tmp_path / f"{step}.ckpt", step) for step in (1, 2, 3))
    attempt(tmp_path, 0, [one], [two])
    attempt(tmp_path, 1, [], [three])
    assert [newest(tmp_path, number) for number in (1, 2, 3)] == [one, three, None]
    assert newest(tmp_path) == three
    assert [num_fits(tmp_path, "job", number, 0) for number in (0, 1, 2)] == [2, 2, 0]
    assert num_fits(tmp_path, "job", 0, rank=1) == 0


def test_a_run_that_was_stopped_before_a_save_and_a_remote_save_name_no_checkpoint_here(tmp_path: Path) -> None:
    with EventLog(tmp_path, 0, run_id="job") as events:
        events.write("start", function="fit")
        events.write("preempted", path=None)
        events.write("saved", path="s3://bucket/1.ckpt")
    assert JobSaves.of_fit(tmp_path, "job").paths == ()
