"""Progress marks: what the training thread is doing, set by that thread and read by others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Mark", "Marks"]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One moment of a rank's progress."""

    number: int
    """How many marks came before it; a rank that moves has a growing number."""
    phase: str
    operation: str
    """What the training thread entered last, for example ``"train_dataloader_next"``."""
    global_step: int
    """Completed optimizer steps when the current step began."""
    silence_s: float
    """Seconds since the mark was set."""


class Marks:
    """The marks of one process.

    Setting a mark is one assignment of a tuple, so that it needs no lock and costs well below 2 microseconds; who reads
    it may come a moment late and never sees half of it.

    Args:
        phase: Tells the present phase.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.global_step = 0
        self._number = 0
        self._last = (0, "start", time.monotonic())

    def set(self, operation: str) -> None:
        """Says that the training thread has entered an operation."""
        self._number += 1
        self._last = (self._number, operation, time.monotonic())

    def read(self) -> Mark:
        """The last mark; from any thread."""
        number, operation, at = self._last
        return Mark(
            number=number,
            phase=self._phase(),
            operation=operation,
            global_step=self.global_step,
            silence_s=time.monotonic() - at,
        )
