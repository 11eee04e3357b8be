"""Saves that fail, on one rank or by a disk: all ranks hear of it, training goes on, the next save is the retry.

Rows C3 and C4.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import newest_valid
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.errors import ExitCode, PeerFailed, PreflightError, SaveFailed
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.folders import disk, read_only
from tests.pairs import kept, kept_rows

NOBODY = 65534


class Large(jobs.Model):
    """State of 1.5 MB, so that a disk of 6 MB holds two checkpoints and not three."""

    def grow(self) -> None:
        self.ballast = torch.nn.Parameter(torch.zeros(128, 1024))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.ballast.sum()


class Spoils(Callback):
    """Breaks this rank's disk before the save of one step, and repairs it before the next one."""

    def __init__(self, fault: str, rank: int, step: int, folder: str) -> None:
        self.fault, self.rank, self.step, self.folder = fault, rank, step, Path(folder)
        self.limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.answers_eio = self.has_fired = False

    def sync(self, descriptor: int) -> None:
        if self.answers_eio:
            raise OSError(5, "Input/output error")
        os.fsync(descriptor)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        trainer.strategy.saves.sync = self.sync

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        # The save of a step comes at the end of its batch.
        if trainer.global_rank != self.rank:
            return
        if trainer.global_step == self.step - 1:
            self.has_fired = True
            self.spoil()
        elif trainer.global_step == self.step:
            self.repair()

    def spoil(self) -> None:
        if self.fault == "EIO":
            self.answers_eio = True
        elif self.fault == "short write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, self.limit[1]))
        elif self.fault == "EACCES":
            self.folder.chmod(0o500)
            os.seteuid(NOBODY if os.geteuid() == 0 else os.geteuid())

    def repair(self) -> None:
        self.answers_eio = False
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)
        if self.fault == "EACCES":
            os.seteuid(os.getuid())
            self.folder.chmod(0o700)


def run(name: str, fault: str, rank: int, folder: str, policy: str = "continue") -> dict[str, Any]:
    """Saves at steps 2, 4 and 6 with ``save_top_k=1``; the save of step 4 fails; the newest one as of step 5."""
    seen: list[str] = []
    sees = jobs.At("on_train_batch_start", lambda *_: seen.append(str(newest_valid(folder))), step=5)
    spoils = Spoils(fault, rank, 4, folder)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    strategy = jobs.strategy(name, on_save_failure=policy)
    trainer = jobs.trainer(strategy, 2, folder, max_steps=6, callbacks=[spoils, sees, saver])
    try:
        trainer.fit(jobs.Model(), jobs.loader())
    except SaveFailed as error:
        return {"error": str(error), "ranks": error.ranks, "step": trainer.global_step}
    return {
        "step": trainer.global_step,
        "failed": strategy.num_failed_saves,
        "best": Path(saver.best_model_path).name,
        "seen": seen,
        "fired": spoils.has_fired,
    }


FAILURES = [
    ("ResilientDDP", "EIO", 0),
    ("ResilientFSDP", "short write", 1),
    ("ResilientModelParallel", "EACCES", 1),
    ("ResilientDeepSpeed", "short write", 1),
    ("ResilientDDP", "short write", 0),
    ("ResilientModelParallel", "EIO", 1),
    ("ResilientDeepSpeed", "EACCES", 0),
]


@pytest.mark.parametrize(("name", "fault", "rank"), kept_rows(FAILURES, FAILURES[:4]))
def test_training_goes_on_over_a_failed_save_and_the_next_one_retries(
    name: str, fault: str, rank: int, tmp_path: Path
) -> None:
    result = spawn(run, 2, args=(name, fault, rank, str(tmp_path)), deadline="50s").check()
    old = tmp_path / "step=2.ckpt"
    for number, outcome in result.results.items():
        assert outcome["fired"] is (number == rank)
        assert (outcome["step"], outcome["failed"], outcome["best"]) == (6, 1, "step=6.ckpt")
        assert outcome["seen"] == [str(old)]
        assert f"rank {rank} failed first" in result.logs[number]
        assert "training goes on without the checkpoint" in result.logs[number]
    assert newest_valid(tmp_path) == tmp_path / "step=6.ckpt"
    assert not old.exists()
    assert not (tmp_path / "step=4.ckpt").exists()


def test_by_policy_a_failed_save_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    result = spawn(run, 2, args=("ResilientFSDP", "EIO", 0, str(tmp_path), "raise"), deadline="50s").check()
    for outcome in result.results.values():
        assert (outcome["ranks"], outcome["step"]) == ([0], 4)
        assert "Input/output error" in outcome["error"]
    assert newest_valid(tmp_path) == tmp_path / "step=2.ckpt"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "size=6m") as folder:
        yield folder


def fill_up(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as opened:
        while opened.write(bytes(1 << 16)):
            pass


def fill_a_disk(name: str, disk: str, folder: str) -> dict[str, Any]:
    """Saves to a folder, with the best of one kept by a monitor; ``disk`` is full while step 4 is saved."""
    tempfile.tempdir = disk
    ballast, best = Path(disk) / "somebody's.log", []
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max", save_last="link"
    )

    def make_room(trainer: Any, *_: Any) -> None:
        best.append(Path(saver.best_model_path).name)
        if trainer.is_global_zero:
            ballast.unlink()

    fills = jobs.At("on_train_batch_start", lambda *_: fill_up(ballast), rank=0, step=3)
    empties = jobs.At("on_train_batch_start", make_room, step=5)
    strategy = jobs.strategy(name)
    jobs.fit(strategy, 2, folder, Large(), max_steps=6, callbacks=[fills, empties, saver])
    return {"failed": strategy.num_failed_saves, "then": best, "at end": sorted(saver.best_k_models)}


@pytest.mark.parametrize("name", kept(["ResilientDDP", "ResilientFSDP"], ["ResilientFSDP"]))
def test_a_full_disk_costs_one_checkpoint_and_not_the_run(name: str, small_disk: Path) -> None:
    result = spawn(fill_a_disk, 2, args=(name, str(small_disk), str(small_disk)), deadline="50s").check()
    newest = small_disk / "step=6.ckpt"
    for outcome in result.results.values():
        assert outcome == {"failed": 1, "then": ["step=2.ckpt"], "at end": [str(newest)]}
    assert "No space left on device" in result.logs[0] + result.logs[1]
    assert newest_valid(small_disk) == newest
    assert read_manifest(small_disk / "last.ckpt").global_step == 6
    assert {path.name for path in small_disk.iterdir()} == {".distplus", "distplus", "last.ckpt", "step=6.ckpt"}


def test_a_full_temporary_folder_does_not_matter(small_disk: Path, tmp_path: Path) -> None:
    # Lightning writes a single-file checkpoint to $TMPDIR first; here it is written where it shall be.
    folder = tmp_path / "checkpoints"
    result = spawn(fill_a_disk, 2, args=("ResilientDDP", str(small_disk), str(folder)), deadline="50s").check()
    for outcome in result.results.values():
        assert outcome == {"failed": 0, "then": ["step=4.ckpt"], "at end": [str(folder / "step=6.ckpt")]}


# -- a host that cannot save: said before the first collective, on all ranks -------------------------------------------


def fit_in(rank: int, folder: str, notes: str) -> None:
    begin = time.monotonic()
    try:
        jobs.fit("ResilientDDP", 2, folder, max_steps=1)
    except PreflightError as error:
        formed = torch.distributed.is_initialized()
        Path(notes, f"rank{rank}").write_text(f"{time.monotonic() - begin} {formed}\n{error}")
        raise


def test_a_folder_that_takes_no_file_ends_the_job_before_its_first_collective(tmp_path: Path) -> None:
    full = tmp_path / "full"
    with read_only(full):
        run = spawn(fit_in, 2, args=(str(full), str(tmp_path)), deadline="40s")
    assert run.exit_codes == dict.fromkeys(range(2), int(ExitCode.PREFLIGHT)), run.logs
    for rank in range(2):
        first, text = (tmp_path / f"rank{rank}").read_text().split("\n", 1)
        seconds, was_formed = first.split()
        assert float(seconds) < 5
        assert was_formed == "False"
        assert f"{full} cannot be written: Read-only file system" in text
        assert ", rank 0: writing into " in text
        assert '"disk": "off"' in text


# -- row C4: state that one rank cannot write --------------------------------------------------------------------------


class FailsToPickle:
    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def save_twice(name: str, folder: str) -> tuple[str, list[int], int]:
    """What the second save says, and the step at which a resume from its place begins."""

    def spoil(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["bad"] = FailsToPickle()

    model, path = jobs.Model(), f"{folder}/last.ckpt"
    bad = jobs.At("on_save_checkpoint", spoil, rank=0, step=4)
    trainer = jobs.fit(name, 2, folder, model, max_steps=2, callbacks=[bad])
    trainer.save_checkpoint(path)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, jobs.loader())
    with pytest.raises(PeerFailed) as failed:
        trainer.save_checkpoint(path)
    resumed = jobs.fit(name, 2, folder, ckpt_path=path, max_steps=2)
    return str(failed.value), failed.value.ranks, resumed.global_step


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_previous_one(name: str, tmp_path: Path) -> None:
    run = spawn(save_twice, 2, args=(name, str(tmp_path)), deadline="60s").check()
    for message, ranks, resumed_at in run.results.values():
        assert (ranks, resumed_at) == ([0], 2)
        assert "No space left on device" in message
    assert newest_valid(tmp_path) == tmp_path / "last.ckpt"
