"""Weighted mixing of sources, computed from the global sample number alone."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.data.order import ORDER_VERSION, EpochOrder, derive_key, permute

__all__ = ["BLOCK", "DENOMINATOR", "MixedOrder", "Mixture"]

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


class MixedOrder:
    """The endless global order of a weighted mixture.

    Args:
        mixture: Which source each global sample comes from.
        sizes: Number of samples of each source; a source that runs out begins its next epoch in another order.
        seed: Of the order of each source.
        shuffle: False reads each source from its beginning to its end.
        first: The global position that is number 0 of the mixture.
        draws: How often each source was drawn before that, int64; None means never.
        lanes: The number by which the order of each source is keyed; None means its place.
        version: Of the order of each source.
    """

    def __init__(
        self,
        mixture: Mixture,
        sizes: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        first: int = 0,
        draws: NDArray[np.int64] | None = None,
        lanes: Sequence[int] | None = None,
        version: int = ORDER_VERSION,
    ) -> None:
        self._mixture = mixture
        self._sizes = list(sizes)
        self._seed = seed
        self._shuffle = shuffle
        self._version = version
        self._first = first
        self._draws = draws
        self._lanes = list(range(len(sizes))) if lanes is None else list(lanes)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """(source, index) at each global position: int64 of shape (num_positions, 2)."""
        sources, draws = self._mixture.locate(positions - self._first)
        if self._draws is not None:
            draws += self._draws[sources]
        ids = np.empty((len(positions), 2), dtype=np.int64)
        ids[:, 0] = sources
        for source, size in enumerate(self._sizes):
            of_source = np.flatnonzero(sources == source)
            lane = self._lanes[source]
            keyed: dict[str, Any] = {"seed": self._seed, "source": lane, "shuffle": self._shuffle}
            ids[of_source, 1] = endless(draws[of_source], size, **keyed, version=self._version)
        return ids


def endless(
    draws: NDArray[np.int64], size: int, *, seed: int, source: int, shuffle: bool, version: int = ORDER_VERSION
) -> NDArray[np.int64]:
    """The index of each draw from a source of ``size`` samples, which begins another order when it runs out."""
    indices = np.empty_like(draws)
    for epoch, here in _groups(draws // size):
        order = EpochOrder(num_samples=size, seed=seed, source=source, epoch=epoch, shuffle=shuffle, version=version)
        indices[here] = order(draws[here])
    return indices


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
