"""What the marks of the watchdog add to a step of the training thread.

Two ways. Marks are counted in a run, and one mark of each kind is timed alone, as the fastest of many: that is steady
on a busy machine. And all marks are toggled inside one fit on two processes, each pinned to a core: blocks of steps
with marks, without them, and without them again (A/A), in random order. The watchdog's own threads run in all three.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader

from benchmarks import jobs
from benchmarks.figures import Figure
from benchmarks.strategy_cost import Toggle, differences, measure
from lightning_distplus import ResilientDDP
from lightning_distplus.strategies.collectives import Collectives
from lightning_distplus.strategies.marking import MarkingProfiler, StepTimes
from lightning_distplus.testing import spawn
from lightning_distplus.trainer_gate import Moment
from lightning_distplus.watchdog import Marks

__all__ = ["ToggleMarks", "count", "run"]

_TARGET_US = 20.0
_TARGET_MARK_US = 2.0
_STEPS = 20


def run(quick: bool) -> list[Figure]:
    """One fit that counts, and one with 100 alternations (quick: 20)."""
    marks_per_step, (mark_us, added_us) = spawn(count, 2, deadline="60s").check().results[0], _one_mark_us()
    own_us, own_marks = _own_marks_us()
    in_actions = marks_per_step - own_marks
    figures = [
        Figure(name="marks in a step", value=marks_per_step, unit=""),
        Figure(name="one mark", value=mark_us, unit="us", target=_TARGET_MARK_US, note="Lightning's profiling too"),
        Figure(
            name="one mark, beyond Lightning's profiling", value=added_us, unit="us", note="the fastest of 200 runs"
        ),
        Figure(name="the strategy's own in a step", value=own_us, unit="us/step", note="with the naming of peers"),
        Figure(name="all of a step", value=in_actions * mark_us + own_us, unit="us/step", target=_TARGET_US),
        Figure(name="the same, beyond Lightning's profiling", value=in_actions * added_us + own_us, unit="us/step"),
    ]
    ranks = measure("ResilientDDP", 20 if quick else 100, toggle=ToggleMarks)
    for what, quantity in (("CPU time", "cpu_us"), ("wall time", "wall_us")):
        for arm in ("ours", "control"):
            values = [value for blocks in ranks.values() for value in differences(blocks, quantity, arm)]
            name = f"toggled, {what}" if arm == "ours" else f"A/A, {what}"
            note = f"{len(values)} alternations"
            figures.append(Figure.of(name, values, "us/step", note=note))
    return figures


class _Counting(Callback):
    """Reads the number of the mark at the ends of two steps."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """The same place in every step."""
        self.numbers.append(trainer.strategy.marks.read().number)  # type: ignore[attr-defined]


def count(rank: int) -> float:
    """Marks in a step of this rank, on average."""
    counting = _Counting()
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        trainer = jobs.trainer(
            ResilientDDP(monitor=False, preemption=False), folder, max_steps=_STEPS, callbacks=[counting]
        )
        trainer.fit(jobs.Model(), DataLoader(torch.randn(8 * _STEPS, jobs.NUM_FEATURES), batch_size=8))
    first, last = counting.numbers[2], counting.numbers[-1]
    return (last - first) / (len(counting.numbers) - 3)


def _one_mark_us() -> tuple[float, float]:
    """Half of an action, which begins and ends with a mark: all of it, and what it adds to Lightning's own profiler."""
    inner = PassThroughProfiler()
    marking = MarkingProfiler(inner, Marks(phase=lambda: "step"), StepTimes(lambda *_, **__: None))
    ours, theirs = (min(_seconds_of_actions(profiler) for _ in range(200)) for profiler in (marking, inner))
    return ours / _ACTIONS / 2 * 1e6, (ours - theirs) / _ACTIONS / 2 * 1e6


_ACTIONS = 500


def _own_marks_us() -> tuple[float, int]:
    """What the strategy's methods add to those of its parent in a step, and how many marks they set."""
    marks = Marks(phase=lambda: "step")
    collectives = Collectives(marks)

    def nothing(*arguments: Any) -> None:
        pass

    def ours(batch_idx: int) -> None:
        marks.set(f"the gate at {Moment.STEP}")
        collectives.optimizer_step(nothing)
        collectives.step("training_step", nothing, None, batch_idx)
        collectives.backward(nothing)

    def theirs(batch_idx: int) -> None:
        nothing()
        nothing(None, batch_idx)
        nothing()

    best_us = [min(_seconds_of_steps(step) for _ in range(200)) / _ACTIONS * 1e6 for step in (ours, theirs)]
    before = marks.read().number
    ours(0)
    return best_us[0] - best_us[1], marks.read().number - before


def _seconds_of_steps(step: Callable[[int], None]) -> float:
    begin = time.perf_counter()
    for number in range(_ACTIONS):
        step(number)
    return time.perf_counter() - begin


def _seconds_of_actions(profiler: Any) -> float:
    begin = time.perf_counter()
    for _ in range(_ACTIONS):
        with profiler.profile("[Callback]Some.on_train_batch_end"):
            pass
    return time.perf_counter() - begin


class _NoMarks(Marks):
    """Sets nothing."""

    def set(self, operation: str) -> None:
        pass

    def enter(self, operation: str) -> str:
        return ""

    def leave(self, outer: str) -> None:
        pass

    def back_to(self, after: str) -> None:
        pass


class ToggleMarks(Toggle):
    """The gate stays in all arms; the Trainer's profiler and the strategy's marks change at it."""

    def arms(self, trainer: pl.Trainer) -> dict[str, Any]:
        """With all marks, and twice without any."""
        strategy: Any = trainer.strategy
        gate, marking, marks, nothing = (
            strategy.on_train_batch_start, trainer.profiler, strategy.marks, _NoMarks(phase=lambda: ""),
        )  # fmt: skip

        def with_marks(batch: Any, batch_idx: int) -> None:
            trainer.profiler, strategy.marks, strategy.collectives.marks = marking, marks, marks
            gate(batch, batch_idx)

        def without(batch: Any, batch_idx: int) -> None:
            trainer.profiler, strategy.marks, strategy.collectives.marks = marking.inner, nothing, nothing
            gate(batch, batch_idx)

        return {"ours": with_marks, "stock": without, "control": without}
