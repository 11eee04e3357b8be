"""Positions of the global order cut into batches: global batch, micro-step, slice of one rank; samples set apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_distplus import env
from lightning_distplus.world import DataParallel

__all__ = ["EpochPlan", "Geometry", "Order", "Quarantine", "Request", "SequentialPlan", "Uneven", "num_global_batches"]


class Request(NamedTuple):
    """One micro-batch to fetch.

    Attributes:
        ids: What the data set is asked for, one row per sample.
        positions: The samples' places in the epoch's global order.
        epoch: The epoch of that order.
        weights: float32 of shape (num_samples,), 0 for a repeat; None where the batch carries no weights.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    epoch: int
    weights: NDArray[np.float32] | None = None


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


# -- samples set apart -------------------------------------------------------------------------------------------------


class Quarantine:
    """Ids of samples that are not to be trained on again, in any epoch.

    A sample that is set apart keeps its position, and the sample of the same rank at the same place of the nearest
    micro-batch before it (else after it) stands in there, so that batches keep their shape and all others their places.
    Where batches carry weights the stand-in has weight 0; elsewhere it counts once more.
    """

    def __init__(self) -> None:
        self.ids: list[Any] = []
        """Numbers, or lists of numbers, in order; plain values, as a checkpoint holds them."""
        self._rows: NDArray[np.int64] = np.empty((0, 1), dtype=np.int64)

    @classmethod
    def of_launcher(cls) -> Quarantine:
        """What ``distplus launch --quarantine`` has set apart in this job."""
        quarantine = cls()
        quarantine.add(json.loads(env.DISTPLUS_QUARANTINE.get() or "[]"))
        return quarantine

    def add(self, ids: Iterable[Any]) -> None:
        """Sets samples apart; those of a checkpoint, say."""
        rows = sorted({tuple(one) if isinstance(one, Sequence) else (one,) for one in (*self.ids, *ids)})
        self.ids = [one[0] if len(one) == 1 else list(one) for one in rows]
        if rows:
            self._rows = np.array(rows, dtype=np.int64)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ids, of shape (num_samples,) or (num_samples, numbers per id), are set apart: (num_samples,)."""
        rows = ids.reshape(len(ids), -1)
        if not self.ids or rows.shape[1] != self._rows.shape[1]:
            return np.zeros(len(rows), dtype=np.bool_)
        found: NDArray[np.bool_] = (rows[:, None, :] == self._rows[None, :, :]).all(axis=2).any(axis=1)
        return found

    def around(self, order: Order, *, step: int, first: int, end: int) -> Order:
        """An order with stand-ins.

        Args:
            order: Positions to ids.
            step: Positions from a sample to that of the same place in the next micro-batch.
            first: The first position of the order.
            end: The position behind the last one that is asked for.

        Raises:
            ValueError: By the order: there is no sample left to stand in.
        """

        def with_stand_ins(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            ids = order(positions)
            for row in np.flatnonzero(self.holds(ids)).tolist():
                ids[row] = self._stand_in(order, int(positions[row]), step, first, end)
            return ids

        return with_stand_ins if self else order

    def _stand_in(self, order: Order, position: int, step: int, first: int, end: int) -> NDArray[np.int64]:
        for others in (range(position - step, first - 1, -step), range(position + step, end, step)):
            for other in others:
                found = order(np.array([other], dtype=np.int64))
                if not self.holds(found)[0]:
                    return np.asarray(found[0])
        raise ValueError(
            f"All samples that could stand in for the one at position {position} are in quarantine: {len(self.ids)} "
            "are. Mend the data, and start without the checkpoint's quarantine."
        )

    def weighted(self, requests: Iterator[Request], order: Order) -> Iterator[Request]:
        """The requests, whose stand-ins have weight 0 where there are weights; ``order`` has no stand-ins."""
        for request in requests:
            if request.weights is None:
                yield request
            else:
                is_apart = self.holds(order(request.positions))
                yield request._replace(weights=np.where(is_apart, np.float32(0), request.weights))
