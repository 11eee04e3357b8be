"""Groups of micro-batches, which worker processes leave in memory that they share with the training process.

A message of a worker costs 200 microseconds, and what it carries crosses a pipe; gathering 8 x 2048 tokens takes 20. So
a worker fetches as many micro-batches at a time as fit a slot of shared memory, and its message says where they lie.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.data.request import Request

__all__ = ["Group", "GroupFetcher", "groups_of"]

_SLOT_BYTES = 2**21  # a message costs a tenth of the work that it carries, at 8 x 2048 tokens a batch
_ALIGNMENT = 64


class _Fetcher(Protocol):
    @property
    def bytes_per_sample(self) -> int:
        """What a fetched sample takes."""

    def __getitems__(self, request: Request) -> Any:
        """A named tuple of arrays, one row per sample, or None in the place of one."""


class Group(NamedTuple):
    """Consecutive micro-batches that are fetched as one.

    Attributes:
        slot: Where to leave them.
        request: All of their samples.
        sizes: Samples of each of them.
    """

    slot: int
    request: Request
    sizes: list[int]


class _Place(NamedTuple):
    """Where an array lies in the shared memory."""

    offset_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class GroupFetcher:
    """Runs in the worker processes, which leave a group in its slot; the training process takes it from there.

    Args:
        fetcher: Fetches a request.
        num_groups: Groups that are asked for at a time and not taken yet. One slot more holds the one that is being
            trained on.
        num_samples: Samples of a micro-batch; one fits a slot at least.
    """

    def __init__(self, fetcher: _Fetcher, *, num_groups: int, num_samples: int) -> None:
        self._fetcher = fetcher
        self.num_slots = num_groups + 1
        self.samples_per_group = max(num_samples, _SLOT_BYTES // fetcher.bytes_per_sample)
        self._slot_bytes = self.samples_per_group * fetcher.bytes_per_sample + 2 * _ALIGNMENT
        # Inherited by forked workers, handed to others; where /dev/shm is too small, a temporary file.
        self._memory = multiprocessing.RawArray("B", self.num_slots * self._slot_bytes)

    def __getitems__(self, group: Group) -> Any:
        """In a worker: fetches, and says where it is."""
        taken = self._fetcher.__getitems__(group.request)
        end, places = group.slot * self._slot_bytes, []
        for array in taken:
            place = None if array is None else _Place(-(-end // _ALIGNMENT) * _ALIGNMENT, array.dtype, array.shape)
            if place is not None:
                np.copyto(self._view(place), array)
                end = place.offset_bytes + array.nbytes
            places.append(place)
        assert end <= (group.slot + 1) * self._slot_bytes, "a group fits its slot"
        return type(taken)(*places)

    def split(self, group: Group, places: Any) -> Iterator[tuple[Request, Any]]:
        """In the training process: each micro-batch of a group. Its arrays hold until the next group is asked for."""
        views = [None if place is None else self._view(place) for place in places]
        ids, positions, epoch, _ = group.request
        first = 0
        for size in group.sizes:
            part = slice(first, first + size)
            arrays = (None if view is None else view[part] for view in views)
            yield Request(ids[part], positions[part], epoch), type(places)(*arrays)
            first += size

    def _view(self, place: _Place) -> NDArray[Any]:
        view: NDArray[Any] = np.ndarray(place.shape, place.dtype, buffer=self._memory, offset=place.offset_bytes)
        return view


def groups_of(requests: Iterable[Request], fetcher: GroupFetcher) -> Iterator[Group]:
    """Groups of 1, 2, 4, ... micro-batches, up to what a slot holds: the first batch is there as soon as without."""
    waiting: list[Request] = []
    num_samples, slots, limit = 0, count(), 1
    for request in requests:
        size = len(request.ids)
        if waiting and (len(waiting) == limit or num_samples + size > fetcher.samples_per_group):
            yield _group(next(slots) % fetcher.num_slots, waiting)
            waiting, num_samples, limit = [], 0, 2 * limit
        waiting.append(request)
        num_samples += size
    if waiting:
        yield _group(next(slots) % fetcher.num_slots, waiting)


def _group(slot: int, requests: list[Request]) -> Group:
    merged = Request(
        np.concatenate([request.ids for request in requests]),
        np.concatenate([request.positions for request in requests]),
        requests[0].epoch,
    )
    return Group(slot, merged, [len(request.ids) for request in requests])
