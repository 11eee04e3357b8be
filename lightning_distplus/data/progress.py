"""Where a run stands in its data: its position, how that is saved, and the Trainer's loops that are read and set.

Lightning saves its counters as they are at the moment of the save: inside an accumulation window, before or after the
validation or the end of the epoch; and takes a different way back from each, of which some skip the validation, the end
of the epoch, or a whole epoch. Here the counters are set to one of two states instead: before the first batch of an
epoch, or after a completed window with what is still due after it. Lightning's loops are taken by their public
attributes, as 2.6 defines them.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, RichProgressBar, TQDMProgressBar
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_distplus.control.secret import words_of
from lightning_distplus.data.batches import Geometry
from lightning_distplus.data.order import ORDER_VERSION, READABLE_ORDER_VERSIONS
from lightning_distplus.errors import DatasetMismatch, PeerError
from lightning_distplus.run_access import gather_bytes
from lightning_distplus.timeouts import Phase
from lightning_distplus.world import DataParallel, name_ranks, ranks_by_text

if TYPE_CHECKING:
    from lightning_distplus.data.datamodule import ExactDataModule

__all__ = [
    "Cursor",
    "InStep",
    "Position",
    "Timer",
    "change_of_cut",
    "data_parallel",
    "differences",
    "epoch_length",
    "is_at_end",
    "is_fitting",
    "position_at",
    "read_state",
    "refuse_changing_windows",
    "refuse_past_end",
    "reopen_epoch",
    "require_version",
    "state_of",
]


_VERSION = 2
_READABLE = (1, _VERSION)  # version 1 knew neither schedules of batches nor changed mixtures

_log = logging.getLogger(__name__)
_GONE = {"schedule": "a schedule of global batches", "parts": "several data sets side by side (their sizes)"}
"""What earlier versions saved, and this one cannot go on with."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place between two optimizer steps."""

    epoch: int = 0  # the Trainer's epoch
    batches: int = 0  # micro-batches of this epoch that are done
    offset: int = 0  # samples of this epoch that are done, over all ranks
    consumed_samples: int = 0  # samples of all epochs that are done, over all ranks
    total_batches: int = 0  # micro-batches of all epochs that are done
    steps: int = 0  # optimizer steps done
    is_validated: bool = False  # whether the validation that is due here, if any, has run
    validation_batches: int = 0  # validation batches that have run in this epoch
    is_epoch_done: bool = False  # whether iterable data ended here; with map-style data this follows from `batches`


def state_of(
    position: Position, geometry: Geometry, identity: Mapping[str, Any], records: Mapping[str, Any]
) -> dict[str, Any]:
    """What is saved: less than 1 KB of plain values, equal on all ranks; of ``records`` what is not empty."""
    return {
        "version": _VERSION,
        "order_version": ORDER_VERSION,
        **identity,
        "global_batch": geometry.global_batch,
        "micro_step": geometry.micro_step,
        "ranks": geometry.ranks.size,
        "global_batch_changes": [],
        **{name: record for name, record in records.items() if record},
        **asdict(position),
    }


def position_at(sample: int, geometry: Geometry, *, num_batches: int | float, num_steps: int) -> Position:
    """The position at a sample with which an optimizer step begins, for a checkpoint that holds none."""
    num_windows, rest = divmod(sample, geometry.global_batch)
    if rest or sample < 0:
        raise ValueError(
            f"start_sample={sample} is not where an optimizer step begins: the global batch is {geometry}. The step "
            f"before begins at sample {max(0, sample - rest)}."
        )
    if sample and num_batches == float("inf"):
        raise ValueError(f"start_sample={sample}: iterable training data begins at its beginning only, start_sample=0.")
    done = num_windows * geometry.accumulation
    epoch, batches = divmod(done, int(num_batches)) if sample else (0, 0)
    return Position(
        epoch=epoch,
        batches=batches,
        offset=batches * geometry.micro_step,
        consumed_samples=sample,
        total_batches=done,
        steps=num_steps,
    )


def require_version(what: str, state: Mapping[str, Any], *readable: int, name: str = "version") -> None:
    """Refuses a state of a version that this package does not know."""
    if state.get(name) not in readable:
        raise DatasetMismatch(
            f"The checkpoint's {what} has {name} {state.get(name)!r}; this lightning_distplus reads "
            f"{' and '.join(map(str, readable))}. Resume with the version of lightning_distplus that wrote it."
        )


def read_state(state: Mapping[str, Any]) -> Position:
    """The position in a saved state; refuses a version, or a feature, that this package does not know."""
    require_version("data state", state, *_READABLE)
    require_version("data state", state, *READABLE_ORDER_VERSIONS, name="order_version")
    for name, what in _GONE.items():
        if record := state.get(name):
            text = record["text"] if isinstance(record, Mapping) else record
            raise DatasetMismatch(
                f"The checkpoint was written under {what}: {text}. This lightning_distplus does not read "
                "data that way any more. Load its weights into a new run, or resume with the version that wrote it."
            )
    names = Position.__dataclass_fields__.keys() - {"is_epoch_done"}  # which older states lack
    return Position(**{name: state[name] for name in names}, is_epoch_done=state.get("is_epoch_done", False))


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """One line for each value that differs, with both sides."""
    for name, now in sorted(ours.items()):
        if (before := saved.get(name)) != now:
            yield f"{name}: {before!r} in the checkpoint, {now!r} in this run"


def change_of_cut(state: Mapping[str, Any], geometry: Geometry) -> str:
    """How the global batches are cut now and were cut before; empty where nothing has changed."""
    saved = (state["global_batch"], state["micro_step"], state.get("ranks", geometry.ranks.size))
    if saved == (geometry.global_batch, geometry.micro_step, geometry.ranks.size):
        return ""
    global_batch, micro_step, ranks = saved
    before = Geometry(
        micro_batch=micro_step // ranks, accumulation=global_batch // micro_step, ranks=DataParallel(size=ranks)
    )
    return f"; global batch {geometry}, before {before}"


# -- the Trainer's loops -----------------------------------------------------------------------------------------------

_MAX_FIELDS = 5  # of a message about ranks that differ
_MAX_WIDTH = 200


@dataclass
class _Validation:
    """A validation run in this epoch: after how many micro-batches in total, and with how many batches before it."""

    after: int
    batches_before: int
    is_extra: bool = False
    """Only because the run stops: the run that nobody stops does not validate here."""
    is_finished: bool = False


class Cursor:
    """The position of a Trainer in the data. Earlier fits of the same Trainer have done ``consumed_samples``."""

    def __init__(
        self, trainer: Any, geometry: Geometry, *, knows_length: bool = True, consumed_samples: int = 0
    ) -> None:
        self.trainer = trainer
        self.geometry = geometry
        self._knows_length = knows_length  # of an epoch, in micro-batches; else only the data do
        self._end = -1  # micro-batches of the whole run after which the data have ended
        self._is_placed = False
        self._validations: list[_Validation] = []
        # The position at which iteration began: all later ones follow from it by counting micro-batches.
        self._anchor = Position(
            epoch=trainer.current_epoch,
            consumed_samples=consumed_samples,
            total_batches=trainer.fit_loop.epoch_loop.batch_progress.total.processed,
            steps=trainer.global_step,
        )
        # Of manual optimization, where the module decides when a window of accumulation ends: at an optimizer's step.
        self._steps = trainer.global_step
        self._whole = self._anchor.total_batches
        self._window_before_epoch: Position | None = None
        self._stepped_in = 0

    def position(self) -> Position:
        """Where a run that is resumed now would go on."""
        if not self._is_window_open:
            return self._position_after(self._total.processed)
        if self._window_before_epoch is not None and self._whole < self._anchor.total_batches:
            return self._window_before_epoch
        return self._position_after(max(self._whole, self._anchor.total_batches))

    @property
    def ends_open(self) -> bool:
        """Whether an epoch has just ended inside a window of manual optimization, whose micro-batches are replayed."""
        return self._is_window_open and self._position_after(self._total.processed).batches == 0

    @property
    def is_behind_step(self) -> bool:
        """Whether an optimizer has stepped in the batch that is under way: weights and counters do not fit together."""
        return bool(self._stepped_in == self._total.ready > self._total.processed)

    @property
    def _is_window_open(self) -> bool:
        return self._has_own_windows and self._whole < self._total.processed

    @property
    def _has_own_windows(self) -> bool:
        module = self.trainer.lightning_module
        return module is not None and not module.automatic_optimization and bool(self.trainer.optimizers)

    @property
    def _total(self) -> Any:
        return self.trainer.fit_loop.epoch_loop.batch_progress.total

    def note_end(self) -> None:
        """Nothing comes behind the micro-batch that has begun last, in its epoch."""
        self._end = self._total.ready

    def note_step(self) -> None:
        """An optimizer has stepped."""
        self._stepped_in = self._total.ready

    def end_batch(self) -> None:
        """A micro-batch has run. Lightning counts a step that a loss scaler leaves out, too."""
        if self._stepped_in == self._total.ready or self.trainer.global_step != self._steps:
            self._steps, self._whole = self.trainer.global_step, self._total.processed

    def _position_after(self, total: int) -> Position:
        """The position after so many micro-batches of the whole run, of which the last ones are of this epoch."""
        anchor, fit = self._anchor, self.trainer.fit_loop
        counters = fit.epoch_loop.batch_progress
        num_done = total - anchor.total_batches
        batches = anchor.batches + num_done
        has_ended = not self._knows_length and batches > 0 and total == self._end
        is_epoch_done = has_ended or batches >= self.trainer.num_training_batches
        num_steps, rest = divmod(num_done, self.geometry.accumulation)
        if is_epoch_done:  # on the last batch of an epoch Lightning steps whether the window is full or not
            num_steps += rest > 0
        else:
            num_done -= rest
        num_samples = num_done * self.geometry.micro_step
        here = Position(
            epoch=anchor.epoch,
            batches=anchor.batches + num_done,
            offset=anchor.offset + num_samples,
            consumed_samples=anchor.consumed_samples + num_samples,
            total_batches=anchor.total_batches + num_done,
            steps=self.trainer.global_step if self._has_own_windows else anchor.steps + num_steps,
            is_epoch_done=has_ended,
        )
        is_epoch_closed = is_epoch_done and fit.epoch_progress.current.processed > anchor.epoch
        is_epoch_left = counters.current.processed > counters.current.started  # on_train_batch_start returned -1
        is_epoch_left = is_epoch_left and total == counters.total.processed
        if is_epoch_closed or is_epoch_left:
            return replace(here, epoch=anchor.epoch + 1, batches=0, offset=0, is_epoch_done=False)
        return self._with_validation(here)

    def begin_epoch(self) -> Position:
        """The position at which an epoch's iteration begins, asked for just before its first batch."""
        fit = self.trainer.fit_loop
        counters = fit.epoch_loop.batch_progress
        epoch, batches = fit.epoch_progress.current.processed, counters.current.ready
        is_placed_here = self._is_placed and (epoch, batches) == (self._anchor.epoch, self._anchor.batches)
        if not is_placed_here:
            if self._is_window_open and self._whole >= self._anchor.total_batches:
                self._window_before_epoch = self.position()
            self._anchor = replace(
                self._position_after(counters.total.processed),
                epoch=epoch,
                batches=batches,
                offset=batches * self.geometry.micro_step,
                total_batches=counters.total.processed,
                is_epoch_done=False,
            )
            self._validations = []
        self._is_placed = False
        return self._anchor

    def place(self, position: Position) -> None:
        """Puts the Trainer's loops at a position, in ``on_train_start``.

        By then its loaders are set up and its states are restored, and the loop over batches has not begun.
        """
        fit = self.trainer.fit_loop
        loop = fit.epoch_loop
        position = replace(position, batches=min(position.batches, self.trainer.num_training_batches))
        is_inside = position.batches > 0
        for tracker in (fit.epoch_progress.total, fit.epoch_progress.current):
            _set(tracker, done=position.epoch, begun=position.epoch + is_inside)
        _set(loop.batch_progress.total, done=position.total_batches)
        _set(loop.batch_progress.current, done=position.batches)
        loop.batch_progress.is_last_batch = is_at_end(self.trainer, position)
        _drop_unfinished_window(loop.automatic_optimization.optim_progress.optimizer)
        is_due = is_inside and _validation_is_due(self.trainer, position)
        _place_validation(loop.val_loop.batch_progress, position, is_pending=is_due and not position.is_validated)
        # Where a validation is due, the loop passes the end of the last batch once more and counts its step there.
        num_stepped = position.steps
        if self._has_own_windows:  # Lightning counts batches there, however often the optimizers step
            num_stepped = position.total_batches // self.geometry.accumulation
        loop.on_load_checkpoint({"_batches_that_stepped": num_stepped - is_due})
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")  # it is, by this package
        fit.restarting = True
        loop.restarting = is_inside
        fit.update_restart_stage()
        self._anchor, self._is_placed = position, True
        self._end = position.total_batches if position.is_epoch_done else -1
        self._whole, self._steps, self._stepped_in = position.total_batches, self.trainer.global_step, 0
        self._validations = []
        if position.is_validated:
            done = _Validation(position.total_batches, position.validation_batches, is_finished=True)
            self._validations.append(done)

    def is_placed_at_end(self) -> bool:
        """Whether the run was resumed after the last batch of an epoch, and is still there."""
        fit = self.trainer.fit_loop
        is_here = fit.epoch_loop.batch_progress.total.processed == self._anchor.total_batches
        is_open = fit.epoch_progress.current.processed == self._anchor.epoch
        return self._is_placed and is_here and is_open and is_at_end(self.trainer, self._anchor)

    def begin_validation(self) -> None:
        """A validation begins, not the sanity check."""
        loop = self.trainer.fit_loop.epoch_loop
        total = loop.val_loop.batch_progress.total
        total.ready = total.started = total.completed  # a pending validation counted its start when it was placed
        after, batches = loop.batch_progress.total.processed, loop.batch_progress.current.processed
        here = replace(
            self._anchor, total_batches=after, batches=batches, is_epoch_done=loop.batch_progress.is_last_batch
        )
        is_extra = self.trainer.should_stop and not _validation_is_due(self.trainer, here)
        self._validations.append(_Validation(after, total.completed, is_extra))

    def end_validation(self) -> None:
        """The validation has run."""
        self._validations[-1].is_finished = True

    def _with_validation(self, position: Position) -> Position:
        runs = self._validations
        counted = [run for run in runs if run.is_finished and not run.is_extra]
        is_validated = any(run.after >= position.total_batches for run in counted)
        replayed = [run for run in runs if run.after > position.total_batches or run not in counted]
        total = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        num_batches = replayed[0].batches_before if replayed else total.completed
        return replace(position, is_validated=is_validated, validation_batches=num_batches)


def reopen_epoch(trainer: Any, checkpoint: dict[str, Any], position: Position, *, ends_open: bool) -> None:
    """Counts the epoch of ``position`` as begun and not done, in a checkpoint that is about to be restored.

    Not where the run was done, with a window of manual optimization open at its end.

    A run that is stopped inside an epoch counts that epoch as done before it saves. Lightning asks whether all epochs
    are done before ``on_train_start``, where the loops are placed: the last epoch would be left out (lightning 2.6.6,
    ``fit_loop.py`` 186-193 and 211).
    """
    if ends_open and trainer.max_epochs is not None and 0 <= trainer.max_epochs <= position.epoch + 1:
        return
    loops = checkpoint.get("loops") or {}
    for tracker in loops.get("fit_loop", {}).get("epoch_progress", {}).values():
        begun = position.epoch + (position.batches > 0)
        tracker.update(ready=begun, started=begun, processed=position.epoch, completed=position.epoch)


def _validation_is_due(trainer: Any, position: Position) -> bool:
    """Whether the Trainer validates after the last batch before ``position``."""
    every = trainer.check_val_every_n_epoch
    if not trainer.enable_validation or trainer.val_check_batch is None:
        return False
    if every is not None and (position.epoch + 1) % every:
        return False
    if trainer.val_check_batch == float("inf"):
        return is_at_end(trainer, position)
    num_done = position.total_batches if every is None else position.batches
    return bool(num_done % trainer.val_check_batch == 0)


def is_at_end(trainer: Any, position: Position) -> bool:
    """Whether nothing is left to fetch in the epoch of a position."""
    return position.is_epoch_done or bool(position.batches >= trainer.num_training_batches)


def _place_validation(progress: Any, position: Position, *, is_pending: bool) -> None:
    """A pending validation has begun and has finished no batch: the loop then runs it from its start."""
    num_done = position.validation_batches
    _set(progress.total, done=num_done, begun=num_done + is_pending)
    if is_pending:
        _set(progress.current, done=0, begun=1)
    else:
        _set(progress.current, done=progress.current.completed)


def _drop_unfinished_window(optimizer: Any) -> None:
    """A window that is begun again has no ``zero_grad`` yet: as many of them as steps."""
    pairs = ((optimizer.step.total, optimizer.zero_grad.total), (optimizer.step.current, optimizer.zero_grad.current))
    for step, zero_grad in pairs:
        step.ready = step.completed
        for name in ("ready", "started", "completed"):
            setattr(zero_grad, name, min(getattr(zero_grad, name), step.completed))


def _set(tracker: Any, *, done: int, begun: int | None = None) -> None:
    tracker.ready = tracker.started = done if begun is None else begun
    tracker.processed = tracker.completed = done


# -- what a data module asks of a Trainer ------------------------------------------------------------------------------


def data_parallel(trainer: Any) -> DataParallel:
    """The data-parallel place of this process; tensor-parallel peers have the same."""
    kwargs = trainer.distributed_sampler_kwargs if trainer is not None else None
    return DataParallel(rank=kwargs["rank"], size=kwargs["num_replicas"]) if kwargs else DataParallel()


def refuse_changing_windows(trainer: Any, accumulation: int, num_batches: int | float) -> None:
    """Refuses what would change the number of micro-batches in an optimizer step during the run."""
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ValueError(
            "GradientAccumulationScheduler changes the global batch during the run, and the order is cut by it. "
            "Use Trainer(accumulate_grad_batches=...)."
        )
    length, limit = epoch_length(trainer, num_batches), trainer.limit_train_batches
    if trainer.strategy.handles_gradient_accumulation and accumulation > 1 and length % accumulation:
        raise ValueError(
            f"An epoch of {length} micro-batches (limit_train_batches={limit}) does not divide by the accumulation of "
            f"{accumulation}, and {type(trainer.strategy).__name__} would carry the rest into the next epoch. "
            "Choose a multiple."
        )


def epoch_length(trainer: Any, num_batches: int | float) -> int | float:
    """Micro-batches of an epoch under ``limit_train_batches``; infinite where only the data knows."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(num_batches, limit)
    return num_batches if isinstance(num_batches, float) else int(num_batches * limit)


def refuse_past_end(trainer: Any, position: Position) -> None:
    """Refuses a loaded position past the end of the run; warns where it is the end, and nothing is left to do.

    Lightning returns at once in both cases, without a word. A job that is started again when it is done ends well.

    Raises:
        DatasetMismatch: The run is shorter than what the checkpoint has done.
    """
    limits = {"max_steps": (trainer.max_steps, position.steps), "max_epochs": (trainer.max_epochs, position.epoch)}
    where = f"step {position.steps}, epoch {position.epoch}, sample {position.consumed_samples}"
    for name, (limit, done) in limits.items():
        if limit is None or limit < 0 or limit > done:
            continue
        if limit < done:
            raise DatasetMismatch(
                f"training already finished: the checkpoint stands after {where}, and this run ends before, with "
                f"{name}={limit}. Raise {name} above {done} to go on, or load the weights into a new run."
            )
        if trainer.is_global_zero:
            text = "training is already finished: the checkpoint stands after %s, and %s is %d; raise it to go on"
            _log.warning(text, where, name, limit)


# -- agreement of the ranks --------------------------------------------------------------------------------------------


def require_agreement(strategy: Any, place: Mapping[str, Any]) -> None:
    """Compares plain values that define data and position over all ranks; no collective is issued.

    Raises:
        DatasetMismatch: On all ranks, if it is not; the message has each value with its ranks.
        PeerMissing, PeerFailed, PeerLost: A peer did not come.
    """
    mine = json.dumps(place, sort_keys=True, default=repr).encode()
    everyone = gather_bytes(strategy, "place in the data", mine, phase=Phase.SETUP)
    if len(set(everyone)) == 1:
        return
    with suppress(PeerError):  # all have read before the first one ends: each raises this error, and none its echo
        gather_bytes(strategy, "difference in the data", b"", phase=Phase.SETUP)
    places = [words_of(one) for one in everyone]
    lines = []
    for name in sorted(set().union(*places)):
        sides = ranks_by_text({rank: repr(one.get(name))[:_MAX_WIDTH] for rank, one in enumerate(places)})
        if len(sides) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in sides.items()))
    text = "\n".join(lines[:_MAX_FIELDS])
    raise DatasetMismatch(
        f"The ranks do not have the same data, or do not stand at the same place in it:\n{text}\n"
        "Give all ranks the same files, settings and checkpoint: a folder that is not shared, or one that is still "
        "being written, is the usual cause."
    )


# -- the callback that keeps loops and data in step --------------------------------------------------------------------


class InStep(Callback):
    """Keeps the Trainer's loops and the data in step. The data module adds it to the Trainer by itself."""

    def __init__(self, data: ExactDataModule) -> None:
        self.data = data
        self._handles: list[RemovableHandle] = []
        self._windows: _Windows | None = None  # where several optimizers step by themselves

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint without a position, or with one that does not fit; reopens the epoch of the position."""
        if not self._is_fitted_by(trainer):
            return
        name = type(self.data).__qualname__
        if name in checkpoint:
            self.data.read_checkpoint(checkpoint)
        elif self.data.begin_without_state(checkpoint["global_step"]):
            if trainer.is_global_zero:
                _log.warning("the checkpoint holds no position in the data; going on where start_sample says")
        else:
            raise DatasetMismatch(
                f"The checkpoint holds no position of a data module {name}, so that training would silently begin its "
                "data anew. Resume with the data module that wrote it; or pass start_sample=... to go on there in the "
                "order of this one (0: at its beginning); or load the weights into a new run."
            )
        ends_open = self.data.require_fit(None if pl_module.automatic_optimization else checkpoint["global_step"])
        reopen_epoch(trainer, checkpoint, self.data.position(), ends_open=ends_open)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds what the data saves beside its state; not where weights and counters do not fit together."""
        if not self._is_fitted_by(trainer):
            return
        if self.data.cursor.is_behind_step:
            raise RuntimeError(
                f"A checkpoint cannot be saved in the middle of batch {trainer.fit_loop.total_batch_idx}, after its "
                "optimizer step: the weights would hold that step and the counters would not, so that a resumed run "
                "would train on the batch twice. Save in on_train_batch_end."
            )
        self._tell_of_windows(trainer)
        self.data.extend_checkpoint(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Puts the loops at a loaded position, compares it over the ranks, and says how large the batches are."""
        if self._is_fitted_by(trainer):
            self.data.place()
            self._watch_steps(trainer)
            here = self.data.position()
            cut = str(self.data.geometry)
            place = {**self.data.identity, "global_batch": cut, **asdict(here), "quarantine": self.data.quarantine.ids}
            require_agreement(trainer.strategy, place)
            if trainer.is_global_zero:
                _log.info("global batch %s%s", cut, self.data.uneven_end())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Notes where the data end; says once, on rank 0, where the run has resumed."""
        if not self._is_fitted_by(trainer):
            return
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.data.cursor.note_end()
        timer = self.data.timer
        if timer is None:
            return
        timer.pause()
        self.data.timer = None
        if trainer.is_global_zero:
            position, elapsed_ms = self.data.position(), timer.elapsed_s * 1000
            where = (position.consumed_samples, trainer.global_step, position.epoch)
            text = "resumed at sample %d, step %d, epoch %d, in %.1f ms%s"
            _log.info(text, *where, elapsed_ms, self.data.receipt)
        if batch_idx > 0:
            _show_epoch(trainer, pl_module, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the batch, where the module decides when its optimizers step."""
        if not pl_module.automatic_optimization and self._is_fitted_by(trainer):
            self.data.cursor.end_batch()
            if self._windows is not None:
                self._windows.end_batch(batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Has schedulers that wait for a plateau step at the end of a resumed epoch too, where they have their metric.

        Lightning leaves them out there, because a checkpoint holds no metrics (lightning 2.6.6, ``fit_loop.py`` 483).
        """
        if not self._is_fitted_by(trainer):
            return
        if not (trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step):
            self.data.cursor.note_end()  # data that say a length may end before it
        plateaus = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau and one.interval == "epoch"]
        if all(one.monitor in trainer.callback_metrics for one in plateaus):
            trainer.fit_loop.on_iteration_done()  # it follows anyway, behind the schedulers

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Notes that a validation begins."""
        if self._is_fitted_by(trainer) and not trainer.sanity_checking:
            self.data.cursor.begin_validation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes that it has run."""
        if self._is_fitted_by(trainer) and not trainer.sanity_checking:
            self.data.cursor.end_validation()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes its hooks from the optimizers."""
        self._release_optimizers()

    def _release_optimizers(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._windows = [], None

    def _watch_steps(self, trainer: Any) -> None:
        self._release_optimizers()
        optimizers = [one for one in map(_of_torch, trainer.optimizers) if isinstance(one, Optimizer)]
        self._handles = [one.register_step_post_hook(self._note_step) for one in optimizers]
        if len(optimizers) > 1 and not trainer.lightning_module.automatic_optimization:
            self._windows = _Windows(optimizers)

    def _tell_of_windows(self, trainer: Any) -> None:
        """Warns once, on rank 0, where a save leaves gradients out."""
        if self._windows is not None and trainer.is_global_zero and (text := self._windows.left_out()):
            _log.warning("%s", text)
            self._windows = None

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.data.cursor.note_step()
        if self._windows is not None:
            self._windows.note_step(optimizer)

    def _is_fitted_by(self, trainer: Any) -> bool:
        return is_fitting(trainer) and trainer.datamodule is self.data


def _of_torch(optimizer: Any) -> Any:
    """The optimizer itself; DeepSpeed's own are none of torch, and hold one."""
    while not hasattr(optimizer, "register_step_post_hook") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


_NUM_PROBES = 4  # parameters of an optimizer whose gradients are looked at
_PROBE = 16  # numbers of each


class _Windows:
    """Finds gradients that a checkpoint leaves out: of an optimizer whose window is open where that of another ends.

    A position lies behind the last batch in which an optimizer has stepped. What another one has summed up by then is
    in no checkpoint and is not done again. A few numbers of each gradient are copied, on their device, when its
    optimizer steps and at the end of that batch. A save compares them, so that no step waits.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._at_step: dict[Optimizer, list[torch.Tensor | None]] = {}
        self._at_end: dict[Optimizer, list[torch.Tensor | None]] = {}
        self._stepped: set[Optimizer] = set()
        self._batch_idx = 0

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._stepped.add(optimizer)
        self._at_step[optimizer] = _probes(optimizer)

    def end_batch(self, batch_idx: int) -> None:
        """A micro-batch has run."""
        if self._stepped:
            self._at_end = {one: _probes(one) for one in self._optimizers if one not in self._stepped}
            self._stepped, self._batch_idx = set(), batch_idx

    def left_out(self) -> str:
        """Says what a save now leaves out; empty where that is nothing."""
        for optimizer, end in self._at_end.items():
            for now, before in zip(end, self._at_step.get(optimizer, repeat(None)), strict=False):
                if now is not None and now.any() and (before is None or not torch.equal(before, now)):
                    place, name = self._optimizers.index(optimizer), type(optimizer).__name__
                    return (
                        f"a checkpoint behind batch {self._batch_idx} leaves gradients out: optimizer {place} ({name}) "
                        "has summed some since its last step, and another one has stepped meanwhile: a run that "
                        "resumes there takes the next step of the first without them. Save where the windows of all "
                        "optimizers end in the same batch"
                    )
        return ""


def _probes(optimizer: Optimizer) -> list[torch.Tensor | None]:
    """Some numbers of the gradients of some parameters; None where there is no gradient."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [one.grad for one in parameters[:: max(1, len(parameters) // _NUM_PROBES)][:_NUM_PROBES]]
    return [None if one is None else _numbers(one) for one in gradients]


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    gradient = getattr(gradient, "to_local", gradient.detach)()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return gradient.reshape(-1)[:: max(1, gradient.numel() // _PROBE)][:_PROBE].clone()


def _show_epoch(trainer: Any, pl_module: Any, batch_idx: int) -> None:
    """Gives the progress bar of an epoch that is resumed inside the length that it gets where an epoch starts."""
    bar = trainer.progress_bar_callback
    if not isinstance(bar, TQDMProgressBar | RichProgressBar) or bar.is_disabled:
        return
    bar.on_train_epoch_start(trainer, pl_module)
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.initial = bar.train_progress_bar.n = batch_idx


class Timer:
    """Adds up the time between ``go_on`` and ``pause``."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.go_on()

    def go_on(self) -> None:
        """Begins a stretch that counts."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Ends it."""
        self.elapsed_s += time.perf_counter() - self._since


def is_fitting(trainer: Any) -> bool:
    """Whether the Trainer fits, and does not only validate, test or predict."""
    return bool(trainer.state.fn == "fit")
