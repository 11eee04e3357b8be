"""Saves in the background: what is saved is the state of its step, and what goes wrong with it reaches all ranks.

Row C6.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.errors import SaveFailed
from lightning_distplus.strategies.saving import Writes
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import kept, kept_rows


class HeldDisk(Callback):
    """An fsync that waits while steps are trained, and may then fail: a save is in flight for as long as we like.

    Args:
        release_at: The step at whose begin the disk goes on.
        fails_on: The rank whose disk then answers EIO once.
    """

    def __init__(self, release_at: int, fails_on: int | None = None) -> None:
        self.release_at, self.fails_on = release_at, fails_on
        self.released = threading.Event()
        self.digests: dict[int, str] = {}
        self.in_flight: list[int] = []
        self.failed_at: list[int] = []
        self.num_fired = 0

    def sync(self, descriptor: int) -> None:
        assert self.released.wait(30)
        if self.rank == self.fails_on and not self.num_fired:
            self.num_fired += 1
            raise OSError(5, "Input/output error")
        os.fsync(descriptor)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.rank = trainer.global_rank
        trainer.strategy.saves.sync = self.sync
        finish = Writes.finish

        def held(writes: Writes) -> None:  # nothing is written before the weights have changed
            assert self.released.wait(30)
            finish(writes)

        Writes.finish = held

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if trainer.strategy.saves.in_flight is not None:
            self.in_flight.append(step)
        if trainer.strategy.num_failed_saves and not self.failed_at:
            self.failed_at.append(step)
        if step == self.release_at:
            self.released.set()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.digests[trainer.global_step] = weights_digest(module)


SAVED = [*jobs.STRATEGIES[:3], "zero1", "zero2", "zero3"]


def run(name: str, folder: str, release_at: int, fails_on: int | None, policy: str, max_steps: int) -> dict[str, Any]:
    """Saves at step 2 and at every fourth step after it, with ``save_top_k=1`` and a link to the last one."""
    disk = HeldDisk(release_at, fails_on)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last="link")
    strategy = jobs.strategy(name, async_save=True, on_save_failure=policy)
    trainer = jobs.trainer(strategy, 2, folder, max_steps=max_steps, callbacks=[disk, saver])
    found: dict[str, Any] = {}
    try:
        trainer.fit(jobs.Model(), jobs.loader())
    except SaveFailed as error:
        found = {"error": str(error), "ranks": error.ranks}
    return {
        **found,
        "step": trainer.global_step,
        "failed": strategy.num_failed_saves,
        "failed_at": disk.failed_at,
        "in_flight": disk.in_flight,
        "digests": disk.digests,
        "fired": disk.num_fired,
    }


def save_and_load(name: str, folder: str) -> tuple[dict[str, Any], str]:
    """The save of step 2 is held until step 3 has begun: the weights change before anything is committed."""
    saved, loaded = run(name, folder, 3, None, "continue", 5), []
    looks = jobs.At("on_train_start", lambda trainer, module: loaded.append(weights_digest(module)))
    jobs.fit(jobs.strategy(name), 2, folder, ckpt_path=newest_valid(folder), max_steps=5, callbacks=[looks])
    return saved, loaded[0]


@pytest.mark.parametrize("name", kept(SAVED, ["ResilientDDP", "ResilientModelParallel", "zero3"]))
def test_what_is_saved_is_the_state_of_its_step_though_training_goes_on_meanwhile(name: str, tmp_path: Path) -> None:
    result = spawn(save_and_load, 2, args=(name, str(tmp_path)), deadline="60s").check()
    for outcome, loaded in result.results.values():
        assert (outcome["step"], outcome["failed"]) == (5, 0)
        assert outcome["in_flight"][:2] == [2, 3]
        assert loaded == outcome["digests"][4] != outcome["digests"][5]
    assert newest_valid(tmp_path) == tmp_path / "step=4.ckpt"
    assert not (tmp_path / "step=2.ckpt").exists()
    assert read_manifest(tmp_path / "last.ckpt").global_step == 4


FAILING = [("ResilientDDP", 0), ("ResilientFSDP", 1), ("ResilientDeepSpeed", 1)]


@pytest.mark.parametrize(("name", "fails_on"), kept_rows(FAILING, FAILING[1:]))
def test_an_error_in_the_background_reaches_all_ranks_in_a_later_step(name: str, fails_on: int, tmp_path: Path) -> None:
    result = spawn(run, 2, args=(name, str(tmp_path), 3, fails_on, "continue", 6), deadline="50s").check()
    for rank, outcome in result.results.items():
        assert outcome["fired"] == (rank == fails_on)
        assert (outcome["step"], outcome["failed"]) == (6, 1)
        assert outcome["failed_at"] == result.results[0]["failed_at"] != []
        assert f"rank {fails_on} failed first" in result.logs[rank]
        assert "training goes on without the checkpoint" in result.logs[rank]
    assert newest_valid(tmp_path) == tmp_path / "step=6.ckpt"
    assert not (tmp_path / "step=2.ckpt").exists()
    assert read_manifest(tmp_path / "last.ckpt").global_step == 6


def test_an_error_in_the_last_save_is_raised_at_the_end_of_the_fit(tmp_path: Path) -> None:
    # Released when step 2 begins: the save of step 2, the only one, fails when all steps but one are done.
    result = spawn(run, 2, args=("ResilientDDP", str(tmp_path), 2, 0, "continue", 3), deadline="50s").check()
    for outcome in result.results.values():
        assert (outcome["step"], outcome["ranks"]) == (3, [0])
        assert "Input/output error" in outcome["error"]
    assert newest_valid(tmp_path) is None


def die_while_saving(name: str, folder: str) -> None:
    disk = HeldDisk(release_at=2)

    def hold(trainer: Any, *_: Any) -> None:
        trainer.strategy.saves.settle()
        disk.released.clear()

    def die(trainer: Any, *_: Any) -> None:  # the save of step 4 is in flight
        assert trainer.strategy.saves.in_flight is not None
        os.kill(os.getpid(), signal.SIGKILL)

    deeds = [jobs.At("on_train_batch_start", deed, step=step) for deed, step in ((hold, 3), (die, 5))]
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    jobs.fit(jobs.strategy(name, async_save=True), 2, folder, max_steps=9, callbacks=[disk, *deeds, saver])


@pytest.mark.parametrize("name", kept(["ResilientModelParallel", "zero2"], ["zero2"]))
def test_killed_with_a_save_in_flight_the_one_before_is_the_newest(name: str, tmp_path: Path) -> None:
    result = spawn(die_while_saving, 2, args=(name, str(tmp_path)), deadline="50s")
    assert set(result.exit_codes.values()) == {-signal.SIGKILL}
    assert newest_valid(tmp_path) == tmp_path / "step=2.ckpt"
    assert verify(tmp_path / "step=2.ckpt").ok
