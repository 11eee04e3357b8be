"""How far a Trainer has come, read off its loops by another thread; the training thread does nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_distplus.watchdog import Progress

__all__ = ["last_batch", "progress_of"]


def progress_of(trainer: Any) -> Progress | None:
    """The batches of the present epoch, validation, test or prediction, or the steps of a run that ends sooner.

    Returns:
        None where the Trainer does nothing that is counted; it may be between two stages at any moment.
    """
    with suppress(AttributeError, TypeError, RuntimeError):
        if trainer.training:
            return _training(trainer)
        if trainer.sanity_checking or trainer.validating:
            is_within_fit = trainer.state.fn == "fit"
            loop = trainer.fit_loop.epoch_loop.val_loop if is_within_fit else trainer.validate_loop
            return _batches("the validation", loop.batch_progress, loop.max_batches)
        if trainer.testing:
            return _batches("the test", trainer.test_loop.batch_progress, trainer.test_loop.max_batches)
        if trainer.predicting:
            return _batches("the prediction", trainer.predict_loop.batch_progress, trainer.predict_loop.max_batches)
    return None


def last_batch(trainer: Any) -> int | None:
    """The index of the last batch of the epoch that this rank has begun; None outside of a fit."""
    if trainer is None or trainer.state.fn != "fit":
        return None
    return max(0, int(trainer.fit_loop.epoch_loop.batch_progress.current.ready) - 1)


def _training(trainer: Any) -> Progress:
    batches = _batches("the epoch", trainer.fit_loop.epoch_loop.batch_progress, [trainer.num_training_batches])
    steps_left = trainer.max_steps - trainer.global_step
    if trainer.max_steps < 0 or (
        batches.total is not None and batches.total - batches.done <= steps_left * trainer.accumulate_grad_batches
    ):
        return batches
    return Progress(unit="steps", whole="the run", done=trainer.global_step, total=trainer.max_steps)


def _batches(whole: str, progress: Any, of_loaders: Sequence[float]) -> Progress:
    total, done = sum(of_loaders), progress.current.completed
    is_known = done <= total < float("inf")
    return Progress(unit="batches", whole=whole, done=done, total=int(total) if is_known else None)
