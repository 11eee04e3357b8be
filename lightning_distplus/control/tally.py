"""Do all ranks say the same: one counter, to which each adds the digest of what it says; a look is one round trip."""

from __future__ import annotations

from lightning_distplus.control.plane import ControlPlane

__all__ = ["Tally"]

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
            self._plane.send(self._keys[(number + 2) % _NUM_KEYS], b"0")
