"""What the resumable data modules share: hooks, state, and the callback that keeps the Trainer in step."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import lightning.pytorch as pl

from lightning_distplus.data.batch_schedule import BatchSchedule, tell_engine
from lightning_distplus.data.in_step import InStep, Timer, is_fitting
from lightning_distplus.data.kind import KindOfData
from lightning_distplus.data.loader import SampleLoader, WorkerOptions
from lightning_distplus.data.lr_scaling import LrScaling
from lightning_distplus.data.plan import EpochPlan, Geometry
from lightning_distplus.data.position import (
    Position,
    change_of_cut,
    position_at,
    read_state,
    require_same_batch,
    require_same_data,
    state_of,
)
from lightning_distplus.data.progress import Cursor
from lightning_distplus.data.request import Request
from lightning_distplus.data.trainer_view import (
    data_parallel,
    epoch_length,
    is_overfitting,
    of_first_epoch,
    refuse_changing_windows,
    refuse_past_end,
)

__all__ = ["ExactDataModule"]

_log = logging.getLogger(__name__)
_MAX_CHANGES = 8  # recorded changes of the global batch; the state stays below 1 KB


class ExactDataModule(KindOfData, pl.LightningDataModule):
    """The position in the data, its state, and its place in the Trainer's loops.

    The position counts completed optimizer steps. It is computed from the Trainer's progress whenever it is asked
    for, so that a checkpoint may be written at any moment; micro-batches of an unfinished accumulation window are
    replayed. The state is the same on all ranks and is made without communication.
    """

    def __init__(
        self,
        *,
        micro_batch: int,
        seed: int,
        options: WorkerOptions,
        pin_memory: bool | None,
        allow_global_batch_change: bool,
        ignore_fingerprint: bool,
        lr_scaling: LrScaling | None = None,
        start_sample: int | None = None,
    ) -> None:
        super().__init__()
        if micro_batch < 1:
            raise ValueError(f"The batch size is {micro_batch}; it is at least 1.")
        self._micro_batch = micro_batch
        self._seed = seed
        self._options = options
        self._pin_memory = pin_memory
        self._allow_global_batch_change = allow_global_batch_change
        self._ignore_fingerprint = ignore_fingerprint
        self._lr_scaling = lr_scaling
        self._start_sample = start_sample
        self._scaled_by = 1.0
        self._cursor: Cursor | None = None
        self._known_identity: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # a state at which the Trainer has not been placed yet
        self._plan: EpochPlan | None = None
        self._changes: list[list[int]] = []
        self._ignored: list[list[Any]] = []
        self._schedule: BatchSchedule | None = None
        self.receipt = ""
        self._loaders: dict[str, Any] = {}
        self.timer: Timer | None = None

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self._micro_batch

    @property
    def consumed_samples(self) -> int:
        """Samples of all completed optimizer steps, over all ranks and epochs."""
        return self.position().consumed_samples

    def position(self) -> Position:
        """Where a run that is resumed now would go on."""
        if self._loaded is not None:
            return read_state(self._loaded)
        return self._cursor.position() if self._cursor is not None else Position()

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

    @property
    def identity(self) -> dict[str, Any]:
        """What defines the data and its order, as a checkpoint holds it; known once a Trainer fits."""
        return dict(self._known_identity)

    @property
    def is_iterable(self) -> bool:
        """Whether the training data can only be read from front to back."""
        return False

    @property
    def cursor(self) -> Cursor:
        """Where the present Trainer stands."""
        return self._joined()

    @property
    def lr_factor(self) -> float:
        """What ``scale_lr`` multiplies the learning rates by; 1 without it. Under a schedule: of its last stage."""
        return 1.0 if self._lr_scaling is None else self._lr_scaling.factor(self.geometry.global_batch)

    @property
    def geometry(self) -> Geometry:
        """The batch sizes of this fit."""
        return self._joined().geometry

    @property
    def delivered(self) -> Request | None:
        """What the training batch that was delivered last was asked for as."""
        loader = self._loaders.get("train")
        return getattr(loader, "delivered", None)

    # Lightning's hooks.

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
        self._joined()
        if "train" not in self._loaders:
            self._loaders["train"] = self._training_loader()
        return self._loaders["train"]

    def val_dataloader(self) -> Any:
        """This rank's validation batches, in order, as many as on any other rank."""
        return self._validation_loader()

    def _training_loader(self) -> Any:
        geometry = self._joined().geometry
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
            "ignored": self._ignored,
            "lr_factor": None if self._scaled_by == 1.0 else self._scaled_by,
        }
        return state_of(self.position(), self._cursor.geometry, self._known_identity, records)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a saved position over.

        Raises:
            DatasetMismatch: It belongs to other data, another order or another global batch, or lies past the end of
                the run.
        """
        if self.trainer is not None and not is_fitting(self.trainer):
            return  # validate and test read weights only
        self.timer = Timer()
        read_state(state_dict)
        self._loaded = dict(state_dict)
        if self.trainer is not None:
            refuse_past_end(self.trainer, self._translate(self._loaded, self._joined().geometry))
        self.timer.pause()

    def begin_without_state(self, num_steps: int) -> bool:
        """Goes on at ``start_sample`` after the steps of a checkpoint without a position; False where that is not set.

        Raises:
            ValueError: No optimizer step begins there.
        """
        if self._start_sample is None:
            return False
        geometry, sample = self._joined().geometry, self._start_sample
        num_batches = epoch_length(self.trainer, self._num_batches(geometry))
        position = position_at(sample, geometry, num_batches=num_batches, num_steps=num_steps)
        self.load_state_dict(state_of(position, geometry, self._known_identity, {}))
        return True

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what each rank has for itself; called on all ranks of a save."""

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes what ``extend_checkpoint`` has added."""

    # Inside.

    def _hide_validation(self) -> None:
        """Tells Lightning that there is no validation data: it only asks whether the hook is overridden."""
        if type(self).val_dataloader is ExactDataModule.val_dataloader:
            self.val_dataloader = MethodType(pl.LightningDataModule.val_dataloader, self)  # type: ignore[method-assign]

    def _joined(self) -> Cursor:
        """The cursor on the present Trainer; also where a subclass overrides ``setup`` without calling this one's."""
        if self._cursor is None or self._cursor.trainer is not self.trainer:
            self._cursor = self._join(None)
        return self._cursor

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
        accumulation, schedule = self.accumulation(trainer, ranks), self._schedule
        geometry = Geometry(micro_batch=self._micro_batch, accumulation=accumulation, ranks=ranks, schedule=schedule)
        refuse_changing_windows(trainer, geometry.accumulation, self._num_batches(geometry))
        if cursor is None or cursor.trainer is not trainer:
            self._changes, self._ignored = [], []
            self._begin_anew()
            self._known_identity = self._identity()
            return Cursor(trainer, geometry, is_end=self._end_of_data())
        if cursor.geometry == geometry:
            return cursor
        consumed = cursor.position().consumed_samples
        return Cursor(trainer, geometry, is_end=self._end_of_data(), consumed_samples=consumed)

    def _num_batches(self, geometry: Geometry) -> int | float:
        """Micro-batches of an epoch; infinite where only the data knows."""
        return self._num_global_batches(geometry) * geometry.accumulation

    @property
    def is_scheduled(self) -> bool:
        """Whether the global batch changes during the run."""
        return self._schedule is not None

    def begin_batch(self, batch_idx: int) -> None:
        """Follows the schedule, called before each training step."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:  # type: ignore[union-attr]
            self.cursor.begin_window()
        tell_engine(self.trainer, batch_idx)

    def _loader(
        self, stage: str, plan: Callable[[], Iterable[Request]], num_batches: Callable[[], int]
    ) -> SampleLoader:
        options = self._worker_options()
        return SampleLoader(self._fetcher(stage), plan=plan, num_batches=num_batches, options=options, seed=self._seed)

    def _worker_options(self) -> WorkerOptions:
        pin = self._pin_memory
        if pin is None:
            pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return replace(self._options, pin_memory=pin)

    def _begin_epoch(self) -> Iterator[Request]:
        """Called at the first ``next()`` of an epoch: the Trainer's counters stand where it begins or goes on."""
        if self.timer is not None:
            self.timer.go_on()
        cursor = self._joined()
        position = cursor.begin_epoch()
        order, first = self._order(of_first_epoch(position) if is_overfitting(self.trainer) else position)
        # A run that resumes at the end of a limited epoch asks for one batch more, and takes an end for its answer.
        num_batches = min(self._num_batches(cursor.geometry), cursor.trainer.num_training_batches)
        self._plan = EpochPlan(
            order=order,
            geometry=cursor.geometry,
            first_batch=position.batches,
            first_position=first,
            num_batches=int(num_batches),
        )
        return self._requests(self._plan, position.epoch)

    def _translate(self, state: Mapping[str, Any], geometry: Geometry) -> Position:
        """A saved position in the micro-batches of this run."""
        state = self._adopt(state)
        names, ignore = self.source_names(), self._ignore_fingerprint
        self._ignored = require_same_data(state, self._known_identity, names, ignore_fingerprint=ignore)
        require_same_batch(state, geometry, allow_change=self._allow_global_batch_change)
        position, global_batch = read_state(state), int(state["global_batch"])
        self._require_reachable(position, global_batch)
        self._changes = [list(change) for change in state["global_batch_changes"]]
        here = geometry.at(position.consumed_samples)
        if global_batch != here.global_batch:
            change = [position.consumed_samples, global_batch, here.global_batch]
            self._changes = [*self._changes, change][-_MAX_CHANGES:]
        if (global_batch, state["micro_step"]) == (here.global_batch, here.micro_step):
            return position
        batches = -(-position.offset // here.global_batch) * here.accumulation
        if geometry.schedule is not None:  # its windows are counted from where a stage begins, not from the epoch's
            batches = -(-position.offset // here.micro_step)
        return replace(position, batches=batches, total_batches=position.consumed_samples // here.micro_step)

    def place(self) -> None:
        """Puts the Trainer at a loaded position: called when training is about to start, before the first batch."""
        cursor = self._joined()
        self._scaled_by = float((self._loaded or {}).get("lr_factor", 1.0))  # in the checkpoint's learning rates
        if self._lr_scaling is not None:
            self._scaled_by = self._lr_scaling.apply(self.trainer, self.geometry.global_batch, before=self._scaled_by)
        if self._loaded is not None:
            cursor.place(self._translate(self._loaded, cursor.geometry))
            self.receipt = change_of_cut(self._loaded, cursor.geometry)
            self._loaded = None
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # it is, by this module
        if self.is_scheduled:
            cursor.geometry.require_whole_steps(cursor.position().consumed_samples)
            cursor.begin_window()

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders = {}
