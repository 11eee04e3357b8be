"""The step gate: the record of each step, shown to all ranks and compared before anything is averaged."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntFlag
from typing import NamedTuple

import xxhash

from lightning_distplus.control.exchange import CountedGate, SharedRecords, Slots
from lightning_distplus.control.plane import DIRECT_RANKS, ControlPlane
from lightning_distplus.errors import DivergenceError

__all__ = ["RECORD_BYTES", "GateRecord", "StepGate", "Wish", "compare"]

RECORD_VERSION = 5


class Wish(IntFlag):
    """What a rank wants, or says, at a gate. One rank's wish is enough for all; SAVED counts when all say it."""

    NONE = 0
    STOP = 1
    PREEMPT = 2
    SAVED = 16
    LATE = 32


class GateRecord(NamedTuple):
    """What one rank says at a gate; at most 128 bytes on the wire.

    The fields of ``must_agree`` are compared at every gate. A field that a run does not fill stays 0 on all ranks.
    """

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


def compare(records: Sequence[GateRecord], must_agree: Sequence[str]) -> None:
    """Compares what all ranks say, given in rank order.

    Raises:
        DivergenceError: The first field of ``must_agree`` in which they differ; the majority is right.
    """
    for field in must_agree:
        values = {rank: getattr(record, field) for rank, record in enumerate(records)}
        if len(set(values.values())) > 1:
            raise _disagreement(field, values)


def _disagreement(field: str, values: dict[int, object]) -> DivergenceError:
    """The error for one field; the majority is right, a tie is undecided."""
    (common, count), *others = Counter(values.values()).most_common()
    undecided = others[0][1] == count
    wrong = sorted(values) if undecided else [rank for rank, value in values.items() if value != common]
    sides = "; ".join(f"rank {rank}: {value}" for rank, value in list(values.items())[:16])
    blame = "no majority decides who is wrong" if undecided else f"wrong: {wrong}"
    return DivergenceError(
        f"The ranks are about to train with different values of {field} ({sides}; {blame}). Nothing was averaged. "
        "A rank skipped or repeated a step: look for code that returns or raises on one rank only.",
        ranks=wrong,
        field=field,
        values=values,
    )


# -- the gate ----------------------------------------------------------------------------------------------------------


class StepGate:
    """Exchanges one record per rank and step, and compares them.

    Gates are numbered: a record cannot pair with the gate of another step, the ranks without one are named, and a gate
    survives a time-out. Up to 64 ranks everybody reads all records; more ranks count equal ones.

    Args:
        plane: The control plane. All ranks create the gate with the same name, at the same point.
        name: Keeps the gates of several runs in one process apart.
        must_agree: The fields in which a difference is an error.
        direct_ranks: Up to so many ranks read all records.
        judge: Raises where records differ that must not.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        name: str,
        must_agree: Sequence[str] = ("global_step", "micro_batch", "epoch"),
        direct_ranks: int = DIRECT_RANKS,
        judge: Callable[[Sequence[GateRecord], Sequence[str]], None] = compare,
    ) -> None:
        self._plane = plane
        self._name = name
        self._must_agree = tuple(must_agree)
        self._judge = judge
        self._number = 0
        self._posted: GateRecord | None = None
        self._gate: CountedGate | _DirectGate
        self.reads_all = plane.world.size <= direct_ranks
        if not self.reads_all:
            self._gate = CountedGate(plane, f"gate/{name}", digest=self._digest)
        else:
            self._gate = _DirectGate(plane, f"gate/{name}")

    def open(self, deadline: timedelta) -> None:
        """Meets all ranks, so that every key is empty before the first record comes.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        if isinstance(self._gate, CountedGate):
            self._plane.barrier(f"gate-{self._name}", deadline)
        else:
            self._gate.open(f"gate-{self._name}", deadline)

    def exchange(self, record: GateRecord, deadline: timedelta) -> list[GateRecord]:
        """Posts this rank's record and collects everybody's, in rank order.

        Of more than 64 ranks that agree in every field of ``must_agree`` and have the same wishes, each gets its own
        record in the place of all others.

        Args:
            record: What this rank says.
            deadline: How long to wait for the slowest rank.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
            DivergenceError: The records differ in a field in which they must agree.
        """
        self.post(record)
        return self.collect(deadline)

    def post(self, record: GateRecord) -> None:
        """Enters the next gate with this rank's record; never waits."""
        self._number += 1
        self._posted = record
        self._gate.post(self._number, record.pack())

    def collect(self, deadline: timedelta) -> list[GateRecord]:
        """Waits until all ranks have entered the gate, and compares their records; may be called again if it raised.

        Raises:
            PeerMissing, PeerFailed, PeerLost, DivergenceError: As for ``exchange``.
        """
        packed = self._gate.collect(self._number, deadline, what=f"step gate {self._number} of {self._name}")
        mine = packed[self._plane.world.rank]
        if self._posted is not None and packed.count(mine) == len(packed):  # the common case
            return [self._posted] * len(packed)
        records = [GateRecord.unpack(data, rank=rank) for rank, data in enumerate(packed)]
        self._judge(records, self._must_agree)
        return records

    def _digest(self, packed: bytes) -> str:
        """What must be equal in a record; all of it, where another version of this package packed it."""
        if not GateRecord.is_readable(packed):
            return xxhash.xxh3_64_hexdigest(packed)
        record = GateRecord.unpack(packed, rank=self._plane.world.rank)
        equal = [record.wishes, *(getattr(record, field) for field in self._must_agree)]
        return xxhash.xxh3_64_hexdigest(repr(equal).encode())


class _DirectGate:
    """Lets all ranks through when all have come; everybody reads the records of all."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._plane = plane
        self._slots: Slots | SharedRecords = Slots(plane, name, is_owner=plane.world.rank == 0)

    def open(self, name: str, deadline: timedelta) -> None:
        """Meets all ranks; those of one host show each other their records in memory from now on."""
        self._slots = SharedRecords.share(self._plane, name, deadline) or self._slots

    def post(self, number: int, packed: bytes) -> None:
        """Enters the gate with this rank's record; never waits."""
        self._slots.post(number, packed)

    def collect(self, number: int, deadline: timedelta, *, what: str) -> list[bytes]:
        """The records of all ranks, in rank order; the errors are those of ``ControlPlane.poll``."""
        size = self._plane.world.size
        self._plane.raise_if_launcher_gone()
        posted = self._slots.linger(number)

        def is_complete() -> bool:
            posted.update(self._slots.read(number))
            return len(posted) == size

        if len(posted) < size:
            self._plane.poll(is_complete, deadline, what=what, arrived=lambda: set(posted))
        self._slots.passed(number)
        return [posted[rank] for rank in range(size)]
