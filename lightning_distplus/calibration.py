"""``timeout="auto"``: deadlines measured in the first steps of a run, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from lightning_distplus.timeouts import Phase, Timeouts

__all__ = ["AUTO", "Calibration"]

AUTO = "auto"

MEASURED_GATES = 50
_FACTOR = 20.0
_FLOOR = timedelta(seconds=60)
_MEASURED = (Phase.STEP, Phase.VALIDATION, Phase.CHECKPOINT)


class Calibration:
    """The largest duration of each phase over all ranks, times 20, at least one minute, at most the static default.

    A hang in the first steps is still bounded by the static defaults. A phase that did not occur in the first 50 steps
    keeps its default.
    """

    def __init__(self) -> None:
        self._longest_s: dict[str, float] = {}
        self._gates = 0
        self.deadlines_s: dict[str, float] = {}
        """What was found, by phase, in seconds; empty until then. Goes into the checkpoint."""

    def note(self, phase: Phase, seconds: float) -> None:
        """Notes one duration of a phase on this rank."""
        self._longest_s[phase.value] = max(seconds, self._longest_s.get(phase.value, 0.0))

    def is_due(self) -> bool:
        """Counts a gate; whether all ranks compare their durations at this one."""
        self._gates += 1
        return not self.deadlines_s and self._gates == MEASURED_GATES

    def of_this_rank(self) -> dict[str, Any]:
        """The longest durations here, to be gathered."""
        return dict(self._longest_s)

    def settle(self, of_all_ranks: Iterable[Mapping[str, Any]]) -> Timeouts:
        """The deadlines that follow from the durations of all ranks."""
        ranks = list(of_all_ranks)
        default = Timeouts()
        for phase in _MEASURED:
            seconds = [rank[phase.value] for rank in ranks if phase.value in rank]
            if seconds:
                wanted = max(_FLOOR, timedelta(seconds=_FACTOR * max(seconds)))
                self.deadlines_s[phase.value] = min(wanted, default.deadline(phase)).total_seconds()
        return self.timeouts()

    def adopt(self, deadlines_s: Mapping[str, float]) -> Timeouts:
        """Takes over what an earlier run has found."""
        self.deadlines_s = dict(deadlines_s)
        return self.timeouts()

    def timeouts(self) -> Timeouts:
        """The defaults, with what was found in their place."""
        return replace(Timeouts(), **self.deadlines_s)

    def describe(self) -> str:
        """Each value with its reason."""
        found = [
            f"{phase} {self.deadlines_s[phase]:g} s (longest {self._longest_s.get(phase, 0.0):.2f} s)"
            for phase in sorted(self.deadlines_s)
        ]
        return f"timeout='auto': {', '.join(found)}; {_FACTOR:g} times the longest, at least {_FLOOR.seconds} s"
