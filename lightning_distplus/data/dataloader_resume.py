"""Exact mid-epoch resume for the DataLoader that a script has already: what is saved, and where the Trainer goes on."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DistributedSampler

from lightning_distplus import env
from lightning_distplus.data.batches import Geometry
from lightning_distplus.data.dataloader import ExactBatches, ExactLoader, StreamOrder, why_not
from lightning_distplus.data.iterable import pack, unpack
from lightning_distplus.data.loader import AUGMENT
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.data.progress import (
    Cursor,
    InStep,
    Timer,
    data_parallel,
    is_fitting,
    refuse_changing_windows,
    reopen_epoch,
)
from lightning_distplus.data.state import Position
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.run_access import gather_bytes

__all__ = ["LoaderResume"]

_log = logging.getLogger(__name__)

_KEY = "lightning_distplus_dataloaders"  # in a checkpoint
_VERSION = 1

_ANEW = (
    "will begin the data of that epoch anew: the batches before the checkpoint are repeated, and as many of the others "
    "are missed"
)
_OF_RANK_0 = "will get the loader's state of rank 0 on every rank, as Lightning saves it"


class LoaderResume(InStep):
    """Keeps the training loaders of a fit and the Trainer's loops in step; a Resilient strategy adds it to the Trainer.

    Args:
        trainer: The Trainer of the fit.
        seeds_samples: Whether python's, numpy's and torch's generators are seeded for each sample from its place.
    """

    def __init__(self, trainer: Any, *, seeds_samples: bool) -> None:
        super().__init__(self)  # type: ignore[arg-type]  # it has what the callback asks of a data module
        self.timer: Timer | None = None
        self.receipt = ""
        self._trainer = trainer
        self._seeds_samples = seeds_samples
        self._seed = int(env.PL_GLOBAL_SEED.get() or 0)
        self._cursor: Cursor | None = None
        self._loaded: dict[str, Any] | None = None  # a state at which the Trainer has not been placed yet
        self._has_found = False  # where the loaders begin
        self._position: Position | None = None  # where the Trainer will be placed
        self._is_placed = False  # at a checkpoint, and has fetched nothing yet
        self._early: list[ExactBatches] = []  # iterators that were made before that
        self._starts: dict[int, deque[Mapping[str, Any]]] = {}  # of the checkpoint, by loader: passes to begin
        self._begun_epoch = -1
        self._end = -1  # the number of micro-batches after which the latest epoch has ended
        self._has_warned = False  # of a state that no checkpoint can hold
        self._num_seeds = 0  # of workers, drawn before the generators are those of the checkpoint
        self._has_foreign_states = False  # of a StatefulDataLoader, in a checkpoint that Lightning wrote alone

    def take(self, loader: Any) -> Any:
        """The loader in which a training loader resumes exactly, or what it was given."""
        is_tuning = self not in self._trainer.callbacks  # the Tuner takes all of them out meanwhile
        is_foreign = self._has_foreign_states and hasattr(loader, "load_state_dict")
        if not self._trainer.training or is_tuning or is_foreign or why_not(loader) is not None:
            return loader
        return ExactLoader.of(loader, self)

    @property
    def is_exact(self) -> bool:
        """Whether a later resume of the fit that runs is exact."""
        return self._cursor is not None

    # -- what a loader asks for ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that runs, or comes next."""
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    @property
    def batch(self) -> int:
        """The batch of the epoch that is fetched now."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def position(self) -> Position | None:
        """Where a run that is resumed now would go on; None before training starts."""
        return None if self._cursor is None else self._cursor.position()

    def hold(self, batches: ExactBatches) -> bool:
        """Whether an iterator has to wait for the Trainer to be placed; it takes the place of an earlier one."""
        for starts in self._starts.values():
            while starts and starts[0]["epoch"] < self.epoch:
                starts.popleft()
        is_due = any(starts and starts[0]["epoch"] == self.epoch for starts in self._starts.values())
        waits = self._loaded is not None or is_due
        self._early = [one for one in self._early if one.loader is not batches.loader]
        if waits or self._cursor is None:
            self._early.append(batches)
        return waits

    def begin(self, batches: ExactBatches) -> None:
        """Begins an iterator, before its first batch, and all that were made before the Trainer was placed."""
        if self._loaded is not None and not self._has_found and self._why_not() is None:
            self._find_starts(self._loaded)
        early, self._early = [one for one in self._early if one.loader in self._exact()], []
        is_resumed, self._is_placed = self._is_placed, False
        if self._cursor is not None and self.epoch != self._begun_epoch:
            self._begun_epoch = self.epoch
            self._cursor.begin_epoch()
        if self.timer is not None:
            self.timer.go_on()
        starts = [self._take_start(one.loader) for one in early]
        if is_resumed and not any(starts) and self._makes_loaders_anew:
            for one in early:
                one.begin(None)  # as Lightning does where it goes on from one epoch to the next
        for one, start in zip(early, starts, strict=True):
            if start is not None or is_resumed or not one.has_begun:
                one.begin(start)

    def sample_seeds(self, loader: ExactLoader, epoch: int, number: int) -> Callable[[int], int] | None:
        """The seed of each of this rank's samples in a pass; the same for a sample on any number of ranks."""
        if not self._seeds_samples:
            return None
        ranks, sampler = data_parallel(self._trainer), loader.distplus_order.sampler
        if isinstance(sampler, DistributedSampler):
            ranks = replace(ranks, rank=sampler.rank, size=sampler.num_replicas)
        key = derive_key(self._seed, AUGMENT, epoch, self._place_of(loader), number)
        return lambda place: splitmix64(key ^ (place * ranks.size + ranks.rank))

    def stream_seed(self, loader: ExactLoader) -> int | None:
        """The seed of a loader's iterable data on this rank."""
        ranks = data_parallel(self._trainer)
        return derive_key(self._seed, AUGMENT, self._place_of(loader), ranks.rank) if self._seeds_samples else None

    def note_seed(self) -> None:
        """Torch draws the seed of workers; anew once the generators are those of the checkpoint."""
        self._num_seeds += self._loaded is not None

    def is_over(self, position: Position) -> bool:
        """Whether nothing is left to fetch in the epoch of a position."""
        return position.is_epoch_done or bool(position.batches >= self._trainer.num_training_batches)

    def _take_start(self, loader: ExactLoader) -> Mapping[str, Any] | None:
        """The pass of the checkpoint with which a loader begins in this epoch."""
        starts = self._starts.get(self._place_of(loader))
        return starts.popleft() if starts and starts[0]["epoch"] == self.epoch else None

    def _place_of(self, loader: ExactLoader) -> int:
        return next((place for place, one in enumerate(self._exact()) if one is loader), 0)

    @property
    def _makes_loaders_anew(self) -> bool:
        """Whether the Trainer asks for new loaders at the beginning of this epoch, which is not the first."""
        every = self._trainer.reload_dataloaders_every_n_epochs
        return every > 0 and self.epoch > 0 and self.epoch % every == 0

    def _exact(self) -> list[ExactLoader]:
        return [one for one in _leaves(self._trainer.train_dataloader) if isinstance(one, ExactLoader)]

    # -- Lightning's hooks, beside those that every data set needs -----------------------------------------------------

    @property
    def cursor(self) -> Cursor:
        """Where the Trainer stands."""
        assert self._cursor is not None, "it is made when training starts"
        return self._cursor

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes a state over, and opens its epoch again. Without one the fit goes on as Lightning's does.

        Raises:
            DatasetMismatch: It is of a version that this package does not know.
        """
        state = checkpoint.get(_KEY)
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._has_foreign_states = state is None and bool(loop.get("state_dict", {}).get("combined_loader"))
        if state is None or not is_fitting(trainer) or self._cursor is not None:  # the Tuner goes back to where it was
            return
        self.timer = Timer()
        if state["version"] != _VERSION:
            raise DatasetMismatch(
                f"The checkpoint's state of the DataLoader has version {state['version']!r}; this lightning_distplus "
                f"reads {_VERSION}. Resume with the version of lightning_distplus that wrote the checkpoint."
            )
        self._loaded, self._seed, self._has_found, self._position = dict(state), state["seed"], False, None
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
        elif not self._is_fitted_by(trainer):
            return
        elif self.cursor.is_behind_step:  # the weights hold a step that the counters do not
            if trainer.is_global_zero:
                _log.warning("saved in the middle of a batch, without a place in the data; save in on_train_batch_end")
        else:
            position = self.cursor.position()
            ranks = gather_bytes(trainer.strategy, "state of the DataLoader", self._packed(position))
            if not all(ranks):
                return
            checkpoint[_KEY] = {
                "version": _VERSION,
                "position": asdict(position),
                "ends_open": self.cursor.ends_open,
                "is_at_end": self.is_over(position),
                "cut": self._cut(),
                "seed": self._seed,
                "ranks": ranks[:1] if len(set(ranks)) == 1 else ranks,
            }

    def _packed(self, position: Position) -> bytes:
        """The state of this rank's loaders; empty where a checkpoint cannot hold it."""
        states = [one.distplus_order.state(position) for one in self._exact()]
        for place, starts in self._starts.items():
            if starts and position == self._position:  # nothing has been fetched since the resume
                states[place]["passes"] = list(starts)
        try:
            return pack(states, owner="the DataLoader")
        except TypeError as error:
            if self._trainer.is_global_zero and not self._has_warned:
                _log.warning("a run that is resumed inside an epoch %s. %s", _ANEW, error)
            self._has_warned = True
            return b""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the loops at a loaded position; warns where a later resume would not be exact.

        Raises:
            DatasetMismatch: The checkpoint stands inside an epoch of other data, or of another order.
        """
        self._cursor, self._begun_epoch = None, -1
        loaded, self._loaded = self._loaded, None
        if (why := self._why_not()) is not None:
            if loaded is not None and loaded["position"]["batches"]:
                _refuse(why)
            if trainer.is_global_zero:
                has_state = any(hasattr(one, "load_state_dict") for one in _leaves(trainer.train_dataloader))
                _log.warning("a run that is resumed inside an epoch %s. %s", _OF_RANK_0 if has_state else _ANEW, why)
            return
        geometry = Geometry(
            micro_batch=self._exact()[0].distplus_order.batch_size or 1,
            accumulation=trainer.accumulate_grad_batches,
            ranks=data_parallel(trainer),
        )
        is_end = self._is_end if any(isinstance(one.distplus_order, StreamOrder) for one in self._exact()) else None
        self._cursor = Cursor(trainer, geometry, is_end=is_end)
        if loaded is not None:
            if not self._has_found:
                self._find_starts(loaded)
            if self._position is not None:
                self._end = self._position.total_batches if self._position.is_epoch_done else -1
                self._cursor.place(self._position)
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # it is, by this class
        self._watch_steps(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes where the data end, if only they know; says once where the run has resumed."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch:
            self._end = progress.total.ready
        for _ in range(self._num_seeds):
            torch.empty((), dtype=torch.int64).random_()
        self._num_seeds = 0
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes where the data have ended."""
        total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        self._end = total.processed

    def _is_end(self, number: int) -> bool:
        return number == self._end

    def _is_fitted_by(self, trainer: Any) -> bool:
        return is_fitting(trainer) and self._cursor is not None

    def _why_not(self) -> str | None:
        """Why a later resume of this fit would not be exact; None: it will be."""
        trainer = self._trainer
        for loader in _leaves(trainer.train_dataloader):
            if (why := why_not(loader)) is not None:
                return why
        ordered = [one for one in self._exact() if not isinstance(one.distplus_order, StreamOrder)]
        if 0 < len(ordered) < len(self._exact()) and trainer.num_training_batches == float("inf"):
            return "Of one of several loaders no length is known, and another one is of map-style data."
        if len(ordered) < len(self._exact()) and trainer.reload_dataloaders_every_n_epochs:
            return "reload_dataloaders_every_n_epochs asks for iterable data again, of which no place is known."
        if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
            return "training_step takes as many batches from dataloader_iter as it likes."
        try:
            refuse_changing_windows(trainer, trainer.accumulate_grad_batches, trainer.num_training_batches)
        except ValueError as error:
            return str(error)
        return None

    # -- going on at a checkpoint --------------------------------------------------------------------------------------

    def _find_starts(self, state: Mapping[str, Any]) -> None:
        """Finds where each loader begins, and where the Trainer will be placed.

        Raises:
            DatasetMismatch: The data or their order are others; or only the data know how they are divided.
        """
        self._has_found, exact = True, self._exact()
        position, cut = Position(**state["position"]), self._cut()
        ranks = state["ranks"]
        saved = unpack(ranks[self._trainer.global_rank if len(ranks) == self._trainer.world_size else 0])
        passes = {place: deque(one["passes"]) for place, one in enumerate(saved)}
        has_stream = any(start.get("stream") is not None for starts in passes.values() for start in starts)
        if position.batches or has_stream:
            self._require_same_order(saved)
            if text := self._other_cut(state["cut"], cut, num_states=len(ranks)):
                if has_stream:
                    _refuse(f"{text}; of iterable data only the data know how they are divided")
                if self._trainer.is_global_zero:
                    _log.warning("the data of this epoch begin anew, as they do in Lightning: %s", text)
                return
        if cut != state["cut"] and not has_stream:
            before, now, length = state["cut"]["accumulation"], cut["accumulation"], self._trainer.num_training_batches
            batches = int(length) if state["is_at_end"] else position.batches // before * now
            position = replace(position, batches=batches, total_batches=position.epoch * int(length) + batches)
            for one in (one for starts in passes.values() for one in starts):
                one["batch"] = one["batch"] // before * now
            self.receipt = f"; {_text(cut)}, before {_text(state['cut'])}"
        if len(exact) == len(saved):
            for loader, one in zip(exact, saved, strict=True):
                loader.distplus_order.place(one)
        self._starts, self._is_placed, self._position = passes, True, position

    def _cut(self) -> dict[str, Any]:
        """How samples are cut into batches, and those into steps."""
        return {
            "batch_sizes": [one.distplus_order.batch_size for one in self._exact()],
            "ranks": data_parallel(self._trainer).size,
            "accumulation": self._trainer.accumulate_grad_batches,
        }

    def _require_same_order(self, saved: list[dict[str, Any]]) -> None:
        """Compares what the rest of an epoch depends on.

        Raises:
            DatasetMismatch: It differs; the message has both sides.
        """
        ours = [one.distplus_order.identity() for one in self._exact()]
        lines = [
            f"{name}: {before.get(name)!r} in the checkpoint, {value!r} in this run"
            for before, now in zip(saved, ours, strict=False)
            for name, value in now.items()
            if before.get(name) != value
        ]
        if len(ours) != len(saved):
            lines.append(f"number of loaders: {len(saved)} in the checkpoint, {len(ours)} in this run")
        if lines:
            _refuse("\n".join(lines))

    def _other_cut(self, before: Mapping[str, Any], now: Mapping[str, Any], *, num_states: int) -> str:
        """How the order is cut in another way, in which a run cannot go on inside an epoch; empty: it can."""
        orders = [one.distplus_order for one in self._exact()]
        is_global = all(type(one.sampler) is DistributedSampler for one in orders)
        may_change = is_global or (before["ranks"] == now["ranks"] and all(one.is_computed for one in orders))
        if any(isinstance(one, StreamOrder) for one in orders):
            before, now = {**before, "accumulation": 1}, {**now, "accumulation": 1}
        if before != now and not (may_change and _global_batches(before) == _global_batches(now)):
            return f"{_text(before)} in the checkpoint, {_text(now)} in this run"
        size = self._trainer.world_size
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
    """The loaders in what a ``CombinedLoader`` combines."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for one in tree.values() for leaf in _leaves(one)]
    return [leaf for one in tree for leaf in _leaves(one)] if isinstance(tree, list | tuple) else [tree]


def _global_batches(cut: Mapping[str, Any]) -> list[Any]:
    factors = (cut["ranks"], cut["accumulation"])
    return [factors if size is None else size * factors[0] * factors[1] for size in cut["batch_sizes"]]


def _text(cut: Mapping[str, Any]) -> str:
    sizes = ", ".join("of the sampler" if size is None else str(size) for size in cut["batch_sizes"])
    return f"batch size {sizes} x {cut['ranks']} data-parallel ranks x accumulation {cut['accumulation']}"
