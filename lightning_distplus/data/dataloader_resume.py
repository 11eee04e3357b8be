"""Exact mid-epoch resume for the DataLoader that a script has already: its own order, from where the Trainer stands.

What torch draws in a pass over map-style data follows from the sampler, its seed and epoch, and the random generators
as they are when the pass begins. A checkpoint holds those, and how many batches the completed steps have used. A resume
draws the same indices again, leaves out those that are done, and reads no data for them. What workers have fetched
ahead does not count.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import lightning.pytorch as pl
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
)

from lightning_distplus import env
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.in_step import InStep, Timer, is_fitting
from lightning_distplus.data.loader import AUGMENT, generators_kept, gives_batches, seed_generators
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.data.plain_state import pack, unpack
from lightning_distplus.data.plan import Geometry
from lightning_distplus.data.position import Position
from lightning_distplus.data.progress import Cursor, reopen_epoch
from lightning_distplus.data.rank_states import gather_bytes
from lightning_distplus.data.trainer_view import data_parallel, refuse_changing_windows
from lightning_distplus.errors import DatasetMismatch

__all__ = ["LoaderResume"]

_log = logging.getLogger(__name__)

_KEY = "lightning_distplus_dataloaders"  # in a checkpoint
_VERSION = 1
_COMPUTED = (SequentialSampler, RandomSampler, DistributedSampler)
"""The samplers that make all indices of a pass at once: those that are done are left out without a look at them."""
_TORCH = {"torch": torch.default_generator}
_MANY_DIGESTS = 1024
_END = object()


# -- one pass over a loader --------------------------------------------------------------------------------------------


@dataclass
class _Pass:
    """One iteration over a loader; there are several in an epoch where a ``CombinedLoader`` begins a short one again.

    Attributes:
        epoch: The Trainer's.
        number: Of the passes in that epoch.
        first_batch: The batch of the epoch before which it began.
        skip: Its batches that a resume leaves out.
        generators: As they were when the pass began, and when its first index was drawn.
        sampler_epoch: Of a ``DistributedSampler``.
        digests: Of the indices up to a batch of the pass.
        rewinds_to: Generators before torch drew the seed of persistent workers that are started anew after a resume.
        is_resumed: Whether it began in an earlier process.
        has_delivered: Whether a batch has left it; Lightning makes iterators that it does not use.
    """

    epoch: int
    number: int
    first_batch: int = 0
    skip: int = 0
    generators: list[dict[str, bytes]] = field(default_factory=list)
    sampler_epoch: int | None = None
    digests: dict[int, int] = field(default_factory=dict)
    rewinds_to: dict[str, bytes] = field(default_factory=dict)
    is_resumed: bool = False
    has_delivered: bool = False

    @property
    def is_drawn(self) -> bool:
        """Whether an earlier process has drawn its first index, and with it what the sampler draws at random."""
        return self.is_resumed and len(self.generators) > 1


class _Passes:
    """The passes over one loader, and what of them goes into a checkpoint.

    Attributes:
        batches: The user's batch sampler; None where the data set makes the batches.
        batch_size: Samples of a batch; None where the batch sampler alone knows.
        sampler: What decides about the order: a sampler, or a batch sampler that is not torch's.
        own_generators: Those that are attributes of the loader or its samplers.
        generators: Those from which the sampler may draw.
    """

    def __init__(self, loader: _ExactLoader, resume: LoaderResume) -> None:
        self.loader = loader
        self.resume = resume
        self.passes: list[_Pass] = []
        self.fetch = ExitStack()  # what is put back when a batch has been fetched
        self.has_begun = False  # a pass, in this process or in an earlier one
        self.has_workers = False  # in this process
        self.batches: Any = loader.batch_sampler
        self.sampler: Any
        self.batch_size: int | None
        if self.batches is None:
            self.batch_size, self.sampler = 1, loader.sampler
        elif type(self.batches) is BatchSampler:
            self.batch_size, self.sampler = self.batches.batch_size, self.batches.sampler
        else:
            self.batch_size, self.sampler = None, self.batches
        self.is_computed = type(self.sampler) in _COMPUTED
        self.own_generators = _generators_of(loader)
        self.generators = dict(self.own_generators)
        if not self.is_computed or isinstance(self.sampler, RandomSampler):
            self.generators |= _TORCH
        if not self.is_computed:
            self.generators |= {"python": random, "numpy": np.random}

    def begin(self, iterate: Callable[[], Iterator[Any]], start: Mapping[str, Any] | None) -> Iterator[Any]:
        """Begins a pass as torch does, or one of a checkpoint, whose draws the generators of this process forget."""
        epoch = self.resume.epoch
        self.passes = [one for one in self.passes if one.has_delivered and one.epoch >= epoch - 1]
        before = self.passes[-1] if self.passes else None
        this = _Pass(epoch, number=before.number + 1 if before is not None and before.epoch == epoch else 0)
        self.passes.append(this)
        if start is not None:
            this.number, this.skip, this.is_resumed = start["pass"], start["batch"], True
            this.generators, this.digests = start["generators"], {this.skip: start["digest"]}
            if this.skip >= len(self.loader):
                return iter(())
            if start["sampler_epoch"] is not None:
                self.sampler.set_epoch(start["sampler_epoch"])
        used: dict[str, Any] = {"sampler" if self.batches is None else "batch_sampler": _Indices(self)}
        if self.resume.seeds_samples:
            used["dataset"] = _SeededDataset(self.loader.dataset)
        shown = {name: vars(self.loader)[name] for name in used}
        if self.loader.persistent_workers and self.has_begun and not self.has_workers:
            this.rewinds_to = _states_of(self.own_generators | _TORCH)
        self.has_begun = self.has_workers = True
        with generators_kept() if this.is_resumed else nullcontext():
            self.note_generators(this, 0)
            vars(self.loader).update(used)  # torch reads them when it makes an iterator
            try:
                return iterate()
            finally:
                vars(self.loader).update(shown)

    def note_generators(self, this: _Pass, moment: int) -> None:
        """Keeps the generators for a checkpoint, or sets them to those of a checkpoint."""
        if this.is_resumed and moment < len(this.generators):
            _set_states(self.generators, this.generators[moment])
        else:
            this.generators = [*this.generators[:moment], _states_of(self.generators)]

    def identity(self) -> dict[str, Any]:
        """What has to be equal inside an epoch."""
        return {
            "sampler": type(self.sampler).__qualname__,
            "num_samples": sized_len(self.loader.dataset),
            "shuffle": getattr(self.sampler, "shuffle", None),
            "drop_last": [getattr(one, "drop_last", None) for one in (self.batches, self.sampler)],
        }

    def state(self, position: Position) -> dict[str, Any]:
        """What a resume at a position needs."""
        this = next((one for one in reversed(self.passes) if self._holds(one, position)), None)
        state = {
            **self.identity(),
            "seed": self.sampler.seed if isinstance(self.sampler, DistributedSampler) else None,
            "generators": [_states_of(self.own_generators)],
            "sampler_epoch": None,
            "pass": 0,
            "batch": None,
            "digest": None,
            "has_begun": self.has_begun,
        }
        if this is None:
            return state
        skip = position.batches - this.first_batch
        state.update({"sampler_epoch": this.sampler_epoch, "pass": this.number, "batch": skip})
        if skip < len(self.loader):
            state.update({"generators": this.generators, "digest": this.digests.get(skip)})
        return state

    def place(self, state: Mapping[str, Any]) -> None:
        """Takes over from a checkpoint what lasts longer than a pass."""
        if isinstance(self.sampler, DistributedSampler) and state["seed"] is not None:
            self.sampler.seed = state["seed"]
        self.has_begun = state["has_begun"]
        if state["batch"] is None or state["batch"] >= len(self.loader):
            _set_states(self.own_generators, state["generators"][0])

    def forget_digests(self, this: _Pass) -> None:
        """Drops the digests before which no checkpoint can stand any more."""
        oldest = self.resume.position().batches - this.first_batch
        this.digests = {number: one for number, one in this.digests.items() if number >= oldest}

    def _holds(self, this: _Pass, position: Position) -> bool:
        return this.epoch == position.epoch and this.first_batch <= position.batches


class _Indices:
    """Stands in the place of a loader's sampler, or batch sampler: what that draws, from a batch of the pass on."""

    def __init__(self, passes: _Passes) -> None:
        self._passes = passes
        self._sampler: Any = passes.sampler if passes.batches is None else passes.batches

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        this = self._passes.passes[-1]
        return self._drawn(after(self._sampler, this.skip if self._passes.is_computed else 0), this)

    def _drawn(self, source: Iterator[Any], this: _Pass) -> Iterator[Any]:
        passes, is_computed = self._passes, self._passes.is_computed
        number = this.skip if is_computed else 0
        num_samples, digest = number * (passes.batch_size or 0), 0
        with generators_kept() if this.is_drawn else nullcontext():
            _set_states(passes.own_generators | _TORCH, this.rewinds_to)
            passes.note_generators(this, 1)
            if isinstance(passes.sampler, DistributedSampler):
                this.sampler_epoch = passes.sampler.epoch
            while (index := next(source, _END)) is not _END and number < this.skip:
                number, num_samples, digest = number + 1, num_samples + self._size(index), _digest(index, digest)
        if number < this.skip or digest != (this.digests.get(this.skip) or digest):
            raise DatasetMismatch(_differs(passes.sampler, this.skip))
        seeds = passes.resume.seeds(passes, this)
        while index is not _END:
            number, size = number + 1, self._size(index)
            if not is_computed:
                digest = this.digests[number] = _digest(index, digest)
                if len(this.digests) > _MANY_DIGESTS:
                    passes.forget_digests(this)
            if seeds is not None and passes.loader.num_workers == 0:
                passes.fetch.enter_context(generators_kept())  # the model must not notice that they were seeded
            yield index if seeds is None else _Asked(index, [seeds(num_samples + place) for place in range(size)])
            num_samples += size
            index = next(source, _END)

    def _size(self, index: Any) -> int:
        return 1 if self._passes.batches is None else len(index)


def after(sampler: Any, skip: int) -> Iterator[Any]:
    """What torch's batch sampler, or any sampler, draws after the first batches, which are not made."""
    if not skip:
        return iter(sampler)
    if type(sampler) is not BatchSampler:
        return islice(iter(sampler), skip, None)
    rest = islice(iter(sampler.sampler), skip * sampler.batch_size, None)
    return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last))


class _ExactLoader(DataLoader[Any]):
    """A copy of the user's loader that begins where the Trainer stands; its attributes are the user's."""

    _distplus: _Passes

    def __iter__(self) -> Any:
        return _Batches(self._distplus, super().__iter__)

    @classmethod
    def of(cls, loader: DataLoader[Any], resume: LoaderResume) -> _ExactLoader:
        """Makes one of a loader of any class that iterates as torch's does."""
        exact: Any = copy.copy(loader)
        exact.__class__ = cls if type(loader) is DataLoader else type(type(loader).__name__, (cls, type(loader)), {})
        exact._distplus = _Passes(exact, resume)
        return exact  # type: ignore[no-any-return]


class _Batches(Iterator[Any]):
    """An iterator over a loader. Lightning makes it early: what a resume needs is known when the first batch is due."""

    def __init__(self, passes: _Passes, iterate: Callable[[], Iterator[Any]]) -> None:
        self.passes = passes
        self._iterate = iterate
        self._batches: Iterator[Any] | None = None
        self._has_begun = False
        passes.resume.waiting.pop(passes, None)
        if passes.resume.is_resuming:
            passes.resume.waiting[passes] = self
        else:
            self.begin(None)

    def begin(self, start: Mapping[str, Any] | None) -> None:
        """Begins, if it has not, or where a checkpoint says."""
        if self._batches is None or start is not None:
            self._batches = self.passes.begin(self._iterate, start)

    def __next__(self) -> Any:
        passes = self.passes
        if not self._has_begun:
            passes.resume.begin(self)
            this, self._has_begun = passes.passes[-1], True
            this.first_batch, this.has_delivered = passes.resume.batch - this.skip, True
        assert self._batches is not None
        with ExitStack() as passes.fetch:
            return next(self._batches)


class _Asked(NamedTuple):
    """What the sampler has drawn, an index or a batch of them, and a seed for each sample."""

    index: Any
    seeds: list[int]


class _SeededDataset(Dataset[Any]):
    """The data set as a worker sees it: the generators are seeded before each sample. All else is the user's."""

    def __init__(self, dataset: Any) -> None:
        vars(self)["dataset"] = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # asked for while it is copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, _Asked):
            seed_generators(index.seeds[0])
            return self.dataset[index.index]
        return self.dataset[index]

    def __getitems__(self, asked: _Asked) -> Any:
        if gives_batches(self.dataset):
            seed_generators(asked.seeds[0] if asked.seeds else None)
            return self.dataset.__getitems__(asked.index)
        return [self[_Asked(one, [seed])] for one, seed in zip(asked.index, asked.seeds, strict=True)]


# -- random generators -------------------------------------------------------------------------------------------------


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


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
        if _is_generator(value):
            found[path] = value
        elif isinstance(value, Sampler | Dataset) or path.count(".") == 0:
            left += [(f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items()]
    return found


def _states_of(generators: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: pack(_state_of(one), owner="a random generator") for name, one in generators.items()}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state(legacy=False)


def _set_states(generators: Mapping[str, Any], states: Mapping[str, bytes]) -> None:
    for name, generator in generators.items():
        if name not in states:
            continue
        state = unpack(states[name])
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif hasattr(generator, "setstate"):
            generator.setstate(state)
        else:
            generator.set_state(state)


def _digest(index: Any, before: int) -> int:
    return xxhash.xxh3_64_intdigest(repr(index).encode(), before)


def _differs(sampler: Any, num_batches: int) -> str:
    return (
        f"{type(sampler).__qualname__} does not draw again what it drew before the checkpoint: the indices of the "
        f"first {num_batches} batches of this epoch differ. It follows something that a resume cannot bring back, such "
        "as the clock, the loss, or random numbers between its draws. Draw from a generator that is an attribute of "
        'the sampler; or pass data="as_is" to the strategy, which begins the epoch anew, as Lightning does.'
    )


# -- the loaders of a run ----------------------------------------------------------------------------------------------


class LoaderResume(InStep):
    """Keeps the training loaders of a fit and the Trainer's loops in step; a Resilient strategy adds it to the Trainer.

    Args:
        seeds_samples: Whether python's, numpy's and torch's generators are seeded for each sample from its place.
    """

    def __init__(self, *, seeds_samples: bool = True) -> None:
        super().__init__(self)  # type: ignore[arg-type]  # it has what the callback asks of a data module
        self.seeds_samples = seeds_samples
        self.timer: Timer | None = None
        self.receipt = ""
        self._trainer: Any = None
        self._cursor: Cursor | None = None
        self._seed = int(env.PL_GLOBAL_SEED.get() or 0)
        self._loaded: dict[str, Any] | None = None  # a state at which the Trainer has not been placed yet
        self.waiting: dict[_Passes, _Batches] = {}  # iterators that were made before the Trainer was placed
        self._starts: dict[int, Mapping[str, Any]] = {}  # of the loaders that have not begun yet
        self._start_epoch = -1
        self._begun = -1

    @classmethod
    def add_to(cls, trainer: pl.Trainer, *, seeds_samples: bool) -> LoaderResume | None:
        """Adds one to the Trainer of a fit, in the place of that of an earlier fit."""
        trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, cls)]  # type: ignore[attr-defined]
        if not is_fitting(trainer) or isinstance(trainer.datamodule, ExactDataModule):  # type: ignore[attr-defined]
            return None
        resume = cls(seeds_samples=seeds_samples)
        resume._trainer = trainer
        trainer.callbacks.insert(0, resume)  # type: ignore[attr-defined]
        return resume

    def take(self, loader: Any) -> Any:
        """The loader in which a training loader resumes exactly, or what it was given."""
        if not self._trainer.training or _why_not(loader) is not None:
            return loader
        return _ExactLoader.of(loader, self)

    # -- what a loader asks for

    @property
    def is_resuming(self) -> bool:
        """Whether a loader has to wait until the Trainer is placed."""
        return self._loaded is not None or (bool(self._starts) and self.epoch == self._start_epoch)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or comes next."""
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    @property
    def batch(self) -> int:
        """The batch of the epoch that is fetched now."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    @property
    def _makes_loaders_anew(self) -> bool:
        """Whether the Trainer has asked for new loaders at the beginning of this epoch, which is not the first."""
        every = self._trainer.reload_dataloaders_every_n_epochs
        return every > 0 and self.epoch > 0 and self.epoch % every == 0

    def begin(self, batches: _Batches) -> None:
        """Begins an iterator, before its first batch, and all that have waited for the place of the Trainer."""
        waiting, self.waiting = [*self.waiting.values()], {}
        if self._cursor is not None and self.epoch != self._begun:
            self._begun = self.epoch
            self._cursor.begin_epoch()
        if self.timer is not None:
            self.timer.go_on()
        if self.epoch != self._start_epoch:
            self._starts = {}  # the checkpoint stood at the end of its epoch
        if waiting and not self._starts and self._makes_loaders_anew:
            for one in waiting:
                iter(one.passes.loader)  # as Lightning does where it goes on from one epoch to the next
        for one in [*waiting, batches]:
            one.begin(self._starts.pop(self._place_of(one.passes), None))

    def seeds(self, passes: _Passes, this: _Pass) -> Callable[[int], int] | None:
        """The seed of each of this rank's samples in a pass; the same for a sample on any number of ranks."""
        if not self.seeds_samples:
            return None
        ranks = data_parallel(self._trainer)
        if isinstance(passes.sampler, DistributedSampler):
            ranks = replace(ranks, rank=passes.sampler.rank, size=passes.sampler.num_replicas)
        key = derive_key(self._seed, AUGMENT, this.epoch, self._place_of(passes), this.number)
        return lambda place: splitmix64(key ^ (place * ranks.size + ranks.rank))

    @property
    def cursor(self) -> Cursor:
        """Where the Trainer stands."""
        assert self._cursor is not None, "it is made when training starts"
        return self._cursor

    def position(self) -> Position:
        """Where a run that is resumed now would go on."""
        return self.cursor.position()

    # -- Lightning's hooks, beside those that every data set needs

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes a state over, and opens its epoch again. Without one the fit goes on as Lightning's does.

        Raises:
            DatasetMismatch: It is of a version that this package does not know.
        """
        state = checkpoint.get(_KEY)
        if state is None or not is_fitting(trainer):
            return
        self.timer = Timer()
        if state["version"] != _VERSION:
            raise DatasetMismatch(
                f"The checkpoint's state of the DataLoader has version {state['version']!r}; this lightning_distplus "
                f"reads {_VERSION}. Resume with the version of lightning_distplus that wrote the checkpoint."
            )
        self._loaded, self._seed = dict(state), state["seed"]
        if not pl_module.automatic_optimization:
            self._loaded["position"] = {**state["position"], "steps": checkpoint["global_step"]}
        max_epochs, position = trainer.max_epochs, Position(**self._loaded["position"])
        is_past_end = state["ends_open"] and max_epochs is not None and 0 <= max_epochs <= position.epoch + 1
        if not is_past_end:
            reopen_epoch(checkpoint, position)
        self.timer.pause()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the place in the data; all ranks of a save call it."""
        if self._loaded is not None:
            checkpoint[_KEY] = self._loaded
        elif self._is_fitted_by(trainer) and not self.cursor.is_behind_step:
            position = self.position()
            mine = pack([one.state(position) for one in self._exact()], owner="the DataLoader")
            ranks = gather_bytes(trainer.strategy, "state of the DataLoader", mine)
            checkpoint[_KEY] = {
                "version": _VERSION,
                "position": asdict(position),
                "ends_open": self.cursor.ends_open,
                "is_at_end": position.batches >= trainer.num_training_batches,
                "cut": self._cut(),
                "seed": self._seed,
                "ranks": ranks[:1] if len(set(ranks)) == 1 else ranks,
            }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the loops at a loaded position; warns where a later resume would not be exact.

        Raises:
            DatasetMismatch: The checkpoint stands inside an epoch of other data, or of another global batch.
        """
        self._cursor, self._begun = None, -1
        if (why := self._why_not()) is not None:
            if self._loaded is not None and self._loaded["position"]["batches"]:
                self._refuse(why)
            self._loaded = None
            self._warn(why)
            return
        micro_batch = self._exact()[0].batch_size or 1
        geometry = Geometry(
            micro_batch=micro_batch, accumulation=trainer.accumulate_grad_batches, ranks=data_parallel(trainer)
        )
        self._cursor = Cursor(trainer, geometry)
        if self._loaded is not None:
            self._place(self._loaded)
            self._loaded = None
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # it is, by this class
        self._watch_steps(trainer)

    def _is_fitted_by(self, trainer: Any) -> bool:
        return is_fitting(trainer) and self._cursor is not None

    # -- inside

    def _exact(self) -> list[_Passes]:
        return [one._distplus for one in _leaves(self._trainer.train_dataloader) if isinstance(one, _ExactLoader)]

    def _place_of(self, passes: _Passes) -> int:
        return next((place for place, one in enumerate(self._exact()) if one is passes), 0)

    def _why_not(self) -> str | None:
        """Why a later resume of this fit would not be exact; None: it will be."""
        trainer = self._trainer
        found = [_why_not(one) for one in _leaves(trainer.train_dataloader)]
        if any(found):
            return next(filter(None, found))
        if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
            return "training_step takes as many batches from dataloader_iter as it likes."
        try:
            refuse_changing_windows(trainer, trainer.accumulate_grad_batches, trainer.num_training_batches)
        except ValueError as error:
            return str(error)
        return None

    def _warn(self, why: str) -> None:
        if self._trainer.is_global_zero:
            _log.warning(
                "A run that is resumed inside an epoch will begin the data of that epoch anew: the batches before the "
                "checkpoint are repeated, and as many of the others are missed. %s",
                why,
            )

    def _cut(self) -> dict[str, Any]:
        """How samples are cut into batches, and those into steps."""
        return {
            "batch_sizes": [one.batch_size for one in self._exact()],
            "ranks": data_parallel(self._trainer).size,
            "accumulation": self._trainer.accumulate_grad_batches,
        }

    def _place(self, state: Mapping[str, Any]) -> None:
        trainer, exact = self._trainer, self._exact()
        position, cut = Position(**state["position"]), self._cut()
        ranks = state["ranks"]
        starts = unpack(ranks[trainer.global_rank if len(ranks) == trainer.world_size else 0])
        if any(start["batch"] is not None for start in starts):
            self._require_same_order(starts, state["cut"], cut, num_states=len(ranks))
        if cut != state["cut"]:
            before, now, length = state["cut"]["accumulation"], cut["accumulation"], int(trainer.num_training_batches)
            batches = length if state["is_at_end"] else position.batches // before * now
            position = replace(position, batches=batches, total_batches=position.epoch * length + batches)
            for start in starts:
                if start["batch"] is not None:
                    start.update({"batch": start["batch"] // before * now, "digest": None})
            self.receipt = f"; {_text(cut)}, before {_text(state['cut'])}"
        for passes, start in zip(exact, starts, strict=False):
            passes.place(start)
        self.cursor.place(position)
        self._starts = {place: start for place, start in enumerate(starts) if start["batch"] is not None}
        self._start_epoch = position.epoch

    def _require_same_order(
        self, starts: list[dict[str, Any]], before: Mapping[str, Any], now: Mapping[str, Any], *, num_states: int
    ) -> None:
        """Compares what the rest of an epoch depends on.

        Raises:
            DatasetMismatch: It differs; the message has both sides.
        """
        lines = []
        ours = [one.identity() for one in self._exact()]
        if len(ours) != len(starts):
            lines.append(f"number of loaders: {len(starts)} in the checkpoint, {len(ours)} in this run")
        for start, mine in zip(starts, ours, strict=False):
            for name, value in mine.items():
                if start[name] != value:
                    lines.append(f"{name}: {start[name]!r} in the checkpoint, {value!r} in this run")
        is_global = all(start["sampler"] == "DistributedSampler" for start in starts)
        if before != now and not (
            (is_global or before["ranks"] == now["ranks"]) and _global_batches(before) == _global_batches(now)
        ):
            lines.append(f"{_text(before)} in the checkpoint, {_text(now)} in this run")
        if num_states not in (1, self._trainer.world_size):
            size = self._trainer.world_size
            lines.append(f"ranks with an order of their own: {num_states} in the checkpoint, {size} in this run")
        if lines:
            self._refuse("\n".join(lines))

    def _refuse(self, why: str) -> None:
        text = "\n".join(f"  {line}" for line in why.splitlines())
        raise DatasetMismatch(
            f"The checkpoint stands inside an epoch, and this run cannot go on there:\n{text}\n"
            'Resume with the DataLoader of the checkpoint; or pass data="as_is" to the strategy, which begins the data '
            "of the epoch anew, as Lightning does."
        )


def _leaves(tree: Any) -> list[Any]:
    """The loaders in what a ``CombinedLoader`` combines."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for one in tree.values() for leaf in _leaves(one)]
    return [leaf for one in tree for leaf in _leaves(one)] if isinstance(tree, list | tuple) else [tree]


def _why_not(loader: Any) -> str | None:
    """Why a loader cannot be resumed exactly, and the two lines that make it so."""
    name = type(loader).__qualname__
    if isinstance(loader, _ExactLoader):
        return None
    if not isinstance(loader, DataLoader):
        return f"{name} is no torch.utils.data.DataLoader. {_TWO_LINES}"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{name} iterates in a way of its own. {_TWO_LINES}"
    if not isinstance(loader.dataset, Dataset) and not hasattr(loader.dataset, "__getitem__"):
        return f"{type(loader.dataset).__qualname__} has no __getitem__. {_TWO_LINES}"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__qualname__} is iterable. {_TWO_LINES}"
    if not loader.in_order:
        return "With in_order=False workers deliver batches in any order. Leave it out."
    for sampler in (loader.batch_sampler, loader.sampler):
        if hasattr(sampler, "state_dict"):
            return f"{type(sampler).__qualname__} has a state of its own, which is left to those who save it."
    if sized_len(loader) is None:
        return f"{type(loader.batch_sampler or loader.sampler).__qualname__} has no __len__. Define it."
    return None


_TWO_LINES = """Two lines make it exact, with a data set that has an index, or a state_dict and a load_state_dict:
    from lightning_distplus import ResumableDataModule
    trainer.fit(model, ResumableDataModule(dataset, batch_size=...))"""


def _global_batches(cut: Mapping[str, Any]) -> list[Any]:
    factors = (cut["ranks"], cut["accumulation"])
    return [factors if size is None else size * factors[0] * factors[1] for size in cut["batch_sizes"]]


def _text(cut: Mapping[str, Any]) -> str:
    sizes = ", ".join("of the sampler" if size is None else str(size) for size in cut["batch_sizes"])
    return f"batch size {sizes} x {cut['ranks']} data-parallel ranks x accumulation {cut['accumulation']}"
