"""The keys through which a group of ranks shows its records: three, used in turn."""

from __future__ import annotations

import struct

from lightning_distplus.control.plane import ControlPlane

__all__ = ["HEAD_BYTES", "Slots"]

_NUM_SLOTS = 3
_HEAD = struct.Struct("<IIH")  # the number of the gate, the rank, the length of the record
_NUMBERS = 1 << 32  # one key holds two neighbouring gates at most: their numbers differ in this as well
HEAD_BYTES = _HEAD.size


class Slots:
    """One key per gate, to which every rank of the group appends its record; a look at all of them is one round trip.

    A record carries its gate's number, so that it cannot pair with that of another gate. A rank enters gate n + 1 only
    when all have entered gate n, so that three keys are enough: once all have entered gate n, nobody reads the key of
    gate n - 1 any more, and nobody writes to it before its owner has entered gate n + 1. The owner empties it between.

    Args:
        plane: The control plane.
        name: What the keys begin with; the same on all ranks of the group.
        is_owner: Whether this rank empties the keys; one rank of the group does.
    """

    def __init__(self, plane: ControlPlane, name: str, *, is_owner: bool) -> None:
        self._plane = plane
        self._name = name
        self._is_owner = is_owner
        if is_owner:
            for number in range(_NUM_SLOTS):
                plane.send(self._key(number), b"")

    def post(self, number: int, packed: bytes) -> None:
        """Shows this rank's record; never waits."""
        head = _HEAD.pack(number % _NUMBERS, self._plane.world.rank, len(packed))
        self._plane.append(self._key(number), head + packed)

    def read(self, number: int) -> dict[int, bytes]:
        """The record of each rank of the group that has entered the gate; never waits."""
        data = self._plane.read(self._key(number)) or b""
        found: dict[int, bytes] = {}
        start = 0
        while start < len(data):
            posted, rank, length = _HEAD.unpack_from(data, start)
            start += _HEAD.size + length
            if posted == number % _NUMBERS:
                found[rank] = data[start - length : start]
        return found

    def passed(self, number: int) -> None:
        """All have entered the gate: the key of the one before it is emptied, for the one after the next."""
        if self._is_owner:
            self._plane.send(self._key(number + 2), b"")

    def _key(self, number: int) -> str:
        return f"{self._name}/{number % _NUM_SLOTS}"
