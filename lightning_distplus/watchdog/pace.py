"""Where a rank is in what it can count, how fast it gets on, and when it is there."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

__all__ = ["Pace", "Progress"]

_SAMPLE_EVERY_S = 1.0
_NUM_SAMPLES = 300  # a rank that has become slow is known by the last five minutes


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training thread has come."""

    unit: str
    """What is counted, in the plural: ``"batches"``."""
    whole: str
    """What is full when all is counted: ``"the epoch"``."""
    done: int
    total: int | None = None
    """None where nobody knows."""
    is_motion: bool = False
    """Whether what is counted moves by itself, while the training thread sets no marks: the bytes of a save."""


class Pace:
    """Notes the progress once a second, on a thread beside the one that makes it."""

    def __init__(self) -> None:
        self._last: Progress | None = None
        """What was noted last."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=_NUM_SAMPLES)

    def note(self, progress: Progress | None, now: float | None = None) -> None:
        """Takes the present progress.

        Args:
            progress: None where nothing can be counted.
            now: ``time.monotonic()``; by default this moment.
        """
        now = time.monotonic() if now is None else now
        if not self._follows(progress):
            self._samples.clear()
        self._last = progress
        if progress is not None and (not self._samples or now - self._samples[-1][0] >= _SAMPLE_EVERY_S):
            self._samples.append((now, progress.done))

    def _follows(self, progress: Progress | None) -> bool:
        last = self._last
        if last is None or progress is None:
            return False
        return (last.unit, last.whole, last.total) == (progress.unit, progress.whole, progress.total) and (
            last.done <= progress.done
        )

    @property
    def per_s(self) -> float:
        """How many are done in a second; 0 where it is not known."""
        if len(self._samples) < 2:
            return 0.0
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - begin)

    @property
    def moves(self) -> bool:
        """Whether something is counted that moves by itself."""
        return self._last is not None and self._last.is_motion and self.per_s > 0

    def describe(self) -> str:
        """For example ``"3 of 100 batches of the epoch, 0.5 batches/s, 0:03:14 left"``; "" where nothing is known."""
        here, rate = self._last, self.per_s
        if here is None:
            return ""
        total = "" if here.total is None else f" of {here.total}"
        parts = [f"{here.done}{total} {here.unit} of {here.whole}"]
        if rate:
            parts.append(f"{rate:.2g} {here.unit}/s")
        if rate and here.total is not None:
            parts.append(f"{timedelta(seconds=round((here.total - here.done) / rate))} left")
        return ", ".join(parts)
