"""Exact resume inside an epoch for the DataLoader that a script has already.

A Resilient strategy gives the Trainer a copy of each training loader, in whose sampler's place stands an order that can
begin inside a pass. What torch draws in a pass over map-style data follows from the sampler and from the random
generators as they are when the pass begins. A checkpoint holds those, and how many batches the completed steps have
used. A resume sets them, draws the same indices again, leaves out those that are done, and reads no data for them. What
workers have fetched ahead does not count. Of iterable data a checkpoint holds the state after a batch, in each worker.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
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

from lightning_distplus import env
from lightning_distplus.data.batches import AUGMENT, Geometry, fetch_seeded, generators_kept, seed_generators
from lightning_distplus.data.iterable import (
    ShownDataset,
    StreamOrder,
    has_state,
    iterate_with,
    pack,
    takes_the_position,
    unpack,
)
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.data.progress import (
    Cursor,
    InStep,
    Position,
    Timer,
    data_parallel,
    differences,
    is_at_end,
    is_fitting,
    refuse_changing_windows,
    reopen_epoch,
    require_version,
)
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.run_access import gather_bytes
from lightning_distplus.world import DataParallel

__all__ = ["LoaderResume", "MapOrder", "after"]

_log = logging.getLogger(__name__)

# -- which loaders -----------------------------------------------------------------------------------------------------

_TWO_LINES = """Two lines make it exact, with a data set that has an index, or a state_dict and a load_state_dict:
    from lightning_distplus import ResumableDataModule
    trainer.fit(model, ResumableDataModule(dataset, batch_size=...))"""


def why_not(loader: Any) -> str | None:
    """Why a loader cannot be resumed exactly, and what makes it so."""
    name = type(loader).__qualname__
    if isinstance(loader, ExactLoader):
        return None
    if not isinstance(loader, DataLoader):
        return f"{name} is no torch.utils.data.DataLoader. {_TWO_LINES}"
    is_usual = {"dataset", "sampler", "batch_sampler"} <= vars(loader).keys()
    if not is_usual or not (type(loader).__iter__ is DataLoader.__iter__ or _is_stateful(loader)):
        return f"{name} iterates in a way of its own. {_TWO_LINES}"
    data, data_name = loader.dataset, type(loader.dataset).__qualname__
    is_stream = isinstance(data, IterableDataset)
    if is_stream and (takes_the_position(data) or not (has_state(data) or _is_stateful(loader))):
        return f"{data_name} is iterable, without a load_state_dict() and a state_dict() of no arguments. {_TWO_LINES}"
    if not loader.in_order:
        return "With in_order=False workers deliver batches in any order. Leave it out."
    for sampler in () if is_stream else (loader.batch_sampler, loader.sampler):
        if hasattr(sampler, "state_dict") and _package(sampler) != "torchdata":
            return f"{type(sampler).__qualname__} has a state of its own, which is left to those who save it."
    if not is_stream and sized_len(loader) is None:
        return f"{type(loader.batch_sampler or loader.sampler).__qualname__} has no __len__. Define it."
    return None


def _is_stateful(loader: Any) -> bool:
    """Whether a loader iterates as torchdata's ``StatefulDataLoader`` does."""
    module = sys.modules.get("torchdata.stateful_dataloader")  # whoever has one has imported it
    return module is not None and type(loader).__iter__ is module.StatefulDataLoader.__iter__


class ExactLoader(DataLoader[Any]):
    """A copy of the user's loader that begins where the Trainer stands; its attributes are the user's."""

    distplus_order: MapOrder | StreamOrder
    """What decides about the order, and how far it has come."""

    def __iter__(self) -> Any:
        return self.distplus_order.batches(super().__iter__)

    @classmethod
    def of(cls, loader: DataLoader[Any], fit: LoaderResume) -> ExactLoader:
        """Makes one of a loader of any class that iterates as torch's does."""
        exact: Any = copy.copy(loader)
        # A StatefulDataLoader has no state here: Lightning would give that of rank 0 to every rank.
        bases = (cls,) if _is_stateful(loader) else (cls, type(loader))
        exact.__class__ = cls if type(loader) is DataLoader else type(type(loader).__name__, bases, {})
        for name in [name for name, value in vars(exact).items() if name[0] == "_" and isinstance(value, Iterator)]:
            del vars(exact)[name]  # what runs over the original, with its workers, where they persist
        exact.distplus_order = (StreamOrder if isinstance(loader.dataset, IterableDataset) else MapOrder)(exact, fit)
        return exact  # type: ignore[no-any-return]


# -- map-style data ----------------------------------------------------------------------------------------------------

_COMPUTED = (SequentialSampler, RandomSampler, DistributedSampler)
"""The samplers whose indices can be left out without a look at them. Of all others a digest is kept."""

States = dict[str, Any]
"""Of generators, by name."""


@dataclass(eq=False)
class _Pass:
    """One iteration over a loader; several in an epoch where a ``CombinedLoader`` begins a short one again."""

    epoch: int
    number: int  # of the passes in that epoch
    first_batch: int  # the batch of the epoch before which it began
    skip: int  # its batches that a resume leaves out
    saved: Mapping[str, Any] | None  # this pass in the checkpoint, if it began in an earlier process
    key: int | None  # of the seeds of its samples
    has_ended: bool  # whether it has given all its batches
    at_iter: States = field(default_factory=dict)  # when torch asks the sampler for an iterator, where some draw
    at_draw: States | None = None  # and when it asks for the first index, where others do
    source: Iterator[Any] = field(init=False)  # what the sampler, or batch sampler, still gives
    drawn: list[Any] = field(default_factory=list)  # what it has given: the first index, or those of the checkpoint
    num_drawn: int = 0  # how often one whose indices are looked at has been asked for more
    digest: int = 0  # of what it gave
    asked: deque[tuple[Any, int]] = field(default_factory=deque)  # not delivered yet: an index, the samples before it

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.first_batch

    def state(self, num_batches: int) -> dict[str, Any]:
        names = ("epoch", "number", "at_iter", "at_draw", "num_drawn", "digest")
        return {"batch": num_batches, **{name: getattr(self, name) for name in names}}

    def note(self, index: Any) -> Any:
        self.num_drawn, self.digest = self.num_drawn + 1, xxhash.xxh3_64_intdigest(repr(index).encode(), self.digest)
        return index


class MapOrder:
    """The order of one loader, in the place of its sampler or batch sampler, and what of it goes into a checkpoint."""

    def __init__(self, loader: DataLoader[Any], fit: LoaderResume) -> None:
        self.loader = loader
        self.fit = fit
        self.batch_size: int | None  # None where the user's batch sampler alone knows
        self.sampler: Any  # what decides about the order; also a batch sampler that is not torch's
        self._batches: Any = loader.batch_sampler
        if self._batches is None:
            self.batch_size, self.sampler = 1, loader.sampler
        elif isinstance(self._batches, BatchSampler) and _package(self._batches) in ("torch", "torchdata"):
            self.batch_size, self.sampler = self._batches.batch_size, self._batches.sampler
        else:
            self.batch_size, self.sampler = None, self._batches
        self.is_computed = type(self.sampler) in _COMPUTED
        parts = {name: getattr(loader, name) for name in ("generator", "sampler", "batch_sampler")}
        seen = {id(loader.dataset)}
        self._own = {path: one for name in parts for path, one in _generators_of(name, parts[name], seen)}
        self._drawn_from = dict(self._own)
        if not self.is_computed or isinstance(self.sampler, RandomSampler):
            self._drawn_from["torch"] = torch.default_generator
        if not self.is_computed:
            self._drawn_from |= {"python": random, "numpy": np.random}
        self._passes: list[_Pass] = []
        self.delivered: tuple[int, Any, int] | None = None
        """Of what has left last: the epoch, the index that was drawn, and this rank's samples before it."""

    def identity(self) -> dict[str, Any]:
        """What has to be equal inside an epoch."""
        return {
            "sampler": type(self.sampler).__qualname__,
            "num_samples": sized_len(self.loader.dataset),
            "shuffle": getattr(self.sampler, "shuffle", None),
            "drop_last": [getattr(one, "drop_last", None) for one in (self._batches, self.sampler)],
        }

    def state(self, position: Position, left: list[Any]) -> dict[str, Any]:
        """What a resume at a position needs; ``left`` are passes of a checkpoint that have not begun again."""
        here = position.epoch, position.batches
        found = [one for one in self._passes if one.epoch == position.epoch and one.place <= here][-1:]
        later = [one for one in self._passes if one.place > here]  # where micro-batches of a window are done again
        passes = [one.state(position.batches - one.first_batch) for one in found]
        return {
            **self.identity(),
            "seed": self.sampler.seed if isinstance(self.sampler, DistributedSampler) else None,
            "generators": _states_of(self._own),
            "passes": [*passes, *(one.state(0) for one in later), *left],
        }

    def place(self, state: Mapping[str, Any]) -> None:
        """Takes over from a checkpoint what lasts longer than a pass."""
        if isinstance(self.sampler, DistributedSampler) and state["seed"] is not None:
            self.sampler.seed = state["seed"]
        _set_states(self._own, state["generators"])

    def batches(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """One pass, or the rest of one of a checkpoint, whose draws the generators of this process forget.

        It begins with its first batch: Lightning makes iterators that it does not use.
        """
        if (this := self._next_pass()) is None:
            yield from iterate()
        elif not this.has_ended:
            if this.saved is None and this.number == 0 and self.fit.has_unused_iterators(self.loader):
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            with generators_kept() if this.saved is not None else nullcontext():
                batches = iterate_with(self._shown(this), self.loader, iterate)
                self._draw(this)
            for batch in batches:
                self.delivered = this.epoch, *this.asked.popleft()  # torch delivers in the order in which it has asked
                yield batch
            this.has_ended = True

    def _next_pass(self) -> _Pass | None:
        """The pass that begins; None where somebody else looks at the data while the Trainer is in a pass."""
        fit = self.fit
        starts, (epoch, batch) = fit.begin(self), fit.here
        before = next((one for one in self._passes[-1:] if one.epoch == epoch), None)
        if before is not None and batch > before.first_batch + before.skip:
            if not before.has_ended:
                return None
        elif before is not None and before.skip < len(self.loader):  # somebody else has read before the Trainer began
            self._passes.remove(before)
            if before.saved is not None:
                starts.appendleft(before.saved)
        saved = starts.popleft() if starts and starts[0]["epoch"] == epoch else None
        number = max((one.number + 1 for one in self._passes if one.epoch == epoch), default=0)
        number, skip = (number, 0) if saved is None else (saved["number"], saved["batch"])
        if (position := fit.position()) is not None:
            while len(self._passes) > 1 and self._passes[1].place <= (position.epoch, position.batches):
                self._passes.pop(0)  # no checkpoint can stand there any more
        key = None if (key := fit.key_of(self)) is None else derive_key(key, epoch, number)
        has_ended = 0 < len(self.loader) <= skip
        self._passes.append(_Pass(epoch, number, batch - skip, skip, saved, key, has_ended))
        return self._passes[-1]

    def _shown(self, this: _Pass) -> dict[str, Any]:
        """What torch's iterator reads in the place of the loader's attributes."""
        loader = self.loader
        used: dict[str, Any] = {"sampler" if self._batches is None else "batch_sampler": self}
        if this.key is not None:
            used["dataset"] = _SeededDataset(loader.dataset)
        if loader.persistent_workers and (this.epoch, this.number) != (0, 0):
            used["generator"] = torch.Generator()  # the seed of such workers is drawn once in a run
        return used

    def __len__(self) -> int:
        return len(self.sampler if self._batches is None else self._batches)

    def __iter__(self) -> Iterator[Any]:
        """What torch asks the workers for in the latest pass; with workers it asks twice."""
        this = self._passes[-1]
        if this.saved is not None:
            _set_states(self._drawn_from, this.saved["at_iter"])
        this.at_iter, this.at_draw, this.num_drawn, this.digest = _states_of(self._drawn_from), None, 0, 0
        source = after(self.sampler if self._batches is None else self._batches, this.skip if self.is_computed else 0)
        this.source = source if self.is_computed else map(this.note, source)
        return self._indices(this)

    def _draw(self, this: _Pass) -> None:
        """Draws the first index, or, again, the indices that were drawn before the checkpoint."""
        if this.at_draw is not None:
            return
        if (saved := this.saved) is not None:
            _set_states(self._drawn_from, saved["at_draw"])
        this.at_draw = _states_of(self._drawn_from)
        this.drawn = list(islice(this.source, 1 if saved is None else saved["num_drawn"] or 1))
        if saved is not None and (this.num_drawn, this.digest) != (saved["num_drawn"], saved["digest"]):
            raise DatasetMismatch(_differs(self.sampler, saved["num_drawn"]))

    def _indices(self, this: _Pass) -> Iterator[Any]:
        """Indices that are not done, with a seed for each sample."""
        self._draw(this)
        ranks, key = self.fit.ranks_of(self.sampler), this.key
        drawn, num_samples = this.drawn, this.skip * (self.batch_size or 0)
        if not self.is_computed:
            drawn, num_samples = drawn[this.skip :], sum(map(self._size, drawn[: this.skip]))
        for index in chain(drawn, this.source):
            size = self._size(index)
            this.asked.append((index, num_samples))
            places = range(num_samples * ranks.size + ranks.rank, (num_samples + size) * ranks.size, ranks.size)
            yield index if key is None else _Drawn(index, [splitmix64(key ^ place) for place in places])
            num_samples += size

    def _size(self, index: Any) -> int:
        return 1 if self._batches is None else len(index)


def _package(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


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


class _Drawn(NamedTuple):
    """What the sampler has drawn, an index or a batch of them, and a seed for each sample."""

    index: Any
    seeds: list[int]


class _SeededDataset(ShownDataset):
    """The data set as a worker sees it: the generators are seeded before each sample. All else is the user's."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, asked: Any) -> Any:
        if not isinstance(asked, _Drawn):
            return self.dataset[asked]
        with _kept_here():
            seed_generators(asked.seeds[0])
            return self.dataset[asked.index]

    def __getitems__(self, asked: _Drawn) -> Any:
        with _kept_here():
            return fetch_seeded(self.dataset, asked.index, asked.seeds)


def _kept_here() -> Any:
    return generators_kept() if get_worker_info() is None else nullcontext()  # the model must not notice


def _generators_of(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The generators that are attributes of a loader and of its samplers, with the way to them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        yield path, value
    elif isinstance(value, Sampler | Dataset) or "." not in path:
        for name, one in getattr(value, "__dict__", {}).items():
            yield from _generators_of(f"{path}.{name}", one, seen)


def _states_of(generators: Mapping[str, Any]) -> States:
    return {name: _accessors(one)[0]() for name, one in generators.items()}


def _set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name in generators.keys() & states.keys():
        _accessors(generators[name])[1](states[name])


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """How the state of a generator is asked for, and how it is set."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    return partial(generator.get_state, legacy=False), generator.set_state


# -- loaders and loops in step -----------------------------------------------------------------------------------------

_KEY = "lightning_distplus_dataloaders"  # in a checkpoint
_VERSION = 3

_ANEW = (
    "will begin the data of that epoch anew: the batches before the checkpoint are repeated, and as many of the others "
    "are missed"
)
_OF_RANK_0 = "will get the loader's state of rank 0 on every rank, as Lightning saves it"


class LoaderResume(InStep):
    """Keeps the training loaders of a fit and the Trainer's loops in step; a Resilient strategy adds it to the Trainer.

    With ``seeds_samples`` python's, numpy's and torch's generators are seeded for each sample from its place.
    """

    def __init__(self, trainer: Any, *, seeds_samples: bool) -> None:
        super().__init__(self)  # type: ignore[arg-type]  # it has what the callback asks of a data module
        self.timer: Timer | None = None
        self.receipt = ""
        self.trainer = trainer
        self._seeds_samples = seeds_samples
        self._seed = int(env.PL_GLOBAL_SEED.get() or 0)
        self.cursor: Any = None  # a Cursor, once training has started
        self._loaded: dict[str, Any] | None = None  # a state at which the Trainer has not been placed yet
        self._position: Position | None = None  # and where it will be
        self._starts: dict[int, deque[Mapping[str, Any]]] | None = {}  # passes to begin again; None: not found yet
        self._has_begun = False  # an epoch; behind a checkpoint without a place it may begin inside
        self._has_warned = False  # of a state that no checkpoint can hold
        self._num_seeds = 0  # of workers, drawn before the generators are those of the checkpoint
        self._has_foreign_states = False  # of a StatefulDataLoader, in a checkpoint that Lightning wrote alone

    def take(self, loader: Any) -> Any:
        """The loader in which a training loader resumes exactly, or what it was given."""
        is_tuning = self not in self.trainer.callbacks  # the Tuner takes all of them out meanwhile
        is_foreign = self._has_foreign_states and hasattr(loader, "load_state_dict")
        if not self.trainer.training or is_tuning or is_foreign or why_not(loader) is not None:
            return loader
        return ExactLoader.of(loader, self)

    @property
    def is_exact(self) -> bool:
        """Whether the fit that runs is exact."""
        return self.cursor is not None

    # -- what a loader asks for

    @property
    def here(self) -> tuple[int, int]:
        """The epoch that runs, or comes next, and the batch of it that is fetched now."""
        if self._position is not None:
            return self._position.epoch, self._position.batches
        loop = self.trainer.fit_loop
        return int(loop.epoch_progress.current.processed), int(loop.epoch_loop.batch_progress.current.ready)

    def has_unused_iterators(self, loader: DataLoader[Any]) -> bool:
        """Whether Lightning has made an iterator of a new loader that it does not use, with a seed of its own."""
        every, (epoch, _) = self.trainer.reload_dataloaders_every_n_epochs, self.here
        return bool(every > 0 and epoch > 0 and epoch % every == 0 and not loader.persistent_workers)

    def position(self) -> Position | None:
        """Where a run that is resumed now would go on; None before training starts."""
        return None if self.cursor is None else self.cursor.position()

    def begin(self, order: MapOrder | StreamOrder) -> deque[Mapping[str, Any]]:
        """The passes of a checkpoint that a loader begins again; called when the first batch of a pass is due."""
        if self._loaded is not None and self._why_not() is None:
            self._find_starts(self._loaded)
        epoch, batch = self.here
        if self.cursor is not None and (batch == 0 or not self._has_begun):
            self._has_begun = True
            self.cursor.begin_epoch()
        if self.timer is not None:
            self.timer.go_on()
        starts = (self._starts or {}).get(self._place_of(order), deque())
        while starts and starts[0]["epoch"] < epoch:
            starts.popleft()
        return starts

    def key_of(self, order: MapOrder | StreamOrder) -> int | None:
        """Of the random numbers of a loader's samples, the same on all ranks; None where they are left alone."""
        return derive_key(self._seed, AUGMENT, self._place_of(order)) if self._seeds_samples else None

    def ranks_of(self, sampler: Any) -> DataParallel:
        """The ranks among which a sampler divides an epoch; where it does not, those that draw beside each other."""
        if isinstance(sampler, DistributedSampler):
            return DataParallel(rank=sampler.rank, size=sampler.num_replicas)
        return data_parallel(self.trainer)

    def note_seed(self) -> None:
        """Torch draws the seed of workers; anew once the generators are those of the checkpoint."""
        self._num_seeds += self._loaded is not None

    def _place_of(self, order: MapOrder | StreamOrder) -> int:
        return next((place for place, one in enumerate(self.orders) if one is order), 0)

    @property
    def orders(self) -> list[MapOrder | StreamOrder]:
        """Those of the loaders that resume exactly."""
        return [one.distplus_order for one in _leaves(self.trainer.train_dataloader) if isinstance(one, ExactLoader)]

    # -- Lightning's hooks, beside those that every data set needs

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes a state over, and opens its epoch again. Without one the fit goes on as Lightning's does."""
        state = checkpoint.get(_KEY)
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._has_foreign_states = state is None and bool(loop.get("state_dict", {}).get("combined_loader"))
        if state is None or not is_fitting(trainer) or self.cursor is not None:  # the Tuner goes back to where it was
            return
        self.timer = Timer()
        require_version("state of the DataLoader", state, _VERSION)
        self._loaded, self._seed, self._starts = dict(state), state["seed"], None
        if not pl_module.automatic_optimization:
            self._loaded["position"] = {**state["position"], "steps": checkpoint["global_step"]}
        reopen_epoch(trainer, checkpoint, Position(**self._loaded["position"]), ends_open=state["ends_open"])
        self.timer.pause()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the place in the data; all ranks of a save call it."""
        if self._loaded is not None:
            checkpoint[_KEY] = self._loaded
        elif not self._is_fitted_by(trainer):
            return
        elif self.cursor.is_behind_step:  # the weights hold a step that the counters do not
            if trainer.is_global_zero:
                _log.warning("saved in the middle of a batch, without a place in the data; save in on_train_batch_end")
        else:
            self._tell_of_windows(trainer)
            position = self.cursor.position()
            ranks = gather_bytes(trainer.strategy, "state of the DataLoader", self._packed(position))
            if not all(ranks):
                return
            checkpoint[_KEY] = {
                "version": _VERSION,
                "position": asdict(position),
                "ends_open": self.cursor.ends_open,
                "is_at_end": is_at_end(trainer, position),
                "cut": self._cut(),
                "seed": self._seed,
                "ranks": ranks[:1] if len(set(ranks)) == 1 else ranks,
            }

    def _packed(self, position: Position) -> bytes:
        """The state of this rank's loaders; empty where a checkpoint cannot hold it."""
        left = self._starts or {}
        states = [one.state(position, list(left.get(place, ()))) for place, one in enumerate(self.orders)]
        try:
            return pack(states, owner="the DataLoader")
        except TypeError as error:
            if self.trainer.is_global_zero and not self._has_warned:
                _log.warning("a run that is resumed inside an epoch %s. %s", _ANEW, error)
            self._has_warned = True
            return b""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Puts the loops at a loaded position, or refuses other data; warns where a later resume would not be exact."""
        self.cursor, loaded, self._loaded = None, self._loaded, None
        if (why := self._why_not()) is not None:
            if loaded is not None and loaded["position"]["batches"]:
                _refuse(why)
            if trainer.is_global_zero:
                has_state = any(hasattr(one, "load_state_dict") for one in _leaves(trainer.train_dataloader))
                _log.warning("a run that is resumed inside an epoch %s. %s", _OF_RANK_0 if has_state else _ANEW, why)
            return
        micro_batch, accumulation = self.orders[0].batch_size or 1, trainer.accumulate_grad_batches
        geometry = Geometry(micro_batch=micro_batch, accumulation=accumulation, ranks=data_parallel(trainer))
        has_stream = any(isinstance(one, StreamOrder) for one in self.orders)
        self.cursor = Cursor(trainer, geometry, knows_length=not has_stream)
        if loaded is not None:
            self._find_starts(loaded)
            if self._position is not None:
                self.cursor.place(self._position)
        self._position = None
        self._watch_steps(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Draws what was drawn before the generators were those of the checkpoint."""
        for _ in range(self._num_seeds):
            torch.empty((), dtype=torch.int64).random_()
        self._num_seeds = 0
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _is_fitted_by(self, trainer: Any) -> bool:
        return is_fitting(trainer) and self.is_exact

    def _why_not(self) -> str | None:
        """Why a later resume of this fit would not be exact; None: it will be."""
        trainer = self.trainer
        if why := next(filter(None, map(why_not, _leaves(trainer.train_dataloader))), None):
            return why
        are_streams = {isinstance(one, StreamOrder) for one in self.orders}
        if len(are_streams) == 2 and trainer.num_training_batches == float("inf"):
            return "Of one of several loaders no length is known, and another one is of map-style data."
        if True in are_streams and trainer.reload_dataloaders_every_n_epochs:
            return "reload_dataloaders_every_n_epochs asks for iterable data again, of which no place is known."
        if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
            return "training_step takes as many batches from dataloader_iter as it likes."
        try:
            refuse_changing_windows(trainer, trainer.accumulate_grad_batches, trainer.num_training_batches)
        except ValueError as error:
            return str(error)
        return None

    # -- going on at a checkpoint

    def _find_starts(self, state: Mapping[str, Any]) -> None:
        """Finds, once, where each loader begins and where the Trainer will be placed; or refuses other data."""
        if self._starts is not None:
            return
        self._starts = {}
        position, ranks, before, now = Position(**state["position"]), state["ranks"], state["cut"], self._cut()
        saved = unpack(ranks[self.trainer.global_rank if len(ranks) == self.trainer.world_size else 0])
        passes = {place: deque(one["passes"]) for place, one in enumerate(saved)}
        has_stream = any(one.get("stream") is not None for one in chain(*passes.values()))
        ours = [one.identity() for one in self.orders]
        lines = [line for pair in zip(saved, ours, strict=False) for line in differences(*pair)]
        if len(ours) != len(saved):
            lines.append(f"number of loaders: {len(saved)} in the checkpoint, {len(ours)} in this run")
        if position.batches or has_stream:
            if lines:
                _refuse("\n".join(lines))
            if text := self._other_cut(before, now, num_states=len(ranks)):
                if has_stream:
                    _refuse(f"{text}; of iterable data only the data know how they are divided")
                if self.trainer.is_global_zero:
                    _log.warning("the data of this epoch begin anew, as they do in Lightning: %s", text)
                return
        length = self.trainer.num_training_batches
        if now != before and not has_stream and length != float("inf"):
            windows = position.batches // before["accumulation"]
            batches = int(length) if state["is_at_end"] else windows * now["accumulation"]
            position = replace(position, batches=batches, total_batches=position.epoch * int(length) + batches)
            for one in chain(*passes.values()):
                one["batch"] = one["batch"] // before["accumulation"] * now["accumulation"]
            self.receipt = f"; {_text(now)}, before {_text(before)}"
        self._position = position
        if not lines:  # else other data begin with an epoch
            self._starts = passes
        for order, one in zip(self.orders, saved, strict=False):
            if one.get("sampler") == order.identity().get("sampler"):  # generators go on, over other data as well
                order.place(one)

    def _cut(self) -> dict[str, Any]:
        """How samples are cut into batches, and those into steps."""
        return {
            "batch_sizes": [one.batch_size for one in self.orders],
            "ranks": data_parallel(self.trainer).size,
            "accumulation": self.trainer.accumulate_grad_batches,
        }

    def _other_cut(self, before: Mapping[str, Any], now: Mapping[str, Any], *, num_states: int) -> str:
        """How the order is cut in another way, in which a run cannot go on inside an epoch; empty: it can."""
        is_global = all(type(one.sampler) is DistributedSampler for one in self.orders)
        may_change = is_global or (before["ranks"] == now["ranks"] and all(one.is_computed for one in self.orders))
        if any(isinstance(one, StreamOrder) for one in self.orders):
            before, now = {**before, "accumulation": 1}, {**now, "accumulation": 1}
        if before != now and not (may_change and _global_batches(before) == _global_batches(now)):
            return f"{_text(before)} in the checkpoint, {_text(now)} in this run"
        size = self.trainer.world_size
        if num_states not in (1, size):
            return f"{num_states} ranks with an order of their own in the checkpoint, {size} in this run"
        return ""


def _refuse(why: str) -> None:
    text = "\n".join(f"  {line}" for line in why.splitlines())
    raise DatasetMismatch(
        f"The checkpoint stands inside an epoch, and this run cannot go on there:\n{text}\n"
        'Resume with the DataLoader of the checkpoint; or pass data="as_is" to the strategy, which begins the data '
        "of the epoch anew, as Lightning does."
    )


def _leaves(tree: Any) -> list[Any]:
    return CombinedLoader(tree).flattened


def _global_batches(cut: Mapping[str, Any]) -> list[Any]:
    factors = (cut["ranks"], cut["accumulation"])
    return [factors if size is None else size * factors[0] * factors[1] for size in cut["batch_sizes"]]


def _text(cut: Mapping[str, Any]) -> str:
    sizes = ", ".join("of the sampler" if size is None else str(size) for size in cut["batch_sizes"])
    return f"batch size {sizes} x {cut['ranks']} data-parallel ranks x accumulation {cut['accumulation']}"
