"""What a data module asks of a Trainer: ranks, and whether its settings allow exact windows."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_distplus.data.position import Position
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

__all__ = [
    "data_parallel",
    "epoch_length",
    "is_overfitting",
    "of_first_epoch",
    "refuse_changing_windows",
    "refuse_past_end",
]

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
    length, limit = epoch_length(trainer, num_batches), trainer.limit_train_batches
    if trainer.strategy.handles_gradient_accumulation and accumulation > 1 and length % accumulation:
        raise ValueError(
            f"An epoch of {length} micro-batches (limit_train_batches={limit}) does not divide by the accumulation of "
            f"{accumulation}, and {type(trainer.strategy).__name__} would carry the rest into the next epoch. "
            "Choose a multiple."
        )


def epoch_length(trainer: Any, num_batches: int | float) -> int | float:
    """Micro-batches of an epoch under ``limit_train_batches``; infinite where only the data knows."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(num_batches, limit)
    return num_batches if isinstance(num_batches, float) else int(num_batches * limit)


def refuse_past_end(trainer: Any, position: Position) -> None:
    """Refuses a loaded position past the end of the run; warns where it is the end, and nothing is left to do.

    Lightning returns at once in both cases, without a word. A job that is started again when it is done ends well.

    Raises:
        DatasetMismatch: The run is shorter than what the checkpoint has done.
    """
    limits = {"max_steps": (trainer.max_steps, position.steps), "max_epochs": (trainer.max_epochs, position.epoch)}
    where = f"step {position.steps}, epoch {position.epoch}, sample {position.consumed_samples}"
    for name, (limit, done) in limits.items():
        if limit is None or limit < 0 or limit > done:
            continue
        if limit < done:
            raise DatasetMismatch(
                f"training already finished: the checkpoint stands after {where}, and this run ends before, with "
                f"{name}={limit}. Raise {name} above {done} to go on, or load the weights into a new run."
            )
        if trainer.is_global_zero:
            text = "training is already finished: the checkpoint stands after %s, and %s is %d; raise it to go on"
            _log.warning(text, where, name, limit)
