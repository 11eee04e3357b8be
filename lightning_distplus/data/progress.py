"""Where the Trainer's loops stand: read for a checkpoint, and set when a run is resumed.

Lightning saves its counters as they are at the moment of the save: inside an accumulation window, before or after the
validation, before or after the end of the epoch; and takes a different way back from each, of which some skip the
validation, the end of the epoch, or a whole epoch. Here the counters are set to one of two states instead: before the
first batch of an epoch, or after a completed window with what is still due after it. Lightning's loops are taken by
their public attributes, as 2.6 defines them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_distplus.data.batch_schedule import Window
from lightning_distplus.data.plan import Geometry
from lightning_distplus.data.position import Position

__all__ = ["Cursor"]

_log = logging.getLogger(__name__)


@dataclass
class _Validation:
    """A validation run in this epoch: after how many micro-batches in total, and with how many batches before it."""

    after: int
    batches_before: int
    is_finished: bool = False


class Cursor:
    """The position of a Trainer in the data.

    Args:
        trainer: A Lightning Trainer that fits.
        geometry: Batch sizes of this fit.
        is_end: Whether iterable data ended before the micro-batch of a number, counted over the whole run; None where
            the Trainer knows how many micro-batches an epoch has.
        consumed_samples: What earlier fits of the same Trainer consumed.
    """

    def __init__(
        self,
        trainer: Any,
        geometry: Geometry,
        *,
        is_end: Callable[[int], bool] | None = None,
        consumed_samples: int = 0,
    ) -> None:
        self.trainer = trainer
        self.geometry = geometry
        self.is_end = is_end
        self._is_placed = False
        self._validations: list[_Validation] = []
        # The position at which iteration began: all later ones follow from it by counting micro-batches.
        self._anchor = Position(
            epoch=trainer.current_epoch,
            consumed_samples=consumed_samples,
            total_batches=trainer.fit_loop.epoch_loop.batch_progress.total.processed,
            steps=trainer.global_step,
        )

    def position(self) -> Position:
        """Where a run that is resumed now would go on."""
        anchor, fit = self._anchor, self.trainer.fit_loop
        counters = fit.epoch_loop.batch_progress
        num_done = counters.total.processed - anchor.total_batches
        batches = anchor.batches + num_done
        has_ended = self.is_end is not None and batches > 0 and self.is_end(counters.total.processed)
        is_epoch_done = has_ended or batches >= self.trainer.num_training_batches
        num_whole, num_steps = self.geometry.whole_windows(anchor.consumed_samples, num_done)
        if is_epoch_done:  # on the last batch of an epoch Lightning steps whether the window is full or not
            num_steps += num_whole < num_done
        else:
            num_done = num_whole
        num_samples = num_done * self.geometry.micro_step
        here = Position(
            epoch=anchor.epoch,
            batches=anchor.batches + num_done,
            offset=anchor.offset + num_samples,
            consumed_samples=anchor.consumed_samples + num_samples,
            total_batches=anchor.total_batches + num_done,
            steps=anchor.steps + num_steps,
            is_epoch_done=has_ended,
        )
        is_epoch_closed = is_epoch_done and fit.epoch_progress.current.processed > anchor.epoch
        is_epoch_left = counters.current.processed > counters.current.started  # on_train_batch_start returned -1
        if is_epoch_closed or is_epoch_left:
            return replace(here, epoch=anchor.epoch + 1, batches=0, offset=0, is_epoch_done=False)
        return self._with_validation(here)

    def begin_epoch(self) -> Position:
        """The position at which an epoch's iteration begins, asked for just before its first batch."""
        fit = self.trainer.fit_loop
        counters = fit.epoch_loop.batch_progress
        epoch, batches = fit.epoch_progress.current.processed, counters.current.ready
        is_placed_here = self._is_placed and (epoch, batches) == (self._anchor.epoch, self._anchor.batches)
        if not is_placed_here:
            self._anchor = replace(
                self.position(),
                epoch=epoch,
                batches=batches,
                offset=batches * self.geometry.micro_step,
                total_batches=counters.total.processed,
                is_epoch_done=False,
            )
            self._validations = []
        self._is_placed = False
        return self._anchor

    def place(self, position: Position) -> None:
        """Puts the Trainer's loops at a position, in ``on_train_start``.

        By then its loaders are set up and its states are restored, and the loop over batches has not begun.
        """
        fit = self.trainer.fit_loop
        loop = fit.epoch_loop
        position = replace(position, batches=min(position.batches, self.trainer.num_training_batches))
        is_inside = position.batches > 0
        for tracker in (fit.epoch_progress.total, fit.epoch_progress.current):
            _set(tracker, done=position.epoch, begun=position.epoch + is_inside)
        _set(loop.batch_progress.total, done=position.total_batches)
        _set(loop.batch_progress.current, done=position.batches)
        loop.batch_progress.is_last_batch = _is_at_end(self.trainer, position)
        _drop_unfinished_window(loop.automatic_optimization.optim_progress.optimizer)
        is_due = is_inside and _validation_is_due(self.trainer, position)
        _place_validation(loop.val_loop.batch_progress, position, is_pending=is_due and not position.is_validated)
        # Where a validation is due, the loop passes the end of the last batch once more and counts its step there.
        loop.on_load_checkpoint({"_batches_that_stepped": position.steps - is_due})
        fit.restarting = True
        loop.restarting = is_inside
        fit.update_restart_stage()
        self._anchor, self._is_placed = position, True
        self._validations = []
        if position.is_validated:
            done = _Validation(position.total_batches, position.validation_batches, is_finished=True)
            self._validations.append(done)

    def is_placed_at_end(self) -> bool:
        """Whether the run was resumed after the last batch of an epoch, and is still there."""
        fit = self.trainer.fit_loop
        is_here = fit.epoch_loop.batch_progress.total.processed == self._anchor.total_batches
        is_open = fit.epoch_progress.current.processed == self._anchor.epoch
        return self._is_placed and is_here and is_open and _is_at_end(self.trainer, self._anchor)

    def begin_window(self) -> None:
        """Follows a schedule of global batches, at the first micro-batch of a step."""
        here = self.position()
        now = self.geometry.at(here.consumed_samples)
        before = self.trainer.accumulate_grad_batches
        if isinstance(before, Window) and before == now.accumulation:
            return
        self.trainer.accumulate_grad_batches = Window(now.accumulation, first_batch=here.batches)
        if isinstance(before, Window) and self.trainer.is_global_zero:
            _log.info("global batch %s from sample %d, step %d on", now, here.consumed_samples, here.steps)

    def begin_validation(self) -> None:
        """A validation begins, not the sanity check."""
        loop = self.trainer.fit_loop.epoch_loop
        total = loop.val_loop.batch_progress.total
        total.ready = total.started = total.completed  # a pending validation counted its start when it was placed
        after = loop.batch_progress.total.processed
        self._validations.append(_Validation(after=after, batches_before=total.completed))

    def end_validation(self) -> None:
        """The validation has run."""
        self._validations[-1].is_finished = True

    def _with_validation(self, position: Position) -> Position:
        runs = self._validations
        is_validated = any(run.is_finished and run.after >= position.total_batches for run in runs)
        replayed = [run for run in runs if run.after > position.total_batches or not run.is_finished]
        total = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        num_batches = replayed[0].batches_before if replayed else total.completed
        return replace(position, is_validated=is_validated, validation_batches=num_batches)


def _validation_is_due(trainer: Any, position: Position) -> bool:
    """Whether the Trainer validates after the last batch before ``position``."""
    every = trainer.check_val_every_n_epoch
    if not trainer.enable_validation or trainer.val_check_batch is None:
        return False
    if every is not None and (position.epoch + 1) % every:
        return False
    if trainer.val_check_batch == float("inf"):
        return _is_at_end(trainer, position)
    num_done = position.total_batches if every is None else position.batches
    return bool(num_done % trainer.val_check_batch == 0)


def _is_at_end(trainer: Any, position: Position) -> bool:
    return position.is_epoch_done or bool(position.batches == trainer.num_training_batches)


def _place_validation(progress: Any, position: Position, *, is_pending: bool) -> None:
    """A pending validation has begun and has finished no batch: the loop then runs it from its start."""
    num_done = position.validation_batches
    _set(progress.total, done=num_done, begun=num_done + is_pending)
    if is_pending:
        _set(progress.current, done=0, begun=1)
    else:
        _set(progress.current, done=progress.current.completed)


def _drop_unfinished_window(optimizer: Any) -> None:
    """A window that is begun again has no ``zero_grad`` yet: as many of them as steps."""
    pairs = ((optimizer.step.total, optimizer.zero_grad.total), (optimizer.step.current, optimizer.zero_grad.current))
    for step, zero_grad in pairs:
        step.ready = step.completed
        for name in ("ready", "started", "completed"):
            setattr(zero_grad, name, min(getattr(zero_grad, name), step.completed))


def _set(tracker: Any, *, done: int, begun: int | None = None) -> None:
    tracker.ready = tracker.started = done if begun is None else begun
    tracker.processed = tracker.completed = done
