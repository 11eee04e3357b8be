"""The callback that keeps the Trainer's loops and a data module in step."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_distplus.data.agreement import require_agreement
from lightning_distplus.data.progress import reopen_epoch
from lightning_distplus.errors import DatasetMismatch

if TYPE_CHECKING:
    from lightning_distplus.data.datamodule import ExactDataModule

__all__ = ["InStep", "Timer", "is_fitting"]

_log = logging.getLogger(__name__)


class InStep(Callback):
    """Keeps the Trainer's loops and the data in step. The data module adds it to the Trainer by itself."""

    def __init__(self, data: ExactDataModule) -> None:
        self.data = data
        self._handles: list[RemovableHandle] = []

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses a checkpoint without a position, or with one that does not fit; reopens the epoch of the position.

        Raises:
            DatasetMismatch: It holds none of this data module; or it is of other data, or past the end of the run.
        """
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
        if not pl_module.automatic_optimization:
            self.data.count_steps(checkpoint["global_step"])
        self.data.require_fit()
        if not self.data.is_past_end:
            reopen_epoch(checkpoint, self.data.position())

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds what the data saves beside its state.

        Raises:
            RuntimeError: The weights and the counters of this moment do not fit together.
        """
        if not self._is_fitted_by(trainer):
            return
        if self.data.cursor.is_behind_step:
            raise RuntimeError(
                f"A checkpoint cannot be saved in the middle of batch {trainer.fit_loop.total_batch_idx}, after its "
                "optimizer step: the weights would hold that step and the counters would not, so that a resumed run "
                "would train on the batch twice. Save in on_train_batch_end."
            )
        self.data.extend_checkpoint(checkpoint)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the loops at a loaded position, and says how large the batches are.

        Raises:
            DatasetMismatch: The ranks do not have the same data, or do not stand at the same place in it.
        """
        if self._is_fitted_by(trainer):
            self.data.place()
            self._watch_steps(trainer)
            here = self.data.position()
            cut = str(self.data.geometry)
            place = {**self.data.identity, "global_batch": cut, **asdict(here), "quarantine": self.data.quarantine.ids}
            require_agreement(trainer.strategy, place)
            if trainer.is_global_zero:
                _log.info("global batch %s%s", cut, self.data.uneven_end())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Says once, on rank 0, where the run has resumed."""
        timer = self.data.timer
        if timer is None or not self._is_fitted_by(trainer):
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

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, where the module decides when its optimizers step."""
        if not pl_module.automatic_optimization and self._is_fitted_by(trainer):
            self.data.cursor.end_batch()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Has schedulers that wait for a plateau step at the end of a resumed epoch too, where they have their metric.

        Lightning leaves them out there, because a checkpoint holds no metrics (lightning 2.6.6, ``fit_loop.py`` 483).
        """
        plateaus = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau and one.interval == "epoch"]
        if self._is_fitted_by(trainer) and all(one.monitor in trainer.callback_metrics for one in plateaus):
            trainer.fit_loop.on_iteration_done()  # it follows anyway, behind the schedulers

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that a validation begins."""
        if self._is_fitted_by(trainer) and not trainer.sanity_checking:
            self.data.cursor.begin_validation()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that it has run."""
        if self._is_fitted_by(trainer) and not trainer.sanity_checking:
            self.data.cursor.end_validation()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes its hooks from the optimizers."""
        self._release_optimizers()

    def _release_optimizers(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch_steps(self, trainer: pl.Trainer) -> None:
        self._release_optimizers()
        for optimizer in trainer.optimizers:
            while not hasattr(optimizer, "register_step_post_hook") and hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer  # DeepSpeed's own are none of torch, and hold one
            if isinstance(optimizer, Optimizer):
                self._handles.append(optimizer.register_step_post_hook(self._note_step))

    def _note_step(self, *_: Any) -> None:
        self.data.cursor.note_step()

    def _is_fitted_by(self, trainer: Any) -> bool:
        return is_fitting(trainer) and trainer.datamodule is self.data


def _show_epoch(trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int) -> None:
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
