"""``timeout="auto"``: measured in the first steps on all ranks, put on every group, kept in the checkpoint."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_distplus import _compat
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from lightning_distplus.timeouts import Calibration, Phase
from tests.distributed import jobs

FACTOR = 200
STEPS_TO_REVIEW = 5
LATE_STEP = 12


class ReadsTheGroup(Callback):
    """Reads the time-out of the default group behind each step; the end of a run has another one."""

    def on_train_batch_end(self, *_: Any) -> None:
        (group,) = _compat.process_groups()
        self.found_s = _compat.read_group_timeout(group).total_seconds()


def fit(folder: str, max_steps: int, ckpt_path: str | None) -> dict[str, Any]:
    reads = ReadsTheGroup()
    strategy = jobs.strategy("ResilientDDP", timeout="auto")
    trainer = jobs.trainer(strategy, 2, folder, max_steps=max_steps, callbacks=[reads])
    trainer.fit(jobs.Model(), jobs.loader(400), ckpt_path=ckpt_path)
    trainer.save_checkpoint(str(Path(folder) / f"{max_steps}.ckpt"))
    return {"step": trainer.strategy.timeouts.step.total_seconds(), "group": reads.found_s}


def test_auto_measures_the_steps_and_a_resumed_run_knows_from_the_start(tmp_path: Path) -> None:
    before = spawn(fit, 2, args=(str(tmp_path), 40, None)).check()
    assert before.results[0] == {"step": 600.0, "group": 660.0}  # not yet settled: the static default bounds a hang
    after = spawn(fit, 2, args=(str(tmp_path), 60, None)).check()
    assert after.results == {0: {"step": 60.0, "group": 70.0}, 1: {"step": 60.0, "group": 70.0}}
    resumed = spawn(fit, 2, args=(str(tmp_path), 70, str(tmp_path / "60.ckpt"))).check()
    assert resumed.results[1]["step"] == 60.0
    settled = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "calibrated"]
    assert {event["deadlines_s"]["step"] for event in settled} == {60.0}
    reasons = [event["reasons"]["step"] for event in settled]
    assert sum("times the longest" in reason for reason in reasons) == 2
    assert sum("from the checkpoint" in reason for reason in reasons) == 2


class SlowsDown(Callback):
    """Once the deadlines have settled, rank 1 takes three times as long as the longest step; one step is late."""

    def __init__(self) -> None:
        self.pause_s = 0.05
        self.deadlines_s: list[float] = []
        """Before each step; 0 before the first review."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        calibration = trainer.strategy.measured.calibration
        self.deadlines_s.append(calibration.deadlines_s.get("step", 0.0))
        if batch_idx == STEPS_TO_REVIEW:
            self.pause_s = 3 * self.deadlines_s[-1] / FACTOR
        if trainer.global_rank == 1:
            time.sleep(self.pause_s)
            if batch_idx == LATE_STEP:
                calibration.note(Phase.STEP, self.deadlines_s[-1] / 2)


def slow_down(folder: str) -> list[float]:
    strategy, slows = jobs.strategy("ResilientDDP", timeout="auto"), SlowsDown()
    strategy.measured.calibration = Calibration(
        factor=FACTOR, floors=dict.fromkeys(Phase, timedelta(seconds=1)), gates=STEPS_TO_REVIEW, review_every_s=0
    )
    trainer = jobs.trainer(strategy, 2, folder, max_steps=LATE_STEP + 2, callbacks=[slows])
    trainer.fit(jobs.Model(), jobs.loader())
    return slows.deadlines_s


def test_the_deadline_of_a_run_that_becomes_three_times_slower_grows_on_all_ranks_and_ends_nothing(
    tmp_path: Path,
) -> None:
    run = spawn(slow_down, 2, args=(str(tmp_path),)).check()
    assert run.results[0] == run.results[1]
    deadlines_s = run.results[0]
    first, second, last = deadlines_s[STEPS_TO_REVIEW], deadlines_s[2 * STEPS_TO_REVIEW], deadlines_s[-1]
    assert deadlines_s[:STEPS_TO_REVIEW] == [0.0] * STEPS_TO_REVIEW
    assert first >= FACTOR * 0.05
    assert second >= min(2.9 * first, 600)
    assert (deadlines_s[LATE_STEP], last) == (second, 600.0)  # a late step is reviewed at once; the default is the most
    assert not list(tmp_path.glob("distplus/verdict-*"))
    told = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "calibrated"]
    assert [event["deadlines_s"]["step"] for event in told if event["rank"] == 0] == sorted({first, second, last})
    assert all("200 times the longest" in event["reasons"]["step"] for event in told)
