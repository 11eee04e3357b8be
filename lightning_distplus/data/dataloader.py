"""A copy of the user's DataLoader that can begin inside a pass, with the indices and random numbers that belong there.

What torch draws in a pass over map-style data follows from the sampler and from the random generators as they are when
the pass begins. A checkpoint holds those, and how many batches the completed steps have used. A resume sets them, draws
the same indices again, leaves out those that are done, and reads no data for them. What workers have fetched ahead does
not count.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from lightning_distplus.data.dataloader_stream import ShownDataset, StreamOrder, is_stateful_loader
from lightning_distplus.data.loader import generators_kept, gives_batches, seed_generators
from lightning_distplus.data.state import Position
from lightning_distplus.errors import DatasetMismatch

if TYPE_CHECKING:
    from lightning_distplus.data.dataloader_resume import LoaderResume

__all__ = ["ExactBatches", "ExactLoader", "after"]

_COMPUTED = (SequentialSampler, RandomSampler, DistributedSampler)
"""The samplers whose indices can be left out without a look at them. Of all others a digest is kept."""
_END = object()

States = dict[str, Any]
"""Of generators, by name."""


@dataclass
class _Pass:
    """One iteration over a loader; there are several in an epoch where a ``CombinedLoader`` begins a short one again.

    Attributes:
        epoch: The Trainer's.
        number: Of the passes in that epoch.
        first_batch: The batch of the epoch before which it began.
        skip: Its batches that a resume leaves out.
        at_iter: Generators as they were when torch asked the sampler for an iterator, where some samplers draw.
        at_draw: And when it asked for the first index, where others do; None before that.
        num_drawn: How often the sampler, or batch sampler, has been asked for more.
        digest: Of what it gave.
        saved: This pass in the checkpoint, if it began in an earlier process.
        rewinds_to: The generators before torch drew the seed of persistent workers that are started anew.
        has_delivered: Whether a batch has left it; Lightning makes iterators that it does not use.
    """

    epoch: int
    number: int = 0
    first_batch: int = 0
    skip: int = 0
    at_iter: States = field(default_factory=dict)
    at_draw: States | None = None
    num_drawn: int = 0
    digest: int = 0
    saved: Mapping[str, Any] | None = None
    rewinds_to: States = field(default_factory=dict)
    has_delivered: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.first_batch


class ExactLoader(DataLoader[Any]):
    """A copy of the user's loader that begins where the Trainer stands; its attributes are the user's.

    Attributes:
        distplus_order: What decides about the order, and how far it has come.
    """

    distplus_order: _Order | StreamOrder

    def __iter__(self) -> Any:
        return ExactBatches(self, super().__iter__)

    @classmethod
    def of(cls, loader: DataLoader[Any], fit: LoaderResume) -> ExactLoader:
        """Makes one of a loader of any class that iterates as torch's does."""
        exact: Any = copy.copy(loader)
        # A StatefulDataLoader has no state here: Lightning would give that of rank 0 to every rank.
        bases = (cls,) if is_stateful_loader(loader) else (cls, type(loader))
        exact.__class__ = cls if type(loader) is DataLoader else type(type(loader).__name__, bases, {})
        for name in [name for name, value in vars(exact).items() if name[0] == "_" and isinstance(value, Iterator)]:
            del vars(exact)[name]  # what runs over the original, with its workers, where they persist
        is_stream = isinstance(loader.dataset, IterableDataset)
        exact.distplus_order = StreamOrder(exact, fit) if is_stream else _Order(exact, fit)
        return exact  # type: ignore[no-any-return]


class ExactBatches(Iterator[Any]):
    """An iterator over a loader. Lightning makes it early: what a resume needs is known when the first batch is due."""

    def __init__(self, loader: ExactLoader, iterate: Callable[[], Iterator[Any]]) -> None:
        self.loader = loader
        self._iterate = iterate
        self._batches: Iterator[Any] | None = None
        self._is_first = True
        if not loader.distplus_order.fit.hold(self):
            self.begin(None)

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """Begins a new pass, or one of a checkpoint."""
        self._batches = self.loader.distplus_order.begin(self._iterate, saved)

    @property
    def has_begun(self) -> bool:
        """Whether torch's iterator is there."""
        return self._batches is not None

    def __next__(self) -> Any:
        order = self.loader.distplus_order
        if self._is_first:
            order.fit.begin(self)
            self._is_first = False
            order.deliver()
        assert self._batches is not None
        return next(self._batches)


class _Order:
    """The order of one loader, in the place of its sampler or batch sampler, and what of it goes into a checkpoint.

    Attributes:
        batch_size: Samples of a batch; None where the user's batch sampler alone knows.
        sampler: What decides about the order: a sampler, or a batch sampler that is not torch's.
        is_computed: Whether its indices can be left out without a look at them.
    """

    def __init__(self, loader: ExactLoader, fit: LoaderResume) -> None:
        self.loader = loader
        self.fit = fit
        self.batch_size: int | None
        self.sampler: Any
        self._batches: Any = loader.batch_sampler
        if self._batches is None:
            self.batch_size, self.sampler = 1, loader.sampler
        elif isinstance(self._batches, BatchSampler) and _is_of_torch(self._batches):
            self.batch_size, self.sampler = self._batches.batch_size, self._batches.sampler
        else:
            self.batch_size, self.sampler = None, self._batches
        self.is_computed = type(self.sampler) in _COMPUTED
        self._own = _generators_of(loader)  # attributes of the loader or its samplers
        self._drawn_from = dict(self._own)
        if not self.is_computed or isinstance(self.sampler, RandomSampler):
            self._drawn_from["torch"] = torch.default_generator
        if not self.is_computed:
            self._drawn_from |= {"python": random, "numpy": np.random}
        self._passes: list[_Pass] = []
        self._seeds: Callable[[int], int] | None = None
        self._has_begun = False  # a pass, in this process
        self._has_begun_before = False  # in an earlier one

    # -- what a checkpoint holds

    def identity(self) -> dict[str, Any]:
        """What has to be equal inside an epoch."""
        return {
            "sampler": type(self.sampler).__qualname__,
            "num_samples": sized_len(self.loader.dataset),
            "shuffle": getattr(self.sampler, "shuffle", None),
            "drop_last": [getattr(one, "drop_last", None) for one in (self._batches, self.sampler)],
        }

    def state(self, position: Position) -> dict[str, Any]:
        """What a resume at a position needs."""
        here = position.epoch, position.batches
        found = [one for one in self._passes if one.epoch == position.epoch and one.place <= here]
        later = [one for one in self._passes if one.place > here]  # where micro-batches of a window are done again
        return {
            **self.identity(),
            "seed": self.sampler.seed if isinstance(self.sampler, DistributedSampler) else None,
            "generators": _states_of(self._own),
            "has_begun": self._has_begun or self._has_begun_before,
            "passes": [
                *(self._state_of(one, position.batches - one.first_batch) for one in found[-1:]),
                *(self._state_of(one, 0) for one in later),
            ],
        }

    def _state_of(self, this: _Pass, skip: int) -> dict[str, Any]:
        return {
            "epoch": this.epoch,
            "number": this.number,
            "batch": skip,
            "at_iter": this.at_iter,
            "at_draw": _states_of(self._own) if this.at_draw is None else this.at_draw,
            "is_drawn": this.at_draw is not None,
            "num_drawn": this.num_drawn,
            "digest": this.digest,
        }

    def place(self, state: Mapping[str, Any]) -> None:
        """Takes over from a checkpoint what lasts longer than a pass."""
        if isinstance(self.sampler, DistributedSampler) and state["seed"] is not None:
            self.sampler.seed = state["seed"]
        self._has_begun_before = state["has_begun"]
        _set_states(self._own, state["generators"])

    # -- a pass

    def begin(self, iterate: Callable[[], Iterator[Any]], saved: Mapping[str, Any] | None) -> Iterator[Any]:
        """Begins a pass as torch does, or one of a checkpoint, whose draws the generators of this process forget."""
        self._passes = [one for one in self._passes if one.has_delivered]
        if (position := self.fit.position()) is not None:
            while len(self._passes) > 1 and self._passes[1].place <= (position.epoch, position.batches):
                self._passes.pop(0)  # no checkpoint can stand there any more
        epoch, before = self.fit.epoch, self._passes[-1] if self._passes else None
        this = _Pass(epoch, before.number + 1 if before is not None and before.epoch == epoch else 0, saved=saved)
        self._passes.append(this)
        if saved is not None:
            this.number, this.skip = saved["number"], saved["batch"]
            if this.skip >= len(self.loader):
                return iter(())
        if self.loader.persistent_workers and self._has_begun_before and not self._has_begun:
            this.rewinds_to = _states_of(self._own | {"torch": torch.default_generator})
        self._has_begun = True
        used: dict[str, Any] = {"sampler" if self._batches is None else "batch_sampler": self}
        if (seeds := self.fit.sample_seeds(self.loader, this.epoch, this.number)) is not None:
            used["dataset"] = _SeededDataset(self.loader.dataset)
        self._seeds = seeds
        shown = {name: vars(self.loader)[name] for name in used}
        with nullcontext() if saved is None else generators_kept():
            vars(self.loader).update(used)  # torch reads them when it makes an iterator
            try:
                return iterate()
            finally:
                vars(self.loader).update(shown)

    def deliver(self) -> None:
        """The first batch of the latest pass is about to leave it."""
        this = self._passes[-1]
        this.first_batch, this.has_delivered = self.fit.batch - this.skip, True

    def __len__(self) -> int:
        return len(self.sampler if self._batches is None else self._batches)

    def __iter__(self) -> Iterator[Any]:
        """What torch asks the workers for in the latest pass: indices, with a seed for each sample."""
        this, saved = self._passes[-1], self._passes[-1].saved
        this.num_drawn = this.digest = 0  # with workers torch asks twice
        _set_states(self._own | {"torch": torch.default_generator}, this.rewinds_to)
        if saved is not None:
            _set_states(self._drawn_from, saved["at_iter"])
        this.at_iter = _states_of(self._drawn_from)
        skip = this.skip if self.is_computed else 0
        return self._draw(after(self.sampler if self._batches is None else self._batches, skip), this)

    def _draw(self, source: Iterator[Any], this: _Pass) -> Iterator[Any]:
        saved, num_samples = this.saved, 0
        ahead: deque[Any] = deque()
        with generators_kept() if saved is not None and saved["is_drawn"] else nullcontext():
            if saved is not None:
                _set_states(self._drawn_from, saved["at_draw"])
            this.at_draw = _states_of(self._drawn_from)
            if self.is_computed:
                num_samples = this.skip * (self.batch_size or 0)
                ahead.extend(islice(source, 1))  # such a sampler draws with its first index
            elif saved is not None:
                for index in islice(source, saved["num_drawn"]):
                    self._note(this, index)
                    if this.num_drawn > this.skip:
                        ahead.append(index)
                    else:
                        num_samples += self._size(index)
                if (this.num_drawn, this.digest) != (saved["num_drawn"], saved["digest"]):
                    raise DatasetMismatch(_differs(self.sampler, saved["num_drawn"]))
        seeds = self._seeds
        while ahead or (index := next(source, _END)) is not _END:
            if ahead:
                index = ahead.popleft()
            elif not self.is_computed:
                self._note(this, index)
            size = self._size(index)
            yield index if seeds is None else _Asked(index, [seeds(num_samples + place) for place in range(size)])
            num_samples += size

    def _note(self, this: _Pass, index: Any) -> None:
        this.num_drawn, this.digest = this.num_drawn + 1, xxhash.xxh3_64_intdigest(repr(index).encode(), this.digest)

    def _size(self, index: Any) -> int:
        return 1 if self._batches is None else len(index)


def _is_of_torch(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")


def after(sampler: Any, skip: int) -> Iterator[Any]:
    """What torch's batch sampler, or any sampler, draws after the first batches, which are not made."""
    if not skip:
        return iter(sampler)
    if type(sampler) is not BatchSampler:
        return islice(iter(sampler), skip, None)
    rest = islice(iter(sampler.sampler), skip * sampler.batch_size, None)
    return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))


def _differs(sampler: Any, num_drawn: int) -> str:
    return (
        f"{type(sampler).__qualname__} does not draw again what it drew before the checkpoint: its first {num_drawn} "
        "draws of this epoch differ. It follows something that a resume cannot bring back, such as the clock, the "
        "loss, or random numbers that others draw in between. Draw from a generator that is an attribute of the "
        'sampler; or pass data="as_is" to the strategy, which begins the epoch anew, as Lightning does.'
    )


# -- samples under random numbers of their own -------------------------------------------------------------------------


class _Asked(NamedTuple):
    """What the sampler has drawn, an index or a batch of them, and a seed for each sample."""

    index: Any
    seeds: list[int]


class _SeededDataset(ShownDataset):
    """The data set as a worker sees it: the generators are seeded before each sample. All else is the user's."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, asked: Any) -> Any:
        return self._seeded(lambda: self._sample(*asked)) if isinstance(asked, _Asked) else self.dataset[asked]

    def __getitems__(self, asked: _Asked) -> Any:
        return self._seeded(lambda: self._batch(*asked))

    def _sample(self, index: Any, seeds: list[int]) -> Any:
        seed_generators(seeds[0])
        return self.dataset[index]

    def _batch(self, indices: Any, seeds: list[int]) -> Any:
        if gives_batches(self.dataset):
            seed_generators(seeds[0] if seeds else None)
            return self.dataset.__getitems__(indices)
        return [self._sample(index, [seed]) for index, seed in zip(indices, seeds, strict=True)]

    def _seeded(self, fetch: Callable[[], Any]) -> Any:
        with generators_kept() if get_worker_info() is None else nullcontext():  # the model must not notice
            return fetch()


# -- random generators -------------------------------------------------------------------------------------------------


def _generators_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The generators that are attributes of a loader and of its samplers, by the way to them."""
    found: dict[str, Any] = {}
    seen = {id(loader.dataset)}
    left: list[tuple[str, Any]] = [(name, getattr(loader, name)) for name in ("generator", "sampler", "batch_sampler")]
    while left:
        path, value = left.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            found[path] = value
        elif isinstance(value, Sampler | Dataset) or "." not in path:
            left += [(f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items()]
    return found


def _states_of(generators: Mapping[str, Any]) -> States:
    return {name: _state_of(one) for name, one in generators.items()}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state(legacy=False)


def _set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name, generator in generators.items():
        if name not in states:
            continue
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = states[name]
        elif hasattr(generator, "setstate"):
            generator.setstate(states[name])
        else:
            generator.set_state(states[name])
