"""What one check of the divergence monitor is, and what it knows of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_distplus.control import ControlPlane, GateRecord
from lightning_distplus.divergence.skips import SkipBudget
from lightning_distplus.errors import DivergenceError

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from lightning_distplus.batch_gate import BatchGate

__all__ = ["Check", "MonitoredRun"]


@dataclass(frozen=True, kw_only=True)
class MonitoredRun:
    """The run, as the checks see it."""

    trainer: Trainer
    module: LightningModule
    plane: ControlPlane
    find_gate: Callable[[], BatchGate]
    patience: Callable[[], timedelta]
    """How long a rank waits for its peers now."""
    skips: SkipBudget
    on_divergence: str
    parameters_every_n_steps: int
    tell: Callable[[DivergenceError], None]
    """Warns or raises, as the user chose, after the evidence is written; all ranks that call it do the same."""
    note: Callable[..., None]
    """Writes one event into the ledger: ``note("kind", field=value)``."""
    sample_ids: Callable[[], list[Any] | None]
    """The ids of the samples in the present micro-batch, where the data module knows them."""

    @property
    def rank(self) -> int:
        """This process."""
        return self.plane.world.rank

    @property
    def gate(self) -> BatchGate:
        """Where the ranks meet; it is there once the engine has wrapped the model."""
        return self.find_gate()

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, in rank order; plain JSON values, at most 1 MiB."""
        packed = json.dumps(value).encode()
        return [json.loads(item) for item in self.plane.gather(f"divergence/{name}", packed, self.patience())]


class Check:
    """One check of the monitor. A hook does nothing unless it is overridden; all ranks call it at the same point."""

    run: MonitoredRun
    """It is there from ``before_engine`` on."""

    def before_engine(self) -> None:
        """The model is built; the engine has not wrapped it, and the ledger is not open."""

    def attach(self, run: MonitoredRun) -> None:
        """The engine has wrapped the model (``trainer.strategy.model``); the checkpoint is not loaded yet."""
        self.run = run

    def start(self) -> None:
        """``on_train_start``: everything is restored, nothing has run."""

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The fields of the gate's record that this check fills for the step that begins with this micro-batch."""
        return {}

    def explain(self, field: str) -> dict[str, Any]:
        """What stands behind a field that differs: names to plain values, compared name by name on all ranks."""
        return {}

    def hear(self, records: Sequence[GateRecord]) -> None:
        """The records of all ranks, once those fields that must agree do."""

    def epoch_start(self) -> None:
        """``on_train_epoch_start``."""

    def epoch_end(self) -> None:
        """``on_train_epoch_end``, before the callbacks that monitor a metric."""

    def validation_start(self) -> None:
        """``on_validation_start``; not in the sanity check."""

    def validation_end(self) -> None:
        """``on_validation_end``, before any other callback; not in the sanity check."""

    def train_end(self) -> None:
        """``on_train_end``."""

    def before_backward(self, loss: torch.Tensor) -> None:
        """``on_before_backward``."""

    def after_backward(self) -> None:
        """``on_after_backward``: the engine has reduced the gradients, unless it accumulates."""

    def before_optimizer_step(self, optimizer: Any) -> None:
        """``on_before_optimizer_step``."""

    def batch_end(self) -> None:
        """``on_train_batch_end``."""

    def before_save(self) -> None:
        """A checkpoint is about to be collected; all ranks have just met."""

    def metrics(self) -> dict[str, float]:
        """What goes to the logger, as ``distplus/...``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back."""

    def detach(self) -> None:
        """The run ends, well or not; never raises."""
