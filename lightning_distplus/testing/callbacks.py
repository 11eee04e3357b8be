"""Callbacks of Lightning that strike planned faults, and record what a run did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import Callback

from lightning_distplus.testing.faults import FaultPlan, Where
from lightning_distplus.testing.oracles import Trace, weights_digest

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from torch.optim import Optimizer

__all__ = ["FaultCallback", "LightningRun"]


class FaultCallback(Callback):
    """Fires the faults of a plan at the points of the training loop that they name.

    A step is counted as in ``Fault.step``; with accumulation the first micro-batch of a step meets the fault. At
    ``validation`` and ``save`` the step is the Trainer's ``global_step`` then. Put it first among the callbacks: then a
    fault at ``batch_start`` strikes before any other callback has seen the batch.

    Args:
        plan: The plan; None takes the one that ``spawn`` gave to this process.
    """

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = FaultPlan.from_environment() if plan is None else plan
        self._step = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """``batch_start``: the batch is fetched, nothing is computed."""
        self._step = trainer.global_step
        self._fire(trainer, "batch_start")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """``before_backward``: the loss is there."""
        self._fire(trainer, "before_backward", loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """``after_backward``: the engine has reduced the gradients."""
        self._fire(trainer, "after_backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """``before_optimizer_step``: the gradients are final."""
        self._fire(trainer, "before_optimizer_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """``batch_end``: the optimizer step is done."""
        self._fire(trainer, "batch_end")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """``validation``: before a validation batch."""
        self._step = trainer.global_step
        self._fire(trainer, "validation")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """``save``: the state is collected, nothing is written."""
        self._step = trainer.global_step
        self._fire(trainer, "save")

    def _fire(self, trainer: Trainer, where: Where, loss: torch.Tensor | None = None) -> None:
        self.plan.fire(trainer.global_rank, self._step, where, loss=loss, module=trainer.strategy.model)


# -- a run that is recorded for the oracle -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LightningRun:
    """Trains with Lightning, records every step, and saves where the oracle asks for it.

    ``assert_resumes_exactly(LightningRun(...), max_steps=6, world_size=2)`` calls it. All four arguments are importable
    functions.
    """

    make_trainer: Callable[..., Trainer]
    """``make_trainer(max_steps=, callbacks=)``; the callbacks go last into the list of the Trainer."""
    make_model: Callable[[], LightningModule]
    """The model, with the same initial weights in every call; ``training_step`` returns a loss."""
    make_data: Callable[[], LightningDataModule]
    """The data module."""
    sample_ids: Callable[[Any], list[Any]]
    """The ids of the samples in a batch, in order; something that compares by value."""

    def __call__(self, max_steps: int, ckpt_path: str | None, save_at: Mapping[int, str]) -> Trace:
        """Trains until ``max_steps`` optimizer steps are complete; see ``ResumableRun``."""
        recorder = _Recorder(self.sample_ids, save_at)
        trainer = self.make_trainer(max_steps=max_steps, callbacks=[recorder])
        trainer.fit(self.make_model(), datamodule=self.make_data(), ckpt_path=ckpt_path)
        return Trace(samples=dict(recorder.samples), losses=dict(recorder.losses), weights=recorder.weights)


class _Recorder(Callback):
    def __init__(self, sample_ids: Callable[[Any], list[Any]], save_at: Mapping[int, str]) -> None:
        self.sample_ids = sample_ids
        self.save_at = save_at
        self.samples: dict[int, list[Any]] = defaultdict(list)
        self.losses: dict[int, list[str]] = defaultdict(list)
        self.weights = ""
        self._step = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        self.samples[self._step] += self.sample_ids(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.losses[self._step].append(float(loss).hex())
        if trainer.global_step > self._step and (path := self.save_at.get(trainer.global_step)):
            trainer.save_checkpoint(path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = weights_digest(cast("Any", trainer.strategy.model))
