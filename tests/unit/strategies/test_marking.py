"""The marks around Lightning's actions with the user's profiler within them, and the counts of a Trainer's loops."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch.utils.data import DataLoader, IterableDataset

from lightning_distplus.events import EventLog, read_ledger
from lightning_distplus.strategies.marking import MarkingProfiler, ProtectionCosts, StepTimes, progress_of
from lightning_distplus.watchdog import Marks


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(32)


class Asks(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None, str, str]] = []

    def note(self, trainer: Any, *_: Any) -> None:
        found = progress_of(trainer)
        assert found is not None
        self.seen.append((found.done, found.total, found.unit, found.whole))
        trainer.should_stop = trainer.max_steps < 0 and found.total is None

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = note


def run(folder: Path, method: str, loader: Any = None, **arguments: Any) -> list[tuple[int, int | None, str, str]]:
    asks = Asks()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, enable_model_summary=False, callbacks=[asks], **quiet, **arguments
    )
    assert progress_of(trainer) is None
    loaders = [] if loader is None else [loader]
    getattr(trainer, method)(BoringModel(), *loaders)
    return asks.seen


def test_every_stage_counts_its_own_batches(tmp_path: Path) -> None:
    named = {"limit_train_batches": 2, "limit_val_batches": 3, "max_epochs": 1, "num_sanity_val_steps": 1}
    validation = [(done, 3, "batches", "the validation") for done in range(3)]
    epoch = [(done, 2, "batches", "the epoch") for done in range(2)]
    assert run(tmp_path, "fit", **named) == [(0, 1, "batches", "the validation"), *epoch, *validation]
    assert run(tmp_path, "validate", limit_val_batches=3) == validation
    assert run(tmp_path, "test", limit_test_batches=2) == [(done, 2, "batches", "the test") for done in range(2)]
    assert run(tmp_path, "predict", limit_predict_batches=1) == [(0, 1, "batches", "the prediction")]


def test_a_run_that_ends_before_its_epoch_counts_steps_and_an_endless_one_knows_no_end(tmp_path: Path) -> None:
    named = {"limit_val_batches": 0, "accumulate_grad_batches": 2}
    steps = [(done, 2, "steps", "the run") for done in (0, 0, 1, 1)]
    assert run(tmp_path, "fit", max_steps=2, **named) == steps
    endless = run(tmp_path, "fit", DataLoader(Endless()), max_steps=-1, max_epochs=-1, **named)
    assert endless == [(0, None, "batches", "the epoch")]


def test_an_action_is_marked_at_its_begin_and_end_also_within_itself() -> None:
    marks = Marks(phase=lambda: "step")
    profiler = MarkingProfiler(PassThroughProfiler(), marks, StepTimes(print))
    seen = []
    with profiler.profile("outer"):
        seen.append(marks.read())
        with profiler.profile("inner"), profiler.profile("outer"):
            seen.append(marks.read())
        seen.append(marks.read())
    assert [mark.operation for mark in seen] == ["outer", "outer", "after inner"]
    assert [mark.number for mark in seen] == [1, 3, 5]
    assert marks.read().operation == "after outer"


def test_the_users_profiler_measures_what_it_measures_without_the_marks() -> None:
    marks, users = Marks(phase=lambda: "step"), SimpleProfiler()
    profiler = MarkingProfiler(users, marks, StepTimes(print))
    for _ in range(2):
        with pytest.raises(KeyError), profiler.profile("an action that fails"):
            raise KeyError
    assert len(profiler.recorded_durations["an action that fails"]) == 2


def test_where_an_action_has_failed_is_kept_while_the_callbacks_hear_of_it() -> None:
    marks = Marks(phase=lambda: "step")
    profiler = MarkingProfiler(PassThroughProfiler(), marks, StepTimes(print))
    with pytest.raises(StopIteration), profiler.profile("train_dataloader_next"):
        raise StopIteration
    assert marks.read().operation == "after train_dataloader_next"  # the end of the data is no failure
    with pytest.raises(KeyError), profiler.profile("run_training_batch"), profiler.profile("a hook"):
        raise KeyError
    for callback in ("FirstWord", "ModelCheckpoint"):
        with profiler.profile(f"[Callback]{callback}.on_exception"):
            assert marks.read().operation == f"[Callback]{callback}.on_exception"
    assert marks.at_failure.operation == "a hook"
    marks.forget()
    assert marks.at_failure.operation == "after [Callback]ModelCheckpoint.on_exception"


def test_actions_with_a_number_in_their_name_are_not_kept_for_ever() -> None:
    profiler = MarkingProfiler(PassThroughProfiler(), Marks(phase=lambda: "step"), StepTimes(print))
    for number in range(3000):
        with profiler.profile(f"batch {number}"):
            pass
    assert len(profiler._actions) <= 1000


def test_a_window_of_steps_is_one_line_of_at_most_100_bytes_a_step_and_says_where_the_time_went(tmp_path: Path) -> None:
    with EventLog(tmp_path, 63, attempt=9, run_id="0123456789ab") as log:
        times = StepTimes(log.write)
        profiler = MarkingProfiler(PassThroughProfiler(), Marks(phase=lambda: "step"), times)
        times.begin(100, {"samples": 4096, "tokens": 8_388_608})
        began_at = time.perf_counter()
        for step in range(100, 120):
            times.pass_gate(step, waited_s=0.001)
            times.take_loss({"loss": torch.tensor(0.123456789, requires_grad=True)})
            profiler.start("[_TrainingEpochLoop].train_dataloader_next")
            profiler.stop("[_TrainingEpochLoop].train_dataloader_next")
            with (
                profiler.profile("[LightningModule]Net.optimizer_step"),
                profiler.profile("[Strategy]ResilientDDP.training_step"),
            ):
                time.sleep(0.06)
        elapsed_s = time.perf_counter() - began_at
        times.add("validation", 12.345)
        times.add("checkpoint", 12.345)
        times.write()
    windows = read_ledger(log.path)
    assert sum(one["steps"] for one in windows) == 18  # the first step belongs to the set-up, the last one is not done
    assert windows[-1]["global_step"] == 119
    assert log.path.stat().st_size / 18 <= 100
    assert windows[0]["loss"] == 0.123457
    assert windows[0]["tokens"] == 2048 * windows[0]["samples"] == 8_388_608 * windows[0]["steps"]
    assert sum(one["wait_s"] for one in windows) == pytest.approx(0.018)
    assert 18 * 0.06 <= sum(one["forward_s"] for one in windows) <= elapsed_s
    for one in windows:
        assert one["forward_s"] >= 0.06 * one["steps"] - 0.001
        assert one.get("optimizer_s", 0.0) < one["forward_s"] / 2  # it took no time of its own


def test_the_times_of_a_step_cost_40_microseconds_at_most() -> None:
    times = StepTimes(lambda *_, **__: None)
    profiler = MarkingProfiler(PassThroughProfiler(), Marks(phase=lambda: "step"), times)
    times.begin(0, {})
    began = time.thread_time()
    for step in range(2000):
        times.pass_gate(step, 0.0)
        profiler.start("[_TrainingEpochLoop].train_dataloader_next")
        profiler.stop("[_TrainingEpochLoop].train_dataloader_next")
        for action in ("[Strategy]A.training_step", "[Strategy]A.backward", "[LightningModule]B.optimizer_step"):
            with profiler.profile(action):
                pass
    assert (time.thread_time() - began) / 2000 < 40e-6


def test_what_the_protections_cost_is_told_after_64_steps_then_twice_as_many() -> None:
    told: list[dict[str, float]] = []
    marks = Marks(phase=lambda: "step")
    costs = ProtectionCosts(lambda kind, **fields: told.append(fields), marks)
    monitor = SimpleNamespace(spent_s=5.0)
    costs.begin(monitor)
    for step in range(200):
        for _ in range(10):
            marks.set("x")
        costs.ledger_s += 1e-5
        monitor.spent_s += 1e-4
        costs.pass_gate(waited_s=2e-4 if step % 4 else 1e-4)
    assert [one["steps"] for one in told] == [64, 128]
    costs.write()
    assert told[-1] == {"steps": 200, "gate_us": 100.0, "monitor_us": 100.0, "ledger_us": 10.0} | {
        "watchdog_us": told[-1]["watchdog_us"]
    }
    assert 0 < told[-1]["watchdog_us"] < 1000


def test_a_run_of_a_few_steps_tells_no_costs() -> None:
    costs = ProtectionCosts(lambda *_, **__: pytest.fail("told"), Marks(phase=lambda: "step"))
    costs.begin(None)
    costs.pass_gate(1e-4)
    costs.write()
