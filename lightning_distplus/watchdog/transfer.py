"""How many bytes a save or a load of this process has moved: the system's own count, so that no disk is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_distplus.watchdog.pace import Progress

__all__ = ["Transfer"]

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
        for line in _IO.read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == _FIELDS[what]:
                return int(value)
    return None
