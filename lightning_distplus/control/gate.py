"""The one check of each step: a keyed exchange of one small record per rank, in place of a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import xxhash

from lightning_distplus.control.counted import CountedGate
from lightning_distplus.control.line import DIRECT_RANKS
from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.control.record import GateRecord, compare
from lightning_distplus.control.slots import Slots

__all__ = ["StepGate"]


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
        self._plane.barrier(f"gate-{self._name}", deadline)

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
        equal = [int(record.wishes), *(getattr(record, field) for field in self._must_agree)]
        return xxhash.xxh3_64_hexdigest(repr(equal).encode())


class _DirectGate:
    """Lets all ranks through when all have come; everybody reads the records of all."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._plane = plane
        self._slots = Slots(plane, name, is_owner=plane.world.rank == 0)

    def post(self, number: int, packed: bytes) -> None:
        """Enters the gate with this rank's record; never waits."""
        self._slots.post(number, packed)

    def collect(self, number: int, deadline: timedelta, *, what: str) -> list[bytes]:
        """The records of all ranks, in rank order; the errors are those of ``ControlPlane.poll``."""
        posted: dict[int, bytes] = {}

        def is_complete() -> bool:
            posted.update(self._slots.read(number))
            return len(posted) == self._plane.world.size

        self._plane.poll(is_complete, deadline, what=what, arrived=lambda: set(posted))
        self._slots.passed(number)
        return [posted[rank] for rank in self._plane.world.ranks]
