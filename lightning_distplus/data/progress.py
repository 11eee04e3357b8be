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

from lightning_distplus.data.plan import Geometry
from lightning_distplus.data.position import Position

__all__ = ["Cursor", "reopen_epoch"]

_log = logging.getLogger(__name__)


@dataclass
class _Validation:
    """A validation run in this epoch: after how many micro-batches in total, and with how many batches before it."""

    after: int
    batches_before: int
    is_extra: bool = False
    """Only because the run stops: the run that nobody stops does not validate here."""
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
        # Of manual optimization, where the module decides when a window of accumulation ends: at an optimizer's step.
        self._steps = trainer.global_step
        self._whole = self._anchor.total_batches
        self._window_before_epoch: Position | None = None
        self._stepped_in = 0

    def position(self) -> Position:
        """Where a run that is resumed now would go on."""
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if not self._is_window_open:
            return self._position_after(total)
        if self._window_before_epoch is not None and self._whole < self._anchor.total_batches:
            return self._window_before_epoch
        return self._position_after(max(self._whole, self._anchor.total_batches))

    @property
    def ends_open(self) -> bool:
        """Whether an epoch has just ended inside a window of manual optimization, whose micro-batches are replayed."""
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return self._is_window_open and self._position_after(total).batches == 0

    @property
    def _is_window_open(self) -> bool:
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return self._has_own_windows and self._whole < total

    @property
    def is_behind_step(self) -> bool:
        """Whether an optimizer has stepped in the batch that is under way: weights and counters do not fit together."""
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return bool(self._stepped_in == total.ready > total.processed)

    @property
    def _has_own_windows(self) -> bool:
        module = self.trainer.lightning_module
        return module is not None and not module.automatic_optimization and bool(self.trainer.optimizers)

    def note_step(self) -> None:
        """An optimizer has stepped."""
        self._stepped_in = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def end_batch(self) -> None:
        """A micro-batch has run. Lightning counts a step that a loss scaler leaves out, too."""
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        if self._stepped_in == total.ready or self.trainer.global_step != self._steps:
            self._steps, self._whole = self.trainer.global_step, total.processed

    def _position_after(self, total: int) -> Position:
        """The position after so many micro-batches of the whole run, of which the last ones are of this epoch."""
        anchor, fit = self._anchor, self.trainer.fit_loop
        counters = fit.epoch_loop.batch_progress
        num_done = total - anchor.total_batches
        batches = anchor.batches + num_done
        has_ended = self.is_end is not None and batches > 0 and self.is_end(total)
        is_epoch_done = has_ended or batches >= self.trainer.num_training_batches
        num_steps, rest = divmod(num_done, self.geometry.accumulation)
        if is_epoch_done:  # on the last batch of an epoch Lightning steps whether the window is full or not
            num_steps += rest > 0
        else:
            num_done -= rest
        num_samples = num_done * self.geometry.micro_step
        here = Position(
            epoch=anchor.epoch,
            batches=anchor.batches + num_done,
            offset=anchor.offset + num_samples,
            consumed_samples=anchor.consumed_samples + num_samples,
            total_batches=anchor.total_batches + num_done,
            steps=self.trainer.global_step if self._has_own_windows else anchor.steps + num_steps,
            is_epoch_done=has_ended,
        )
        is_epoch_closed = is_epoch_done and fit.epoch_progress.current.processed > anchor.epoch
        is_epoch_left = counters.current.processed > counters.current.started  # on_train_batch_start returned -1
        is_epoch_left = is_epoch_left and total == counters.total.processed
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
            if self._is_window_open and self._whole >= self._anchor.total_batches:
                self._window_before_epoch = self.position()
            self._anchor = replace(
                self._position_after(counters.total.processed),
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
        num_stepped = position.steps
        if self._has_own_windows:  # Lightning counts batches there, however often the optimizers step
            num_stepped = position.total_batches // self.geometry.accumulation
        loop.on_load_checkpoint({"_batches_that_stepped": num_stepped - is_due})
        fit.restarting = True
        loop.restarting = is_inside
        fit.update_restart_stage()
        self._anchor, self._is_placed = position, True
        self._whole, self._steps, self._stepped_in = position.total_batches, self.trainer.global_step, 0
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

    def begin_validation(self) -> None:
        """A validation begins, not the sanity check."""
        loop = self.trainer.fit_loop.epoch_loop
        total = loop.val_loop.batch_progress.total
        total.ready = total.started = total.completed  # a pending validation counted its start when it was placed
        after, batches = loop.batch_progress.total.processed, loop.batch_progress.current.processed
        here = replace(
            self._anchor, total_batches=after, batches=batches, is_epoch_done=loop.batch_progress.is_last_batch
        )
        is_extra = self.trainer.should_stop and not _validation_is_due(self.trainer, here)
        self._validations.append(_Validation(after, total.completed, is_extra))

    def end_validation(self) -> None:
        """The validation has run."""
        self._validations[-1].is_finished = True

    def _with_validation(self, position: Position) -> Position:
        runs = self._validations
        counted = [run for run in runs if run.is_finished and not run.is_extra]
        is_validated = any(run.after >= position.total_batches for run in counted)
        replayed = [run for run in runs if run.after > position.total_batches or run not in counted]
        total = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        num_batches = replayed[0].batches_before if replayed else total.completed
        return replace(position, is_validated=is_validated, validation_batches=num_batches)


def reopen_epoch(checkpoint: dict[str, Any], position: Position) -> None:
    """Counts the epoch of ``position`` as begun and not done, in a checkpoint that is about to be restored.

    A run that is stopped inside an epoch counts that epoch as done before it saves. Lightning asks whether all epochs
    are done before ``on_train_start``, where the loops are placed: the last epoch would be left out (lightning 2.6.6,
    ``fit_loop.py`` 186-193 and 211).
    """
    loops = checkpoint.get("loops") or {}
    for tracker in loops.get("fit_loop", {}).get("epoch_progress", {}).values():
        begun = position.epoch + (position.batches > 0)
        tracker.update(ready=begun, started=begun, processed=position.epoch, completed=position.epoch)


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
