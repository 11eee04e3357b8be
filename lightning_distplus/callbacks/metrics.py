"""The check of logged metrics: those that are reduced over all ranks, and those that decide about saves and stops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.divergence.agreement import disagreement
from lightning_distplus.divergence.batch import digest
from lightning_distplus.divergence.moments import Moment

__all__ = ["MetricCheck"]

_RELATIVE = 1e-6  # ranks that compute a metric from the same numbers on different hardware may round differently


class MetricCheck(Check):
    """Compares the names of metrics before they are reduced, and the values of monitored ones before they are used."""

    def attach(self, run: MonitoredRun) -> None:
        """Stands before the reduction at the end of a validation."""
        super().attach(run)
        self._connector = getattr(run.trainer, "_logger_connector", None)
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
        self.run.tell(
            disagreement(
                f"logged metric {name!r}",
                values,
                where="before it is reduced over all ranks",
                remedy=f"call self.log({name!r}, ..., sync_dist=True) on every rank, in the same order",
            )
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
                self.run.tell(
                    disagreement(
                        f"monitored metric {name!r}",
                        values,
                        where="and the ranks would save or stop at different times",
                        remedy=f"self.log({name!r}, ..., sync_dist=True)",
                    )
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
