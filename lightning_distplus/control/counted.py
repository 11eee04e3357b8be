"""A gate of many ranks: they count equal records instead of reading them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.control.slots import Slots

__all__ = ["CountedGate"]

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
        word = b""

        def is_open() -> bool:
            nonlocal word
            word = self._word(number)
            return bool(word)

        self._plane.poll(is_open, deadline, what=what, arrived=lambda: set(self._read_all(number)))
        are_equal = word == _EQUAL
        records = {} if are_equal else self._read_all(number)
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
