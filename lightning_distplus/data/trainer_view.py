"""What a data module asks of a Trainer: ranks, and whether its settings allow exact windows."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_distplus.data.position import Position
from lightning_distplus.world import DataParallel

__all__ = ["data_parallel", "is_overfitting", "of_first_epoch", "refuse_changing_windows", "say_if_finished"]

_log = logging.getLogger(__name__)


def is_overfitting(trainer: Any) -> bool:
    """Whether every epoch has the batches of the first one."""
    return bool(trainer.overfit_batches > 0)


def of_first_epoch(position: Position) -> Position:
    """The same place in the first epoch: its batches are those of every epoch."""
    return replace(position, epoch=0, consumed_samples=position.offset)


def data_parallel(trainer: Any) -> DataParallel:
    """The data-parallel place of this process; tensor-parallel peers have the same."""
    kwargs = trainer.distributed_sampler_kwargs if trainer is not None else None
    return DataParallel(rank=kwargs["rank"], size=kwargs["num_replicas"]) if kwargs else DataParallel()


def refuse_changing_windows(trainer: Any, accumulation: int, num_batches: int | float) -> None:
    """Refuses what would change the number of micro-batches in an optimizer step during the run.

    Raises:
        ValueError: A callback does so, or the strategy carries the rest of an epoch into the next one.
    """
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ValueError(
            "GradientAccumulationScheduler changes the global batch during the run, and the order is cut by it. "
            "Use Trainer(accumulate_grad_batches=...)."
        )
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        length = min(num_batches, limit)
    else:
        length = num_batches if isinstance(num_batches, float) else int(num_batches * limit)
    if trainer.strategy.handles_gradient_accumulation and accumulation > 1 and length % accumulation:
        raise ValueError(
            f"An epoch of {length} micro-batches (limit_train_batches={limit}) does not divide by the accumulation of "
            f"{accumulation}, and {type(trainer.strategy).__name__} would carry the rest into the next epoch. "
            "Choose a multiple."
        )


def say_if_finished(trainer: Any, position: Position) -> None:
    """Warns where a loaded position leaves nothing to do: Lightning then returns at once, without a word."""
    limits = {"max_steps": (trainer.max_steps, position.steps), "max_epochs": (trainer.max_epochs, position.epoch)}
    for name, (limit, done) in limits.items():
        if limit is not None and 0 <= limit <= done and trainer.is_global_zero:
            _log.warning(
                "training is already finished: the checkpoint stands after step %d, epoch %d, sample %d, and %s is %d; "
                "raise it to go on",
                position.steps, position.epoch, position.consumed_samples, name, limit,
            )  # fmt: skip
