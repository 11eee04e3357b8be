"""How positions of the global order are cut into batches: global batch, micro-step, slice of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.world import DataParallel

__all__ = ["EpochPlan", "Geometry", "Order", "SequentialPlan", "Uneven", "num_global_batches"]

Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Positions to sample ids, one row each."""

Uneven = Literal["drop", "pad", "error"]

_OWN_AHEAD = 4096  # positions of this rank computed in one call: the fixed cost of a call is 80 microseconds
_GLOBAL_AHEAD = 8 * 4096  # and at most so many positions of all ranks, because a mixture computes whole blocks


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Batch sizes in samples: micro_batch per rank, micro_step over all data-parallel ranks, global_batch per step."""

    micro_batch: int
    accumulation: int
    ranks: DataParallel

    @property
    def micro_step(self) -> int:
        """Samples that all data-parallel ranks together take in one micro-batch."""
        return self.micro_batch * self.ranks.size

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_step * self.accumulation

    def __str__(self) -> str:
        return (
            f"{self.global_batch} (batch size {self.micro_batch} x {self.ranks.size} data-parallel ranks x "
            f"accumulation {self.accumulation})"
        )


def num_global_batches(num_samples: int, geometry: Geometry, uneven: Uneven) -> int:
    """Global batches in an epoch of ``num_samples``.

    Raises:
        ValueError: There is none, or samples remain and ``uneven`` is "error".
    """
    whole, rest = divmod(num_samples, geometry.global_batch)
    if rest and uneven == "error":
        raise ValueError(
            f"{num_samples} samples are {whole} global batches of {geometry} and {rest} samples more. "
            'Choose sizes that divide the data set, or uneven="drop" or "pad".'
        )
    num_batches = whole + 1 if rest and uneven == "pad" else whole
    if num_batches < 1:
        raise ValueError(
            f"The data set has {num_samples} samples, fewer than one global batch of {geometry}. "
            "Use a smaller batch or a larger data set."
        )
    return num_batches


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """This rank's micro-batches from ``first_batch`` to the end of an epoch.

    Args:
        order: Positions to sample ids.
        geometry: Batch sizes.
        first_batch: Number of the first micro-batch, counted from the beginning of the epoch.
        first_position: Position at which the micro-step of ``first_batch`` begins.
        num_batches: Micro-batches of the whole epoch.
    """

    order: Order
    geometry: Geometry
    first_batch: int
    first_position: int
    num_batches: int

    def positions(self, batch: int, count: int = 1) -> NDArray[np.int64]:
        """Positions of this rank in ``count`` micro-batches from ``batch``: int64 of shape (count, micro_batch)."""
        geometry = self.geometry
        start = self.first_position + (batch - self.first_batch) * geometry.micro_step
        steps = start + np.arange(count, dtype=np.int64) * geometry.micro_step
        own = geometry.ranks.rank * geometry.micro_batch + np.arange(geometry.micro_batch, dtype=np.int64)
        return steps[:, None] + own

    def ids(self, batch: int) -> NDArray[np.int64]:
        """Sample ids of this rank in one micro-batch."""
        return self.order(self.positions(batch).ravel())

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(positions, ids) of each micro-batch; ids are computed for many of them at a time."""
        size = self.geometry.micro_batch
        most = max(1, min(_OWN_AHEAD // size, _GLOBAL_AHEAD // self.geometry.micro_step))
        batch, ahead = self.first_batch, 1  # the first batch of a run that resumes does not wait for many others
        while batch < self.num_batches:
            count = min(ahead, self.num_batches - batch)
            positions = self.positions(batch, count)
            ids = self.order(positions.ravel())
            for row in range(count):
                yield positions[row], ids[row * size : (row + 1) * size]
            batch, ahead = batch + count, min(8 * ahead, most)


@dataclass(frozen=True, kw_only=True)
class SequentialPlan:
    """Every sample once, in order, with the same number of batches on every rank; for validation.

    The samples after the last whole micro-step are split evenly over the ranks, in one smaller batch. When they do
    not divide: "drop" leaves out at most (number of ranks - 1) samples, "pad" repeats as many, "error" refuses.
    """

    num_samples: int
    micro_batch: int
    ranks: DataParallel
    uneven: Uneven

    def __post_init__(self) -> None:
        rest = self.num_samples % self.ranks.size
        if self.uneven == "error" and rest:
            raise ValueError(
                f"{self.num_samples} validation samples do not divide by {self.ranks.size} data-parallel ranks "
                f'({rest} remain). Use uneven="drop" or "pad".'
            )

    def __len__(self) -> int:
        return -(-self._own() // self.micro_batch)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Positions of this rank in each batch; with "pad" a position may lie past ``num_samples``."""
        own, rank = self._own(), self.ranks.rank
        for done in range(0, own, self.micro_batch):
            size = min(self.micro_batch, own - done)
            start = done * self.ranks.size + rank * size
            yield np.arange(start, start + size, dtype=np.int64)

    def _own(self) -> int:
        """Samples per rank."""
        whole, rest = divmod(self.num_samples, self.ranks.size)
        return whole + 1 if rest and self.uneven == "pad" else whole
