"""Scrubbing: the newest checkpoints are read again while training goes on, so that a resume does not meet the rot."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from lightning_distplus.checkpoint.catalog import committed_in, reference, verify
from lightning_distplus.checkpoint.torn import quarantine

__all__ = ["Scrubber"]

logger = logging.getLogger(__name__)

_BYTES_PER_S = 100e6
_NEWEST = 3
_LOWEST_PRIORITY = 19


class Scrubber:
    """A thread that reads the newest checkpoints of the folders that a run saves to, slowly, again and again.

    What it finds damaged goes into quarantine: nothing is deleted, and `newest_valid` looks further. One process of a
    job has one.

    Args:
        every: The time from the end of one pass to the begin of the next.
        moves: Held while something is moved, by saves too.
        on_damage: Told, in the thread, which checkpoint is damaged, where it is kept, and how it is damaged.
        newest: How many of a folder's checkpoints are read.
        bytes_per_s: How fast.
    """

    def __init__(
        self,
        every: timedelta,
        *,
        moves: threading.Lock,
        on_damage: Callable[[Path, Path, str], object],
        newest: int = _NEWEST,
        bytes_per_s: float = _BYTES_PER_S,
    ) -> None:
        self._every_s = every.total_seconds()
        self._moves = moves
        self._on_damage = on_damage
        self._newest = newest
        self._bytes_per_s = bytes_per_s
        self._folders: set[Path] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, folder: Path) -> None:
        """Reads the checkpoints of this folder too; the first one starts the thread."""
        self._folders.add(folder)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="distplus-scrubber", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, in the middle of a file if need be."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # of this thread alone, on Linux
        while not self._stop.wait(self._every_s):
            for folder in sorted(self._folders):
                try:
                    self.scrub(folder)
                except _Stopped:
                    return
                except OSError as error:
                    logger.warning("%s cannot be scrubbed (%s)", folder, error)

    def scrub(self, folder: Path) -> None:
        """One pass over the newest checkpoints of a folder."""
        for report in committed_in(folder)[: self._newest]:
            before = reference(report.path)
            if before is not None and not self._is_sound(report.path):
                self._put_away(report.path, before)

    def _is_sound(self, path: Path) -> bool:
        began_at, read_bytes = time.monotonic(), 0

        def wait(num_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += num_bytes
            if self._stop.wait(max(0.0, began_at + read_bytes / self._bytes_per_s - time.monotonic())):
                raise _Stopped

        return verify(path, on_bytes=wait).ok

    def _put_away(self, path: Path, before: dict[str, str]) -> None:
        # It may have been removed or replaced meanwhile, and so may not be damaged at all: once more, undisturbed.
        with self._moves:
            if not path.exists() or reference(path) != before:
                return
            report = verify(path)
            if report.ok or not path.exists():
                return
            damage = str(report.findings[0])
            kept = quarantine(path)
        logger.warning("the checkpoint %s is damaged and is kept at %s: %s", path, kept, damage)
        self._on_damage(path, kept, damage)


class _Stopped(Exception):
    """The thread ends."""
