"""Progress marks: what the training thread is doing, set by that thread and read by others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from lightning_distplus.process import running_time

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
    call: int = 0
    """In a call through Lightning in which all ranks take part: its number in the run; else 0."""
    ended: str = ""
    """Set where the run has ended on this rank: how, for example ``"has ended its run after batch 5"``."""


class Marks:
    """The marks of one process.

    Setting a mark is one assignment of a tuple, so that it needs no lock and costs a fraction of a microsecond; a step
    has some fifty. Who reads it may come a moment late and never sees half of it.

    Args:
        phase: Tells the present phase.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.global_step = 0
        self.call = 0
        """Of the call through Lightning in which the training thread is; see ``Mark.call``."""
        self.within = ""
        """The operation to which the mark returns when a part of it has ended."""
        self._count = itertools.count(1)
        self._last = (0, "start", running_time())
        self._at_failure: Mark | None = None
        self._ended = ""

    def set(self, operation: str) -> None:
        """Says that the training thread has entered an operation."""
        self._last = (next(self._count), operation, running_time())

    def enter(self, operation: str) -> str:
        """Says that the training thread has entered an operation that has parts with marks of their own.

        Returns:
            What ``leave`` needs at its end.
        """
        outer, self.within = self.within, operation
        self.set(operation)
        return outer

    def leave(self, outer: str) -> None:
        """Says that the operation entered last has ended."""
        ended, self.within = self.within, outer
        self.back_to(f"after {ended}")

    def abandon(self, outer: str) -> None:
        """Says that the operation entered last has raised: the mark stays where that happened."""
        self.within = outer

    def back_to(self, after: str) -> None:
        """Says that an operation has ended: the mark is that of the one of which it is a part, or else ``after``."""
        self.set(self.within or after)

    def keep(self) -> None:
        """Keeps the present mark as the one at which this rank has failed; the first one stays."""
        self._at_failure = self._at_failure or self.read()

    def end(self, how: str) -> None:
        """Says that the run has ended on this rank: it comes to nothing any more for which a peer could wait."""
        self._ended = how
        self.set("the end of the run")

    def forget(self) -> None:
        """Drops what was kept: another run begins."""
        self._at_failure = None
        self._ended = ""

    @property
    def at_failure(self) -> Mark:
        """The mark at which this rank has failed; the last one where none was kept."""
        return self._at_failure or self.read()

    def read(self) -> Mark:
        """The last mark; from any thread."""
        number, operation, at = self._last
        return Mark(
            number=number,
            phase=self._phase(),
            operation=operation,
            global_step=self.global_step,
            silence_s=running_time() - at,
            call=self.call,
            ended=self._ended,
        )
