"""Small records of all ranks: the gate of each step, and the digests of a checked call.

They stand in memory that the ranks of a host share, where all of them are on one; else in the store.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntFlag
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import xxhash

from lightning_distplus.control.plane import DIRECT_RANKS, ControlPlane
from lightning_distplus.control.secret import Entries
from lightning_distplus.errors import DivergenceError
from lightning_distplus.process import boot_id, open_memory

if TYPE_CHECKING:
    from typing_extensions import Self

# -- the record of a step ----------------------------------------------------------------------------------------------

RECORD_VERSION = 5


class Wish(IntFlag):
    """What a rank wants, or says, at a gate. One rank's wish is enough for all; SAVED counts when all say it."""

    NONE = 0
    STOP = 1
    PREEMPT = 2
    SAVED = 16
    LATE = 32


class GateRecord(NamedTuple):
    """What one rank says at a gate; at most 128 bytes on the wire. A field that a run does not fill stays 0."""

    global_step: int
    """Completed optimizer steps."""
    micro_batch: int
    """Index of the micro-batch in its epoch."""
    epoch: int
    wishes: int = 0
    """What this rank wants, or says: bits of ``Wish``."""
    decisions: int = 0
    """Bits: what follows this step (validation, save, stop, last batch, accumulation boundary)."""
    consumed_samples: int = 0
    data_fingerprint: int = 0
    """Order and content of the data, unsigned 64 bits."""
    batch_structure: int = 0
    """Tree, shapes and dtypes of the batch, unsigned 64 bits."""
    collectives: int = 0
    """Sequence numbers of all process groups, unsigned 64 bits."""
    state_fingerprint: int = 0
    """The step's window of the model state, unsigned 64 bits."""
    settings: int = 0
    """What the optimizers do: rates and counts of all groups, trainable parameters; unsigned 64 bits."""
    batch_content: int = 0
    """A sum of this rank's own samples, unsigned 64 bits; it never has to agree."""
    learning_rate: float = 0.0
    loss_scale: float = 0.0
    lead_s: float = 0.0
    """From the gate before to this rank's first backward, to three digits; it never has to agree."""
    wait_s: float = 0.0
    """How long this rank waited at the gate before, to three digits; it never has to agree."""
    data_s: float = 0.0
    """How long it waited for its batches since then, to three digits; it never has to agree, nor do the next two."""
    forward_s: float = 0.0
    """In ``training_step``."""
    optimizer_s: float = 0.0
    """In the optimizer, without forward and backward."""

    def pack(self) -> bytes:
        """The record as bytes."""
        return _LAYOUT.pack(RECORD_VERSION, *self)

    @staticmethod
    def is_readable(data: bytes) -> bool:
        """Whether this version of the package can unpack it."""
        return data[:1] == bytes([RECORD_VERSION]) and len(data) == RECORD_BYTES

    @classmethod
    def unpack(cls, data: bytes, *, rank: int) -> GateRecord:
        """Reads a record.

        Raises:
            DivergenceError: Another version of this package packed it.
        """
        if not cls.is_readable(data):
            raise DivergenceError(
                f"Rank {rank} runs another version of lightning_distplus: its step record has version {data[0]} and "
                f"{len(data)} bytes, this one has version {RECORD_VERSION} and {_LAYOUT.size} bytes. "
                "Install the same version everywhere.",
                ranks=[rank],
                field="record_version",
            )
        return cls._make(_LAYOUT.unpack(data)[1:])


_LAYOUT = struct.Struct("<B QQI H H QQQQQQQ dd eeeee".replace(" ", ""))
RECORD_BYTES = _LAYOUT.size


# -- the gate of a step ------------------------------------------------------------------------------------------------


class GateWatcher(Protocol):
    """Hears that this rank waits at a gate: ``Points``."""

    def enter_gate(self, record: GateRecord) -> None:
        """This rank is about to wait."""

    def leave_gate(self) -> None:
        """It has passed the gate, or has given up."""


class StepGate:
    """Exchanges one record per rank and step.

    Gates are numbered: a record cannot pair with the gate of another step, the ranks without one are named, and a gate
    survives a time-out. Up to 64 ranks everybody reads all records; more ranks count equal ones.

    Args:
        plane: The control plane.
        name: Keeps the gates of several runs in one process apart; alike on all ranks.
        must_agree: The fields in which records that differ are read by all ranks, however many there are.
        direct_ranks: Up to so many ranks read all records in any case.
        points: Lets those that wait at a point see who waits here, and ends a wait for one of them.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        name: str,
        must_agree: Sequence[str] = ("global_step", "micro_batch", "epoch"),
        direct_ranks: int = DIRECT_RANKS,
        points: GateWatcher | None = None,
    ) -> None:
        self._plane = plane
        self._points = points
        self._name = name
        self._must_agree = tuple(must_agree)
        self._number = 0
        self._posted: GateRecord | None = None
        self.reads_all = plane.world.size <= direct_ranks
        self._slots: Slots | SharedRecords | CountedGate = (
            Slots(plane, f"gate/{name}", is_owner=plane.world.rank == 0)
            if self.reads_all
            else CountedGate(plane, f"gate/{name}", digest=self._digest)
        )

    def open(self, deadline: timedelta) -> None:
        """Meets all ranks, so that every key is empty before the first record comes.

        Those of one host show each other their records in memory from now on.
        """
        name = f"gate-{self._name}"
        if isinstance(self._slots, CountedGate):
            self._plane.barrier(name, deadline)
        else:
            self._slots = SharedRecords.share(self._plane, name, deadline) or self._slots

    def exchange(self, record: GateRecord, deadline: timedelta) -> list[GateRecord]:
        """Posts this rank's record and collects everybody's, in rank order.

        Of more than 64 ranks that agree in every field of ``must_agree`` and have the same wishes, each gets its own
        record in the place of all others.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
            DivergenceError: A peer runs another version of this package, or waits at a point to which this rank has
                not come.
        """
        if self._points is None:
            self.post(record)
            return self.collect(deadline)
        self._points.enter_gate(record)
        try:
            self.post(record)
            return self.collect(deadline)
        finally:
            self._points.leave_gate()

    def post(self, record: GateRecord) -> None:
        """Enters the next gate with this rank's record; never waits."""
        self._number += 1
        self._posted = record
        self._slots.post(self._number, record.pack())

    def collect(self, deadline: timedelta) -> list[GateRecord]:
        """Waits until all ranks have entered the gate, and returns their records; may be called again if it raised."""
        what = f"step gate {self._number} of {self._name}"
        if isinstance(self._slots, CountedGate):
            packed = self._slots.collect(self._number, deadline, what=what)
        else:
            packed = self._collect_all(self._slots, self._number, deadline, what)
        mine = packed[self._plane.world.rank]
        if self._posted is not None and packed.count(mine) == len(packed):  # the common case
            return [self._posted] * len(packed)
        return [GateRecord.unpack(data, rank=rank) for rank, data in enumerate(packed)]

    def _collect_all(self, slots: Slots | SharedRecords, number: int, deadline: timedelta, what: str) -> list[bytes]:
        ranks = self._plane.world.ranks
        self._plane.raise_if_launcher_gone()
        posted = slots.linger(number)

        def is_complete() -> bool:
            posted.update(slots.read(number))
            return len(posted) == len(ranks)

        if len(posted) < len(ranks):
            self._plane.poll(is_complete, deadline, what=what, arrived=lambda: set(posted))
        slots.passed(number)
        return [posted[rank] for rank in ranks]

    def _digest(self, packed: bytes) -> str:
        """What must be equal in a record; all of it, where another version of this package packed it."""
        if not GateRecord.is_readable(packed):
            return xxhash.xxh3_64_hexdigest(packed)
        record = GateRecord.unpack(packed, rank=self._plane.world.rank)
        equal = [record.wishes, *(getattr(record, field) for field in self._must_agree)]
        return xxhash.xxh3_64_hexdigest(repr(equal).encode())


# -- equal records of many ranks, counted ------------------------------------------------------------------------------

_LARGEST_GROUP = 64
_EQUAL, _DIFFERENT = b"equal", b"different"


class CountedGate:
    """Lets all ranks through when all have come; the work of a rank does not grow with their number.

    The ranks of a node form a group. Its first rank reads the group's records, adds their number to the counter of
    their digest, and then to that of all; who brings the latter to the number of ranks opens the gate, and says whether
    one digest has them all. Only where the digests differ does every rank read the records of everybody.
    """

    def __init__(self, plane: ControlPlane, name: str, *, digest: Callable[[bytes], str]) -> None:
        self._plane = plane
        self._name, self._total, self._opened = name, f"{name}/total", f"{name}/opened"
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

    def _agreed(self, number: int, digest: str) -> str:
        return f"{self._name}/agreed/{number}/{digest}"


# -- records in the store ----------------------------------------------------------------------------------------------

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


# -- records in memory that the ranks of a host share ------------------------------------------------------------------

_NAME = "distplus-shared"
_NUM_SETS = 2
_LINGER_S = 0.02  # longer than ranks that train in step wait for each other
# A futex: one who waits on it costs no processor, and is awake sooner than the shortest sleep ends.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_BYTES = 8
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class SharedRecords:
    """The records of ranks that share a host, where ``Slots`` has them in the store: a look asks nobody.

    Each rank writes into a place of its own, in one of two sets that are used in turn: a rank enters gate n + 1 only
    when all have entered gate n, so that whoever still looks at n finds its records. One that is read while it is
    written does not fit its sum, and counts as not there yet. Nobody but this user can write.
    """

    PLACE = struct.Struct("<QQH")  # the number of the gate, the sum of number and record, the length of the record
    PLACE_BYTES = 256

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory = memory
        self._rank = rank
        self._size = size
        self._word = ctypes.c_uint32.from_buffer(memory, _NUM_SETS * size * self.PLACE_BYTES)
        self._at = ctypes.byref(self._word)
        self._syscall = ctypes.CDLL(None).syscall

    @classmethod
    def share(cls, plane: ControlPlane, name: str, deadline: timedelta) -> Self | None:
        """Meets all ranks; None on all alike, where they are many, on several hosts, or may not look at each other."""
        memory = _share_memory(plane, name, _NUM_SETS * plane.world.size * cls.PLACE_BYTES + _FUTEX_BYTES, deadline)
        return None if memory is None else cls(memory, plane.world.rank, plane.world.size)

    def post(self, number: int, packed: bytes) -> None:
        """Shows this rank's record; never waits."""
        place = self.PLACE.pack(number, _sum(number, packed), len(packed)) + packed
        assert len(place) <= self.PLACE_BYTES
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
        """Gives the others a moment to come; the records of those that have. Whoever comes last wakes the others.

        Two ranks that come together may both ring, or, should neither see the other's record yet, none: then the moment
        passes.
        """
        until = time.monotonic() + _LINGER_S
        rung = self._word.value  # before the look: a ring in between ends the wait at once
        if len(found := self.read(number)) == self._size:
            self._word.value = number & 0xFFFFFFFF
            self._syscall(_FUTEX, self._at, _WAKE, _ALL, None, None, 0)
        while len(found) < self._size and (left := until - time.monotonic()) > 0:
            at_most = (ctypes.c_long * 2)(int(left), int(left % 1 * 1e9))
            self._syscall(_FUTEX, self._at, _WAIT, ctypes.c_uint32(rung), at_most, None, 0)
            rung = self._word.value
            found = self.read(number)
        return found

    def passed(self, number: int) -> None:
        """All have come: nothing has to be emptied."""

    def _start(self, number: int, rank: int) -> int:
        return (number % _NUM_SETS * self._size + rank) * self.PLACE_BYTES


def _sum(number: int, packed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(packed, seed=number)


def _share_memory(plane: ControlPlane, name: str, num_bytes: int, deadline: timedelta) -> mmap.mmap | None:
    """Memory that rank 0 offers; None on all ranks where one of them is on another host, or may not look at it."""
    if plane.world.size > DIRECT_RANKS:
        plane.barrier(name, deadline)
        return None
    own, descriptor = f"{_NAME}-{secrets.token_hex(8)}", None
    if plane.world.rank == 0 and _FUTEX is not None:
        with suppress(OSError):
            descriptor = os.memfd_create(own)
            os.ftruncate(descriptor, num_bytes)
    try:
        offer = {"pid": os.getpid(), "memory": own, "boot": boot_id()}
        found = plane.gather_json(name, offer, deadline)[0]
        memory = _map(found, num_bytes) if found["boot"] == boot_id() else None
        all_have = all(one["has"] for one in plane.gather_json(name, {"has": memory is not None}, deadline))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return memory if all_have else None


def _map(offer: dict[str, Any], num_bytes: int) -> mmap.mmap | None:
    if (descriptor := open_memory(offer["pid"], offer["memory"], os.O_RDWR)) is None:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):  # rank 0 could not make it as large
        return None
    finally:
        os.close(descriptor)


# -- digests of all ranks ----------------------------------------------------------------------------------------------

_NUM_KEYS = 3
_COUNTER_BITS = 63  # the store's counters are signed


class Tally:
    """Counts the ranks that have come to a number with the same digest.

    The sum is this rank's digest times the number of ranks, as long as all say the same; the work of a look does not
    grow with the ranks. The first look costs nothing: the store answers an addition with the sum.

    A rank enters number n + 1 only when all have entered number n, so that three keys, used in turn, are enough: once
    all have entered n, nobody looks at the key of n - 1 any more, and nobody adds to it before rank 0 has entered
    n + 1. Rank 0 empties it between. A ``name`` is used once.
    """

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._plane = plane
        self._keys = [f"{name}/{number}" for number in range(_NUM_KEYS)]
        self._bits = _COUNTER_BITS - plane.world.size.bit_length()
        self._key = ""
        self._digest = 1
        self._sum: int | None = None

    def enter(self, number: int, digest: bytes) -> None:
        """Says this rank's part, a digest of at least 8 bytes, at a number that grows by one; never waits."""
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


class SharedTally(SharedRecords):
    """Counts the ranks that have come to a number with the same digest; what ``Tally`` does over the store."""

    def enter(self, number: int, digest: bytes) -> None:
        """Says this rank's part at a number that grows by one, and gives the others a moment to say theirs."""
        self._number, self._digest = number, digest
        self.post(number, digest)
        self.linger(number)

    def look(self) -> int | None:
        """How many ranks have come, this one included; None where they do not all say the same; never waits."""
        come = self.read(self._number).values()
        return len(come) if all(digest == self._digest for digest in come) else None
