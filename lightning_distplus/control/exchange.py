"""Small records of all ranks: over the store, or in memory that the ranks of a host share."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import xxhash

from lightning_distplus.control.plane import DIRECT_RANKS, ControlPlane
from lightning_distplus.control.secret import Entries
from lightning_distplus.process import boot_id

__all__ = ["BELL_BYTES", "HEAD_BYTES", "Bell", "CountedGate", "SharedRecords", "SharedTally", "Slots", "Tally"]

_NUM_SLOTS = 3
_HEAD = struct.Struct("<II")  # the number of the gate, and the rank
_NUMBERS = 1 << 32  # one key holds two neighbouring gates at most: their numbers differ in this as well
HEAD_BYTES = _HEAD.size


class Slots:
    """One key per gate, to which every rank of the group appends its record; a look at all of them is one round trip.

    A record carries its gate's number, so that it cannot pair with that of another gate. A rank enters gate n + 1 only
    when all have entered gate n, so that three keys are enough: once all have entered gate n, nobody reads the key of
    gate n - 1 any more, and nobody writes to it before its owner has entered gate n + 1. The owner empties it between.

    Every record is signed: what a stranger writes between them is skipped.

    Args:
        plane: The control plane.
        name: What the keys begin with; the same on all ranks of the group.
        is_owner: Whether this rank empties the keys; one rank of the group does.
    """

    def __init__(self, plane: ControlPlane, name: str, *, is_owner: bool) -> None:
        self._plane = plane
        self._keys = [f"{name}/{number}" for number in range(_NUM_SLOTS)]
        self._entries: list[Entries | None] = [None] * _NUM_SLOTS
        self._is_owner = is_owner
        self._number = 0
        self._unpacked: list[bytes] = []
        self._records: dict[int, bytes] = {}
        if is_owner:
            for key in self._keys:
                plane.send_unsigned(key, b"")

    def post(self, number: int, packed: bytes) -> None:
        """Shows this rank's record; never waits."""
        slot = number % _NUM_SLOTS
        head = _HEAD.pack(number % _NUMBERS, self._plane.world.rank)
        self._plane.append(self._keys[slot], self._entries_of(slot).entry(head + packed))

    def read(self, number: int) -> dict[int, bytes]:
        """The record of each rank of the group that has entered the gate; never waits."""
        slot = number % _NUM_SLOTS
        entries = self._entries_of(slot).read(self._plane.read_unsigned(self._keys[slot]) or b"")
        if number != self._number or entries[: len(self._unpacked)] != self._unpacked:  # another key, or written anew
            self._number, self._unpacked, self._records = number, [], {}
        for entry in entries[len(self._unpacked) :]:  # a rank that waits looks ten times and more
            posted, rank = _HEAD.unpack_from(entry)
            if posted == number % _NUMBERS:
                self._records[rank] = entry[HEAD_BYTES:]
        self._unpacked = entries[:]
        return self._records

    def linger(self, number: int) -> dict[int, bytes]:
        """Nothing wakes this rank when the others have come: it has to ask the store."""
        return {}

    def passed(self, number: int) -> None:
        """All have entered the gate: the key of the one before it is emptied, for the one after the next."""
        if self._is_owner:
            self._plane.send_unsigned(self._keys[(number + 2) % _NUM_SLOTS], b"")

    def _entries_of(self, slot: int) -> Entries:
        entries = self._entries[slot] = self._entries[slot] or self._plane.secret.entries(self._keys[slot])
        return entries


# -- equal records of many ranks, counted ------------------------------------------------------------------------------


_LARGEST_GROUP = 64
_EQUAL, _DIFFERENT = b"equal", b"different"


class CountedGate:
    """Lets all ranks through when all have come; the work of a rank does not grow with their number.

    The ranks of a node form a group. Its first rank reads the group's records, adds their number to the counter of
    their digest, and then to that of all; who brings the latter to the number of ranks opens the gate, and says whether
    one digest has them all. Only where the digests differ does every rank read the records of everybody.

    Args:
        plane: The control plane; all ranks create the gate at the same point.
        name: What the keys begin with.
        digest: Sums up what must be equal in a packed record.
    """

    def __init__(self, plane: ControlPlane, name: str, *, digest: Callable[[bytes], str]) -> None:
        self._plane = plane
        self._name = name
        self._digest = digest
        size = plane.world.size
        per_group = min(_LARGEST_GROUP, max(1, size // plane.world.num_nodes))
        self._groups = [range(first, min(first + per_group, size)) for first in range(0, size, per_group)]
        mine = plane.world.rank // per_group
        self._group = self._groups[mine]
        self._leads = plane.world.rank == self._group.start
        self._slots = [
            Slots(plane, f"{name}/group{index}", is_owner=self._leads and index == mine)
            for index in range(len(self._groups))
        ]
        self._own_slots = self._slots[mine]
        self._packed = b""
        self._is_counted = False
        if plane.world.rank == 0:
            plane.delete(self._total)
            plane.delete(self._opened)

    def post(self, number: int, packed: bytes) -> None:
        """Enters the gate with this rank's record; never waits."""
        self._packed = packed
        self._is_counted = False
        self._own_slots.post(number, packed)

    def collect(self, number: int, deadline: timedelta, *, what: str) -> list[bytes]:
        """Waits until all ranks have entered the gate.

        Returns:
            The records in rank order; this rank's own for all, where all digests are equal.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        are_equal = False
        records: dict[int, bytes] = {}

        def is_open() -> bool:
            nonlocal are_equal
            word = self._word(number)
            are_equal = word == _EQUAL
            if word and not are_equal:  # a stranger can count, but not sign
                records.update(self._read_all(number))
            return are_equal or len(records) == self._plane.world.size

        self._plane.poll(is_open, deadline, what=what, arrived=lambda: set(self._read_all(number)))
        self._own_slots.passed(number)
        if self._plane.world.rank == 0:
            for digest in {self._digest(record) for record in records.values()} or {self._digest(self._packed)}:
                self._plane.delete(self._agreed(number, digest))
        ranks = self._plane.world.ranks
        return [self._packed] * len(ranks) if are_equal else [records[rank] for rank in ranks]

    def _word(self, number: int) -> bytes:
        """What opened the gate; nothing while it is closed."""
        if self._leads and not self._is_counted:
            records = self._own_slots.read(number)
            if len(records) < len(self._group):
                return b""
            self._is_counted = True
            self._count(number, records)
        opened, _, word = (self._plane.read(self._opened) or b"").partition(b",")
        return word if opened == b"%d" % number else b""

    def _count(self, number: int, records: dict[int, bytes]) -> None:
        for digest, num_ranks in Counter(self._digest(record) for record in records.values()).items():
            self._plane.add(self._agreed(number, digest), num_ranks)
        # The total is never set back: a gate is full when all gates up to it are.
        if self._plane.add(self._total, len(records)) == number * self._plane.world.size:
            agreed = self._plane.add(self._agreed(number, self._digest(self._packed)), 0)
            word = _EQUAL if agreed == self._plane.world.size else _DIFFERENT
            self._plane.send(self._opened, b"%d,%s" % (number, word))

    def _read_all(self, number: int) -> dict[int, bytes]:
        return {rank: packed for slots in self._slots for rank, packed in slots.read(number).items()}

    @property
    def _total(self) -> str:
        return f"{self._name}/total"

    @property
    def _opened(self) -> str:
        return f"{self._name}/opened"

    def _agreed(self, number: int, digest: str) -> str:
        return f"{self._name}/agreed/{number}/{digest}"


# -- digests, added up in the store ------------------------------------------------------------------------------------


_NUM_KEYS = 3
_COUNTER_BITS = 63  # the store's counters are signed


class Tally:
    """Counts the ranks that have come to a number with the same digest.

    The sum is this rank's digest times the number of ranks, as long as all say the same; the work of a look does not
    grow with the ranks. The first look costs nothing: the store answers an addition with the sum.

    A rank enters number n + 1 only when all have entered number n, so that three keys, used in turn, are enough: once
    all have entered n, nobody looks at the key of n - 1 any more, and nobody adds to it before rank 0 has entered
    n + 1. Rank 0 empties it between.

    Args:
        plane: The control plane.
        name: What the keys begin with; the same on all ranks, and never used before.
    """

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._plane = plane
        self._keys = [f"{name}/{number}" for number in range(_NUM_KEYS)]
        self._bits = _COUNTER_BITS - plane.world.size.bit_length()
        self._key = ""
        self._digest = 1
        self._sum: int | None = None

    def enter(self, number: int, digest: bytes) -> None:
        """Says this rank's part; never waits.

        Args:
            number: Grows by one.
            digest: At least 8 bytes.
        """
        self._key = self._keys[number % _NUM_KEYS]
        # The highest bit is set: no digest is a multiple of another.
        self._digest = int.from_bytes(digest[:8], "little") >> (64 - self._bits) | 1 << (self._bits - 1)
        self._sum = self._plane.add(self._key, self._digest)

    def look(self) -> int | None:
        """How many ranks have come, this one included; None where they do not all say the same; never waits."""
        total = self._plane.add(self._key, 0) if self._sum is None else self._sum
        self._sum = None
        num_ranks, rest = divmod(total, self._digest)
        return None if rest else num_ranks

    def passed(self, number: int) -> None:
        """All have come: the key of the number before is emptied, for the one after the next."""
        if self._plane.world.rank == 0:
            self._plane.send_unsigned(self._keys[(number + 2) % _NUM_KEYS], b"0")


# -- a word of memory on which processes wait --------------------------------------------------------------------------


BELL_BYTES = 8
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_WORD_MASK = 0xFFFFFFFF


class Bell:
    """Wakes those who wait; one who waits costs no processor, and is awake sooner than the shortest sleep ends.

    Args:
        memory: Mapped by all of them.
        offset: Of ``BELL_BYTES`` in it, a multiple of 8.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._at = ctypes.byref(self._word)
        self._call = ctypes.CDLL(None).syscall

    @staticmethod
    def is_available() -> bool:
        """Whether this system has it, as far as we know its numbers."""
        return _FUTEX is not None

    @property
    def rung(self) -> int:
        """What it was last rung with."""
        return self._word.value

    def ring(self, number: int) -> None:
        """Wakes everybody.

        Args:
            number: Differs from that before, so that one who is about to wait does not.
        """
        self._word.value = number & _WORD_MASK
        self._call(_FUTEX, self._at, _WAKE, _ALL, None, None, 0)

    def wait(self, rung: int, seconds: float) -> None:
        """Waits for the next ring; returns at once if it rang since ``rung`` was read, and early for a signal."""
        at_most = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        self._call(_FUTEX, self._at, _WAIT, ctypes.c_uint32(rung), at_most, None, 0)


# -- memory that the ranks of a host share -----------------------------------------------------------------------------


_NAME = "distplus-shared"
_NUM_SETS = 2
_LINGER_S = 0.02  # longer than ranks that train in step wait for each other


class SharedRecords:
    """The records of ranks that share a host, where ``Slots`` has them in the store: a look asks nobody.

    Each rank writes into a place of its own, in one of two sets that are used in turn: a rank enters gate n + 1 only
    when all have entered gate n, so that whoever still looks at n finds its records. One that is read while it is
    written does not fit its sum, and counts as not there yet. Nobody but this user can write.

    Args:
        memory: Shared by all ranks, and empty.
        rank: This rank.
        size: The number of ranks.
    """

    PLACE = struct.Struct("<QQH")  # the number of the gate, the sum of number and record, the length of the record
    PLACE_BYTES = 256

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory = memory
        self._rank = rank
        self._size = size
        self._bell = Bell(memory, _NUM_SETS * size * self.PLACE_BYTES)

    @classmethod
    def share(cls, plane: ControlPlane, name: str, deadline: timedelta) -> SharedRecords | None:
        """Meets all ranks; see ``share_memory``."""
        memory = share_memory(plane, name, _NUM_SETS * plane.world.size * cls.PLACE_BYTES + BELL_BYTES, deadline)
        return None if memory is None else cls(memory, plane.world.rank, plane.world.size)

    def post(self, number: int, packed: bytes) -> None:
        """Shows this rank's record; never waits."""
        place = self.PLACE.pack(number, _sum(number, packed), len(packed)) + packed
        if len(place) > self.PLACE_BYTES:
            raise ValueError(
                f"A record has {len(packed)} bytes; it takes at most {self.PLACE_BYTES - self.PLACE.size}."
            )
        start = self._start(number, self._rank)
        self._memory[start : start + len(place)] = place

    def read(self, number: int) -> dict[int, bytes]:
        """The record of each rank that has entered the gate; never waits."""
        found: dict[int, bytes] = {}
        for rank in range(self._size):
            start = self._start(number, rank)
            posted, summed, length = self.PLACE.unpack_from(self._memory, start)
            if posted == number:
                start += self.PLACE.size
                packed = self._memory[start : start + length]
                if summed == _sum(number, packed):
                    found[rank] = packed
        return found

    def linger(self, number: int) -> dict[int, bytes]:
        """Gives the others a moment to come; the records of those that have."""
        found: dict[int, bytes] = {}

        def have_come() -> bool:
            found.update(self.read(number))
            return len(found) == self._size

        _linger(self._bell, number, have_come)
        return found

    def passed(self, number: int) -> None:
        """All have come: nothing has to be emptied."""

    def _start(self, number: int, rank: int) -> int:
        return (number % _NUM_SETS * self._size + rank) * self.PLACE_BYTES


def _sum(number: int, packed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(packed, seed=number)


def share_memory(plane: ControlPlane, name: str, num_bytes: int, deadline: timedelta) -> mmap.mmap | None:
    """Meets all ranks; makes memory where all of them can map it.

    Args:
        plane: The control plane.
        name: Of the meeting.
        num_bytes: How much, all of it zero.
        deadline: How long to wait for the slowest rank.

    Returns:
        None on all ranks alike, where they run on several hosts, may not look at each other, or are many.

    Raises:
        PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
    """
    if plane.world.size > DIRECT_RANKS:
        plane.barrier(name, deadline)
        return None
    descriptor, offer = _offer(num_bytes) if plane.world.rank == 0 else (None, {})
    try:
        offers = plane.gather_json(name, offer, deadline)
        memory = _map(offers[0], num_bytes)
        all_have = all(one["has"] for one in plane.gather_json(name, {"has": memory is not None}, deadline))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return memory if all_have else None


def _offer(num_bytes: int) -> tuple[int | None, dict[str, object]]:
    """New memory, and where the others find it; nothing where this system has none to give."""
    memory = f"{_NAME}-{secrets.token_hex(8)}"
    with suppress(OSError):
        descriptor = os.memfd_create(memory)
        os.ftruncate(descriptor, num_bytes)
        return descriptor, {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "memory": memory, "boot": boot_id()}
    return None, {}


def _map(offer: dict[str, object], num_bytes: int) -> mmap.mmap | None:
    """The memory of an offer; None where it is of another host, or may not be looked at."""
    path = str(offer.get("path", ""))
    with suppress(OSError, ValueError):
        is_here = bool(offer) and Bell.is_available() and offer["boot"] == boot_id()
        # Another process may have that number here: what it holds open must not be touched.
        if is_here and str(Path(path).readlink()).startswith(f"/memfd:{offer['memory']}"):
            descriptor = os.open(path, os.O_RDWR)
            try:
                return mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
    return None


def _linger(bell: Bell, number: int, have_come: Callable[[], bool]) -> None:
    """Returns when all have come, or a moment has passed; whoever comes last wakes the others.

    Two ranks that come together may both ring, or, should neither see the other's record yet, none: then the moment
    passes.
    """
    until = time.monotonic() + _LINGER_S
    rung = bell.rung
    if have_come():
        bell.ring(number)
        return
    while (left := until - time.monotonic()) > 0:
        bell.wait(rung, left)
        rung = bell.rung
        if have_come():
            return


# -- digests in memory that the ranks of a host share ------------------------------------------------------------------


_RECORD = struct.Struct("<QQ")  # the digest; the digest and the number, mixed
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that no two numbers are mixed alike
_WORD = (1 << 64) - 1


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
        """Meets all ranks; see ``share_memory``."""
        memory = share_memory(plane, name, _NUM_SETS * plane.world.size * _RECORD.size + BELL_BYTES, deadline)
        return None if memory is None else cls(memory, plane.world.rank, plane.world.size)

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
        _linger(self._bell, number, lambda: self._records() == self._complete)

    def look(self) -> int | None:
        """How many ranks have come, this one included; None where they do not all say the same; never waits."""
        records = self._records()
        if records == self._complete:
            return self._size
        come = [digest for digest, mixed in _RECORD.iter_unpack(records) if digest ^ mixed == self._mixed_in]
        return len(come) if all(digest == self._digest for digest in come) else None

    def passed(self, number: int) -> None:
        """All have come: nothing has to be emptied."""

    def _records(self) -> bytes:
        return self._memory[self._start : self._start + self._set_bytes]
