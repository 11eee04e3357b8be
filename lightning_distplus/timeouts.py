"""Deadlines: one for each phase of a run, in every form in which people write durations, or measured (``"auto"``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Literal

# The order matters to jsonargparse: with timedelta first, 600 would be dumped as text.
Duration = float | timedelta | str
OnHang = Literal["abort", "report"]

ACCEPTED_FORMS = '"90s", "30m", "30 minutes", "2h", "1d", "1h30m", "0:30:00", a number of seconds, or a timedelta'

_UNITS = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_PART = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(sorted(_UNITS, key=len, reverse=True))})(?![a-z])")
_PARTS = re.compile(rf"{_PART.pattern}(?:\s*{_PART.pattern})*")
_CLOCK = re.compile(r"(?:(\d+) days?, ?)?(\d+):([0-5]\d):([0-5]\d(?:\.\d+)?)")

# With on_hang="report" nothing may end the run, and a group's own time-out would.
_REPORT_ONLY = timedelta(hours=24)
_MARGIN_FLOOR = timedelta(seconds=10)
_MARGIN_SHARE = 0.10


class Phase(str, Enum):
    """What a rank is doing, as coarse as its deadlines."""

    RENDEZVOUS = "rendezvous"
    SETUP = "setup"
    DATA = "data"
    RESUME = "resume"
    STEP = "step"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    TEARDOWN = "teardown"


def parse_duration(value: Duration, *, field: str = "duration") -> timedelta:
    """Reads a duration in any accepted form.

    Args:
        value: ``"90s"``, ``"30m"``, ``"30 minutes"``, ``"2h"``, ``"1d"``, ``"1h30m"``, ``"0:30:00"``, seconds as a
            number or as text, or a timedelta.
        field: The name to blame in the error.

    Raises:
        ValueError: The value is in none of these forms, or is not positive and finite.
    """
    duration = _to_timedelta(value)
    if duration is None:
        raise ValueError(f"{field} is {value!r}, which is no duration. Accepted: {ACCEPTED_FORMS}.")
    if duration <= timedelta(0):
        raise ValueError(f"{field} is {value!r}; a deadline is longer than zero. Accepted: {ACCEPTED_FORMS}.")
    return duration


def _to_timedelta(value: Any) -> timedelta | None:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return _seconds(value)
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return _seconds(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if _PARTS.fullmatch(text):
        return _seconds(sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))
    try:
        return _seconds(float(text))
    except ValueError:
        return None


def _seconds(value: float) -> timedelta | None:
    try:
        return timedelta(seconds=float(value)) if math.isfinite(value) else None
    except OverflowError:
        return None


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """One deadline for each phase of a run. Every field takes any form that ``parse_duration`` reads.

    A deadline bounds one silence, not the phase: the time in which a rank makes no progress, or keeps its peers
    waiting.
    """

    rendezvous: Duration = timedelta(minutes=10)
    """From entering set-up until every rank has arrived; above the import skew of the launcher."""

    setup: Duration = timedelta(minutes=30)
    """Model build and the first step after a start or a resume (communicators, compilation)."""

    data: Duration = timedelta(hours=2)
    """Data preparation on rank 0 and index building, while the others wait."""

    resume: Duration = timedelta(hours=1)
    """Loading a checkpoint."""

    step: Duration = timedelta(minutes=10)
    """One optimizer step, the batch fetch included."""

    validation: Duration = timedelta(minutes=30)
    """One batch of validation, test or prediction, and their start and end."""

    checkpoint: Duration = timedelta(hours=1)
    """One save, until all ranks know that it is committed."""

    teardown: Duration = timedelta(minutes=5)
    """Leaving together."""

    report_after: Duration | None = timedelta(seconds=30)
    """A silence longer than this is reported; it never ends anything. None: never reported."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "report_after":
                object.__setattr__(self, field.name, parse_duration(value, field=f"Timeouts.{field.name}"))

    def deadline(self, phase: Phase) -> timedelta:
        """The deadline of one phase."""
        value = getattr(self, phase.value)
        assert isinstance(value, timedelta)
        return value


def resolve_timeouts(value: Timeouts | Duration | Mapping[str, Any] | None) -> Timeouts | None:
    """Turns the ``timeout`` argument of a strategy into deadlines.

    One value sets ``step``; ``setup``, ``data``, ``resume``, ``validation`` and ``checkpoint`` grow to it where their
    default is shorter; ``rendezvous`` and ``teardown`` stay. None stays None: torch's own time-outs, no verdict
    deadline.

    Raises:
        ValueError: The value is in none of the accepted forms; the message lists them.
    """
    if value is None or isinstance(value, Timeouts):
        return value
    if isinstance(value, Mapping):
        known = [field.name for field in fields(Timeouts)]
        if unknown := sorted(set(value) - set(known)):
            raise ValueError(f"timeout has no phase {', '.join(map(repr, unknown))}. Phases: {', '.join(known)}.")
        return Timeouts(**value)
    try:
        step = parse_duration(value, field="timeout")
    except ValueError as error:
        raise ValueError(f"{error} Also accepted: Timeouts(step=..., ...), the same as a mapping, or None.") from None
    default = Timeouts()
    grown = {
        phase.value: max(default.deadline(phase), step)
        for phase in (Phase.SETUP, Phase.DATA, Phase.RESUME, Phase.VALIDATION, Phase.CHECKPOINT)
    }
    return replace(default, step=step, **grown)


def group_timeout(deadline: timedelta, on_hang: OnHang = "abort") -> timedelta:
    """The time-out that process groups get in a phase.

    It lies above the deadline, so that a verdict, which names the culprit, always precedes the group's own time-out,
    which only hits the innocent ranks that wait.
    """
    if on_hang == "report":
        return max(_REPORT_ONLY, deadline)
    return deadline + max(_MARGIN_FLOOR, deadline * _MARGIN_SHARE)


# -- timeout="auto" ----------------------------------------------------------------------------------------------------

AUTO = "auto"

MEASURED_GATES = 50
_MOST_GATES = 1000
_REVIEW_EVERY_S = 10.0  # about so many seconds lie between two reviews
_FACTOR = 20.0
_FLOOR = timedelta(seconds=60)
_FLOOR_SHARE = 0.25  # of the default, for what a cache makes quick: it may have to be compiled or read again
_FALL = 0.2  # how much of the way down to what is measured now a deadline goes at each review
_LATE_SHARE = 0.25  # of a deadline; a run of which a part takes longer is reviewed at the next gate
_LEAST_CHANGE = 0.1
_CACHED = (Phase.SETUP, Phase.RESUME)
_MEASURED = (*_CACHED, Phase.STEP, Phase.VALIDATION, Phase.CHECKPOINT)
_KEPT = {
    Phase.RENDEZVOUS.value: "the default: no checkpoint is read before it",
    Phase.DATA.value: "the default: no checkpoint is read before it",
    Phase.TEARDOWN.value: "the default: no checkpoint is saved after it",
}
_FLOORS = {phase: Timeouts().deadline(phase) * _FLOOR_SHARE if phase in _CACHED else _FLOOR for phase in _MEASURED}


class Calibration:
    """The largest duration of each phase over all ranks, times a factor, with a floor, at most the static default.

    A run that becomes slower gets its longer deadline at once, one that becomes faster step by step (an exponential
    moving average). A hang in the first steps is bounded by the static defaults, and so is every later one: no deadline
    is ever longer. A phase that has not occurred keeps its default. One that occurs once in a run (set-up,
    resume) is measured for the run that resumes.

    Args:
        factor: How much longer than the longest a deadline is.
        floors: The shortest deadline of each phase that is measured.
        gates: After how many steps the ranks compare for the first time, and at least from one review to the next.
    """

    def __init__(
        self, *, factor: float = _FACTOR, floors: Mapping[Phase, timedelta] = _FLOORS, gates: int = MEASURED_GATES
    ) -> None:
        self._factor = factor
        self._floors = floors
        self._gates = self._gates_left = gates
        self._seen_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}
        self.is_late = False
        """Whether a phase has taken so long on this rank that its deadline should not wait for the next review."""
        self.deadlines_s: dict[str, float] = {}
        """What was found, by phase, in seconds; empty until then. Goes into the checkpoint."""
        self.reasons: dict[str, str] = {}
        """Why each deadline is what it is, by phase."""

    def note(self, phase: Phase, seconds: float) -> None:
        """Notes one duration of a phase on this rank."""
        self._seen_s[phase.value] = max(seconds, self._seen_s.get(phase.value, 0.0))
        self.is_late = self.is_late or seconds > _LATE_SHARE * self.deadlines_s.get(phase.value, math.inf)

    def is_due(self, *, somebody_is_late: bool = False) -> bool:
        """Counts a gate; whether all ranks compare their durations at this one. All ranks get the same answer."""
        self._gates_left -= 1
        return somebody_is_late or self._gates_left <= 0

    def take(self) -> dict[str, float]:
        """The longest durations here since the last review, to be gathered."""
        seen, self._seen_s, self.is_late = self._seen_s, {}, False
        return seen

    def settle(self, of_all_ranks: Sequence[Mapping[str, Any]]) -> bool:
        """Takes the durations of all ranks, in rank order.

        Returns:
            Whether a deadline has become another one; a change of less than a tenth is none.
        """
        has_changed = False
        for phase in _MEASURED:
            name, found = phase.value, self._review(phase, of_all_ranks)
            if found is None:
                self.reasons.setdefault(name, f"the default: none in the first {self._gates} steps")
                continue
            last = self.deadlines_s.get(name)
            if last is None or abs(found[0] - last) > _LEAST_CHANGE * last:
                self.deadlines_s[name], self.reasons[name] = found
                has_changed = True
        self.reasons |= _KEPT
        self._gates_left = self._gates_to_next()
        return has_changed

    def _review(self, phase: Phase, ranks: Sequence[Mapping[str, Any]]) -> tuple[float, str] | None:
        """The deadline of a phase, and why; None where the phase has not occurred since the last review."""
        seconds = {rank: float(told[phase.value]) for rank, told in enumerate(ranks) if phase.value in told}
        if not seconds:
            return None
        slowest = max(seconds, key=seconds.__getitem__)
        now, before = seconds[slowest], self._longest_s.get(phase.value, 0.0)
        longest = now if now >= before else before + _FALL * (now - before)
        self._longest_s[phase.value] = longest
        wanted = timedelta(seconds=self._factor * longest)
        floor, limit = self._floors[phase], Timeouts().deadline(phase)
        basis = f"the longest, {now:.2f} s on rank {slowest}"
        if longest != now:
            basis = f"{longest:.2f} s, on the way down to {basis}"
        bound = "; that is the least" if wanted < floor else "; the default is the most" if wanted > limit else ""
        return min(max(floor, wanted), limit).total_seconds(), f"{self._factor:g} times {basis}{bound}"

    def _gates_to_next(self) -> int:
        """The same on all ranks, because what it follows from is."""
        longest_s = self._longest_s.get(Phase.STEP.value, 0.0)
        gates = _REVIEW_EVERY_S / longest_s if longest_s else 0.0
        return max(self._gates, min(_MOST_GATES, math.ceil(gates)))

    def adopt(self, deadlines_s: Mapping[str, float]) -> None:
        """Takes over what an earlier run has found; a phase that it has not found keeps its default."""
        known = {phase.value for phase in _MEASURED}
        self.deadlines_s = {name: seconds for name, seconds in deadlines_s.items() if name in known}
        self._longest_s = {name: seconds / self._factor for name, seconds in self.deadlines_s.items()}
        self.reasons = dict.fromkeys(self.deadlines_s, "from the checkpoint, measured by the run that wrote it") | _KEPT

    def timeouts(self) -> Timeouts:
        """The defaults, with what was found in their place."""
        return replace(Timeouts(), **self.deadlines_s)

    def describe(self) -> str:
        """Each value with its reason."""
        found = [f"{phase} {self.deadlines_s[phase]:g} s ({self.reasons[phase]})" for phase in sorted(self.deadlines_s)]
        return f"timeout='auto': {', '.join(found)}"

    def to_event(self) -> dict[str, Any]:
        """The fields of the event ``calibrated``: the deadline of each phase, and why."""
        deadlines = self.timeouts()
        return {
            "deadlines_s": {name: deadlines.deadline(Phase(name)).total_seconds() for name in self.reasons},
            "reasons": self.reasons,
        }
