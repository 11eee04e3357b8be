"""Orders with weights, by length, or of the user's own: pure functions of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.data.order import derive_key, permute
from lightning_distplus.errors import DatasetMismatch

__all__ = ["GroupedByLength", "OwnSampler", "Sampling", "SamplingOptions", "Weighted"]

_WEIGHTED = -6  # separate the keys of these orders from those of the plain one
_GROUPED = -7
_BATCHES_PER_GROUP = 50  # as many as Hugging Face's LengthGroupedSampler sorts at a time


class Sampling:
    """How an epoch draws from a map-style data set."""

    num_samples: int
    """Samples of an epoch."""

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Positions of the epoch to dataset indices; positions past the end begin again at its first sample."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """What must be equal for the same order."""
        raise NotImplementedError

    def require_same_batch(self, before: int, now: int) -> None:
        """Raises where the order depends on the global batch, and that was another one when the epoch began."""


@dataclass(frozen=True)
class _Table:
    """An epoch whose indices are computed at its start."""

    indices: NDArray[np.int64]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.indices[positions % len(self.indices)]


@dataclass(frozen=True)
class _Draws:
    """Independent draws: each position by itself, without a table."""

    cumulative: NDArray[np.float64]
    num_samples: int
    key: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        drawn = _uniform(positions % self.num_samples, self.key) * self.cumulative[-1]
        found: NDArray[np.int64] = np.searchsorted(self.cumulative, drawn, side="right").astype(np.int64)
        return found


class Weighted(Sampling):
    """Draws in proportion to weights, as ``torch.utils.data.WeightedRandomSampler`` does.

    With replacement each position is drawn by itself: nothing to compute at the start of an epoch but a search of the
    cumulative weights per sample. Without, the order is that of the keys log(u) / weight (Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", 2006), computed at the start of an epoch.

    Args:
        weights: One finite number >= 0 for each sample of the data set; only their ratios count.
        replacement: Whether a sample may be drawn twice in an epoch.
        num_samples: Samples of an epoch; None: as many as there are weights (without replacement: weights above 0).
        size: Samples of the data set.

    Raises:
        ValueError: The weights do not fit the data set, or an epoch would need more samples than there are.
    """

    def __init__(self, weights: Any, *, replacement: bool, num_samples: int | None, size: int) -> None:
        self._weights = np.asarray(weights, dtype=np.float64)
        if self._weights.shape != (size,):
            raise ValueError(f"weights has shape {self._weights.shape}; the data set has {size} samples.")
        if not np.isfinite(self._weights).all() or (self._weights < 0).any() or not self._weights.any():
            worst = int(np.argmin(np.where(np.isfinite(self._weights), self._weights, -np.inf)))
            raise ValueError(
                f"weights[{worst}] is {self._weights[worst]}; weights are finite, not negative, and not all 0."
            )
        num_possible = int(np.count_nonzero(self._weights))
        self.num_samples = num_samples or (size if replacement else num_possible)
        if not replacement and self.num_samples > num_possible:
            raise ValueError(
                f"num_samples is {self.num_samples} and {num_possible} samples have a weight above 0. Draw fewer, or "
                "use replacement=True."
            )
        self._replacement = replacement

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """See ``Sampling``."""
        key = derive_key(seed, _WEIGHTED, epoch)
        if self._replacement:
            return _Draws(np.cumsum(self._weights), self.num_samples, key)
        possible = np.flatnonzero(self._weights)
        keys = np.log1p(-_uniform(possible, key)) / self._weights[possible]
        return _Table(possible[np.argsort(-keys, kind="stable")][: self.num_samples])

    def fingerprint(self) -> str:
        """See ``Sampling``."""
        return f"weights {_digest(self._weights)} replacement={self._replacement} num_samples={self.num_samples}"


class GroupedByLength(Sampling):
    """Batches of samples of about the same length: less padding.

    The shuffled data set is cut into groups of 50 global batches; each is sorted by length and cut into global batches,
    which are shuffled within the group. So every epoch is a permutation; the ranks of a step, and their micro-batches,
    get neighbours in length.

    Args:
        lengths: One number for each sample of the data set.
        size: Samples of the data set.

    Raises:
        ValueError: The lengths do not fit the data set.
    """

    def __init__(self, lengths: Any, *, size: int) -> None:
        self._lengths = np.asarray(lengths)
        if self._lengths.shape != (size,):
            raise ValueError(
                f"lengths has shape {self._lengths.shape}; the data set has {size} samples: give one each."
            )
        self.num_samples = size

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """See ``Sampling``."""
        key = derive_key(seed, _GROUPED, epoch)
        size = self.num_samples
        shuffled = permute(np.arange(size, dtype=np.int64), size, key)
        num_batches = size // global_batch
        whole, rest = np.split(shuffled, [num_batches * global_batch])
        if not num_batches:
            return _Table(shuffled)
        groups = np.arange(len(whole)) // (_BATCHES_PER_GROUP * global_batch)
        batches = whole[np.lexsort((self._lengths[whole], groups))].reshape(num_batches, global_batch)
        ranks = _uniform(np.arange(num_batches), derive_key(key, 1))
        turns = np.lexsort((ranks, np.arange(num_batches) // _BATCHES_PER_GROUP))
        return _Table(np.concatenate([batches[turns].ravel(), rest]))

    def fingerprint(self) -> str:
        """See ``Sampling``."""
        return f"lengths {_digest(self._lengths)}"

    def require_same_batch(self, before: int, now: int) -> None:
        """See ``Sampling``.

        Raises:
            DatasetMismatch: They differ.
        """
        if before != now:
            raise DatasetMismatch(
                f"The checkpoint stands inside an epoch that is grouped by length into global batches of {before} "
                f"samples; this run has {now}, which gives another order. Resume with the same global batch, or from a "
                "checkpoint between two epochs."
            )


class OwnSampler(Sampling):
    """The indices of an epoch from a function of the user's.

    Args:
        sampler: ``sampler(seed, epoch)`` returns the dataset indices of an epoch: integers of shape (num_samples,), or
            of shape (num_batches, batch_size), one row for each micro-batch, in the order of ranks within micro-steps.
            It depends on its arguments alone, and every epoch has as many.
        size: Samples of the data set.
        seed: Of the run.
        batch_size: Of a micro-batch, and so of a row.

    Raises:
        ValueError: It is no function, an index lies outside the data set, or its rows are no micro-batches.
    """

    def __init__(self, sampler: Callable[[int, int], Any], *, size: int, seed: int, batch_size: int) -> None:
        if not callable(sampler) or hasattr(sampler, "__iter__"):
            raise ValueError(
                f"sampler is a {type(sampler).__name__}, whose place nobody can know after a restart. Pass a function "
                "(seed, epoch) -> indices; for WeightedRandomSampler use weights=..., for RandomSampler nothing."
            )
        self._sampler = sampler
        self._size = size
        self._batch_size = batch_size
        self.num_samples = -1
        self.num_samples = len(self._indices(seed, 0))

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """See ``Sampling``."""
        return _Table(self._indices(seed, epoch))

    def fingerprint(self) -> str:
        """See ``Sampling``."""
        return f"sampler num_samples={self.num_samples}"

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


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What ``ResumableDataModule`` was told about the order; the names are those of its arguments.

    Raises:
        ValueError: Two of them contradict each other.
    """

    weights: Any
    replacement: bool
    num_samples: int | None
    lengths: Any
    sampler: Callable[[int, int], Any] | None
    shuffle: bool

    def __post_init__(self) -> None:
        if len(self._given()) > 1:
            raise ValueError(f"{' and '.join(self._given())} each decide about the order. Pass one of them.")
        if self._given() and not self.shuffle:
            raise ValueError(f"shuffle is False and {self._given()[0]} decides about the order. Leave one of them out.")
        if self.weights is None and (self.num_samples is not None or not self.replacement):
            raise ValueError("num_samples and replacement belong to weights. Pass weights=..., or leave them out.")

    def sampling(self, size: int | None, *, seed: int, batch_size: int) -> Sampling | None:
        """How an epoch draws from a data set of ``size`` samples; None: in the plain order.

        Raises:
            ValueError: The data has no index (``size`` is None), or what was given does not fit it.
        """
        if not self._given():
            return None
        if size is None:
            raise ValueError(f"{self._given()[0]} needs one data set with an index.")
        if self.sampler is not None:
            return OwnSampler(self.sampler, size=size, seed=seed, batch_size=batch_size)
        if self.lengths is not None:
            return GroupedByLength(self.lengths, size=size)
        return Weighted(self.weights, replacement=self.replacement, num_samples=self.num_samples, size=size)

    def _given(self) -> list[str]:
        return [name for name in ("weights", "lengths", "sampler") if getattr(self, name) is not None]


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
