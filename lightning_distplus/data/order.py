"""The global order of samples, computed and never stored: keyed permutation, weighted mixture, phases of a mixture."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK",
    "DENOMINATOR",
    "MAX_SAMPLES",
    "ORDER_VERSION",
    "READABLE_ORDER_VERSIONS",
    "EpochOrder",
    "MixedOrder",
    "Mixture",
    "MixturePhase",
    "change_of_mixture",
    "derive_key",
    "order_of",
    "past_mixture",
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
    # 32 bits times at most 2**20: reduces to range(modulus) without a division.
    np.multiply(scratch, modulus, out=scratch)
    np.right_shift(scratch, _SHIFT, out=scratch)
    target += scratch
    # Wraps to a huge value where target < modulus, so that minimum keeps target.
    np.subtract(target, modulus, out=scratch)
    np.minimum(target, scratch, out=target)


# -- mixtures of sources -----------------------------------------------------------------------------------------------

BLOCK = 4096
DENOMINATOR = 2**32

_MIX = -1  # takes the place of a source's number in the key, so that no source's order is reused for the mixing
_MAX_CACHED_BLOCKS = 16
_PLACES = np.arange(BLOCK)
_Block = tuple[NDArray[np.int64], NDArray[np.int64]]


class Mixture:
    """Sends global sample numbers to (source, draw), where each source is drawn 0, 1, 2, ... without a gap.

    Global samples are cut into blocks of 4096. How often a source was drawn before a block follows from its weight
    alone, so that any block is computed without the ones before it; inside a block the order is a keyed permutation.

    Args:
        weights: One positive number per source; only their ratios count.
        seed: Of the order inside the blocks.

    Attributes:
        numerators: The weights as integers over ``DENOMINATOR``; their sum is ``DENOMINATOR``.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.numerators = _integer_weights(weights)
        self._seed = seed
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def locate(self, numbers: NDArray[np.int64]) -> _Block:
        """The source and the draw of each global sample number; both int64 of the shape of ``numbers``."""
        if len(self.numerators) == 1:
            return np.zeros_like(numbers), numbers.copy()
        sources, draws = np.empty_like(numbers), np.empty_like(numbers)
        for block, here in _groups(numbers // BLOCK):
            block_sources, block_draws = self._block(block)
            places = numbers[here] - block * BLOCK
            sources[here], draws[here] = block_sources[places], block_draws[places]
        return sources, draws

    def draws_before(self, number: int) -> list[int]:
        """How often each source is drawn by the global samples before ``number``, a multiple of ``BLOCK``.

        Each source takes its share of what the sources before it left. A share of a growing whole never shrinks, and
        the last source takes the rest: exact in sum and without a step back, for any weight.
        """
        counts, left, weight_left = [], number, DENOMINATOR
        for numerator in self.numerators:
            counts.append(left * numerator // weight_left)
            left -= counts[-1]
            weight_left -= numerator
        return counts

    def draws_at(self, number: int) -> list[int]:
        """How often each source is drawn by the global samples before any ``number``."""
        whole, rest = divmod(number, BLOCK)
        sources, _ = self.locate(np.arange(whole * BLOCK, whole * BLOCK + rest))
        inside = np.bincount(sources, minlength=len(self.numerators)).tolist()
        return [before + here for before, here in zip(self.draws_before(whole * BLOCK), inside, strict=True)]

    def _block(self, block: int) -> _Block:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return self._blocks[block]
        before, after = self.draws_before(block * BLOCK), self.draws_before((block + 1) * BLOCK)
        counts = np.array(after) - np.array(before)
        shuffled = permute(_PLACES, BLOCK, derive_key(self._seed, _MIX, block))
        # Of the smallest type: numpy sorts 8 and 16 bits by radix, four times as fast as it merges 64.
        sources = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts))), counts)[shuffled]
        draws = np.empty(BLOCK, dtype=np.int64)
        ranges = [np.arange(first, end) for first, end in zip(before, after, strict=True)]
        draws[np.argsort(sources, kind="stable")] = np.concatenate(ranges)
        self._blocks[block] = (sources.astype(np.int64), draws)
        if len(self._blocks) > _MAX_CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return self._blocks[block]


@dataclass(frozen=True)
class MixedOrder:
    """The endless global order of a weighted mixture."""

    mixture: Mixture  # which source each global sample comes from
    sizes: Sequence[int]  # samples of each source; one that runs out begins its next epoch in another order
    _: KW_ONLY
    seed: int  # of the order of each source
    shuffle: bool  # False reads each source from its beginning to its end
    first: int = 0  # the global position that is number 0 of the mixture
    draws: NDArray[np.int64] | None = None  # how often each source was drawn before that; None: never
    lanes: Sequence[int] | None = None  # the number by which the order of each source is keyed; None: its place
    version: int = ORDER_VERSION  # of the order of each source

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """(source, index) at each global position: int64 of shape (num_positions, 2)."""
        sources, draws = self.mixture.locate(positions - self.first)
        if self.draws is not None:
            draws += self.draws[sources]
        ids = np.empty((len(positions), 2), dtype=np.int64)
        ids[:, 0] = sources
        for source, size in enumerate(self.sizes):
            of_source = np.flatnonzero(sources == source)
            drawn = draws[of_source]
            indices = np.empty_like(drawn)
            for epoch, here in _groups(drawn // size):
                order = EpochOrder(
                    num_samples=size,
                    seed=self.seed,
                    source=source if self.lanes is None else self.lanes[source],
                    epoch=epoch,
                    shuffle=self.shuffle,
                    version=self.version,
                )
                indices[here] = order(drawn[here])
            ids[of_source, 1] = indices
        return ids


def _groups(values: NDArray[np.int64]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Each value that occurs, and where; a slice, which is fast, where the values do not decrease."""
    if not len(values):
        return
    first, last = int(values[0]), int(values[-1])
    if first == last and int(values.min()) == int(values.max()):
        yield first, slice(None)
    elif (values[1:] >= values[:-1]).all():
        starts = np.flatnonzero(values[1:] != values[:-1]) + 1
        for start, end in pairwise([0, *starts.tolist(), len(values)]):
            yield int(values[start]), slice(start, end)
    else:
        for value in np.unique(values).tolist():
            yield value, np.flatnonzero(values == value)


def _integer_weights(weights: Sequence[float]) -> list[int]:
    """Integers in the ratio of the weights, with the sum ``DENOMINATOR``; what rounding lost goes to the largest."""
    if not weights:
        raise ValueError("A mixture has at least one source.")
    for place, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"The weight of source {place} is {weight}; it is a finite number above 0.")
    total = math.fsum(weights)
    numerators = [round(weight / total * DENOMINATOR) for weight in weights]
    numerators[numerators.index(max(numerators))] += DENOMINATOR - sum(numerators)
    if min(numerators) < 1:
        place = numerators.index(min(numerators))
        raise ValueError(
            f"The weight of source {place}, {weights[place]} of {total}, is below one in 2**32 samples; leave it out."
        )
    return numerators


# -- phases of a mixture -----------------------------------------------------------------------------------------------

_PHASE = -5  # separates the keys of later phases from those of orders and augmentation


@dataclass(frozen=True, kw_only=True)
class MixturePhase:
    """A stretch of the global order in which the weights and sources stay the same."""

    first: int  # the sample with which it begins
    draws: tuple[int, ...]  # how often each source was drawn before
    lanes: tuple[int, ...]  # keys the order of each source, which keeps it when others come and go

    @classmethod
    def in_state(cls, state: Mapping[str, Any]) -> MixturePhase:
        """The phase in a data module's identity or state; without a record there it is the first one."""
        num_sources = len(state["sources"])
        first, draws, lanes = state.get("phase", [0, [0] * num_sources, range(num_sources)])
        return cls(first=first, draws=tuple(draws), lanes=tuple(lanes))

    def as_state(self) -> dict[str, Any]:
        """What is added to the identity: nothing for the first phase."""
        return {"phase": [self.first, list(self.draws), list(self.lanes)]} if self.first else {}

    def mixture(self, weights: Sequence[float], seed: int) -> Mixture:
        """The mixture whose number 0 is ``first``; each phase mixes in an order of its own."""
        return Mixture(weights, derive_key(seed, _PHASE, self.first) if self.first else seed)

    def followed_by(
        self, old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]], *, sample: int, seed: int
    ) -> MixturePhase:
        """The phase in which sources ``new`` take the place of ``old`` from ``sample`` on.

        A source that stays (same content, same number of samples) goes on with its next draw; any other begins. A row
        is (fingerprint, weight as an integer, number of samples).
        """
        mixture = self.mixture([row[1] for row in old], seed)
        drawn = [before + here for before, here in zip(self.draws, mixture.draws_at(sample - self.first), strict=True)]
        known: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
        for row, lane, count in zip(old, self.lanes, drawn, strict=True):
            known.setdefault((row[0], row[2]), []).append((lane, count))
        free_lane = max(self.lanes) + 1
        lanes, draws = [], []
        for row in new:
            if stayed := known.get((row[0], row[2])):
                lane, count = stayed.pop(0)
            else:
                lane, count = free_lane, 0
                free_lane += 1
            lanes.append(lane)
            draws.append(count)
        return MixturePhase(first=sample, draws=tuple(draws), lanes=tuple(lanes))


def past_mixture(phase: MixturePhase, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The record of a mixture that holds no more: where it began, and its weights to four digits."""
    return [phase.first, [round(row[1] / DENOMINATOR, 4) for row in rows]]


def change_of_mixture(
    phase: MixturePhase, old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]], names: Sequence[str]
) -> str:
    """What changes where a phase begins, in one line."""
    before = ", ".join(f"{row[1] / DENOMINATOR:.4g}" for row in old)
    rows = zip(names, new, phase.draws, strict=True)
    after = ", ".join(f"{name} {row[1] / DENOMINATOR:.4g} (from its sample {count} on)" for name, row, count in rows)
    return f"the mixture changes at sample {phase.first}: weights {before} become {after}"


def order_of(identity: Mapping[str, Any]) -> MixedOrder:
    """The global order of samples that an identity of ``TokenDataModule`` describes, from its phase on."""
    _, numerators, sizes = zip(*identity["sources"], strict=True)
    phase, seed = MixturePhase.in_state(identity), identity["seed"]
    return MixedOrder(
        phase.mixture(numerators, seed),
        sizes,
        seed=seed,
        shuffle=identity["shuffle"],
        first=phase.first,
        draws=np.array(phase.draws),
        lanes=phase.lanes,
        version=identity.get("order_version", ORDER_VERSION),
    )
