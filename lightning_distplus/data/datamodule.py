"""The resumable data modules: their base, and the one for any data set, map-style or iterable with a state."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import CombinedLoader
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lightning_distplus.data.batches import (
    EpochPlan,
    Geometry,
    Order,
    Quarantine,
    Request,
    SampleFetcher,
    SampleLoader,
    SequentialPlan,
    Uneven,
    WorkerOptions,
    num_global_batches,
)
from lightning_distplus.data.iterable import (
    STREAM,
    IterableTraining,
    Stateful,
    StreamPasses,
    StreamReader,
    StreamState,
    is_iterable,
    require_data,
    stateful,
)
from lightning_distplus.data.order import ORDER_VERSION, EpochOrder, derive_key
from lightning_distplus.data.progress import (
    Cursor,
    InStep,
    Position,
    Timer,
    change_of_cut,
    data_parallel,
    differences,
    epoch_length,
    is_fitting,
    position_at,
    read_state,
    refuse_changing_windows,
    refuse_past_end,
    state_of,
)
from lightning_distplus.data.samplers import OwnSampler
from lightning_distplus.errors import DatasetMismatch, refuse_unknown_arguments, require_choice
from lightning_distplus.events import SampleNote
from lightning_distplus.run_access import gather_bytes
from lightning_distplus.world import DataParallel

__all__ = ["ExactDataModule", "ResumableDataModule"]

_log = logging.getLogger(__name__)
_MAX_CHANGES = 8  # recorded changes of the global batch; the state stays below 1 KB


class ExactDataModule(pl.LightningDataModule):
    """The position in the data, its state, and its place in the Trainer's loops.

    The position counts completed optimizer steps. It is computed from the Trainer's progress whenever it is asked
    for, so that a checkpoint may be written at any moment; micro-batches of an unfinished accumulation window are
    replayed. The state is the same on all ranks and is made without communication.

    Args:
        micro_batch: Samples of one micro-batch on one rank.
        seed: Of the order and of the augmentation.
        num_workers: As in ``torch.utils.data.DataLoader``.
        pin_memory: None means: when the Trainer runs on CUDA.
        persistent_workers: As in ``DataLoader``.
        prefetch_factor: Micro-batches that each worker reads ahead; None means 2.
        allow_global_batch_change: Resume with another global batch. The epoch in which it changes may leave out up to
            one global batch more.
        ignore_fingerprint: Resume although data, seed or order differ.
        start_sample: Samples that count as done where a checkpoint holds no position, as one of another data module;
            with 0 the data begins. A checkpoint with a position goes on there.
    """

    def __init__(
        self,
        *,
        micro_batch: int,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        allow_global_batch_change: bool = False,
        ignore_fingerprint: bool = False,
        start_sample: int | None = None,
        **removed: Any,
    ) -> None:
        super().__init__()
        if removed:
            kinds = [kind for kind in type(self).__mro__ if issubclass(kind, ExactDataModule)]
            known = {name for kind in kinds for name in inspect.signature(kind).parameters} - {"micro_batch", "common"}
            refuse_unknown_arguments(type(self).__name__, removed, known - {"removed"})
        if micro_batch < 1:
            raise ValueError(f"The batch size is {micro_batch}; it is at least 1.")
        self.micro_batch = micro_batch
        self._seed = seed
        self._pin_memory = pin_memory
        self._options = WorkerOptions(
            num_workers=num_workers, persistent_workers=persistent_workers, prefetch_factor=prefetch_factor
        )
        self._allow_global_batch_change = allow_global_batch_change
        self._ignore_fingerprint = ignore_fingerprint
        self._start_sample = start_sample
        self._cursor: Cursor | None = None
        self._known_identity: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # a state at which the Trainer has not been placed yet
        self._changes: list[list[int]] = []
        self.receipt = ""
        self._loaders: dict[str, Any] = {}
        self.quarantine = Quarantine()
        self._plan: EpochPlan | None = None
        self._in_hand: Request | None = None
        self._note: SampleNote | None = None
        self.timer: Timer | None = None

    @property
    def consumed_samples(self) -> int:
        """Samples of all completed optimizer steps, over all ranks and epochs."""
        return self.position().consumed_samples

    def position(self) -> Position:
        """Where a run that is resumed now would go on."""
        if self._loaded is not None:
            return read_state(self._loaded)
        return self._cursor.position() if self._cursor is not None else Position()

    @property
    def identity(self) -> dict[str, Any]:
        """What defines the data and its order, as a checkpoint holds it; known once a Trainer fits."""
        return {"order_version": ORDER_VERSION, **self._known_identity}

    @property
    def cursor(self) -> Cursor:
        """Where the present Trainer stands; also where a subclass overrides ``setup`` without calling this one's."""
        if self._cursor is None or self._cursor.trainer is not self.trainer:
            self._cursor = self._join(None)
        return self._cursor

    @property
    def geometry(self) -> Geometry:
        """The batch sizes of this fit."""
        return self.cursor.geometry

    # -- hooks of Lightning --------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Checks the data against the batch sizes; sets the Trainer's accumulation where a global batch is given."""
        if stage == "fit":
            self._cursor = self._join(self._cursor)

    def teardown(self, stage: str) -> None:
        """Ends persistent workers."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Ends persistent workers."""
        self._close()

    def train_dataloader(self) -> Any:
        """This rank's batches."""
        if "train" not in self._loaders:
            self._loaders["train"] = self._training_loader()
        return self._loaders["train"]

    def val_dataloader(self) -> Any:
        """This rank's validation batches, in order, as many as on any other rank."""
        return self._validation_loader()

    def _training_loader(self) -> Any:
        geometry = self.geometry
        return self._loader("train", self._begin_epoch, lambda: int(self._num_batches(geometry)))

    def _validation_loader(self, stage: str = "val") -> Any:
        plan = self._validation_plan(data_parallel(self.trainer), stage)
        if plan is None:
            return []
        if stage not in self._loaders:
            request = self._validation_request
            self._loaders[stage] = self._loader(stage, lambda: (request(plan, one) for one in plan), lambda: len(plan))
        return self._loaders[stage]

    def state_dict(self) -> dict[str, Any]:
        """The position and what it refers to: less than 1 KB of plain values, equal on all ranks."""
        if self._loaded is not None or self._cursor is None:
            return dict(self._loaded or {})
        records = {
            "global_batch_changes": self._changes,
            "quarantine": self.quarantine.ids,
            "ends_open": self._cursor.ends_open,
        }
        return state_of(self.position(), self._cursor.geometry, self._known_identity, records)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a saved position over; ``require_fit`` compares it, once all of the checkpoint is known."""
        if self.trainer is not None and not is_fitting(self.trainer):
            return  # validate and test read weights only
        self.timer = Timer()
        read_state(state_dict)
        self._loaded = dict(state_dict)
        self.quarantine.add(state_dict.get("quarantine", []))
        self.timer.pause()

    def begin_without_state(self, num_steps: int) -> bool:
        """Goes on at ``start_sample`` behind a checkpoint without a position; False where that is not set."""
        if self._start_sample is None:
            return False
        geometry, sample = self.geometry, self._start_sample
        num_batches = epoch_length(self.trainer, self._num_batches(geometry))
        position = position_at(sample, geometry, num_batches=num_batches, num_steps=num_steps)
        self.load_state_dict(state_of(position, geometry, self._known_identity, {}))
        return True

    def require_fit(self, num_steps: int | None) -> bool:
        """Compares a loaded position with this run; says whether its epoch ends with an open window.

        ``num_steps`` are the Trainer's with manual optimization, which may do none or several in a batch.

        Raises:
            DatasetMismatch: It belongs to other data, another order or another global batch, or lies past the end of
                the run.
        """
        if self._loaded is None:
            return False
        if num_steps is not None:
            self._loaded["steps"] = num_steps
        refuse_past_end(self.trainer, self._translate(self._loaded, self.geometry))
        return bool(self._loaded.get("ends_open"))

    # -- how Trainer and data fit each other ---------------------------------------------------------------------------

    def _hide_validation(self) -> None:
        """Tells Lightning that there is no validation data: it only asks whether the hook is overridden."""
        if type(self).val_dataloader is ExactDataModule.val_dataloader:
            self.val_dataloader = MethodType(pl.LightningDataModule.val_dataloader, self)  # type: ignore[method-assign]

    def _join(self, cursor: Cursor | None) -> Cursor:
        """Fits the Trainer and the data to each other; a Trainer that goes on keeps its cursor."""
        trainer: Any = self.trainer
        if trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no Trainer yet, and which samples a batch holds depends on its ranks. "
                "Pass it to Trainer.fit, or set its attribute `trainer` first."
            )
        if not any(isinstance(one, InStep) and one.data is self for one in trainer.callbacks):
            trainer.callbacks.insert(0, InStep(self))  # first, so that its records are made when others save
        ranks = data_parallel(trainer)
        accumulation = self.accumulation(trainer, ranks)
        geometry = Geometry(micro_batch=self.micro_batch, accumulation=accumulation, ranks=ranks)
        refuse_changing_windows(trainer, geometry.accumulation, self._num_batches(geometry))
        consumed = 0
        if cursor is None or cursor.trainer is not trainer:
            self._changes = []
            self.quarantine = Quarantine.of_launcher()
            self._begin_anew()
            self._known_identity = self._identity()
        elif cursor.geometry == geometry:
            return cursor
        else:
            consumed = cursor.position().consumed_samples
        knows_length = math.isfinite(epoch_length(trainer, self._num_batches(geometry)))
        return Cursor(trainer, geometry, knows_length=knows_length, consumed_samples=consumed)

    def _num_batches(self, geometry: Geometry) -> int | float:
        """Micro-batches of an epoch; infinite where only the data knows."""
        return self._num_global_batches(geometry) * geometry.accumulation

    def _loader(
        self, stage: str, plan: Callable[[], Iterable[Request]], num_batches: Callable[[], int]
    ) -> SampleLoader:
        return SampleLoader(
            self._fetcher(stage),
            plan=plan,
            num_batches=num_batches,
            options=self._worker_options(),
            seed=self._seed,
            on_asked=self._note_samples if stage == "train" else None,
        )

    def _worker_options(self) -> WorkerOptions:
        pin = self._pin_memory
        if pin is None:
            pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return replace(self._options, pin_memory=pin)

    def _begin_epoch(self) -> Iterator[Request]:
        """Called at the first ``next()`` of an epoch: the Trainer's counters stand where it begins or goes on."""
        if self.timer is not None:
            self.timer.go_on()
        cursor = self.cursor
        geometry, trainer, position = cursor.geometry, cursor.trainer, cursor.begin_epoch()
        is_overfitting = trainer.overfit_batches > 0  # every epoch has the batches of the first one
        of_first = replace(position, epoch=0, consumed_samples=position.offset)
        whole, first_position = self._order(of_first if is_overfitting else position)
        # A run that resumes at the end of a limited epoch asks for one batch more, and takes an end for its answer.
        num_batches = int(min(self._num_batches(geometry), trainer.num_training_batches))
        end = first_position + (num_batches - position.batches) * geometry.micro_step
        first = self._known_identity.get("phase", [0])[0]
        self._plan = EpochPlan(
            order=self.quarantine.around(whole, step=geometry.micro_step, first=first, end=end),
            geometry=geometry,
            first_batch=position.batches,
            first_position=first_position,
            num_batches=num_batches,
        )
        requests = self._requests(self._plan, position.epoch)
        return self.quarantine.weighted(requests, whole) if self.quarantine else requests

    def _translate(self, state: Mapping[str, Any], geometry: Geometry) -> Position:
        """A saved position in the micro-batches of this run."""
        state = self._adopt(state)
        text = "\n".join(f"  {line}" for line in self._differences(state))
        if text and self._ignore_fingerprint:
            _log.warning("The data is not that of the checkpoint; going on, because ignore_fingerprint=True:\n%s", text)
        elif text:
            raise DatasetMismatch(
                f"The checkpoint was written with other data or another order:\n{text}\n"
                "Give this run the data and settings of the checkpoint, or pass ignore_fingerprint=True to the data "
                "module to go on at the same position of the new order (samples may then repeat or be missed)."
            )
        if state["order_version"] != ORDER_VERSION:  # the run goes on in the order in which it began
            self._known_identity = {**self._known_identity, "order_version": state["order_version"]}
        position, global_batch = read_state(state), int(state["global_batch"])
        if global_batch != geometry.global_batch and not self._allow_global_batch_change:
            raise DatasetMismatch(
                f"The checkpoint was written with a global batch of {global_batch} samples; this run has {geometry}. "
                "Choose batch size, ranks and accumulation with the same product, or pass "
                "allow_global_batch_change=True."
            )
        self._require_reachable(position, global_batch)
        self._changes = [list(change) for change in state["global_batch_changes"]]
        if global_batch != geometry.global_batch:
            change = [position.consumed_samples, global_batch, geometry.global_batch]
            self._changes = [*self._changes, change][-_MAX_CHANGES:]
        is_same_cut = (global_batch, state["micro_step"]) == (geometry.global_batch, geometry.micro_step)
        # After a ramp of the global batch, which earlier versions had, no window begins there.
        if is_same_cut and (position.is_epoch_done or position.batches % geometry.accumulation == 0):
            return position
        batches = -(-position.offset // geometry.global_batch) * geometry.accumulation
        return replace(position, batches=batches, total_batches=position.consumed_samples // geometry.micro_step)

    def place(self) -> None:
        """Puts the Trainer at a loaded position: called when training is about to start, before the first batch."""
        cursor = self.cursor
        if self._loaded is not None:
            cursor.place(self._translate(self._loaded, cursor.geometry))
            self.receipt = change_of_cut(self._loaded, cursor.geometry)
            if cursor.trainer.is_global_zero:
                for text in self._warnings_of_resume():
                    _log.warning("%s", text)
            self._loaded = None

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders = {}
        if self._note is not None:
            self._note.close()
            self._note = None

    # -- the samples that are handed out -------------------------------------------------------------------------------

    @property
    def is_iterable(self) -> bool:
        """Whether the training data can only be read from front to back."""
        return False

    def sample_ids(self, batch_idx: int) -> list[Any]:
        """Ids of this rank's samples in a micro-batch of the present epoch: dataset indices, or (source, index).

        Raises:
            RuntimeError: No epoch has begun, or the data is iterable and its samples have no ids.
        """
        if self.is_iterable:
            raise RuntimeError("The training data is iterable: its samples have no ids that this package knows.")
        if self._plan is None:
            raise RuntimeError("No epoch has begun, so that no samples are assigned yet.")
        ids: list[Any] = self._plan.ids(batch_idx).tolist()
        return [tuple(one) if isinstance(one, list) else one for one in ids]

    def samples_in_hand(self) -> list[Any]:
        """Ids of the samples that this rank fetches, or trains on; none where it does neither, or they have none."""
        return [] if self._in_hand is None else list(self._in_hand.ids.tolist())

    @property
    def delivered(self) -> Request | None:
        """What the training batch that was delivered last was asked for as."""
        return getattr(self._loaders.get("train"), "delivered", None)

    def _note_samples(self, request: Request) -> None:
        """Tells the launcher what this rank has in hand from now on."""
        self._in_hand = request
        if self._note is None:
            self._note = SampleNote()
        self._note.write(request.ids.tobytes(), request.ids.shape[1] if request.ids.ndim > 1 else 0)

    # -- for a kind of data to define ----------------------------------------------------------------------------------

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What must be equal for the same order; compared when a state is loaded."""

    @abstractmethod
    def _num_global_batches(self, geometry: Geometry) -> int:
        """Optimizer steps of an epoch."""

    @abstractmethod
    def _order(self, position: Position) -> tuple[Order, int]:
        """The order of the epoch at ``position``, and the place of the next sample in that order."""

    def _requests(self, plan: EpochPlan, epoch: int) -> Iterator[Request]:
        for positions, ids in plan:
            yield Request(ids, positions, epoch)

    @abstractmethod
    def _fetcher(self, stage: str) -> Any:
        """Fetches a request of the stage, "train", "val", or "val/..." where there are several."""

    @abstractmethod
    def _validation_plan(self, ranks: DataParallel, stage: str) -> SequentialPlan | None:
        """The validation batches, or None where there is no validation data."""

    @abstractmethod
    def _validation_request(self, plan: SequentialPlan, positions: Any) -> Request:
        """One validation request."""

    def accumulation(self, trainer: Any, ranks: DataParallel) -> int:
        """Micro-batches of an optimizer step; refuses batch sizes that contradict each other, or the ranks."""
        return int(trainer.accumulate_grad_batches)

    def uneven_end(self) -> str:
        """What happens to samples that fill no global batch, for the line at the start; empty where there are none."""
        return ""

    def _begin_anew(self) -> None:
        """Forgets what an earlier Trainer's position depended on."""

    def _adopt(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes over what in a saved state the identity depends on; returns the state as it is compared."""
        return state

    def _require_reachable(self, position: Position, global_batch: int) -> None:
        """Raises when the position lies past the data; data without an end need not override this."""

    def _differences(self, state: Mapping[str, Any]) -> Iterator[str]:
        """What in the data, or in its order, is not as in a saved state."""
        return differences(state, self._known_identity)

    def _warnings_of_resume(self) -> Iterator[str]:
        """What the ranks say before a resumed run trains, beside what is refused."""
        yield from ()

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what is saved beside the state; called on all ranks of a save."""

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes what ``extend_checkpoint`` has added."""


# -- any data set ------------------------------------------------------------------------------------------------------

_STATES = "lightning_distplus_iterable"  # in a checkpoint: the states of all ranks


class ResumableDataModule(ExactDataModule):
    """Exact resume for any data set: map-style at any position at the same cost, iterable by the state of its own.

    Epoch e visits a map-style data set in an order that is computed from (seed, e). The order is cut into global
    batches (batch size x data-parallel ranks x accumulation), these into micro-batches, these into one contiguous slice
    per data-parallel rank. A checkpoint holds the position and a fingerprint.

    An iterable data set divides itself among ranks and workers, as under a stock Trainer. A checkpoint holds the state
    of each rank after the batches of the completed steps. The Trainer's epoch ends with the data; with an integer
    ``limit_train_batches`` it has that many batches, and the data goes on in the next one.

    Override ``train_dataset()`` and ``val_dataset()`` instead of passing data sets where they are made after
    ``prepare_data``. Give a data set a method ``fingerprint() -> str`` to have changes noticed that keep its length.

    Args:
        train_dataset: Anything with ``__len__`` and ``__getitem__``; or an iterable with ``state_dict()`` and
            ``load_state_dict(state)``, among them a ``StatefulDataLoader``, nodes of ``torchdata.nodes``, and the
            ``StreamingDataLoader`` of litdata.
        val_dataset: Likewise; read in order, every sample once. An iterable needs no state. Of a dict each is read by
            itself, one after the other, and ``validation_step`` gets a ``dataloader_idx``.
        batch_size: Samples per data-parallel rank and micro-batch.
        val_batch_size: The same for validation; None means ``batch_size``.
        shuffle: False reads the training data in its own order.
        uneven: What happens to the last global batch of an epoch when it is not full: "drop" leaves it out; "pad"
            fills it with repeats, and then every batch is the pair (batch, weights), weights being float32 of shape
            (batch_size,) with 0 for repeats; "error" refuses at setup. For validation the same words hold for the
            samples that do not divide by the number of ranks.
        collate_fn: As in ``DataLoader``.
        seed_samples: Seed python's, numpy's and torch's generators for each sample from (seed, epoch, position), so
            that augmentation is exact too; costs 7 microseconds per sample, and 100 per batch with ``num_workers=0``.
        sampler: A function (seed, epoch) -> dataset indices of the epoch, of shape (num_samples,), or of shape
            (num_batches, batch_size), whose rows are micro-batches. It must depend on its arguments alone.
            ``samplers.weighted(...)`` and ``samplers.by_length(...)`` make some.
        batched: The iterable yields batches of ``batch_size`` samples, which are passed on as they are.
        allow_stateless: Take iterable training data that has no state; a resumed run then begins it anew.
        common: Seed, workers and what a resume allows: see ``ExactDataModule``.
    """

    def __init__(
        self,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        batch_size: int,
        val_batch_size: int | None = None,
        shuffle: bool = True,
        uneven: Uneven = "drop",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed_samples: bool = True,
        sampler: Callable[[int, int], Any] | None = None,
        batched: bool = False,
        allow_stateless: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(micro_batch=batch_size, **common)
        require_choice("uneven", uneven, Uneven)
        if sampler is not None and not shuffle:
            raise ValueError("shuffle is False and sampler decides about the order. Leave one of them out.")
        self._given = {"train": train_dataset, "val": val_dataset}
        self._val_batch_size = val_batch_size or batch_size
        self._shuffle = shuffle
        self._uneven = uneven
        self._collate_fn = collate_fn
        self.sample_seed = self._seed if seed_samples else None
        """Of the random numbers of each sample; None leaves the generators alone."""
        self._sampler = sampler
        self._sampling: OwnSampler | None = None
        self._batched = batched
        self._allow_stateless = allow_stateless
        self._datasets: dict[str, Any] = {}
        self._iterable: IterableTraining | None = None
        if val_dataset is None and not self._overrides("val_dataset"):
            self._hide_validation()

    @property
    def is_iterable(self) -> bool:
        """Whether the training data can only be read from front to back."""
        return is_iterable(self._dataset("train"))

    def train_dataset(self) -> Any:
        """The training data; override this or pass it to the constructor."""
        return self._given["train"]

    def val_dataset(self) -> Any:
        """The validation data, or None; override this or pass it to the constructor."""
        return self._given["val"]

    def setup(self, stage: str) -> None:
        """Asks for the data sets anew and checks them against the batch sizes."""
        self._datasets = {}
        if stage == "fit":
            every = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[union-attr]
            if every and self._overrides("train_dataset"):
                raise ValueError(
                    f"reload_dataloaders_every_n_epochs={every} asks for other training data in later epochs, and "
                    f"{type(self).__name__}.train_dataset() is asked once in a run: a position in data that changes "
                    "cannot be resumed. Leave reload_dataloaders_every_n_epochs out, or train on other data in another "
                    "run."
                )
        super().setup(stage)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(ResumableDataModule, name)

    def _dataset(self, stage: str) -> Any:
        if stage not in self._datasets:
            dataset = self.train_dataset() if stage == "train" else self.val_dataset()
            require_data(dataset, stage)
            if stage == "train":
                self._iterable = self._read_iterable(dataset) if is_iterable(dataset) else None
                self._sampling = self._sample(dataset, self._sampler) if self._sampler is not None else None
            self._datasets[stage] = dataset
        return self._datasets[stage]

    def _sample(self, dataset: Any, sampler: Callable[[int, int], Any]) -> OwnSampler:
        if self._iterable is not None:
            raise ValueError("sampler needs a data set with an index, and the training data is iterable.")
        return OwnSampler(sampler, size=len(dataset), seed=self._seed, batch_size=self.micro_batch)

    def _fetcher(self, stage: str) -> SampleFetcher:
        return SampleFetcher(self._dataset(stage), collate=self._collate_fn, seed=self.sample_seed)

    # -- the order of map-style data -----------------------------------------------------------------------------------

    @property
    def _num_samples(self) -> int:
        """Samples of an epoch before it is cut into global batches."""
        dataset = self._dataset("train")
        return len(dataset) if self._sampling is None else self._sampling.num_samples

    def _identity(self) -> dict[str, Any]:
        dataset = self._dataset("train")
        fingerprint = getattr(dataset, "fingerprint", None)
        is_indexed, sampling = self._iterable is None, self._sampling
        return {
            "fingerprint": str(fingerprint())[:64] if callable(fingerprint) else None,
            "seed": self._seed,
            "num_samples": len(dataset) if is_indexed else None,
            "shuffle": self._shuffle if is_indexed else None,
            "sampling": None if sampling is None else sampling.fingerprint(),
        }

    def _order(self, position: Position) -> tuple[Order, int]:
        if self._sampling is not None:
            return self._sampling.order(seed=self._seed, epoch=position.epoch), position.offset
        order = EpochOrder(
            num_samples=self._num_samples,
            seed=self._seed,
            epoch=position.epoch,
            shuffle=self._shuffle,
            version=self._known_identity.get("order_version", ORDER_VERSION),
        )
        return order, position.offset

    def _requests(self, plan: EpochPlan, epoch: int) -> Iterator[Request]:
        size = self._num_samples
        for positions, ids in plan:
            yield Request(ids, positions, epoch, self._weights(positions, size))

    def _weights(self, positions: NDArray[np.int64], num_samples: int) -> NDArray[np.float32] | None:
        """With "pad": 0 for a repeat, which lies past the end of the epoch, and else 1."""
        return (positions < num_samples).astype(np.float32) if self._uneven == "pad" else None

    def _num_global_batches(self, geometry: Geometry) -> int:
        return num_global_batches(self._num_samples, geometry, self._uneven)

    def _num_batches(self, geometry: Geometry) -> int | float:
        self._dataset("train")
        return math.inf if self._iterable is not None else super()._num_batches(geometry)

    def uneven_end(self) -> str:
        """How many samples of each epoch are left out, or how many repeats fill its last global batch."""
        if self._iterable is not None or self.cursor.trainer.overfit_batches > 0:
            return ""
        size, global_batch = self._num_samples, self.geometry.global_batch
        rest = size % global_batch
        if rest and self._uneven == "pad":
            return f"; {global_batch - rest} repeats of weight 0 fill each epoch of {size} samples"
        return f"; {rest} of {size} samples are left out of each epoch" if rest else ""

    def _require_reachable(self, position: Position, global_batch: int) -> None:
        if self._iterable is None and position.offset >= self._num_samples + global_batch:
            raise DatasetMismatch(
                f"The checkpoint stands at sample {position.offset} of epoch {position.epoch}, and an epoch of this "
                f"run has {self._num_samples} samples. Resume with the data of the checkpoint, or start a new run from "
                "its weights."
            )

    def _warnings_of_resume(self) -> Iterator[str]:
        if not self.receipt or self._iterable is not None:
            return
        fetcher = self._fetcher("train")
        if fetcher.is_seeded_per_batch:
            yield (
                f"{type(fetcher.dataset).__name__} fetches whole batches (__getitems__), so that random numbers drawn "
                f"in it depend on how batches are cut, which has changed{self.receipt}. The samples and their order "
                "are those of the checkpoint; a random augmentation inside the data set is not. Keep ranks and batch "
                "size to have the same one."
            )

    # -- validation ----------------------------------------------------------------------------------------------------

    def _validation_loader(self, stage: str = "val") -> Any:
        trainer: Any = self.trainer
        is_anew = trainer is not None and trainer.reload_dataloaders_every_n_epochs > 0
        if is_anew and stage == "val" and self._overrides("val_dataset"):  # asks for the validation data again
            for name in [one for one in {*self._datasets, *self._loaders} if one.partition("/")[0] == "val"]:
                self._datasets.pop(name, None)
                if (loader := self._loaders.pop(name, None)) is not None:
                    loader.close()
        dataset = self._dataset(stage)
        if type(dataset) is dict:
            self._datasets.update({f"{stage}/{name}": one for name, one in dataset.items()})
            return {name: self._validation_loader(f"{stage}/{name}") for name in dataset}
        if not is_iterable(dataset):
            return super()._validation_loader(stage)
        if isinstance(dataset, DataLoader | CombinedLoader):
            return dataset
        batch_size = None if self._batched else self._val_batch_size

        def make_reader() -> StreamReader:
            return self._reader(Stateful(dataset, allow_stateless=True), batch_size, rest="keep", seed=self._seed)

        return StreamPasses(make_reader, workers=self._worker_options())

    def _validation_plan(self, ranks: DataParallel, stage: str) -> SequentialPlan | None:
        dataset = self._dataset(stage)
        if dataset is None:
            return None
        size, batch = len(dataset), self._val_batch_size
        return SequentialPlan(num_samples=size, micro_batch=batch, ranks=ranks, uneven=self._uneven)

    def _validation_request(self, plan: SequentialPlan, positions: Any) -> Request:
        size = plan.num_samples
        return Request(positions % size, positions, 0, self._weights(positions, size))

    # -- iterable data -------------------------------------------------------------------------------------------------

    def _read_iterable(self, dataset: Any) -> IterableTraining:
        trainer: Any = self.trainer
        before, cursor = self._iterable, self._cursor
        if before is not None and before.data is dataset and cursor is not None and cursor.trainer is trainer:
            return before  # a Trainer that fits again goes on
        if trainer is not None and trainer.overfit_batches > 0:
            raise ValueError(
                "overfit_batches takes the same batches in every epoch, and iterable training data goes on. Overfit on "
                "a list of its first samples."
            )
        if self._uneven == "error":
            raise ValueError(
                'uneven is "error" and the training data is iterable: where it ends is known only when it does. Use '
                '"drop" or "pad".'
            )
        if self._uneven == "pad" and self._batched:
            raise ValueError('uneven is "pad" and the data yields batches, passed on as they are. Use "drop".')
        ranks, workers, seed = data_parallel(trainer), self._worker_options(), self.sample_seed
        source, is_batched = stateful(
            dataset,
            batch_size=self.micro_batch,
            num_workers=workers.num_workers,
            batched=self._batched,
            ranks=ranks,
            allow_stateless=self._allow_stateless,
        )
        reader = self._reader(
            source,
            None if is_batched else self.micro_batch,
            rest="drop",
            seed=None if seed is None else derive_key(seed, STREAM, ranks.rank),
        )
        return IterableTraining(dataset, self, reader, workers, before)

    def _reader(self, source: Stateful, batch_size: int | None, *, rest: Any, seed: int | None) -> StreamReader:
        return StreamReader(
            source=source,
            batch_size=batch_size,
            collate=None if batch_size is None else self._collate_fn,
            rest="pad" if self._uneven == "pad" else rest,
            seed=seed,
            begin=StreamState.at_beginning(self._options.num_workers),
        )

    def _training_loader(self) -> Any:
        _ = self.cursor  # joins the Trainer, and so asks for the data
        if self._iterable is None:
            return super()._training_loader()
        return self._iterable.open(self.position().total_batches)

    @property
    def is_endless(self) -> bool:
        """Whether the Trainer says how many batches an epoch has: iterable data begins anew where it ends before."""
        return isinstance(self.trainer.limit_train_batches, int)  # type: ignore[union-attr]

    @property
    def num_trained(self) -> int:
        """Micro-batches that the Trainer has processed."""
        return int(self.cursor.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def begin_stream(self) -> int | None:
        """The number of the next batch to train on; None: nothing is left of the epoch.

        Called when an iteration begins, also where Lightning looks ahead before the states are restored.
        """
        cursor = self.cursor
        if self._loaded is not None:
            position = self.position()
            return None if position.is_epoch_done else position.total_batches
        if cursor.is_placed_at_end():
            return None
        epochs = cursor.trainer.fit_loop.epoch_progress.current
        if epochs.ready > epochs.processed:  # else the epoch that the batches are for has not begun yet
            cursor.begin_epoch()
        return self.num_trained

    def _close(self) -> None:
        if self._iterable is not None and self._loaders.pop("train", None) is not None:
            self._iterable.close(self.position().total_batches)
        super()._close()

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Gathers the states of iterable data from all ranks."""
        if self._iterable is not None:
            mine = self._iterable.packed(self.position().total_batches)
            states = gather_bytes(self.cursor.trainer.strategy, "state of the training data", mine)
            checkpoint[_STATES] = self._iterable.to_checkpoint(states)

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes this rank's state of iterable data, if the checkpoint has one of as many ranks and workers."""
        if self._iterable is not None:
            trainer = self.cursor.trainer
            self._iterable.from_checkpoint(checkpoint.get(_STATES), trainer.global_rank, trainer.world_size)
