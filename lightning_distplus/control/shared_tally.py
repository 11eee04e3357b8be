"""The tally of ranks that share a host: memory that all of them have mapped; a look asks nobody."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from lightning_distplus.control.bell import BELL_BYTES, Bell
from lightning_distplus.control.line import DIRECT_RANKS
from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.process import boot_id

__all__ = ["SharedTally"]

_NAME = "distplus-tally"
_RECORD = struct.Struct("<QQ")  # the digest; the digest and the number, mixed
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that no two numbers are mixed alike
_WORD = (1 << 64) - 1
_NUM_SETS = 2
_LINGER_S = 0.02  # longer than ranks that train in step wait for each other


class SharedTally:
    """Counts the ranks that have come to a number with the same digest; what ``Tally`` does over the store.

    Each rank writes a record of its own, in one of two sets that are used in turn: a rank enters number n + 1 only when
    all have entered number n, so that whoever still looks at n finds it. A record that is read while it is written
    fits no number, and counts as not there yet.

    Args:
        memory: Shared by all ranks, and empty.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory = memory
        self._rank = rank
        self._size = size
        self._set_bytes = size * _RECORD.size
        self._bell = Bell(memory, _NUM_SETS * self._set_bytes)
        self._start = 0
        self._digest = 0
        self._mixed_in = 0
        self._complete = b""

    @classmethod
    def share(cls, plane: ControlPlane, name: str, deadline: timedelta) -> SharedTally | None:
        """Meets all ranks; makes the memory where all of them can map it.

        Returns:
            None on all ranks alike, where they run on several hosts, may not look at each other, or are many.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        if plane.world.size > DIRECT_RANKS:
            plane.barrier(name, deadline)
            return None
        descriptor, offer = _offer(plane.world.size) if plane.world.rank == 0 else (None, {})
        try:
            offers = plane.gather_json(name, offer, deadline)
            memory = _map(offers[0], plane.world.size)
            all_have = all(one["has"] for one in plane.gather_json(name, {"has": memory is not None}, deadline))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return cls(memory, plane.world.rank, plane.world.size) if memory is not None and all_have else None

    def enter(self, number: int, digest: bytes) -> None:
        """Says this rank's part, and gives the others a moment to say theirs.

        Args:
            number: Grows by one.
            digest: At least 8 bytes.
        """
        self._digest = int.from_bytes(digest[:8], "little")
        self._mixed_in = number * _SPREAD & _WORD
        self._start = number % _NUM_SETS * self._set_bytes
        record = _RECORD.pack(self._digest, self._digest ^ self._mixed_in)
        self._complete = record * self._size
        own = self._start + self._rank * _RECORD.size
        self._memory[own : own + _RECORD.size] = record
        self._await_others(number)

    def look(self) -> int | None:
        """How many ranks have come, this one included; None where they do not all say the same; never waits."""
        records = self._records()
        if records == self._complete:
            return self._size
        come = [digest for digest, mixed in _RECORD.iter_unpack(records) if digest ^ mixed == self._mixed_in]
        return len(come) if all(digest == self._digest for digest in come) else None

    def passed(self, number: int) -> None:
        """All have come: nothing has to be emptied."""

    def _await_others(self, number: int) -> None:
        """Returns when all have come, or a moment has passed; whoever comes last wakes the others.

        Two ranks that come together may both ring, or, should neither see the other's record yet, none: then the moment
        passes.
        """
        until = time.monotonic() + _LINGER_S
        rung = self._bell.rung
        if self._records() == self._complete:
            self._bell.ring(number)
            return
        while (left := until - time.monotonic()) > 0:
            self._bell.wait(rung, left)
            rung = self._bell.rung
            if self._records() == self._complete:
                return

    def _records(self) -> bytes:
        return self._memory[self._start : self._start + self._set_bytes]


def _num_bytes(size: int) -> int:
    return _NUM_SETS * size * _RECORD.size + BELL_BYTES


def _offer(size: int) -> tuple[int | None, dict[str, object]]:
    """New memory, and where the others find it; nothing where this system has none to give."""
    memory = f"{_NAME}-{secrets.token_hex(8)}"
    with suppress(OSError):
        descriptor = os.memfd_create(memory)
        os.ftruncate(descriptor, _num_bytes(size))
        return descriptor, {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "memory": memory, "boot": boot_id()}
    return None, {}


def _map(offer: dict[str, object], size: int) -> mmap.mmap | None:
    """The memory of an offer; None where it is of another host, or may not be looked at."""
    path = str(offer.get("path", ""))
    with suppress(OSError, ValueError):
        is_here = bool(offer) and Bell.is_available() and offer["boot"] == boot_id()
        # Another process may have that number here: what it holds open must not be touched.
        if is_here and str(Path(path).readlink()).startswith(f"/memfd:{offer['memory']}"):
            descriptor = os.open(path, os.O_RDWR)
            try:
                return mmap.mmap(descriptor, _num_bytes(size))
            finally:
                os.close(descriptor)
    return None
