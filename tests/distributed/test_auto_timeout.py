"""``timeout="auto"``: measured in the first steps on all ranks, put on every group, kept in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_distplus import _compat
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs


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
