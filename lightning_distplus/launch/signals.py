"""The signals of the launcher: each is noted at any moment, and goes on to the ranks of this host."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

__all__ = ["HANDLED", "Signals", "Stop"]

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stop(BaseException):
    """The launcher was asked to stop while no rank was there to be told."""


class Signals:
    """Takes the signals of the launcher, from its first moment to its last.

    A rank that is just being started when a signal comes hears of it as soon as it is there. A SIGHUP, the end of the
    terminal, reaches the ranks as a SIGTERM; where it is ignored (``nohup``) it stays so.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        """The name of the last signal."""
        self._number: signal.Signals | None = None
        self._told: set[int] = set()
        self._is_interruptible = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def has_reached_ranks(self) -> bool:
        """Whether a rank was there to be told."""
        return bool(self._told)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal ends the block, in which no rank is there; so does one that came before.

        Raises:
            Stop: There was one.
        """
        self._is_interruptible = True
        try:
            if self.asked is not None:
                raise Stop
            yield
        finally:
            self._is_interruptible = False

    def ranks_begin(self) -> None:
        """From here on ranks are being started: a signal is for them."""
        self._is_interruptible = False

    def pass_on(self) -> None:
        """Tells the ranks that have come since the signal. Called again and again, from any thread."""
        if self._number is not None:
            self._tell(set(_ranks()) - self._told)

    def stop_ranks(self) -> None:
        """Sends a SIGTERM to the ranks of this host."""
        for pid in _ranks():
            _send(pid, signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self._number = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        self._tell(set(_ranks()))
        if self._is_interruptible:
            raise Stop

    def _tell(self, ranks: set[int]) -> None:
        assert self._number is not None
        self._told |= ranks
        for pid in ranks:
            _send(pid, self._number)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _ranks() -> list[int]:
    """Processes that this one has started as leaders of sessions of their own, which is how the agent starts ranks."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            for word in (task / "children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(int(word)) == int(word):
                        found.append(int(word))
    return found
