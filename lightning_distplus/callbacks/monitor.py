"""What the callbacks that compare the ranks at the gate have in common: they hand each moment on to their checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import Callback

from lightning_distplus.batch_gate import BatchGate
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.callbacks.comparison import Comparison
from lightning_distplus.callbacks.hosting import Host, host_of
from lightning_distplus.callbacks.incidents import Incidents
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.skips import SkipBudget
from lightning_distplus.ending import install_exit_codes
from lightning_distplus.errors import DivergenceError

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["GateMonitor", "OnDivergence"]

OnDivergence = Literal["raise", "warn", "skip"]


class GateMonitor(Callback):
    """Brings checks to the gate of a Resilient strategy, or to one that it opens on any other.

    It moves itself to the head of the Trainer's callbacks, so that it sees metrics before they are acted upon.
    """

    on_divergence: OnDivergence = "raise"
    parameters_every_n_steps = 50

    def __init__(self, checks: Sequence[Check] = (), *, max_skips_in_a_row: int = 0) -> None:
        self.checks = list(checks)
        self.skips = SkipBudget(max_skips_in_a_row)
        self._host: Host | None = None
        self._gate: BatchGate | None = None
        self._incidents: Incidents | None = None

    def take_over(self, checks: Sequence[Check]) -> None:
        """Runs the checks of another monitor, in the place of its own of the same kind."""
        kinds = {type(check) for check in checks}
        self.checks = [check for check in self.checks if type(check) not in kinds] + list(checks)

    # -- starting ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connects the control plane where the strategy has none; the rest follows when the strategy is set up."""
        if stage != "fit" or trainer.world_size == 1:
            return
        install_exit_codes()
        self._host = host_of(trainer)
        strategy: Any = trainer.strategy
        inner = strategy.setup

        def setup(trainer: Trainer) -> None:
            vars(strategy).pop("setup", None)
            self._before_engine(trainer)
            inner(trainer)
            self._after_engine(trainer)

        strategy.setup = setup

    def _before_engine(self, trainer: Trainer) -> None:
        """The model is built, the engine has not wrapped it."""
        assert self._host is not None
        self._incidents = Incidents(
            self._host.plane.world,
            Path(self._host.folder),
            note=self._host.note,
            only_warns=self.on_divergence == "warn",
        )
        self._trainer = trainer
        self._log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._run = MonitoredRun(
            trainer=trainer,
            module=trainer.lightning_module,
            plane=self._host.plane,
            find_gate=self._find_gate,
            patience=self._host.patience,
            skips=self.skips,
            on_divergence=self.on_divergence,
            parameters_every_n_steps=self.parameters_every_n_steps,
            tell=self._tell,
            note=self._host.note,
            sample_ids=lambda: _sample_ids(trainer),
        )
        for check in self.checks:
            check.run = self._run
            check.before_engine()

    def _find_gate(self) -> BatchGate:
        assert self._gate is not None
        return self._gate

    def _after_engine(self, trainer: Trainer) -> None:
        assert self._host is not None
        self._gate = self._host.gate(trainer)
        self._gate.say, self._gate.hear, self._gate.tell = self._say, self._hear, self._tell
        self._comparison = Comparison(self._run, self._explain)
        for check in self.checks:
            check.attach(self._run)
        trainer.callbacks.remove(self)  # type: ignore[attr-defined]
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first comparison: everything is restored, nothing has run."""
        if self._gate is None or self._host is None:
            return
        for check in self.checks:
            check.start()
        if self._host.owns_gate:
            self._gate.open()

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    def _is_called(self) -> bool:
        """Whether its hooks are: ``LearningRateFinder`` trains before a run, or inside it, without its callbacks."""
        return self in self._trainer.callbacks  # type: ignore[attr-defined]

    def _say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if not self._is_called:
            return {}
        self.skips.begin()
        fields: dict[str, Any] = {}
        for check in self.checks:
            fields.update(check.say(batch, batch_idx))
        return fields

    def _hear(self, records: list[GateRecord]) -> None:
        self._comparison.require_agreement(records)
        if not self._is_called:
            return
        for check in self.checks:
            check.hear(records)

    def _before_save(self) -> None:
        for check in self._active():
            check.before_save()

    def _explain(self, field: str) -> dict[str, Any]:
        return {name: value for check in self.checks for name, value in check.explain(field).items()}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            check.epoch_start()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            check.epoch_end()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            if not trainer.sanity_checking:
                check.validation_start()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            if not trainer.sanity_checking:
                check.validation_end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            check.train_end()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            check.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            check.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Hands it on to the checks."""
        for check in self._active():
            check.before_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hands it on to the checks, and their metrics to the loggers."""
        for check in self._active():
            check.batch_end()
        if self._gate is not None and (batch_idx + 1) % self._log_every == 0:
            metrics = self.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def metrics(self) -> dict[str, float]:
        """What goes to the loggers, as ``distplus/...``."""
        found = {name: value for check in self.checks for name, value in check.metrics().items()}
        return {f"distplus/{name}": value for name, value in found.items()}

    def _active(self) -> Iterator[Check]:
        return iter(self.checks if self._gate is not None else ())

    def _tell(self, error: DivergenceError) -> None:
        assert self._incidents is not None
        self._incidents.tell(error, global_step=self._trainer.global_step)

    # -- ending ------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tells the peers, where the strategy does not, and steps aside; never raises."""
        if self._host is not None and self._gate is not None:
            self._gate.is_open = False
            self._host.report(exception)
            self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts everything back; never raises."""
        self._detach()
        if self._host is not None:
            vars(trainer.strategy).pop("setup", None)
            self._host.close()
        self._host = self._gate = None

    def _detach(self) -> None:
        for check in self._active():
            with suppress(Exception):
                check.detach()


def _sample_ids(trainer: Any) -> list[Any] | None:
    """The ids of the samples in the present micro-batch, where our data module delivered it."""
    delivered = getattr(getattr(trainer, "datamodule", None), "delivered", None)
    return None if delivered is None else list(delivered.ids.tolist())
