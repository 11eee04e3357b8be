"""The one check of each step: a keyed exchange of one small record per rank, in place of a collective."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import IntFlag
from operator import attrgetter

from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.errors import DivergenceError

__all__ = ["GateRecord", "StepGate", "Wish"]

RECORD_VERSION = 1

_SLOTS = 3
_HEAD = struct.Struct("<QIH")  # the number of the gate, the rank, the length of the record


class Wish(IntFlag):
    """What a rank wants, or says, at a gate. One rank's wish is enough for all."""

    NONE = 0
    STOP = 1
    PREEMPT = 2
    SKIP = 4
    FAILED = 8


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """What one rank says at a gate; at most 128 bytes on the wire.

    The fields of ``must_agree`` are compared at every gate. A field that a run does not fill stays 0 on all ranks.
    """

    global_step: int
    """Completed optimizer steps."""
    micro_batch: int
    """Index of the micro-batch in its epoch."""
    epoch: int
    wishes: Wish = Wish.NONE
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
    learning_rate: float = 0.0
    loss_scale: float = 0.0

    def pack(self) -> bytes:
        """The record as bytes."""
        return _LAYOUT.pack(RECORD_VERSION, *_values(self))

    @classmethod
    def unpack(cls, data: bytes, *, rank: int) -> GateRecord:
        """Reads a record.

        Raises:
            DivergenceError: Another version of this package packed it.
        """
        if data[0] != RECORD_VERSION or len(data) != _LAYOUT.size:
            raise DivergenceError(
                f"Rank {rank} runs another version of lightning_distplus: its step record has version {data[0]} and "
                f"{len(data)} bytes, this one has version {RECORD_VERSION} and {_LAYOUT.size} bytes. "
                "Install the same version everywhere.",
                ranks=[rank],
                field="record_version",
            )
        values = dict(zip(_NAMES, _LAYOUT.unpack(data)[1:], strict=True))
        values["wishes"] = Wish(values["wishes"])
        return cls(**values)


_NAMES = tuple(field.name for field in fields(GateRecord))
_values = attrgetter(*_NAMES)  # dataclasses.astuple copies deeply, which costs more than the exchange
_LAYOUT = struct.Struct("<B QQI H H QQQQQ dd".replace(" ", ""))
assert _HEAD.size + _LAYOUT.size <= 128


class StepGate:
    """Exchanges one record per rank and step, and compares them.

    Gates are numbered, and a record carries its gate's number: it cannot pair with the gate of another step, the ranks
    without it are named, and a gate survives a time-out. Each gate is one key, to which every rank appends its record;
    a look at it is one round trip.

    A rank enters gate n + 1 only when all have entered gate n, so that three keys are enough: when rank 0 enters gate
    n, nobody reads gate n - 2 any more and nobody writes to gate n + 1 yet. It empties that key then.

    Args:
        plane: The control plane. All ranks create the gate with the same name, at the same point.
        name: Keeps the gates of several runs in one process apart.
        must_agree: The fields in which a difference is an error.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        name: str,
        must_agree: Sequence[str] = ("global_step", "micro_batch", "epoch"),
    ) -> None:
        self._plane = plane
        self._name = name
        self._must_agree = tuple(must_agree)
        self._number = 0
        if plane.world.rank == 0:
            for number in range(_SLOTS):
                plane.send(self._key(number), b"")

    def open(self, deadline: timedelta) -> None:
        """Meets all ranks, so that every key is empty before the first record comes.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        self._plane.barrier(f"gate-{self._name}", deadline)

    def exchange(self, record: GateRecord, deadline: timedelta) -> list[GateRecord]:
        """Posts this rank's record and collects everybody's, in rank order.

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
        rank = self._plane.world.rank
        if rank == 0:
            self._plane.send(self._key(self._number + 1), b"")
        packed = record.pack()
        self._plane.append(self._key(self._number), _HEAD.pack(self._number, rank, len(packed)) + packed)

    def collect(self, deadline: timedelta) -> list[GateRecord]:
        """Waits until all ranks have entered the gate, and compares their records; may be called again if it raised.

        Raises:
            PeerMissing, PeerFailed, PeerLost, DivergenceError: As for ``exchange``.
        """
        key = self._key(self._number)
        posted: dict[int, bytes] = {}

        def is_complete() -> bool:
            posted.update(self._entries(self._plane.read(key) or b""))
            return len(posted) == self._plane.world.size

        self._plane.poll(
            is_complete,
            deadline,
            what=f"step gate {self._number} of {self._name}",
            arrived=lambda: set(posted),
        )
        return self._read([posted[rank] for rank in self._plane.world.ranks])

    def _key(self, number: int) -> str:
        return f"gate/{self._name}/{number % _SLOTS}"

    def _entries(self, data: bytes) -> dict[int, bytes]:
        """The packed record of each rank that has entered this gate."""
        entries: dict[int, bytes] = {}
        start = 0
        while start < len(data):
            number, rank, length = _HEAD.unpack_from(data, start)
            start += _HEAD.size + length
            if number == self._number:
                entries[rank] = data[start - length : start]
        return entries

    def _read(self, packed: Sequence[bytes]) -> list[GateRecord]:
        mine = packed[self._plane.world.rank]
        if all(data == mine for data in packed):  # the common case costs one comparison per rank
            return [GateRecord.unpack(mine, rank=self._plane.world.rank)] * len(packed)
        records = [GateRecord.unpack(data, rank=rank) for rank, data in enumerate(packed)]
        self._compare(records)
        return records

    def _compare(self, records: Sequence[GateRecord]) -> None:
        for field in self._must_agree:
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
