"""A Lightning callback that plants the faults of a plan in any Trainer, whatever its strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from lightning_distplus.testing.faults import FaultPlan, Where

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

__all__ = ["FaultCallback"]


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
