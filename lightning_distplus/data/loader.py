"""The loader: a plain iterable around a stock DataLoader that fetches what it is told to, and draws nothing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from lightning_distplus.data.batches import Request
from lightning_distplus.data.order import derive_key, splitmix64

__all__ = [
    "AUGMENT",
    "SampleFetcher",
    "SampleLoader",
    "WorkerOptions",
    "as_it_is",
    "generators_kept",
    "gives_batches",
    "seed_generators",
]

AUGMENT = -2  # separates the keys of augmentation from those of the order
_PRIVATE = -3  # and those of the DataLoader's own generator
_END = object()


class SampleFetcher:
    """Fetches and collates the samples of a map-style data set, each under random numbers of its own.

    Before each sample python's, numpy's and torch's CPU generators are seeded from (seed, epoch, position in the
    global order). So a random augmentation does not depend on the number of workers or ranks, on what was fetched
    before, or on whether the run was interrupted. A data set with ``__getitems__`` of its own, such as those of Hugging
    Face, is seeded once per batch, by its first position: its augmentation then depends on how the batch is cut. A
    ``Subset`` (``random_split``) is read as what it is a part of.

    Args:
        dataset: Anything with ``__getitem__``, or ``__getitems__`` for a whole batch.
        collate: Samples to batch; None means ``torch.utils.data.default_collate``.
        seed: Of the augmentation; None leaves the generators alone.
    """

    def __init__(self, dataset: Any, *, collate: Callable[[list[Any]], Any] | None, seed: int | None) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate
        self.seed = seed
        self.is_seeded_per_batch = seed is not None and gives_batches(dataset)

    def __getitems__(self, request: Request) -> Any:
        """The collated batch, or the pair (batch, weights) where the request has weights."""
        ids, seeds = request.ids.tolist(), self._seeds(request)
        if gives_batches(self.dataset):
            seed_generators(seeds[0])
            samples = self.dataset.__getitems__(ids)
        else:
            samples = []
            for index, seed in zip(ids, seeds, strict=True):
                seed_generators(seed)
                samples.append(self.dataset[index])
        batch = self.collate(samples)
        return batch if request.weights is None else (batch, torch.from_numpy(request.weights))

    def _seeds(self, request: Request) -> list[int] | list[None]:
        if self.seed is None:
            return [None] * len(request.ids)
        key = derive_key(self.seed, AUGMENT, request.epoch)
        return [splitmix64(key ^ position) for position in request.positions.tolist()]


def gives_batches(dataset: Any) -> bool:
    """Whether a data set fetches whole batches itself; that of a ``Subset`` only passes them on."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def seed_generators(seed: int | None) -> None:
    """Seeds python's, numpy's and torch's CPU generators; None leaves them alone."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of ``torch.utils.data.DataLoader`` that are passed on to it."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None


@dataclass
class _Asked:
    """The batch sampler of the inner DataLoader: what is left to ask the workers for."""

    ahead: Iterable[Any] = field(default_factory=tuple)
    drawn: deque[Any] = field(default_factory=deque)
    """What the DataLoader has asked for and not yet delivered; it delivers in order."""

    def __iter__(self) -> Iterator[Any]:
        for one in self.ahead:
            self.drawn.append(one)
            yield one


class SampleLoader:
    """Batches in the order of the requests.

    It is no DataLoader and has no ``load_state_dict``, so that Lightning neither rebuilds it with another sampler nor
    hands every rank the state of rank 0. Its iterator asks for the plan at the first ``next()`` and not before: by
    then the Trainer has restored all states.

    Args:
        fetcher: An object with ``__getitems__(request)`` that returns the batch; where it also has
            ``finish(batch, pin_memory=...)``, that is called in this process and returns the finished batch.
        plan: Called at the start of each pass: the requests that remain in this epoch.
        num_batches: Batches of a whole epoch, also after a resume (Lightning adds what was done before).
        options: Workers and pinning.
        seed: Of the DataLoader's own generator; the global one is never drawn from.
        on_asked: Told each request before this process fetches it, or waits for it.
    """

    def __init__(
        self,
        fetcher: Any,
        *,
        plan: Callable[[], Iterable[Request]],
        num_batches: Callable[[], int],
        options: WorkerOptions,
        seed: int = 0,
        on_asked: Callable[[Request], object] = lambda request: None,
    ) -> None:
        self._fetcher = fetcher
        self._plan = plan
        self._num_batches = num_batches
        self._options = options
        self._finish = getattr(fetcher, "finish", None)
        self._seed = derive_key(seed, _PRIVATE)
        # Only a fetcher that seeds disturbs the generators, and only where it runs in this process.
        self._isolate = options.num_workers == 0 and getattr(fetcher, "seed", None) is not None
        # Without workers a DataLoader would only cost: 30 microseconds per batch.
        self._is_direct = options.num_workers == 0 and (self._finish is not None or not options.pin_memory)
        self._asked = _Asked()
        self._generator = torch.Generator()
        self._inner: DataLoader[Any] | None = None  # where workers persist
        self._on_asked = on_asked
        self._told: Request | None = None
        self.delivered: Request | None = None
        """What the latest batch was asked for as."""

    def __len__(self) -> int:
        return self._num_batches()

    def __iter__(self) -> Iterator[Any]:
        fetched = self._fetched()
        while True:
            with generators_kept() if self._isolate else nullcontext():
                one = next(fetched, None)
            if one is None:
                return
            self.delivered, batch = one
            self._ask(self.delivered)
            if self._finish is not None:
                batch = self._finish(batch, pin_memory=self._options.pin_memory)
            yield batch

    def close(self) -> None:
        """Ends the workers that persist."""
        self._inner = None

    def _fetched(self) -> Iterator[tuple[Request, Any]]:
        """Each request of the plan with what was fetched for it."""
        plan = iter(self._plan())
        if self._is_direct:
            for request in plan:
                self._ask(request)
                yield request, self._fetcher.__getitems__(request)
            return
        if (first := next(plan, None)) is None:
            return
        requests, asked = chain([first], plan), self._asked
        self._generator.manual_seed(self._seed)
        inner = self._dataloader() if self._inner is None else self._inner
        if self._options.persistent_workers:
            self._inner = inner
        asked.drawn.clear()
        asked.ahead = requests
        batches = iter(inner)
        while True:
            if asked.drawn:
                self._ask(asked.drawn[0])
            taken = next(batches, _END)
            if taken is _END:
                return
            yield asked.drawn.popleft(), taken

    def _ask(self, request: Request) -> None:
        if request is not self._told:
            self._told = request
            self._on_asked(request)

    def _dataloader(self) -> DataLoader[Any]:
        options: WorkerOptions = self._options
        return DataLoader(
            self._fetcher,
            batch_sampler=self._asked,  # any iterable of what the fetcher takes
            collate_fn=as_it_is,
            generator=self._generator,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory and self._finish is None,
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch_factor,
        )


def as_it_is(batch: Any) -> Any:
    """Collates nothing; a worker can be given it."""
    return batch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts the three generators back at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
