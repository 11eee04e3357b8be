"""Reading iterable data in one process: samples to batches, and with each batch the state that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lightning_distplus.data.loader import AUGMENT, seed_generators
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.data.stateful import Stateful

__all__ = ["Item", "StreamReader", "WorkerState"]

_BEGIN = -4  # separates the keys of a pass's beginning from those of its samples


class WorkerState(NamedTuple):
    """Where one process stands in its share of the data.

    Attributes:
        data: The state of the data, pickled; None: at the beginning, or where it has none.
        epoch: Passes that are complete.
        num_taken: Samples (or batches, where the data yields these) taken in this pass.
        is_ended: Whether the pass is over.
    """

    data: bytes | None = None
    epoch: int = 0
    num_taken: int = 0
    is_ended: bool = False

    def begin_again(self) -> WorkerState:
        """The beginning of the next pass: the data goes on from its own end."""
        return WorkerState(self.data, self.epoch + 1)


class Item(NamedTuple):
    """What a worker passes on: a batch and the state after it; ``batch`` means nothing in the other kinds."""

    kind: Literal["batch", "skip", "end"]
    worker: int
    state: WorkerState
    batch: Any = None


class StreamReader(IterableDataset[Item]):
    """Runs in each worker, or in the training process where there is none.

    Args:
        source: The data.
        batch_size: Samples of a batch; None: the data yields batches.
        collate: Samples to batch; None means ``torch.utils.data.default_collate``.
        rest: What happens to the samples after the last whole batch of a pass: "drop", "pad" (repeats of weight 0) or
            "keep" (a smaller batch).
        seed: Of the random numbers of each sample; None leaves the generators alone.
        starts: Where each worker begins.
        last_worker: The worker that gave the last batch; DataLoader begins with worker 0, so that those up to this one
            skip their first turn.
    """

    def __init__(
        self,
        source: Stateful,
        *,
        batch_size: int | None,
        collate: Callable[[list[Any]], Any] | None,
        rest: Literal["drop", "pad", "keep"],
        seed: int | None,
        starts: tuple[WorkerState, ...],
        last_worker: int,
    ) -> None:
        self.source = source
        self.seed = seed
        self._batch_size = batch_size
        self._collate = collate or default_collate
        self._rest = rest
        self._starts = starts
        self._last_worker = last_worker
        self._own: WorkerState | None = None  # of a worker that persists: where its last pass ended

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start = self._starts[worker]
        if self._own is not None:
            start = self._own.begin_again()
        elif not start.is_ended and worker <= self._last_worker:
            yield Item("skip", worker, start)
        if not start.is_ended:
            for item in self._read(worker, start):
                if item.kind == "end":
                    self._own = item.state
                yield item

    def _read(self, worker: int, start: WorkerState) -> Iterator[Item]:
        samples: list[Any] = []
        epoch, num_taken = start.epoch, start.num_taken
        for sample in self._samples(worker, start):
            num_taken += 1
            if self._batch_size is None:
                yield Item("batch", worker, WorkerState(self.source.state(), epoch, num_taken), sample)
                continue
            samples.append(sample)
            if len(samples) == self._batch_size:
                batch = self._batch(samples)
                yield Item("batch", worker, WorkerState(self.source.state(), epoch, num_taken), batch)
                samples = []
        end = WorkerState(self.source.state(), epoch, num_taken, is_ended=True)
        if samples and self._rest != "drop":
            yield Item("batch", worker, end._replace(is_ended=False), self._batch(samples))
        yield Item("end", worker, end)

    def _samples(self, worker: int, start: WorkerState) -> Iterator[Any]:
        """The samples of a pass from ``start``, each under random numbers of its own."""
        seeds = None if self.seed is None else derive_key(self.seed, AUGMENT, worker, start.epoch)
        _seed(seeds, _BEGIN)
        iterator = self.source.start(start.data, start.epoch)
        if start.num_taken == 0 and start.data is not None:
            # The state is that of the end of a pass. Some data begin anew from it, some have to find that end first.
            _seed(seeds, 0)
            first = list(islice(iterator, 1))
            if not first:
                _seed(seeds, _BEGIN)
                iterator = iter(self.source.data)
            yield from first
            start = start._replace(num_taken=len(first))
        index = start.num_taken
        while True:
            _seed(seeds, index)
            try:
                sample = next(iterator)
            except StopIteration:
                return
            yield sample
            index += 1

    def _batch(self, samples: list[Any]) -> Any:
        if self._rest != "pad":
            return self._collate(samples)
        assert self._batch_size is not None
        weights = torch.zeros(self._batch_size)
        weights[: len(samples)] = 1
        repeats = (samples * (self._batch_size // len(samples) + 1))[: self._batch_size]
        return self._collate(repeats), weights


def _seed(key: int | None, index: int) -> None:
    if key is not None:
        seed_generators(splitmix64(key ^ (index & (2**64 - 1))))
