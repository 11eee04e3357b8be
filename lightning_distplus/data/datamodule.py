"""Base of the resumable data modules: hooks, state, samples handed out, and what a kind of data defines."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import lightning.pytorch as pl

from lightning_distplus.data.batches import EpochPlan, Geometry, Order, Quarantine, Request, SequentialPlan
from lightning_distplus.data.loader import SampleLoader, WorkerOptions
from lightning_distplus.data.order import ORDER_VERSION
from lightning_distplus.data.progress import (
    Cursor,
    InStep,
    Timer,
    data_parallel,
    epoch_length,
    is_fitting,
    is_overfitting,
    of_first_epoch,
    refuse_changing_windows,
    refuse_past_end,
)
from lightning_distplus.data.state import (
    Position,
    change_of_cut,
    position_at,
    read_state,
    require_same_batch,
    require_same_data,
    state_of,
)
from lightning_distplus.events import SampleNote
from lightning_distplus.world import DataParallel

__all__ = ["ExactDataModule"]

_MAX_CHANGES = 8  # recorded changes of the global batch; the state stays below 1 KB


class ExactDataModule(pl.LightningDataModule):
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
        self._start_sample = start_sample
        self._cursor: Cursor | None = None
        self._known_identity: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # a state at which the Trainer has not been placed yet
        self._changes: list[list[int]] = []
        self._ignored: list[list[Any]] = []
        self.receipt = ""
        self._loaders: dict[str, Any] = {}
        self.quarantine = Quarantine()
        self._plan: EpochPlan | None = None
        self._in_hand: Request | None = None
        self._note: SampleNote | None = None
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

    @property
    def identity(self) -> dict[str, Any]:
        """What defines the data and its order, as a checkpoint holds it; known once a Trainer fits."""
        return {"order_version": ORDER_VERSION, **self._known_identity}

    @property
    def cursor(self) -> Cursor:
        """Where the present Trainer stands."""
        return self._joined()

    @property
    def geometry(self) -> Geometry:
        """The batch sizes of this fit."""
        return self._joined().geometry

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
            "quarantine": self.quarantine.ids,
            "ends_open": self._cursor.ends_open,
        }
        return state_of(self.position(), self._cursor.geometry, self._known_identity, records)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a saved position over; ``require_fit`` compares it, once all of the checkpoint is known.

        Raises:
            DatasetMismatch: It is of a version that this package does not know.
        """
        if self.trainer is not None and not is_fitting(self.trainer):
            return  # validate and test read weights only
        self.timer = Timer()
        read_state(state_dict)
        self._loaded = dict(state_dict)
        self._set_apart(state_dict)
        self.timer.pause()

    def require_fit(self) -> None:
        """Compares a loaded position with this run.

        Raises:
            DatasetMismatch: It belongs to other data, another order or another global batch, or lies past the end of
                the run.
        """
        if self._loaded is not None:
            refuse_past_end(self.trainer, self._translate(self._loaded, self._joined().geometry))

    def count_steps(self, num_steps: int) -> None:
        """Takes the Trainer's steps over, of which manual optimization may do none or several in a batch."""
        if self._loaded is not None:
            self._loaded["steps"] = num_steps

    @property
    def is_past_end(self) -> bool:
        """Whether the loaded run is done, although a window of manual optimization was open at its end."""
        if self._loaded is None or not self._loaded.get("ends_open"):
            return False
        max_epochs: int | None = self.trainer.max_epochs  # type: ignore[union-attr]
        return max_epochs is not None and 0 <= max_epochs <= self._loaded["epoch"] + 1

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

    # -- how Trainer and data fit each other ---------------------------------------------------------------------------

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
        accumulation = self.accumulation(trainer, ranks)
        geometry = Geometry(micro_batch=self._micro_batch, accumulation=accumulation, ranks=ranks)
        refuse_changing_windows(trainer, geometry.accumulation, self._num_batches(geometry))
        if cursor is None or cursor.trainer is not trainer:
            self._changes, self._ignored = [], []
            self.quarantine = Quarantine.of_launcher()
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

    def _loader(
        self, stage: str, plan: Callable[[], Iterable[Request]], num_batches: Callable[[], int]
    ) -> SampleLoader:
        arguments: dict[str, Any] = {"on_asked": self._note_samples} if stage == "train" else {}
        return SampleLoader(
            self._fetcher(stage),
            plan=plan,
            num_batches=num_batches,
            options=self._worker_options(),
            seed=self._seed,
            **arguments,
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
        cursor = self._joined()
        position = cursor.begin_epoch()
        order = self._order(of_first_epoch(position) if is_overfitting(self.trainer) else position)
        # A run that resumes at the end of a limited epoch asks for one batch more, and takes an end for its answer.
        num_batches = min(self._num_batches(cursor.geometry), cursor.trainer.num_training_batches)
        return iter(self._hand_out(position, cursor.geometry, order, int(num_batches)))

    def _translate(self, state: Mapping[str, Any], geometry: Geometry) -> Position:
        """A saved position in the micro-batches of this run."""
        state = self._adopt(state)
        self._ignored = require_same_data(
            state,
            self._known_identity,
            self.source_names(),
            explain=self._explain,
            ignore_fingerprint=self._ignore_fingerprint,
        )
        if state["order_version"] != ORDER_VERSION:  # the run goes on in the order in which it began
            self._known_identity = {**self._known_identity, "order_version": state["order_version"]}
        require_same_batch(state, geometry, allow_change=self._allow_global_batch_change)
        position, global_batch = read_state(state), int(state["global_batch"])
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
        cursor = self._joined()
        if self._loaded is not None:
            cursor.place(self._translate(self._loaded, cursor.geometry))
            self.receipt = change_of_cut(self._loaded, cursor.geometry)
            if self.receipt:
                self._warn_of_cut(self.receipt)
            self._warn_of_rewritten()
            self._loaded = None
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # it is, by this module

    def _warn_of_cut(self, receipt: str) -> None:
        """Says before training what depends on the cut of batches, which is not that of the checkpoint."""

    def _warn_of_rewritten(self) -> None:
        """Says before training which data was written to since the checkpoint, where not all of it is compared."""

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders = {}
        self._forget_note()

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
        loader = self._loaders.get("train")
        return getattr(loader, "delivered", None)

    def _note_samples(self, request: Request) -> None:
        """Tells the launcher what this rank has in hand from now on."""
        self._in_hand = request
        if self._note is None:
            self._note = SampleNote()
        self._note.write(request.ids.tobytes(), request.ids.shape[1] if request.ids.ndim > 1 else 0)

    def _forget_note(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None

    def _hand_out(self, position: Position, geometry: Geometry, order: tuple[Order, int], num_batches: int) -> Any:
        """The requests from a position to the end of its epoch, with stand-ins for what is in quarantine."""
        whole, first_position = order
        first, rest = self._known_identity.get("phase", [0])[0], num_batches - position.batches
        end = first_position + rest * geometry.micro_step
        self._plan = EpochPlan(
            order=self.quarantine.around(whole, step=geometry.micro_step, first=first, end=end),
            geometry=geometry,
            first_batch=position.batches,
            first_position=first_position,
            num_batches=num_batches,
        )
        requests = self._requests(self._plan, position.epoch)
        return self.quarantine.weighted(requests, whole) if self.quarantine else requests

    def _set_apart(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint has in quarantine."""
        self.quarantine.add(state.get("quarantine", []))

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

    @abstractmethod
    def _requests(self, plan: EpochPlan, epoch: int) -> Iterator[Request]:
        """The requests of a plan."""

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
        """Micro-batches of an optimizer step.

        Raises:
            ValueError: The batch sizes that were asked for contradict each other, or do not fit the number of ranks.
        """
        return int(trainer.accumulate_grad_batches)

    def _end_of_data(self) -> Callable[[int], bool] | None:
        """For ``Cursor``: whether iterable data ended before a micro-batch."""
        return None

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

    def source_names(self) -> list[str]:
        """What messages call the sources, where there are some."""
        return []

    def _explain(self, place: int) -> str:
        """What differs first between source ``place`` and that of the checkpoint; empty where that is not known."""
        return ""

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what is saved beside the state; called on all ranks of a save."""

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes what ``extend_checkpoint`` has added."""
