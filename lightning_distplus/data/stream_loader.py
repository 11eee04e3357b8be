"""The loader of iterable data: batches in a fixed order, and the state after each until its step is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_distplus.data.loader import WorkerOptions, generators_kept
from lightning_distplus.data.stream_worker import Item, StreamReader, WorkerState

__all__ = ["StreamLoader", "StreamPasses", "StreamState"]

MakeReader = Callable[[tuple[WorkerState, ...], int], StreamReader]


class StreamState(NamedTuple):
    """Where one rank stands in its data: the place of each worker, and the worker whose batch was the last."""

    workers: tuple[WorkerState, ...]
    last_worker: int = -1

    @property
    def is_ended(self) -> bool:
        """Whether every worker's pass is over."""
        return all(one.is_ended for one in self.workers)

    def begin_again(self) -> StreamState:
        """The beginning of the next pass."""
        return StreamState(tuple(one.begin_again() for one in self.workers))


class StreamLoader:
    """Numbered batches: batch b is the one before which the Trainer has processed b micro-batches, in the whole run.

    Workers and Lightning run ahead of the training. So each batch comes with the state after it, which is kept until
    the optimizer step that it belongs to is complete; and a batch that was fetched and not trained on when an epoch
    ended, because Lightning looks one batch ahead, is the first of the next epoch.

    Args:
        make_reader: Gives what the workers run, from where each of them begins.
        check: Called with the first state; raises where a checkpoint could not hold it.
        state: Where to begin.
        number: Of the first batch.
        begin: Called when an iteration begins: the number of the next batch to train on; None: nothing is left of the
            epoch.
        oldest: The number of the oldest batch before which a checkpoint may still stand.
        num_done: Micro-batches that the Trainer has processed.
        is_endless: Whether the data begins anew where it ends within an epoch.
        options: Workers and pinning.
        generator_seed: Of the DataLoader's own generator; the global one is never drawn from.
    """

    def __init__(
        self,
        make_reader: MakeReader,
        *,
        check: Callable[[StreamState], object],
        state: StreamState,
        number: int,
        begin: Callable[[], int | None],
        oldest: Callable[[], int],
        num_done: Callable[[], int],
        is_endless: Callable[[], bool],
        options: WorkerOptions,
        generator_seed: int,
    ) -> None:
        self._make_reader = make_reader
        self._check: Callable[[StreamState], object] | None = check
        self._begin = begin
        self._oldest = oldest
        self._num_done = num_done
        self._is_endless = is_endless
        self._options = options
        self._seed = generator_seed
        self._state = state
        self._states = {number: state}
        self._batches: deque[tuple[int, Any]] = deque()
        self._inner: DataLoader[Item] | None = None
        self._items: Iterator[Item] | None = None
        self._isolate = False

    def __iter__(self) -> Iterator[Any]:
        first = self._begin()
        if first is None:
            return
        number = first
        while self._batches and self._batches[0][0] < number:
            self._batches.popleft()
        for _, batch in tuple(self._batches):
            yield batch
            number += 1
        has_begun_again = False
        while True:
            if self._state.is_ended:
                # An epoch is never empty: where nothing is left for its first batch, the one before it ended there.
                if number > first and not self._is_endless():
                    return
                if has_begun_again:
                    raise ValueError(
                        "The training data yields nothing on this rank, or less than one batch in each worker. Use a "
                        'smaller batch_size, fewer workers, or uneven="pad".'
                    )
                self._begin_again()
                has_begun_again = True
            if self._pull(number):
                yield self._batches[-1][1]
                number += 1
                has_begun_again = False

    def state_before(self, number: int) -> StreamState:
        """The state in which batch ``number`` is the next one."""
        return self._states[number]

    def is_end(self, number: int) -> bool:
        """Whether the data is known to have ended before batch ``number``."""
        state = self._states.get(number)
        return state is not None and state.is_ended

    def close(self) -> None:
        """Ends the workers."""
        self._items = None
        self._inner = None

    def _pull(self, number: int) -> bool:
        """Fetches batch ``number``; False: the data ends before it."""
        self._forget(number)
        for item in self._fetched():
            state = self._state
            workers = (*state.workers[: item.worker], item.state, *state.workers[item.worker + 1 :])
            if item.kind == "batch":
                self._state = self._states[number + 1] = StreamState(workers, item.worker)
                self._batches.append((number, item.batch))
                if self._check is not None:
                    self._check(self._state)
                    self._check = None
                return True
            self._state = StreamState(workers, state.last_worker)
        self._items = None
        self._states[number] = self._state
        return False

    def _forget(self, number: int) -> None:
        oldest = self._oldest()
        for old in [one for one in self._states if one < min(oldest, number)]:
            del self._states[old]
        while self._batches and self._batches[0][0] < self._num_done():
            self._batches.popleft()

    def _fetched(self) -> Iterator[Item]:
        if self._items is None:
            self._items = iter(self._loader())
        while True:
            with generators_kept() if self._isolate else nullcontext():
                item = next(self._items, None)
            if item is None:
                return
            yield item

    def _begin_again(self) -> None:
        self._state = self._state.begin_again()
        self._items = None
        if not self._options.persistent_workers:
            self._inner = None

    def _loader(self) -> DataLoader[Item]:
        if self._inner is None:
            reader = self._make_reader(self._state.workers, self._state.last_worker)
            # Without workers the data's random numbers are drawn in this process: the model must not notice.
            self._isolate = self._options.num_workers == 0 and reader.seed is not None
            self._inner = _dataloader(reader, self._options, self._seed)
        return self._inner


class StreamPasses:
    """Iterable data for validation: every iteration is one pass, from the beginning.

    Args:
        make_reader: Gives what the workers run, from where each of them begins.
        options: Workers and pinning.
    """

    def __init__(self, make_reader: MakeReader, *, options: WorkerOptions) -> None:
        self._make_reader = make_reader
        self._options = replace(options, persistent_workers=False)

    def __iter__(self) -> Iterator[Any]:
        reader = self._make_reader((WorkerState(),) * max(1, self._options.num_workers), -1)
        items = iter(_dataloader(reader, self._options, 0))
        while True:
            with generators_kept() if self._options.num_workers == 0 else nullcontext():
                item = next(items, None)
            if item is None:
                return
            if item.kind == "batch":
                yield item.batch


def _dataloader(reader: StreamReader, options: WorkerOptions, seed: int) -> DataLoader[Item]:
    return DataLoader(
        reader,
        batch_size=None,
        collate_fn=_as_it_is,
        generator=torch.Generator().manual_seed(seed),
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        persistent_workers=options.persistent_workers,
        prefetch_factor=options.prefetch_factor,
    )


def _as_it_is(item: Any) -> Any:
    return item
