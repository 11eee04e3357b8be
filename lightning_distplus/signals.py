"""Requests to stop: a signal only leaves a note, until the training thread has time for it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

__all__ = ["StopRequests"]

log = logging.getLogger(__name__)

# A data worker inherits the handlers of the process that forked it. It outlives a signal to the whole group, because
# the step that is under way still needs its batches. Not for ever: its parent ends workers with SIGTERM too.
_WORKER_OUTLIVES_S = 300


class StopRequests:
    """Takes signals, remembers the first one, and hands each on to the handler that was there before.

    A repeated signal changes nothing: schedulers repeat them, and torchrun's agent sends a SIGTERM of its own. A
    second SIGINT is a person who does not want to wait, and ends the process at once.

    Args:
        signals: Names of signals, as ``"SIGTERM"``.

    Raises:
        ValueError: A name is not that of a signal that can be taken.
    """

    def __init__(self, signals: Iterable[str]) -> None:
        self._signals = [_parse(name) for name in signals]
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = 0
        self.reason: str | None = None
        """What asked first, for example ``"SIGTERM"``; None while nothing has."""
        self.asked_at = 0.0
        """``time.monotonic()`` of the first request."""

    def attach(self) -> None:
        """Takes the signals. Only the main thread can; on another one the signals stay where they are, and it says so.

        A handler that was not set from Python (``faulthandler.register``) could not be called after ours: it stays.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals do not stop this run: it does not run on the main thread, which alone gets them")
            return
        self._pid = os.getpid()
        for number in self._signals:
            previous = signal.getsignal(number)
            if previous is None:
                log.warning("%s does not stop this run: a handler that is not Python's has it", number.name)
                continue
            self._previous[number] = previous
            signal.signal(number, self._note)

    def detach(self, *, is_ending: bool = False) -> None:
        """Puts the earlier handlers back.

        Args:
            is_ending: The process is about to exit. Then the signals are ignored from here on, because torchrun's
                agent terminates all ranks as soon as it sees the first one end, and the exit codes would differ.
        """
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_IGN if is_ending else previous)
        self._previous.clear()

    def outlive(self) -> None:
        """In a data worker, once torch has set its handlers there: a SIGTERM to all processes does not end it."""
        if signal.SIGTERM in self._previous:
            signal.signal(signal.SIGTERM, self._note)

    def request(self, reason: str) -> None:
        """Asks for a stop; from any thread. The first reason stays."""
        if self.reason is None:
            self.asked_at = time.monotonic()
            self.reason = reason

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """The handler: no lock, no log, no collective."""
        number = signal.Signals(signum)
        if os.getpid() != self._pid:
            if number is signal.SIGTERM:
                signal.alarm(_WORKER_OUTLIVES_S)
            return
        if number is signal.SIGINT and self.reason == number.name:
            _end_now(number)
        self.request(number.name)
        _call(self._previous.get(number), signum, frame)


def _parse(name: str) -> signal.Signals:
    number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"signals holds {name!r}; each one is the name of a signal that a process can take, "
            "such as SIGTERM, SIGINT, SIGUSR1 or SIGUSR2."
        )
    return signal.Signals(number)


def _end_now(number: signal.Signals) -> None:
    os.write(2, b"interrupted twice: ends now, without a checkpoint of this step\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _call(previous: Callable[[int, FrameType | None], Any] | int | None, signum: int, frame: FrameType | None) -> None:
    if callable(previous) and previous is not signal.default_int_handler:
        previous(signum, frame)
