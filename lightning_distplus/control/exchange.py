"""Small records of all ranks: the gate of each step, and the digests of a checked call.

The ranks of a host show them to each other in memory that they share; one rank of each host speaks to the store.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import secrets
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntFlag
from typing import Any, NamedTuple, Protocol

import xxhash

from lightning_distplus.control.plane import DIRECT_RANKS, ControlPlane
from lightning_distplus.errors import DivergenceError
from lightning_distplus.process import boot_id, open_memory

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


class StepGate:
    """Exchanges one record per rank and step.

    Gates are numbered: a record cannot pair with the gate of another step, the ranks without one are named, and a gate
    survives a time-out. Up to 64 ranks everybody reads all records; of more, records that agree are not read.

    Args:
        plane: The control plane.
        name: Keeps the gates of several runs in one process apart; alike on all ranks, and no other gate's.
        must_agree: The fields in which records that differ are read by all ranks, however many there are.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        name: str,
        must_agree: Sequence[str] = ("global_step", "micro_batch", "epoch"),
    ) -> None:
        self._rank = plane.world.rank
        self._name = name
        self._must_agree = tuple(must_agree)
        self._posted: GateRecord | None = None
        self.reads_all = plane.world.size <= DIRECT_RANKS
        self._exchange = Exchange(plane, f"gate/{name}")

    def open(self, deadline: timedelta) -> None:
        """Meets all ranks, and finds those of this host."""
        self._exchange.open(deadline)

    def exchange(self, record: GateRecord, deadline: timedelta) -> list[GateRecord]:
        """Posts this rank's record and collects everybody's, in rank order.

        Of more than 64 ranks that agree in every field of ``must_agree`` and have the same wishes, each may get its own
        record in the place of all others.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
            DivergenceError: A peer runs another version of this package.
        """
        self.post(record)
        return self.collect(deadline)

    def post(self, record: GateRecord) -> None:
        """Enters the next gate with this rank's record; never waits."""
        self._posted = record
        self._exchange.post(record.pack(), None if self.reads_all else self._digest(record))

    def collect(self, deadline: timedelta) -> list[GateRecord]:
        """Waits until all ranks have entered the gate, and returns their records; may be called again if it raised."""
        packed = self._exchange.collect(deadline, what=f"step gate {self._exchange.number} of {self._name}")
        mine = packed[self._rank]
        if self._posted is not None and packed.count(mine) == len(packed):  # the common case
            return [self._posted] * len(packed)
        return [GateRecord.unpack(data, rank=rank) for rank, data in enumerate(packed)]

    def _digest(self, record: GateRecord) -> bytes:
        """Of what must be equal in a record."""
        equal = [RECORD_VERSION, record.wishes, *(getattr(record, field) for field in self._must_agree)]
        return xxhash.xxh3_64_digest(repr(equal).encode())


# -- records of all ranks, over two tiers ------------------------------------------------------------------------------

_DIGEST_BYTES = 8
_EQUAL = b"equal"
_FEW_HOSTS = 8  # all of them read what all say: one way less
# The first rank of a host that waits for other hosts asks the store less and less often, and less the more hosts there
# are; rank 0, on which the others wait, asks more often.
_ASK_FLOOR_S = 20e-6
_ASK_FLOOR_PER_HOST_S = 100e-6
_RANK_0_ASKS_PER_HOST_S = 20e-6
_ASK_SHARE = 0.25
_ASK_CEILING_S = 0.01
_ALONE_S = 0.1  # after so long a wait every rank asks the store itself: who serves it may be gone
# Who waits longer reads for itself what all have said; many ranks do so later.
_LATE_S = 0.25
_LATE_PER_RANK_S = 5e-3
_LATE_SHARE = 0.25  # of the deadline at most, so that it is known before who is missing


class Referee(Protocol):
    """Judges ranks that show different records: ``Points``."""

    def judge(self) -> None:
        """Called at each look while they differ; what it raises ends the wait."""


class Exchange:
    """One record of each rank at every number: in memory that the ranks of a host share, between hosts in the store.

    The first rank of a host speaks for it: when all of its host have come, it posts their records in one entry. Rank 0
    reads the entries of all hosts and publishes the outcome: that all agree, or all records. The first rank of each
    host reads that, or among few hosts the entries themselves, and shows it to its peers in the memory. So a number
    costs the store one entry and some looks a host, however many ranks it has, and nothing where there is one host.

    Nobody waits for a rank that has come and stopped. Who waits for some time asks the store too; the lowest rank that
    has come posts those that have; and after a while each reads the entries of all, adds those of its host that are not
    there, and draws the conclusion itself. So the missing ranks are named, whoever they are. A rank that can share no
    memory is a host of its own, and so is each until ``open``.

    Args:
        plane: The control plane.
        name: Of the keys; alike on all ranks, and no other exchange's.
        ranks: Those that take part, in their order; all by default. The first of them stands for rank 0.
    """

    def __init__(self, plane: ControlPlane, name: str, ranks: Sequence[int] = ()) -> None:
        self._plane = plane
        self._name = name
        self._rank, self._ranks = plane.world.rank, ranks or plane.world.ranks
        self._leads = self._rank == self._ranks[0]
        self._roll = Roll(plane, name)
        self._outcome_key = f"{name}/outcome"
        self.number = 0
        self._take_place(list(plane.world.ranks), mmap.mmap(-1, SharedRecords.num_bytes(plane.world.size)))

    def open(self, deadline: timedelta) -> None:
        """Finds the ranks that share memory; all of them take part."""
        self._take_place(*share_memory(self._plane, self._name, deadline))

    def _take_place(self, firsts: list[int], memory: mmap.mmap) -> None:
        self._memory = SharedRecords(memory, len(firsts))
        self._host = [rank for rank in self._ranks if firsts[rank] == firsts[self._rank]]
        self._is_first = self._rank == self._host[0]
        self._num_hosts = len({firsts[rank] for rank in self._ranks})
        self._is_split = self._num_hosts > 1
        self._bell = _AT_FIRST if self._is_split and self._is_first else _AT_ALL

    def post(self, record: bytes, digest: bytes | None = None) -> None:
        """Enters the next number with this rank's record; never waits, nor asks the store.

        Where all ranks show the same digest, of 8 bytes, they need not read each other's records; without one, the
        whole record has to be the same for that.
        """
        self.number += 1
        self._own = (digest or xxhash.xxh3_64_digest(record)) + record
        self._here: dict[int, bytes] = {}  # of this host
        self._said: dict[int, bytes] = {}  # of all hosts, as far as this rank has read it
        self._posted: set[int] = set()
        self._is_known = False
        self._asks_since = time.monotonic()
        self._ask_at, self._late_at = self._asks_since + _ALONE_S, math.inf
        self._memory.write(self.number, self._rank, self._own)

    def collect(self, deadline: timedelta, *, what: str, referee: Referee | None = None) -> list[bytes]:
        """Waits until all ranks have come to the number; may be called again if it raised.

        Returns:
            The records in rank order; this rank's own for all, where those of several hosts show the same digest.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        self._plane.raise_if_launcher_gone()
        if self._is_split:
            self._late_every_s = max(_LATE_S, _LATE_PER_RANK_S * len(self._ranks))
            self._late_every_s = min(self._late_every_s, _LATE_SHARE * deadline.total_seconds())
            turn, now = self._host.index(self._rank) / len(self._host), time.monotonic()  # one after the other
            self._late_at = now + self._late_every_s * (1 + turn)
            self._ask_at = min(self._ask_at, now + self._late_every_s)

        def is_complete() -> bool:
            have_come = self._look()
            if referee is not None and self._differ():
                referee.judge()
                return False
            return have_come

        if not is_complete():
            self.rest(_LINGER_S)  # ranks that train in step wait no longer
            if not is_complete():
                self._plane.poll(is_complete, deadline, what=what, arrived=self._arrived, pause=self)
        if self._is_split and self._leads:
            self._roll.passed(self.number)
        records = self._said if self._is_split else self._here
        return [records[rank][_DIGEST_BYTES:] for rank in self._ranks]

    def rest(self, seconds: float) -> None:
        """Waits for a ring, or until the store is asked next."""
        seconds = max(seconds, _LINGER_S)
        if self._is_split and not self._is_known:
            seconds = min(seconds, max(0.0, self._ask_at - time.monotonic()))
        if len(self._host) > 1:
            self._memory.wait(seconds)
        else:
            time.sleep(seconds)

    def _look(self) -> bool:
        """Whether all have come; asks the store only where there are other hosts, and when it is time to."""
        self._memory.listen(self._bell)
        if self._is_known:
            return True
        self._read_host()
        if not self._is_split:
            self._is_known = len(self._here) == len(self._ranks)
            return self._is_known
        outcome = self._memory.read(self.number, [self._memory.outcome]).get(self._memory.outcome)
        if outcome is None and (outcome := self._ask_in_time()) is not None:
            self._memory.write(self.number, self._memory.outcome, outcome)
            if len(self._host) > 1:
                self._memory.ring(_AT_ALL, self.number)
        if outcome is not None:
            self._is_known = True
            self._said = dict.fromkeys(self._ranks, self._own) if outcome == _EQUAL else _unpacked(outcome)
        return self._is_known

    def _read_host(self) -> None:
        """Whoever comes last wakes the others."""
        if not self._here:
            self._here = self._memory.read(self.number, self._host)
            if 1 < len(self._host) == len(self._here):
                self._memory.ring(_AT_FIRST if self._is_split else _AT_ALL, self.number)
        elif len(self._here) < len(self._host):
            self._here |= self._memory.read(self.number, [rank for rank in self._host if rank not in self._here])

    def _differ(self) -> bool:
        own = self._own[:_DIGEST_BYTES]
        return any(one[:_DIGEST_BYTES] != own for one in (*self._here.values(), *self._said.values()))

    # -- the tier between hosts ----------------------------------------------------------------------------------------

    def _ask_in_time(self) -> bytes | None:
        now = time.monotonic()
        if self._is_first and len(self._posted) < len(self._here) == len(self._host):  # now it has all to say
            self._asks_since = now
        elif now < self._ask_at and self._plane.first_error is None:
            return None
        outcome = self._ask(now)
        pause_s = self._plane.longest_pause_s
        if self._is_first:
            per_host_s = _RANK_0_ASKS_PER_HOST_S if self._leads else _ASK_FLOOR_PER_HOST_S
            floor_s = per_host_s * self._num_hosts if self._num_hosts > _FEW_HOSTS else _ASK_FLOOR_S
            pause_s = min(pause_s, max(floor_s, min(_ASK_SHARE * (now - self._asks_since), _ASK_CEILING_S)))
        self._ask_at = now + pause_s
        return outcome

    def _ask(self, now: float) -> bytes | None:
        """Says what has come of this host, where that is this rank's part. The outcome, once it is known."""
        is_late = now >= self._late_at
        reads_all = is_late or self._leads or self._num_hosts <= _FEW_HOSTS
        unsaid = self._here.keys() - self._posted if self._rank == min(self._here) else set()
        if unsaid:
            self._post(unsaid)
        if not reads_all:
            # Right after a post nobody can have answered yet.
            number, _, outcome = (b"" if unsaid else self._plane.read(self._outcome_key) or b"").partition(b" ")
            return outcome if number == b"%d" % self.number else None
        if is_late:
            self._late_at = now + self._late_every_s
        self._said = self._roll.read(self.number)
        if unseen := self._here.keys() - self._said.keys():  # their first rank has stopped, or a stranger wrote over it
            self._post(unseen)
        records = self._said | self._here
        if len(records) < len(self._ranks):
            return None
        outcome = _packed(records) if len({one[:_DIGEST_BYTES] for one in records.values()}) > 1 else _EQUAL
        if self._leads and self._num_hosts > _FEW_HOSTS:
            self._plane.send(self._outcome_key, b"%d " % self.number + outcome)
        return outcome

    def _post(self, ranks: Iterable[int]) -> None:
        self._roll.post(self.number, {rank: self._here[rank] for rank in ranks})
        self._posted.update(ranks)

    def _arrived(self) -> set[int]:
        """And those that are not awaited."""
        self._ask_at = self._late_at = 0.0
        self._look()
        return {*self._here, *self._said} | (set(self._plane.world.ranks) - set(self._ranks))


# -- records in the store ----------------------------------------------------------------------------------------------

_NUM_KEYS = 3
_NUMBER = struct.Struct("<I")
_NUMBERS = 1 << 32  # one key holds two neighbouring numbers at most: they differ in this as well
_HEAD = struct.Struct("<IH")  # the rank, and the length of its record
HEAD_BYTES = _HEAD.size


def _packed(records: Mapping[int, bytes]) -> bytes:
    return b"".join(_HEAD.pack(rank, len(records[rank])) + records[rank] for rank in sorted(records))


def _unpacked(data: bytes, start: int = 0) -> dict[int, bytes]:
    records = {}
    while start < len(data):
        rank, length = _HEAD.unpack_from(data, start)
        start += HEAD_BYTES + length
        records[rank] = data[start - length : start]
    return records


class Roll:
    """One key per number, to which each host appends the records of its ranks; a look at all of them is one round trip.

    An entry carries its number, so that its records cannot pair with those of another. A rank enters number n + 1 only
    when all have entered number n, so that three keys are enough: once all have entered n, nobody reads the key of
    n - 1 any more, and nobody writes to it before rank 0 has entered n + 1. Rank 0 empties it between.

    Every entry is signed: what a stranger writes between them is skipped.
    """

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._plane = plane
        self._keys = [f"{name}/{number}" for number in range(_NUM_KEYS)]
        self._entries = [plane.secret.entries(key) for key in self._keys]

    def post(self, number: int, records: Mapping[int, bytes]) -> None:
        """Shows the records of some ranks; never waits."""
        turn = number % _NUM_KEYS
        entry = self._entries[turn].entry(_NUMBER.pack(number % _NUMBERS) + _packed(records))
        self._plane.append(self._keys[turn], entry)

    def read(self, number: int) -> dict[int, bytes]:
        """The records that have been posted at the number; never waits."""
        head, records, turn = _NUMBER.pack(number % _NUMBERS), dict[int, bytes](), number % _NUM_KEYS
        for entry in self._entries[turn].read(self._plane.read_unsigned(self._keys[turn]) or b""):
            if entry.startswith(head):
                records |= _unpacked(entry, len(head))
        return records

    def passed(self, number: int) -> None:
        """All have entered the number: the key of the one before it is emptied, for the one after the next."""
        if number > 1:
            self._plane.send_unsigned(self._keys[(number - 1) % _NUM_KEYS], b"")


# -- records in memory that the ranks of a host share ------------------------------------------------------------------

_NAME = "distplus-shared"
_NUM_SETS = 2
_PLACE = struct.Struct("<QQI")  # the number, the sum of number and record, the length of the record
_PLACE_HEAD_BYTES = _PLACE.size
_PLACE_BYTES = 256
_LINGER_S = 0.02
# A futex: one who waits on it costs no processor, and is awake sooner than the shortest sleep ends.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_syscall = ctypes.CDLL(None).syscall
_ALL = 0x7FFFFFFF
_sum = xxhash.xxh3_64_intdigest
_AT_FIRST, _AT_ALL = range(2)  # the bells: for the first rank when its host has come, for the others when all have
_BELLS = ctypes.c_uint32 * 2


class SharedRecords:
    """The records of ranks that share a host, and the outcome of all: a look asks nobody.

    Each rank has a place in each of two sets, which are used in turn: a rank enters number n + 1 only when all have
    entered n, so that whoever still looks at n finds its records. What is read while it is written does not fit its
    sum, and counts as not there yet. Nobody but this user can write.
    """

    def __init__(self, memory: mmap.mmap, num_ranks: int) -> None:
        self._memory = memory
        self.outcome = num_ranks
        """The place for the outcome, with room for the records of all."""
        self._set_bytes = (self.num_bytes(num_ranks) - ctypes.sizeof(_BELLS)) // _NUM_SETS
        self._bells = _BELLS.from_buffer(memory, _NUM_SETS * self._set_bytes)
        self._heard = (_AT_ALL, 0)

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """What so many ranks need."""
        return _NUM_SETS * 2 * _PLACE_BYTES * (num_ranks + 1) + ctypes.sizeof(_BELLS)

    def write(self, number: int, place: int, record: bytes) -> None:
        """Puts a record into a rank's place, or the outcome into the one behind them; never waits.

        An outcome with records longer than places, which another version of this package has posted, is left out: who
        waits for it reads the entries, and names that version.
        """
        first = place * _PLACE_BYTES
        room = self._set_bytes - first if place == self.outcome else _PLACE_BYTES
        record = _PLACE.pack(number, _sum(record, number), len(record)) + record
        assert len(record) <= room or place == self.outcome
        if len(record) <= room:
            start = self._start(number) + first
            self._memory[start : start + len(record)] = record

    def read(self, number: int, places: Iterable[int]) -> dict[int, bytes]:
        """What stands at the number in those of the places that have been written; never waits."""
        found = {}
        memory, first, unpack = self._memory, self._start(number), _PLACE.unpack_from  # every rank does this each step
        for place in places:
            start = first + place * _PLACE_BYTES
            posted, summed, length = unpack(memory, start)
            if posted == number:
                start += _PLACE_HEAD_BYTES
                record = memory[start : start + length]
                if summed == _sum(record, number):
                    found[place] = record
        return found

    def _start(self, number: int) -> int:
        return number % _NUM_SETS * self._set_bytes

    def listen(self, bell: int) -> None:
        """Before a look: a ring from now on ends the next wait at once."""
        self._heard = (bell, self._bells[bell])

    def ring(self, bell: int, number: int) -> None:
        """Ends the waits of all who wait for what is there now.

        Two ranks that come together may both ring, or, should neither see the other's record yet, none: then the wait
        passes.
        """
        self._bells[bell] = number & 0xFFFFFFFF
        _syscall(_FUTEX, self._at(bell), _WAKE, _ALL, None, None, 0)

    def wait(self, seconds: float) -> None:
        """Returns at the next ring after ``listen``, or sooner, or when the time is over."""
        bell, heard = self._heard
        at_most = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        _syscall(_FUTEX, self._at(bell), _WAIT, ctypes.c_uint32(heard), at_most, None, 0)

    def _at(self, bell: int) -> Any:
        return ctypes.byref(self._bells, bell * ctypes.sizeof(ctypes.c_uint32))


def share_memory(plane: ControlPlane, name: str, deadline: timedelta) -> tuple[list[int], mmap.mmap]:
    """Meets all ranks. The first rank of each host offers memory to the others of its host.

    A rank that may not look at it, as in a container of its own, is a host of its own.

    Returns:
        The first rank of each rank's host, and the memory.
    """
    num_bytes = SharedRecords.num_bytes(plane.world.size)
    own, descriptor = f"{_NAME}-{secrets.token_hex(8)}", None
    if _FUTEX is not None:
        with suppress(OSError):
            descriptor = os.memfd_create(own)
            os.ftruncate(descriptor, num_bytes)
    try:
        offer = {"pid": os.getpid(), "memory": own, "host": f"{plane.world.host} {boot_id()}"}
        offers = plane.gather_json(name, offer, deadline)
        hosts = dict[str, int]()
        firsts = [hosts.setdefault(offer["host"], rank) for rank, offer in enumerate(offers)]
        first = firsts[plane.world.rank]
        memory = _map(offers[first], num_bytes) if boot_id() else None
        can_map = [one["can_map"] for one in plane.gather_json(name, {"can_map": memory is not None}, deadline)]
    finally:
        if descriptor is not None:
            os.close(descriptor)
    firsts = [first if can_map[rank] and can_map[first] else rank for rank, first in enumerate(firsts)]
    if memory is None or firsts[plane.world.rank] != first:
        memory = mmap.mmap(-1, num_bytes)
    return firsts, memory


def _map(offer: dict[str, Any], num_bytes: int) -> mmap.mmap | None:
    if (descriptor := open_memory(offer["pid"], offer["memory"], os.O_RDWR)) is None:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):  # the one who offers it could not make it as large
        return None
    finally:
        os.close(descriptor)
