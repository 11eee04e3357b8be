"""The callback that compares the ranks before each step, and stops the run before a difference does damage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch.callbacks import Callback

from lightning_distplus.batch_gate import BatchGate
from lightning_distplus.callbacks.batches import BatchShapes
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.callbacks.checks import make_checks
from lightning_distplus.callbacks.comparison import Comparison
from lightning_distplus.callbacks.hosting import Host, host_of
from lightning_distplus.callbacks.incidents import Incidents
from lightning_distplus.callbacks.plan import RngPolicy
from lightning_distplus.callbacks.spikes import OnSpike
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.skips import SkipBudget
from lightning_distplus.ending import install_exit_codes
from lightning_distplus.errors import CheckpointMismatch, DivergenceError

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["OnDivergence", "OnLocalFailure", "RankDivergenceMonitor"]

log = logging.getLogger(__name__)

OnDivergence = Literal["raise", "warn", "skip"]
OnLocalFailure = Literal["raise", "skip_all"]

STATE_VERSION = 1


class RankDivergenceMonitor(Callback):
    """Names the rank that differs from the others before its difference reaches a collective or the weights.

    Works with every strategy of Lightning; on a Resilient one it uses that strategy's gate. It moves itself to the head
    of the Trainer's callbacks, so that it sees metrics before they are acted upon.

    Args:
        every_n_steps: How often the batches are looked into. Place, learning rate and settings are compared each step.
        parameters_every_n_steps: How often replicated state is compared in full.
        on_divergence: ``"raise"`` on all ranks; ``"warn"`` where the run can go on, which it cannot when the ranks
            stand at different points; ``"skip"`` leaves out, on all ranks, a step whose loss or gradients are not
            finite, and raises otherwise.
        max_skips_in_a_row: So many steps may be left out one after the other.
        on_local_failure: What follows when a batch fails on some ranks (out of memory, ``training_step`` returns None):
            ``"raise"``, or ``"skip_all"``: all ranks leave the step out.
        trace_collectives: Compare every call of ``torch.distributed`` in training before it is made: operation, root,
            reduce operation, group, shapes. Costs one exchange per call.
        rng_policy: For each of the generators "python", "numpy", "torch" and "cuda", whether its state must be the
            "same" on all ranks or "distinct" on each, at the start of each epoch; nothing is required of the others.
        repair_replicas: Overwrite a wrong copy of a weight, a buffer or an optimizer state with the majority's, and
            write that into the ledger. Without a majority the run ends as it does otherwise.
        on_spike: What follows when one rank's loss or gradient norm stands out from the others' and from its own past:
            ``"warn"`` (rank, step, samples), ``"raise"``, or ``"ignore"``.
        replay_suspects: Compute a step again, on its rank alone, when its loss or gradients stand out or are not
            finite: the same again speaks for the samples, otherwise the device miscalculated. For DDP with one
            micro-batch per step; costs a copy of buffers and generators per step, and of the model in a replay.
        state_at_rest: Fingerprint what this rank alone holds (its shards of weights and optimizer state) after each
            step, and again before the next one: finds memory that changes by itself. Costs two passes over it.
        batch_shapes: ``"any"`` where batches of different sizes are right, as for sequences; ``"equal"`` where each
            rank must have the same shapes.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        parameters_every_n_steps: int = 50,
        on_divergence: OnDivergence = "raise",
        max_skips_in_a_row: int = 3,
        on_local_failure: OnLocalFailure = "raise",
        trace_collectives: bool = False,
        rng_policy: dict[str, RngPolicy] | None = None,
        repair_replicas: bool = False,
        state_at_rest: bool = False,
        on_spike: OnSpike = "warn",
        replay_suspects: bool = False,
        batch_shapes: BatchShapes = "any",
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("parameters_every_n_steps", parameters_every_n_steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it is at least 1.")
        _require_one_of("on_divergence", on_divergence, get_args(OnDivergence))
        _require_one_of("on_local_failure", on_local_failure, get_args(OnLocalFailure))
        _require_one_of("on_spike", on_spike, get_args(OnSpike))
        _require_one_of("batch_shapes", batch_shapes, get_args(BatchShapes))
        self.every_n_steps = every_n_steps
        self.parameters_every_n_steps = parameters_every_n_steps
        self.on_divergence = on_divergence
        self.on_local_failure = on_local_failure
        self.trace_collectives = trace_collectives
        self.rng_policy = rng_policy
        self.repair_replicas = repair_replicas
        self.state_at_rest = state_at_rest
        self.on_spike = on_spike
        self.replay_suspects = replay_suspects
        self.batch_shapes = batch_shapes
        self.skips = SkipBudget(max_skips_in_a_row)
        self.checks: list[Check] = make_checks(self, self._before_save)
        self._host: Host | None = None
        self._gate: BatchGate | None = None
        self._incidents: Incidents | None = None

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

    def _say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.skips.begin()
        fields: dict[str, Any] = {}
        for check in self.checks:
            fields.update(check.say(batch, batch_idx))
        return fields

    def _hear(self, records: list[GateRecord]) -> None:
        self._comparison.require_agreement(records)
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
        found = {"divergences": float(self._incidents.count if self._incidents else 0)}
        found["skipped_steps"] = float(self.skips.total)
        for check in self.checks:
            found.update(check.metrics())
        return {f"distplus/{name}": value for name, value in found.items()}

    def _active(self) -> Iterator[Check]:
        return iter(self.checks if self._gate is not None else ())

    def _tell(self, error: DivergenceError) -> None:
        assert self._incidents is not None
        self._incidents.tell(error, global_step=self._trainer.global_step)

    # -- state and ending --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts and whatever the checks keep: plain values."""
        return {
            "version": STATE_VERSION,
            "skips": self.skips.state_dict(),
            "checks": {type(check).__name__: check.state_dict() for check in self.checks},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back.

        Raises:
            CheckpointMismatch: Another version of this package wrote it.
        """
        if state_dict.get("version") != STATE_VERSION:
            raise CheckpointMismatch(
                f"The checkpoint's RankDivergenceMonitor has version {state_dict.get('version')!r}; this one reads "
                f"version {STATE_VERSION}. Use the version of lightning_distplus that wrote it."
            )
        self.skips.load_state_dict(state_dict["skips"])
        for check in self.checks:
            check.load_state_dict(state_dict["checks"].get(type(check).__name__, {}))

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


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(map(repr, allowed))}.")


def _sample_ids(trainer: Any) -> list[Any] | None:
    """The ids of the samples in the present micro-batch, where our data module delivered it."""
    delivered = getattr(getattr(trainer, "datamodule", None), "delivered", None)
    return None if delivered is None else list(delivered.ids.tolist())
