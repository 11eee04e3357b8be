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
        self.reasons: dict[str, str] = {}
        """Why each deadline is what it is, by phase."""

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
        """The deadlines that follow from the durations of all ranks, in rank order."""
        ranks = list(of_all_ranks)
        default = Timeouts()
        for phase in _MEASURED:
            seconds = {rank: told[phase.value] for rank, told in enumerate(ranks) if phase.value in told}
            if not seconds:
                self.reasons[phase.value] = f"the default: none in the first {MEASURED_GATES} steps"
                continue
            slowest = max(seconds, key=seconds.__getitem__)
            wanted, limit = timedelta(seconds=_FACTOR * seconds[slowest]), default.deadline(phase)
            bound = "; that is the least" if wanted < _FLOOR else "; the default is the most" if wanted > limit else ""
            self.deadlines_s[phase.value] = min(max(_FLOOR, wanted), limit).total_seconds()
            self.reasons[phase.value] = (
                f"{_FACTOR:g} times the longest, {seconds[slowest]:.2f} s on rank {slowest}{bound}"
            )
        return self.timeouts()

    def adopt(self, deadlines_s: Mapping[str, float]) -> Timeouts:
        """Takes over what an earlier run has found."""
        self.deadlines_s = dict(deadlines_s)
        self.reasons = dict.fromkeys(self.deadlines_s, "from the checkpoint, measured by the run that wrote it")
        return self.timeouts()

    def timeouts(self) -> Timeouts:
        """The defaults, with what was found in their place."""
        return replace(Timeouts(), **self.deadlines_s)

    def describe(self) -> str:
        """Each value with its reason."""
        found = [f"{phase} {self.deadlines_s[phase]:g} s ({self.reasons[phase]})" for phase in sorted(self.deadlines_s)]
        return f"timeout='auto': {', '.join(found)}"

    def to_event(self) -> dict[str, Any]:
        """The fields of the event ``calibrated``: the deadlines of all measured phases, and why."""
        deadlines = self.timeouts()
        return {
            "deadlines_s": {name: deadlines.deadline(Phase(name)).total_seconds() for name in self.reasons},
            "reasons": self.reasons,
        }
