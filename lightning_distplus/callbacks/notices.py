"""Notices of a coming end that are no signals: a file that appears, a command that succeeds; and the grace."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from lightning_distplus.signals import StopRequests

__all__ = ["NoticeWatch"]

log = logging.getLogger(__name__)

_TICK_S = 0.5
_COMMAND_S = 10.0


class NoticeWatch:
    """Looks for notices on a thread of its own, and says so when the grace has passed without a checkpoint.

    Args:
        requests: Where a notice is noted.
        file: Its existence is a notice.
        command: Its success (exit code 0) is a notice.
        every: How often both are asked for.
        grace: How long after a request the platform lets this process live; None: not known.
        on_late: Called once, when the grace has passed and nothing has stopped this watch.
    """

    def __init__(
        self,
        requests: StopRequests,
        *,
        file: Path | None,
        command: Sequence[str] | None,
        every: timedelta,
        grace: timedelta | None,
        on_late: Callable[[timedelta], None],
    ) -> None:
        self._requests = requests
        self._file = file
        self._command = command
        self._every_s = every.total_seconds()
        self._grace = grace
        self._on_late = on_late
        self._has_warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distplus-notices", daemon=True)

    def start(self) -> None:
        """Starts the thread, where there is anything to look for."""
        if self._file or self._command or self._grace:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a command that runs is not waited for."""
        self._stopping.set()

    def _watch(self) -> None:
        look_at = time.monotonic()
        tick_s = min(_TICK_S, self._every_s)
        while not self._stopping.wait(tick_s):
            if self._requests.reason is not None:
                if self._grace is None:
                    return
                if time.monotonic() - self._requests.asked_at > self._grace.total_seconds():
                    self._on_late(self._grace)
                    return
            elif time.monotonic() >= look_at:
                look_at = time.monotonic() + self._every_s
                self._look()

    def _look(self) -> None:
        if self._file is not None and self._file.exists():
            self._requests.request(f"the notice file {self._file}")
        elif self._command is not None and self._succeeds(self._command):
            self._requests.request(f"the notice command {self._command[0]}")

    def _succeeds(self, command: Sequence[str]) -> bool:
        try:
            ended = subprocess.run(
                list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("the notice command cannot be asked: %s. It is tried again; training goes on.", error)
            return False
        return ended.returncode == 0
