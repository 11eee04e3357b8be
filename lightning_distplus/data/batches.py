"""Positions of the global order cut into batches, samples set apart, and the loader that fetches the batches."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset, default_collate

from lightning_distplus import env
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.world import DataParallel

__all__ = [
    "AUGMENT",
    "EpochPlan",
    "Geometry",
    "Order",
    "Quarantine",
    "Request",
    "SampleFetcher",
    "SampleLoader",
    "SequentialPlan",
    "Uneven",
    "WorkerOptions",
    "as_it_is",
    "fetch_seeded",
    "generators_kept",
    "isolated",
    "num_global_batches",
    "seed_generators",
]


class Request(NamedTuple):
    """One micro-batch to fetch."""

    ids: NDArray[np.int64]  # what the data set is asked for, one row per sample
    positions: NDArray[np.int64]  # the samples' places in the epoch's global order
    epoch: int  # of that order
    weights: NDArray[np.float32] | None = None  # of shape (num_samples,), 0 for a repeat; None: the batch carries none


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
    """Global batches in an epoch of ``num_samples``: one at least, and nothing remains where ``uneven`` is "error"."""
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
    """This rank's micro-batches from ``first_batch`` to the end of an epoch."""

    order: Order  # positions to sample ids
    geometry: Geometry  # batch sizes
    first_batch: int  # number of the first micro-batch, counted from the beginning of the epoch
    first_position: int  # position at which the micro-step of `first_batch` begins
    num_batches: int  # micro-batches of the whole epoch

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
        """An order with stand-ins, for positions from ``first`` to before ``end``; it raises where none is left.

        ``step`` positions lie between a sample and that of the same place in the next micro-batch.
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


# -- fetching ----------------------------------------------------------------------------------------------------------

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
        batch = self.collate(fetch_seeded(self.dataset, request.ids.tolist(), self._seeds(request)))
        return batch if request.weights is None else (batch, torch.from_numpy(request.weights))

    def _seeds(self, request: Request) -> Sequence[int | None]:
        if self.seed is None:
            return [None] * len(request.ids)
        key = derive_key(self.seed, AUGMENT, request.epoch)
        return [splitmix64(key ^ position) for position in request.positions.tolist()]


def fetch_seeded(dataset: Any, indices: list[Any], seeds: Sequence[int | None]) -> Any:
    """Samples of a map-style data set, each under random numbers of its own; one that fetches batches has the first."""
    if gives_batches(dataset):
        seed_generators(seeds[0] if seeds else None)
        return dataset.__getitems__(indices)
    samples = []
    for index, seed in zip(indices, seeds, strict=True):
        seed_generators(seed)
        samples.append(dataset[index])
    return samples


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
    then the Trainer has restored all states. The global generator is never drawn from.

    Args:
        fetcher: An object with ``__getitems__(request)`` that returns the batch; where it also has
            ``finish(batch, pin_memory=...)``, that is called in this process and returns the finished batch.
        plan: Called at the start of each pass: the requests that remain in this epoch.
        num_batches: Of a whole epoch, also after a resume (Lightning adds what was done before).
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
        on_asked: Callable[[Request], object] | None = None,
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
        for request, batch in isolated(self._fetched(), self._isolate):
            self.delivered = request
            self._ask(request)
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
        self._generator.manual_seed(self._seed)
        inner = self._dataloader() if self._inner is None else self._inner
        if self._options.persistent_workers:
            self._inner = inner
        asked = self._asked
        asked.drawn.clear()
        asked.ahead = chain([first], plan)
        batches = iter(inner)
        while True:
            if asked.drawn:
                self._ask(asked.drawn[0])
            taken = next(batches, _END)
            if taken is _END:
                return
            yield asked.drawn.popleft(), taken

    def _ask(self, request: Request) -> None:
        if self._on_asked is not None and request is not self._told:
            self._told = request
            self._on_asked(request)

    def _dataloader(self) -> DataLoader[Any]:
        arguments = asdict(self._options)
        if self._finish is not None:
            arguments["pin_memory"] = False
        return DataLoader(
            self._fetcher,
            batch_sampler=self._asked,  # any iterable of what the fetcher takes
            collate_fn=as_it_is,
            generator=self._generator,
            **arguments,
        )


def as_it_is(batch: Any) -> Any:
    """Collates nothing; a worker can be given it."""
    return batch


def isolated(items: Iterator[Any], isolate: bool = True) -> Iterator[Any]:
    """The items; what is drawn at random to make them leaves the generators of this process as they were."""
    while True:
        with generators_kept() if isolate else nullcontext():
            item = next(items, _END)
        if item is _END:
            return
        yield item


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
