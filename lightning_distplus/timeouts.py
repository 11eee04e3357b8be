"""Deadlines: one for each phase of a run, in every form in which people write durations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Literal

__all__ = ["Duration", "OnHang", "Phase", "Timeouts", "group_timeout", "parse_duration", "resolve_timeouts"]

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
        return _from_mapping(value)
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


def _from_mapping(value: Mapping[str, Any]) -> Timeouts:
    known = [field.name for field in fields(Timeouts)]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ValueError(f"timeout has no phase {', '.join(map(repr, unknown))}. Phases: {', '.join(known)}.")
    return Timeouts(**value)


def group_timeout(deadline: timedelta, on_hang: OnHang = "abort") -> timedelta:
    """The time-out that process groups get in a phase.

    It lies above the deadline, so that a verdict, which names the culprit, always precedes the group's own time-out,
    which only hits the innocent ranks that wait.
    """
    if on_hang == "report":
        return max(_REPORT_ONLY, deadline)
    return deadline + max(_MARGIN_FLOOR, deadline * _MARGIN_SHARE)
