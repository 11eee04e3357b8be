"""The callback that keeps the Trainer's loops and a data module in step."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_distplus.data.agreement import require_agreement
from lightning_distplus.data.trainer_view import planned_samples
from lightning_distplus.errors import DatasetMismatch

if TYPE_CHECKING:
    from lightning_distplus.data.datamodule import ExactDataModule

__all__ = ["InStep", "Timer", "is_fitting"]

_log = logging.getLogger(__name__)


class InStep(Callback):
    """Keeps the Trainer's loops and the data in step. The data module adds it to the Trainer by itself."""

    def __init__(self, data: ExactDataModule) -> None:
        self.data = data

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses a checkpoint without a position, or with one that does not fit.

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
        self.data.require_fit()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds what the data saves beside its state."""
        if self._is_fitted_by(trainer):
            self.data.extend_checkpoint(checkpoint)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the loops at a loaded position, and says how large the batches are.

        Raises:
            DatasetMismatch: The ranks do not have the same data, or do not stand at the same place in it.
            ValueError: The run would read a source more often than it may.
        """
        if self._is_fitted_by(trainer):
            self.data.place()
            here = self.data.position()
            cut = str(self.data.geometry.at(here.consumed_samples))
            place = {**self.data.identity, "global_batch": cut, **asdict(here), "quarantine": self.data.quarantine.ids}
            require_agreement(trainer.strategy, place)
            if (num_samples := planned_samples(trainer, self.data.geometry, here)) is not None:
                self.data.require_few_repeats(num_samples)
            if trainer.is_global_zero:
                _log.info("global batch %s%s", self.data.geometry.at(here.consumed_samples), self.data.uneven_end())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Follows a schedule of batch sizes; says once, on rank 0, where the run has resumed."""
        if self.data.is_scheduled and self._is_fitted_by(trainer):
            self.data.begin_batch(batch_idx)
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

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that a validation begins."""
        if self._is_fitted_by(trainer) and not trainer.sanity_checking:
            self.data.cursor.begin_validation()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that it has run."""
        if self._is_fitted_by(trainer) and not trainer.sanity_checking:
            self.data.cursor.end_validation()

    def _is_fitted_by(self, trainer: Any) -> bool:
        return is_fitting(trainer) and trainer.datamodule is self.data


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
