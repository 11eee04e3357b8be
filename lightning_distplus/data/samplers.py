"""Functions (seed, epoch) -> indices that draw by weights or group by length, and the check of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.data.order import derive_key, permute

__all__ = ["OwnSampler", "by_length", "weighted"]

_WEIGHTED = -6  # separate the keys of these orders from those of the plain one
_GROUPED = -7
_BATCHES_PER_GROUP = 50  # as many as Hugging Face's LengthGroupedSampler sorts at a time

Sampler = Callable[[int, int], NDArray[np.int64]]


def weighted(weights: Any, *, num_samples: int | None = None, replacement: bool = True) -> Sampler:
    """Draws in proportion to weights, as ``torch.utils.data.WeightedRandomSampler`` does.

    Without replacement the order is that of the keys log(u) / weight (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", 2006).

    Args:
        weights: One finite number >= 0 for each sample of the data set; only their ratios count.
        num_samples: Samples of an epoch; None: as many as there are weights (without replacement: weights above 0).
        replacement: Whether a sample may be drawn twice in an epoch.

    Raises:
        ValueError: The weights are no such numbers, or an epoch would need more samples than there are.
    """
    return _Weighted(weights, num_samples, replacement)


def by_length(lengths: Any, *, global_batch: int) -> Sampler:
    """Groups samples of about the same length into global batches: less padding.

    The shuffled data set is cut into groups of 50 global batches; each is sorted by length and cut into global batches,
    which are shuffled within the group. So every epoch is a permutation; the ranks of a step, and their micro-batches,
    get neighbours in length.

    Args:
        lengths: One number for each sample of the data set.
        global_batch: Samples of an optimizer step: batch size x data-parallel ranks x accumulation.

    Raises:
        ValueError: The lengths are no row of numbers, or the global batch is below 1.
    """
    return _ByLength(lengths, global_batch)


class _Weighted:
    def __init__(self, weights: Any, num_samples: int | None, replacement: bool) -> None:
        self._weights = np.asarray(weights, dtype=np.float64)
        if self._weights.ndim != 1 or not self._weights.size:
            raise ValueError(f"weights has shape {self._weights.shape}; it is one number for each sample.")
        if not np.isfinite(self._weights).all() or (self._weights < 0).any() or not self._weights.any():
            worst = int(np.argmin(np.where(np.isfinite(self._weights), self._weights, -np.inf)))
            raise ValueError(
                f"weights[{worst}] is {self._weights[worst]}; weights are finite, not negative, and not all 0."
            )
        self.size = len(self._weights)
        num_possible = int(np.count_nonzero(self._weights))
        self._num_samples = num_samples or (self.size if replacement else num_possible)
        if not replacement and self._num_samples > num_possible:
            raise ValueError(
                f"num_samples is {self._num_samples} and {num_possible} samples have a weight above 0. Draw fewer, or "
                "use replacement=True."
            )
        self._replacement = replacement

    def __call__(self, seed: int, epoch: int) -> NDArray[np.int64]:
        key = derive_key(seed, _WEIGHTED, epoch)
        if self._replacement:
            cumulative = np.cumsum(self._weights)
            drawn = _uniform(np.arange(self._num_samples), key) * cumulative[-1]
            places: NDArray[np.int64] = np.searchsorted(cumulative, drawn, side="right").astype(np.int64)
            return places
        possible = np.flatnonzero(self._weights)
        keys = np.log1p(-_uniform(possible, key)) / self._weights[possible]
        found: NDArray[np.int64] = possible[np.argsort(-keys, kind="stable")][: self._num_samples]
        return found

    def fingerprint(self) -> str:
        return f"weights {_digest(self._weights)} replacement={self._replacement} num_samples={self._num_samples}"


class _ByLength:
    def __init__(self, lengths: Any, global_batch: int) -> None:
        self._lengths = np.asarray(lengths)
        if self._lengths.ndim != 1 or not self._lengths.size:
            raise ValueError(f"lengths has shape {self._lengths.shape}; it is one number for each sample.")
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}; it is at least 1.")
        self.size = len(self._lengths)
        self._global_batch = global_batch

    def __call__(self, seed: int, epoch: int) -> NDArray[np.int64]:
        key = derive_key(seed, _GROUPED, epoch)
        shuffled = permute(np.arange(self.size, dtype=np.int64), self.size, key)
        num_batches = self.size // self._global_batch
        if not num_batches:
            return shuffled
        whole, rest = np.split(shuffled, [num_batches * self._global_batch])
        groups = np.arange(len(whole)) // (_BATCHES_PER_GROUP * self._global_batch)
        batches = whole[np.lexsort((self._lengths[whole], groups))].reshape(num_batches, self._global_batch)
        ranks = _uniform(np.arange(num_batches), derive_key(key, 1))
        turns = np.lexsort((ranks, np.arange(num_batches) // _BATCHES_PER_GROUP))
        return np.concatenate([batches[turns].ravel(), rest])

    def fingerprint(self) -> str:
        return f"lengths {_digest(self._lengths)} global_batch={self._global_batch}"


class OwnSampler:
    """The indices of an epoch from a function.

    Args:
        sampler: ``sampler(seed, epoch)`` returns the dataset indices of an epoch: integers of shape (num_samples,), or
            of shape (num_batches, batch_size), one row for each micro-batch, in the order of ranks within micro-steps.
            It depends on its arguments alone, and every epoch has as many. Where it has ``fingerprint()``, that is part
            of the identity of the data.
        size: Samples of the data set.
        seed: Of the run.
        batch_size: Of a micro-batch, and so of a row.

    Raises:
        ValueError: It is no function, was made for another number of samples, an index lies outside the data set, or
            its rows are no micro-batches.
    """

    def __init__(self, sampler: Callable[[int, int], Any], *, size: int, seed: int, batch_size: int) -> None:
        if not callable(sampler) or hasattr(sampler, "__iter__"):
            raise ValueError(
                f"sampler is a {type(sampler).__name__}, whose place nobody can know after a restart. Pass a function "
                "(seed, epoch) -> indices; for WeightedRandomSampler samplers.weighted(...), for RandomSampler nothing."
            )
        if getattr(sampler, "size", size) != size:
            raise ValueError(f"The sampler was made for {sampler.size} samples; the data set has {size}.")  # type: ignore[attr-defined]
        self._sampler = sampler
        self._size = size
        self._batch_size = batch_size
        self.num_samples = -1
        self.num_samples = len(self._indices(seed, 0))

    def order(self, *, seed: int, epoch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Positions of the epoch to dataset indices; those past its end begin again at its first sample."""
        indices = self._indices(seed, epoch)
        return lambda positions: indices[positions % len(indices)]

    def fingerprint(self) -> str:
        """What must be equal for the same order, as far as that is known."""
        fingerprint = getattr(self._sampler, "fingerprint", None)
        return str(fingerprint()) if callable(fingerprint) else f"sampler num_samples={self.num_samples}"

    def _indices(self, seed: int, epoch: int) -> NDArray[np.int64]:
        found = np.asarray(self._sampler(seed, epoch))
        if not found.size or not np.issubdtype(found.dtype, np.integer) or found.min() < 0 or found.max() >= self._size:
            raise ValueError(
                f"sampler({seed}, {epoch}) returned {found.dtype} of shape {found.shape}; it returns indices in "
                f"0..{self._size - 1}."
            )
        if found.ndim > 2 or (found.ndim == 2 and found.shape[1] != self._batch_size):
            raise ValueError(
                f"sampler({seed}, {epoch}) returned shape {found.shape}; a row is a micro-batch of batch_size="
                f"{self._batch_size}. Give both the same."
            )
        if self.num_samples not in (-1, found.size):
            raise ValueError(
                f"sampler({seed}, {epoch}) returned {found.size} indices and {self.num_samples} in epoch 0; every "
                "epoch has as many."
            )
        return found.astype(np.int64).ravel()


def _uniform(numbers: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of ``numbers``: SplitMix64 of the number under a key."""
    value = numbers.astype(np.uint64) ^ np.uint64(key)
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = value ^ (value >> np.uint64(31))
    uniform: NDArray[np.float64] = (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def _digest(values: NDArray[Any]) -> str:
    return xxhash.xxh3_64(np.ascontiguousarray(values).tobytes()).hexdigest()
