"""Checks of what each rank decides: stops, validations, saves, and the metrics behind them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from lightning_distplus import _compat
from lightning_distplus.divergence.check import Check, digest
from lightning_distplus.trainer_gate import Flag, Moment, moment_of

log = logging.getLogger(__name__)
_CONSEQUENCE = "a stop or a validation by the clock on one rank is not agreed upon"


class DecisionCheck(Check):
    """Agrees on stops and on validations by the clock, and meets all ranks at validations, saves and epochs' ends.

    A rank that wants to stop says so before it does. Where all ranks want the same after the same step, nothing
    changes. Where only some do, these go on for one more optimizer step, and then all stop: the others are on their way
    to it already. Inside an accumulation window a wish waits for the window's end.
    """

    def attach(self) -> None:
        """Stands around the Trainer's decisions."""
        fit_loop = self.run.trainer.fit_loop
        self._loop: Any = fit_loop.epoch_loop
        self._forced: bool | None = None
        self._has_validated = False
        self.num_delayed = 0
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
            (self._loop, "on_advance_end", self._after_batch),
            (self._loop, "_should_check_val_fx", self._should_validate),
            (fit_loop, "on_advance_end", self._after_epoch),
            (self.run.trainer, "save_checkpoint", self._save),
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
        if self.run.gate.is_open:
            self.run.gate.meet(Moment.VALIDATION)

    def validation_end(self) -> None:
        """Remembers that the other callbacks, which come after this one, may want to stop now."""
        self._has_validated = True

    def train_end(self) -> None:
        """All ranks end."""
        if self.run.gate.is_open:
            self.run.gate.meet(Moment.END)

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
            if self.run.is_stock:
                self.run.gate.meet(Moment.SAVE)
            else:  # a checked call sees peers in their backward too, as where rank 0 saves alone in training_step
                self.run.trainer.strategy.barrier("Trainer.save_checkpoint")
            self.run.monitor.hand_on("before_save")
        inner(*arguments, **named)

    # -- agreeing ----------------------------------------------------------------------------------------------------

    def _decide(self, *arguments: Any) -> None:
        """Settles whether all ranks stop or validate after this step; sets ``should_stop`` and ``_forced``."""
        trainer, gate = self.run.trainer, self.run.gate
        is_by_clock = _compat.validation_interval(trainer) is not None
        if not (trainer.should_stop or gate.wishes or is_by_clock):  # of nearly every step
            return
        gate.wishes |= self._local_wishes(*arguments)
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
        if _compat.validation_interval(trainer) is not None and _compat.validates_now(trainer, *arguments):
            wishes |= Flag.WANTS_VALIDATION
        return wishes

    def _agree_on_stop(self, moment: Moment) -> None:
        """All ranks meet here anyway: a wish of one is the decision of all."""
        trainer, gate = self.run.trainer, self.run.gate
        gate.meet(moment, Flag.WANTS_STOP if trainer.should_stop else Flag.NONE)
        if Flag.WANTS_STOP in gate.wishes:
            trainer.should_stop = True
            gate.wishes &= ~Flag.WANTS_STOP


# -- metrics that are reduced over all ranks, or decide about saves and stops ------------------------------------------

_RELATIVE = 1e-6  # ranks that compute a metric from the same numbers on different hardware may round differently


class MetricCheck(Check):
    """Compares the names of metrics before they are reduced, and the values of monitored ones before they are used."""

    def attach(self) -> None:
        """Stands before the reduction at the end of a validation."""
        self._connector = _compat.logger_connector(self.run.trainer)
        consequence = "the names of metrics in validation are not compared"
        _compat.wrap_method(self._connector, "update_eval_epoch_metrics", self._before_reduction, consequence)

    def detach(self) -> None:
        """Steps aside."""
        _compat.restore_method(self._connector, "update_eval_epoch_metrics")

    def epoch_end(self) -> None:
        """Names, then values: the reduction is due when a value is first asked for."""
        self._compare_names()
        self._compare_values()

    def validation_end(self) -> None:
        """The metrics are reduced; no callback has acted on them."""
        self._compare_values()

    def _before_reduction(self, inner: Callable[[], Any]) -> Any:
        self._compare_names()
        return inner()

    def _compare_names(self) -> None:
        names = _compat.synced_metrics(self.run.trainer)
        if self._digests_agree(digest(names)):
            return
        everybody = self.run.gather("metric names", names)
        odd = _first_odd(everybody)
        values = {rank: odd if odd in theirs else "absent" for rank, theirs in enumerate(everybody)}
        if "absent" not in values.values():
            values = {rank: ", ".join(theirs[:8]) for rank, theirs in enumerate(everybody)}
        name = odd.split(".")[-1]
        self.run.differ(
            f"logged metric {name!r}",
            values,
            where="before it is reduced over all ranks",
            remedy=f"call self.log({name!r}, ..., sync_dist=True) on every rank, in the same order",
        )

    def _digests_agree(self, mine: int) -> bool:
        if self.run.trainer.sanity_checking:  # the gate is not open yet
            return len(set(self.run.gather("metric digests", mine))) == 1
        if not self.run.gate.is_open:
            return True
        records = self.run.gate.meet(Moment.METRICS, data_fingerprint=mine)
        return len({record.data_fingerprint for record in records}) == 1

    def _compare_values(self) -> None:
        names = self._monitored()
        if not names or not self.run.gate.is_open:
            return
        metrics = self.run.trainer.callback_metrics
        mine = {name: float(metrics[name]) if name in metrics else None for name in names}
        everybody = self.run.gather("monitored metrics", mine)
        for name in names:
            values = {rank: theirs.get(name) for rank, theirs in enumerate(everybody)}
            if not _are_close(list(values.values())):
                self.run.differ(
                    f"monitored metric {name!r}",
                    values,
                    where="and the ranks would save or stop at different times",
                    remedy=f"self.log({name!r}, ..., sync_dist=True)",
                )

    def _monitored(self) -> list[str]:
        trainer: Any = self.run.trainer
        sources = [*trainer.callbacks, *trainer.lr_scheduler_configs]
        names = (getattr(source, "monitor", None) for source in sources)
        return sorted({name for name in names if isinstance(name, str)})


def _first_odd(everybody: list[list[str]]) -> str:
    """The first name that some rank lacks; else the first one that stands at another place."""
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        if any(name not in theirs for theirs in everybody):
            return name
    places: list[str] = [names[0] for names in zip(*everybody, strict=False) if len(set(names)) > 1]
    return places[0]


def _are_close(values: list[float | None]) -> bool:
    first = values[0]
    if first is None or math.isnan(first):
        return all(value is None if first is None else value is not None and math.isnan(value) for value in values)
    return all(value is not None and math.isclose(value, first, rel_tol=_RELATIVE) for value in values)
