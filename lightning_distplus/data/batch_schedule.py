"""Batch-size warm-up: the global batch as a function of the samples consumed so far."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

__all__ = ["BatchSchedule", "Window", "require_fit_for_schedule", "tell_engine"]

_MAX_SHOWN = 4  # stages in a message


@dataclass(frozen=True)
class BatchSchedule:
    """The sizes of the global batches.

    An optimizer step that begins at sample g has the size of the last stage that begins at g or before; a stage that
    begins inside a step waits for its end. So from any place where a step begins all later steps follow, without a
    history.

    Args:
        stages: (first sample, size), ascending, the first at sample 0.

    Raises:
        ValueError: They are not.
    """

    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.stages]
        if not firsts or firsts[0] != 0 or any(b <= a for a, b in itertools.pairwise(firsts)):
            raise ValueError(
                f"The stages of a batch schedule begin at samples {firsts}; the first begins at 0, and each other "
                "after the one before it. Write global_batch_size as [[0, size], [first sample, size], ...]."
            )
        if (smallest := min(size for _, size in self.stages)) < 1:
            raise ValueError(f"A stage of the batch schedule has a global batch of {smallest}; it is at least 1.")

    @classmethod
    def ramp(cls, start: int, increment: int, samples: int, size: int) -> BatchSchedule:
        """Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES`` up to ``--global-batch-size SIZE``.

        Raises:
            ValueError: The increments do not lead from ``start`` to ``size``.
        """
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(
                f"rampup_batch_size is [{start}, {increment}, {samples}]: a start and an increment of at least 1, and "
                "the number of samples over which the global batch grows."
            )
        num_increments, rest = divmod(size - start, increment)
        if rest or num_increments < 0:
            raise ValueError(
                f"rampup_batch_size=[{start}, {increment}, {samples}] does not lead to global_batch_size={size}: "
                f"{size} - {start} is no multiple of {increment}. Change one of the three."
            )
        stages = {0: start}
        for number in range(1, num_increments + 1):
            stages[-(-number * samples // num_increments)] = start + number * increment
        return cls(tuple(sorted(stages.items())))

    def size_at(self, sample: int) -> int:
        """Size of a step that begins at ``sample``."""
        return self.stages[self._stage(sample)][1]

    def sizes_from(self, sample: int) -> list[int]:
        """Sizes of the stages from ``sample`` on."""
        return [size for _, size in self.stages[self._stage(sample) :]]

    def whole_steps(self, first: int, num_samples: int) -> tuple[int, int]:
        """Steps that begin at ``first`` and end within ``num_samples``: their number, and that of their samples."""
        num_steps, here, end = 0, first, first + num_samples
        for until, size in self._stretches(first):
            steps = (end - here) // size
            if until is not None:
                steps = min(steps, _steps_until(until - here, size))
            num_steps += steps
            here += steps * size
            if until is None or here < until:
                break
        return num_steps, here - first

    def samples_of(self, first: int, num_steps: int) -> int:
        """Samples of ``num_steps`` steps, the first of which begins at ``first``."""
        here, left = first, num_steps
        for until, size in self._stretches(first):
            steps = left if until is None else min(left, _steps_until(until - here, size))
            here += steps * size
            left -= steps
        return here - first

    def rest(self, sample: int) -> str:
        """16 hex digits over the stages after ``sample``; empty where the size does not change any more."""
        stages = self.stages[self._stage(sample) :]
        return xxhash.xxh3_64(repr(stages[1:]).encode()).hexdigest() if len(stages) > 1 else ""

    def __str__(self) -> str:
        shown = [f"{size} from sample {first} on" for first, size in self.stages[:_MAX_SHOWN]]
        more = f", ... {self.stages[-1][1]} in the end" if len(self.stages) > _MAX_SHOWN else ""
        return ", ".join(shown) + more

    def _stage(self, sample: int) -> int:
        return bisect_right([first for first, _ in self.stages], sample) - 1

    def _stretches(self, sample: int) -> Sequence[tuple[int | None, int]]:
        """(sample at which the next stage is due or None, size) of each stage from ``sample`` on."""
        stages = self.stages[self._stage(sample) :]
        return [
            (stages[place + 1][0] if place + 1 < len(stages) else None, size) for place, (_, size) in enumerate(stages)
        ]


def _steps_until(num_samples: int, size: int) -> int:
    """Steps of a stage after which the next one is due."""
    return max(0, -(-num_samples // size))


class Window(int):
    """``Trainer.accumulate_grad_batches`` in a stage of a schedule: the number of micro-batches of a step.

    Lightning steps where the number of micro-batches in the epoch, modulo this, is 0. That assumes windows of one size
    since the beginning of the epoch; here the number is counted from the beginning of the stage.
    """

    first_batch: int

    def __new__(cls, size: int, first_batch: int = 0) -> Window:
        """``first_batch``: number of micro-batches of the epoch before the stage."""
        window = super().__new__(cls, size)
        window.first_batch = first_batch
        return window

    def __rmod__(self, num_batches: int) -> int:
        return (num_batches - self.first_batch) % int(self)


def require_fit_for_schedule(trainer: Any, schedule: BatchSchedule) -> None:
    """What a changing accumulation needs of the Trainer.

    Raises:
        ValueError: It lacks that.
    """
    strategy, present = trainer.strategy, trainer.accumulate_grad_batches
    whole = "Under a schedule of global batches the run is one epoch"
    if strategy.handles_gradient_accumulation and not hasattr(type(strategy), "deepspeed_engine"):
        problem = (
            f"{type(strategy).__name__} accumulates by itself, and cannot be told when a window ends. Use another "
            f"strategy, or global_batch_size={schedule.stages[-1][1]}"
        )
    elif not trainer.lightning_module.automatic_optimization:
        problem = "With manual optimization the Trainer does not accumulate. Leave the schedule out"
    elif present != 1 and not isinstance(present, Window):
        problem = f"Trainer(accumulate_grad_batches={present}) contradicts the schedule, from which it follows. Omit it"
    elif trainer.max_steps < 0:
        problem = f"{whole}, whose length is known from max_steps alone. Pass Trainer(max_steps=...)"
    elif trainer.limit_train_batches != 1.0 or trainer.overfit_batches > 0:
        problem = f"{whole} of max_steps. Leave limit_train_batches and overfit_batches out"
    else:
        return
    raise ValueError(f"{problem}. (The schedule: {schedule}.)")


def tell_engine(trainer: Any, batch_idx: int) -> None:
    """Tells DeepSpeed whether this micro-batch is the last of its window, before each training step under a schedule.

    Its engine would count windows of one size. It is left with an accumulation of 1, so that it does not divide the
    gradients a second time: Lightning has divided the loss by the micro-batches of the window.
    """
    if not trainer.strategy.handles_gradient_accumulation:
        return
    engine, window = trainer.strategy.deepspeed_engine, trainer.accumulate_grad_batches
    if engine.gradient_accumulation_steps() != 1:
        engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    if hasattr(
        engine.optimizer, "gradient_accumulation_steps"
    ):  # where it looks for the sum when it offloads to the CPU
        engine.optimizer.gradient_accumulation_steps = int(window)
    engine.set_gradient_accumulation_boundary((batch_idx + 1) % window == 0)
