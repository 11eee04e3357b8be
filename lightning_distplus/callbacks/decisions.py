"""The check of what follows a step: all ranks stop, validate and save at the same one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.divergence.moments import Flag, Moment, moment_of

__all__ = ["DecisionCheck"]

log = logging.getLogger(__name__)

_CONSEQUENCE = "a stop or a validation by the clock on one rank is not agreed upon"


class DecisionCheck(Check):
    """Agrees on stops and on validations by the clock, and meets all ranks at validations, saves and epochs' ends.

    A rank that wants to stop says so before it does. Where all ranks want the same after the same step, nothing
    changes. Where only some do, these go on for one more optimizer step, and then all stop: the others are on their way
    to it already. Inside an accumulation window a wish waits for the window's end.

    Args:
        before_save: Called on all ranks when they have met before a save.
    """

    def __init__(self, before_save: Callable[[], None]) -> None:
        self._before_save = before_save

    def attach(self, run: MonitoredRun) -> None:
        """Stands around the Trainer's decisions."""
        super().attach(run)
        fit_loop = run.trainer.fit_loop
        self._loop: Any = fit_loop.epoch_loop
        self._forced: bool | None = None
        self._has_validated = False
        self.num_delayed = 0
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
            (self._loop, "on_advance_end", self._after_batch),
            (self._loop, "_should_check_val_fx", self._should_validate),
            (fit_loop, "on_advance_end", self._after_epoch),
            (run.trainer, "save_checkpoint", self._save),
        ]
        for owner, name, wrapper in self._wrapped:
            _compat.wrap_method(owner, name, wrapper, _CONSEQUENCE)

    def detach(self) -> None:
        """Steps aside."""
        for owner, name, _ in self._wrapped:
            _compat.restore_method(owner, name)

    def metrics(self) -> dict[str, float]:
        """How often a rank waited for its peers with a decision."""
        return {"delayed_decisions": float(self.num_delayed)}

    def validation_start(self) -> None:
        """All ranks validate."""
        self._meet(Moment.VALIDATION)

    def validation_end(self) -> None:
        """Remembers that the other callbacks, which come after this one, may want to stop now."""
        self._has_validated = True

    def train_end(self) -> None:
        """All ranks end."""
        self._meet(Moment.END)

    # -- around the Trainer's methods --------------------------------------------------------------------------------

    def _after_batch(self, inner: Callable[..., None], *arguments: Any) -> None:
        if not self.run.gate.is_open:
            inner(*arguments)
            return
        self._decide(*arguments)
        self._has_validated = False
        try:
            inner(*arguments)
        finally:
            self._forced = None
        if self._has_validated:
            self._agree_on_stop(Moment.VALIDATION_END)

    def _after_epoch(self, inner: Callable[[], None]) -> None:
        inner()
        if self.run.gate.is_open:
            self._agree_on_stop(Moment.EPOCH_END)

    def _should_validate(self, inner: Callable[..., bool], *arguments: Any) -> bool:
        return inner(*arguments) if self._forced is None else self._forced

    def _save(self, inner: Callable[..., None], *arguments: Any, **named: Any) -> None:
        if self.run.gate.is_open:
            self.run.gate.meet(Moment.SAVE)
            self._before_save()
        inner(*arguments, **named)

    # -- agreeing ----------------------------------------------------------------------------------------------------

    def _decide(self, *arguments: Any) -> None:
        """Settles whether all ranks stop or validate after this step; sets ``should_stop`` and ``_forced``."""
        trainer, gate = self.run.trainer, self.run.gate
        gate.wishes |= self._local_wishes(*arguments)
        is_by_clock = _is_by_clock(trainer)
        agreed = Flag.NONE
        if gate.wishes and not _compat.accumulates(trainer):
            records = gate.meet(Moment.DECISION, gate.wishes)
            if all(moment_of(record) is Moment.DECISION for record in records):
                agreed, gate.wishes = gate.wishes, Flag.NONE
            else:
                self.num_delayed += 1
                log.info("rank %d goes on for a step: its peers had not come to %s", self.run.rank, gate.wishes)
        trainer.should_stop = Flag.WANTS_STOP in agreed
        if is_by_clock:
            stops_now = trainer.should_stop and _compat.may_stop_early(trainer)
            self._forced = Flag.WANTS_VALIDATION in agreed or stops_now

    def _local_wishes(self, *arguments: Any) -> Flag:
        trainer = self.run.trainer
        wishes = Flag.WANTS_STOP if trainer.should_stop else Flag.NONE
        trainer.should_stop = False
        if _is_by_clock(trainer) and _compat.validates_now(trainer, *arguments):
            wishes |= Flag.WANTS_VALIDATION
        return wishes

    def _agree_on_stop(self, moment: Moment) -> None:
        """All ranks meet here anyway: a wish of one is the decision of all."""
        trainer, gate = self.run.trainer, self.run.gate
        gate.meet(moment, Flag.WANTS_STOP if trainer.should_stop else Flag.NONE)
        if Flag.WANTS_STOP in gate.wishes:
            trainer.should_stop = True
            gate.wishes &= ~Flag.WANTS_STOP

    def _meet(self, moment: Moment) -> None:
        if self.run.gate.is_open:
            self.run.gate.meet(moment)


def _is_by_clock(trainer: Any) -> bool:
    """Whether validations come at intervals of time, which pass at different steps on different ranks."""
    return getattr(trainer, "_val_check_time_interval", None) is not None
