"""The global order of samples: a keyed permutation that is computed, never stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_SAMPLES",
    "ORDER_VERSION",
    "READABLE_ORDER_VERSIONS",
    "EpochOrder",
    "derive_key",
    "permute",
    "splitmix64",
]

ORDER_VERSION = 2
"""Changes whenever the same arguments would give another order. A run that began in an older one ends in it."""

READABLE_ORDER_VERSIONS = (1, ORDER_VERSION)
"""Version 1 had no shuffle of its own for up to 64 samples, where its network is not uniform."""

MAX_SAMPLES = 2**40

_NUM_ROUNDS = 8  # 4 rounds fail lag and adjacency tests at n = 1000, 6 pass; two more cost 15 ns an index
_TABLE_SAMPLES = 64  # up to here a table; below 25 the network favours pairs, and at 9 has no odd permutation
_CHUNK = 8192  # keeps the working arrays of one call within the second-level cache
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def splitmix64(value: int) -> int:
    """One step of Steele, Lea and Flood's SplitMix64: 64 bits in, 64 well mixed bits out."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """A 64-bit key that depends on every part and on their order.

    ``seed + epoch`` as a key would make epoch 1 of seed 0 equal to epoch 0 of seed 1; this does not.
    """
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part & _MASK))
    return key


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of one epoch of one source; positions past the end begin again at its first sample."""

    num_samples: int
    seed: int
    epoch: int = 0
    source: int = 0
    shuffle: bool = True
    version: int = ORDER_VERSION

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset index at each position of the epoch."""
        indices = positions % self.num_samples
        if not self.shuffle:
            return indices
        return permute(indices, self.num_samples, derive_key(self.seed, self.source, self.epoch), self.version)


def permute(indices: NDArray[np.int64], n: int, key: int, version: int = ORDER_VERSION) -> NDArray[np.int64]:
    """Where a keyed permutation of ``range(n)`` sends each index.

    Up to 64 samples it is a shuffle (Fisher and Yates), computed anew from the key: every permutation is as likely.
    Above, an unbalanced Feistel network over a grid of rows x columns >= n, of which at most one row is too many; the
    few results beyond n are sent through it again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        indices: int64 of any shape, each in ``range(n)``.
        n: Number of samples, 1 to ``MAX_SAMPLES``.
        key: 64 bits, see ``derive_key``.
        version: Of the order.

    Returns:
        int64 of the shape of ``indices``, no value twice where ``indices`` has no value twice.
    """
    if not 1 <= n <= MAX_SAMPLES:
        raise ValueError(f"An order has 1 to 2**40 samples, not {n}.")
    flat = np.ascontiguousarray(indices, dtype=np.int64).ravel()
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= n):
        raise ValueError(f"Indices lie in 0..{n - 1}; got {int(flat.min())}..{int(flat.max())}.")
    if n <= _TABLE_SAMPLES and version > 1:
        return _shuffled(n, key & _MASK)[flat].reshape(np.shape(indices))
    grid = _Grid(n, key)
    result = np.empty(flat.size, dtype=np.int64)
    for start in range(0, flat.size, _CHUNK):
        result[start : start + _CHUNK] = grid.permute(flat[start : start + _CHUNK].astype(np.uint64))
    return result.reshape(np.shape(indices))


@lru_cache(maxsize=256)
def _shuffled(n: int, key: int) -> NDArray[np.int64]:
    """``range(n)``, shuffled by the outputs of SplitMix64 from ``key`` on."""
    table = np.arange(n)
    for last in range(n - 1, 0, -1):
        other = splitmix64(key + last * _GOLDEN) * (last + 1) >> 64  # in range(last + 1), to one part in 2**57
        table[[last, other]] = table[[other, last]]
    return table


class _Grid:
    """The network for one (n, key): index = row * columns + column."""

    def __init__(self, n: int, key: int) -> None:
        rows = isqrt(n - 1) + 1
        self.size = np.uint64(n)
        self.rows = np.uint64(rows)
        self.columns = np.uint64(-(-n // rows))
        self.round_keys = [np.uint64(part) for part in _round_keys(key)]

    def permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        values = self._encipher(values)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encipher(values[outside])
            outside = outside[values[outside] >= self.size]
        return values

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row: NDArray[np.uint64] = values // self.columns
        column = values - row * self.columns
        scratch = np.empty_like(values)
        for step in range(0, _NUM_ROUNDS, 2):
            _add_modulo(row, column, self.rows, self.round_keys[step], scratch)
            _add_modulo(column, row, self.columns, self.round_keys[step + 1], scratch)
        row *= self.columns
        row += column
        return row


def _round_keys(key: int) -> Iterator[int]:
    for _ in range(_NUM_ROUNDS):
        key = splitmix64(key)
        yield key


def _add_modulo(
    target: NDArray[np.uint64],
    other: NDArray[np.uint64],
    modulus: np.uint64,
    key: np.uint64,
    scratch: NDArray[np.uint64],
) -> None:
    """Sets target to (target + hash(other, key)) % modulus."""
    np.add(other, key, out=scratch)
    np.multiply(scratch, _MULTIPLIERS[0], out=scratch)
    scratch ^= scratch >> _SHIFT
    np.multiply(scratch, _MULTIPLIERS[1], out=scratch)
    np.right_shift(scratch, _SHIFT, out=scratch)
    np.multiply(
        scratch, modulus, out=scratch
    )  # 32 bits times at most 2**20: reduce to range(modulus) without a division
    np.right_shift(scratch, _SHIFT, out=scratch)
    target += scratch
    np.subtract(
        target, modulus, out=scratch
    )  # wraps to a huge value where target < modulus, so that minimum keeps target
    np.minimum(target, scratch, out=target)
