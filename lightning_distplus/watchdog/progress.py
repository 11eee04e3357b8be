"""Progress of the training thread: the marks that it sets, and how far and how fast it gets on."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol

from lightning_distplus.process import running_time


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


# -- what can be counted, how fast it grows, and when it is complete ---------------------------------------------------


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


class Counts(Protocol):
    """Knows how far the training thread has come, such as a ``Transfer``; asked on other threads, once a second."""

    def progress(self) -> Progress | None:
        """What can be counted at present; None where nothing can."""


class Pace:
    """Notes the progress once a second, on a thread beside the one that makes it."""

    def __init__(self) -> None:
        self._last: Progress | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=_NUM_SAMPLES)

    def note(self, progress: Progress | None, now: float | None = None) -> None:
        """Takes the present progress.

        Args:
            progress: None where nothing can be counted.
            now: ``time.monotonic()``; by default this moment.
        """
        now = time.monotonic() if now is None else now
        last, self._last = self._last, progress
        if (
            last is None
            or progress is None
            or replace(last, done=progress.done) != progress
            or progress.done < last.done
        ):
            self._samples.clear()  # another thing is counted, or the same anew
        if progress is not None and (not self._samples or now - self._samples[-1][0] >= _SAMPLE_EVERY_S):
            self._samples.append((now, progress.done))

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
        text = f"{here.done}{'' if here.total is None else f' of {here.total}'} {here.unit} of {here.whole}"
        if rate:
            text += f", {rate:.2g} {here.unit}/s"
        if rate and here.total is not None:
            text += f", {timedelta(seconds=round((here.total - here.done) / rate))} left"
        return text


# -- bytes of a save or a load: the system's own count, so that no disk is asked ---------------------------------------


_IO = Path("/proc/self/io")
_FIELDS = {"save": "wchar", "load": "rchar"}
_MB = 1_000_000
_LEAST_BYTES = 64 << 10  # in a second: less is what logs and messages take
_STALLED_S = 5.0


@dataclass
class _Moving:
    what: Literal["save", "load"]
    begin_bytes: int
    total_bytes: int | None
    seen_bytes: int
    seen_at: float


class Transfer:
    """The save or load in progress on the training thread; another thread asks how far it is."""

    def __init__(self) -> None:
        self._now: _Moving | None = None
        self._last_bytes: dict[str, int] = {}

    @contextmanager
    def of(self, what: Literal["save", "load"], total_bytes: int | None = None) -> Iterator[None]:
        """Counts while the block runs.

        Args:
            what: A save writes, a load reads.
            total_bytes: How much it will be; by default as much as the last one of this process.
        """
        begin = _count(what)
        if begin is None:
            yield
            return
        self._now = _Moving(what, begin, total_bytes or self._last_bytes.get(what), begin, time.monotonic())
        try:
            yield
            self._last_bytes[what] = (_count(what) or begin) - begin
        finally:
            self._now = None

    def progress(self) -> Progress | None:
        """Megabytes of the present save or load; None where there is none, or where it has not moved for seconds."""
        moving = self._now
        count = None if moving is None else _count(moving.what)
        if moving is None or count is None:
            return None
        now = time.monotonic()
        if count - moving.seen_bytes > _LEAST_BYTES:
            moving.seen_bytes, moving.seen_at = count, now
        if now - moving.seen_at > _STALLED_S:
            return None
        done, total = (count - moving.begin_bytes) // _MB, moving.total_bytes
        return Progress(
            unit="MB",
            whole=f"the {moving.what}",
            done=done,
            total=None if total is None or total // _MB < done else total // _MB,
            is_motion=True,
        )


def _count(what: str) -> int | None:
    with suppress(OSError):
        counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(counts[_FIELDS[what]])
    return None
