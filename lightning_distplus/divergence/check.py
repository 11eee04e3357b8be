"""One check of the divergence monitor, the run as it sees it, and the callback that brings checks to the gate."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, GateRecord
from lightning_distplus.control.secret import words_of
from lightning_distplus.errors import DivergenceError, install_exit_codes, refuse_other_trainer
from lightning_distplus.majority import disagreement, first_difference
from lightning_distplus.run_access import Host, host_of
from lightning_distplus.trainer_gate import BatchGate
from lightning_distplus.watchdog.verdict import Verdict, name_incident
from lightning_distplus.world import World

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


import math
import statistics
from collections import defaultdict, deque

__all__ = [
    "Budget",
    "Check",
    "Comparison",
    "GateMonitor",
    "Incidents",
    "MonitoredRun",
    "OnDivergence",
    "SkipBudget",
    "drop_gradients",
]


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
    budget: Budget
    on_divergence: str
    parameters_every_n_steps: int
    tell: Callable[[DivergenceError], None]
    """Warns or raises, as the user chose, after the evidence is written; all ranks that call it do the same."""
    note: Callable[..., None]
    """Writes one event into the ledger: ``note("kind", field=value)``."""
    step_parts: Callable[[], Mapping[str, float]]
    """Seconds that this rank has spent in each part of its steps, added up, where the strategy measures them."""
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
        return [words_of(item) for item in self.plane.gather(f"divergence/{name}", packed, self.patience())]


class Check:
    """One check of the monitor. A hook does nothing unless it is overridden; all ranks call it at the same point."""

    run: MonitoredRun
    """It is there from ``before_engine`` on."""

    def needs(self, hook: str) -> bool:
        """Whether it has a hook of the step, such as ``"say"``, in this run; asked once it is attached."""
        return getattr(type(self), hook) is not getattr(Check, hook)

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


# -- skipped steps -----------------------------------------------------------------------------------------------------


class SkipBudget:
    """Counts skipped steps.

    Args:
        max_in_a_row: So many skipped steps may follow on one another.
    """

    def __init__(self, max_in_a_row: int) -> None:
        if max_in_a_row < 0:
            raise ValueError(f"max_skips_in_a_row is {max_in_a_row}; it is at least 0.")
        self.max_in_a_row = max_in_a_row
        self.in_a_row = 0
        self.total = 0
        self.is_skipping = False
        """Whether the present step is left out; set back when a step begins."""

    def skipped(self, reason: DivergenceError) -> None:
        """A step is skipped on all ranks.

        Raises:
            DivergenceError: It was one too many in a row; the reason's ranks, field and values.
        """
        if self.is_skipping:  # another reason for the same step
            return
        self.is_skipping = True
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row > self.max_in_a_row:
            raise DivergenceError(
                f"{self.in_a_row} steps in a row would be skipped; max_skips_in_a_row is {self.max_in_a_row}. "
                f"The last one: {reason}",
                ranks=reason.ranks,
                field=reason.field,
                values=reason.values,
            ) from reason

    def stepped(self) -> None:
        """A step is made, as far as one check can tell; another one may have left it out."""
        if not self.is_skipping:
            self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts of the run that is continued."""
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])


def drop_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Leaves nothing for the optimizer: a parameter without gradient keeps its value and its optimizer state."""
    for parameter in parameters:
        parameter.grad = None


# -- the fields of a record that must agree ----------------------------------------------------------------------------

# In this order: a field that differs is often the cause of those after it.
_REMEDIES = {
    "learning_rate": "a scheduler or a callback changes the rate on some ranks only",
    "settings": "the optimizers or the trainable parameters are not the same on all ranks",
    "loss_scale": "a rank skipped a step, or loaded another checkpoint",
    "collectives": "a rank called a collective more often than the others since the last step; "
    "trace_collectives=True names the call",
    "consumed_samples": "a rank stands at another place in the data",
    "data_fingerprint": "a rank stands at another place in the data: set_epoch, seed, checkpoint",
    "batch_structure": "the batch of a rank has other parts or types, so that its step may take another path",
}


_agreeing = attrgetter(*_REMEDIES)


class Comparison:
    """Compares field by field; for a fingerprint, all ranks lay open what is behind it.

    Args:
        run: The run.
        explain: What stands behind a fingerprint on this rank: names to plain values.
    """

    def __init__(self, run: MonitoredRun, explain: Callable[[str], dict[str, Any]]) -> None:
        self._run = run
        self._explain = explain

    def require_agreement(self, records: Sequence[GateRecord]) -> None:
        """Every rank has the same records and so comes to the same conclusion.

        Raises:
            DivergenceError: Two ranks differ, unless the user only wants to be warned.
        """
        if len(set(map(_agreeing, records))) == 1:
            return
        for field, remedy in _REMEDIES.items():
            values = {rank: getattr(record, field) for rank, record in enumerate(records)}
            if len(set(map(repr, values.values()))) > 1:
                self._tell(field, values, remedy)

    def _tell(self, field: str, values: dict[int, Any], remedy: str) -> None:
        explained = self._run.gather(f"behind {field}", self._explain(field))
        name, found = first_difference(explained) or (field, values)
        where = f"before step {self._run.trainer.global_step}; nothing was averaged"
        self._run.tell(disagreement(name, found, where=where, remedy=remedy))


# -- verdict, ledger and message of a difference -----------------------------------------------------------------------

log = logging.getLogger(__name__)
_BLOCKING = frozenset({"moment", "epoch", "global_step", "micro_batch", "last_batch", "collective"})
"""The ranks stand at different points: to go on would be to hang."""


class Incidents:
    """Writes down every difference, and ends the run unless the user only wants to be warned.

    Args:
        world: This process.
        folder: Where verdicts go.
        run_id: ``ControlPlane.run_id``.
        note: Writes one event into the ledger.
        only_warns: Whether a difference that lets the run go on is only reported.
    """

    def __init__(self, world: World, folder: Path, *, run_id: str, note: Callable[..., None], only_warns: bool) -> None:
        self._world = world
        self._run_id = run_id
        self._folder = folder
        self._note = note
        self._only_warns = only_warns
        self._warned: set[str] = set()
        self.count = 0

    def tell(self, error: DivergenceError, *, global_step: int) -> None:
        """Every rank that has found the same difference calls this.

        Raises:
            DivergenceError: The one given, unless it is only reported.
        """
        self.count += 1
        if self._only_warns and error.field not in _BLOCKING:
            self._warn(error, global_step)
            return
        self.write(error, global_step=global_step)
        error.has_verdict = True
        raise error

    def write(self, error: DivergenceError, *, global_step: int, kind: str = "divergence") -> None:
        """Puts the evidence on disk; never raises."""
        self._note(kind, field=error.field, ranks=error.ranks, values=error.values, global_step=global_step)
        knows_alone = set(error.values) == {self._world.rank}
        if self._world.local_rank != 0 and not knows_alone:
            return
        verdict = Verdict(
            incident=f"{name_incident(kind, self._run_id)}-step{global_step}",
            run_id=self._run_id,
            kind=kind,
            culprits=error.ranks,
            waiting=sorted(set(self._world.ranks) - set(error.ranks)),
            phase="step",
            operation=error.field,
            location=None,
            global_step=global_step,
            elapsed_s=0.0,
            cause=str(error).splitlines()[0],
            remedy=str(error).rpartition("do: ")[2],
            field=error.field,
            values={str(rank): _plain(value) for rank, value in error.values.items()},
            parameter=getattr(error, "parameter", None),
        )
        with suppress(OSError):
            verdict.write(self._folder, self._world.host)

    def _warn(self, error: DivergenceError, global_step: int) -> None:
        """The first time in full, then in the ledger only."""
        if error.field not in self._warned:
            self._warned.add(error.field)
            self.write(error, global_step=global_step)
            log.warning("rank %d: %s", self._world.rank, error)
        else:
            self._note("divergence", field=error.field, ranks=error.ranks, global_step=global_step)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else str(value)


# -- the callback ------------------------------------------------------------------------------------------------------

OnDivergence = Literal["raise", "warn", "skip"]
_BATCH_END = "on_train_batch_end"
# The hooks of a step that a check may have, and Lightning's from which they are called.
_STEP_HOOKS = {
    "say": "",
    "hear": "",
    "before_backward": "on_before_backward",
    "after_backward": "on_after_backward",
    "before_optimizer_step": "on_before_optimizer_step",
    "batch_end": _BATCH_END,
}


class GateMonitor(Callback):
    """Brings checks to the gate of a Resilient strategy, or to one that it opens on any other.

    It moves itself to the head of the Trainer's callbacks, so that it sees metrics before they are acted upon.
    """

    on_divergence: OnDivergence = "raise"
    parameters_every_n_steps = 50

    def __init__(
        self, checks: Sequence[Check] = (), *, max_skips_in_a_row: int = 0, budget: float | None = None
    ) -> None:
        self.checks = list(checks)
        self.skips = SkipBudget(max_skips_in_a_row)
        self.budget = budget
        self._host: Host | None = None
        self._gate: BatchGate | None = None
        self._incidents: Incidents | None = None
        self._hooks: dict[str, list[Callable[..., Any]]] = {hook: [] for hook in _STEP_HOOKS}
        self.spent_s = 0.0
        """What its hooks have taken of the steps so far, on the training thread."""
        self.num_compared = 0
        """Steps in which the ranks were compared."""

    def take_over(self, checks: Sequence[Check]) -> None:
        """Runs the checks of another monitor, in the place of its own of the same kind."""
        kinds = {type(check) for check in checks}
        self.checks = [check for check in self.checks if type(check) not in kinds] + list(checks)

    # -- starting ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connects the control plane where the strategy has none; the rest follows when the strategy is set up."""
        refuse_other_trainer(trainer)
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
            run_id=self._host.plane.run_id,
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
            budget=Budget(self.budget),
            on_divergence=self.on_divergence,
            parameters_every_n_steps=self.parameters_every_n_steps,
            tell=self._tell,
            note=self._host.note,
            step_parts=self._host.step_parts,
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
        self._find_hooks()
        trainer.callbacks.remove(self)  # type: ignore[attr-defined]
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]
        _compat.skip_step_hooks(self)

    def _find_hooks(self) -> None:
        """Binds those hooks of a step that its checks have: most have one or two."""
        for hook in _STEP_HOOKS:
            self._hooks[hook] = [getattr(check, hook) for check in self.checks if check.needs(hook)]

    def _skip_idle_hooks(self, *, has_loggers: bool) -> None:
        """Lightning need not call what would do nothing."""
        names = [name for hook, name in _STEP_HOOKS.items() if name and not self._hooks[hook]]
        if has_loggers and _BATCH_END in names:
            names.remove(_BATCH_END)
        ours = [name for name in names if getattr(type(self), name) is getattr(GateMonitor, name)]
        _compat.skip_step_hooks(self, *ours)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first comparison: everything is restored, nothing has run."""
        if self._gate is None or self._host is None:
            return
        for check in self.checks:
            check.start()
        self._skip_idle_hooks(has_loggers=bool(trainer.loggers))
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
        began = time.perf_counter()
        self._run.budget.begin_step()
        self.skips.is_skipping = False
        fields: dict[str, Any] = {}
        for say in self._hooks["say"]:
            fields.update(say(batch, batch_idx))
        self.spent_s += time.perf_counter() - began
        return fields

    def _hear(self, records: list[GateRecord]) -> None:
        self._comparison.require_agreement(records)
        self.num_compared += 1
        if not self._is_called:
            return
        self._each("hear", records)

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
        self._each("before_backward", loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        self._each("after_backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Hands it on to the checks."""
        self._each("before_optimizer_step", optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hands it on to the checks, and their metrics to the loggers."""
        self._each("batch_end")
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

    def _each(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of the step, and adds to what the monitor has taken."""
        began = time.perf_counter()
        for call in self._hooks[hook]:
            call(*arguments)
        self.spent_s += time.perf_counter() - began

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
        self._hooks = {hook: [] for hook in _STEP_HOOKS}
        _compat.restore_step_hooks(self)

    def _detach(self) -> None:
        for check in self._active():
            with suppress(Exception):
                check.detach()


def _sample_ids(trainer: Any) -> list[Any] | None:
    """The ids of the samples in the present micro-batch, where our data module delivered it."""
    delivered = getattr(getattr(trainer, "datamodule", None), "delivered", None)
    return None if delivered is None else list(delivered.ids.tolist())


# -- the monitor's own cost --------------------------------------------------------------------------------------------

_KEPT = 32  # measurements of a look, and lengths of steps
_SETTLED = 20  # steps, before their length is known
_PARTS = {"state": 0.5, "batch": 0.25, "everything": 0.25}


class _Measuring:
    """Notes the CPU time of this thread within it."""

    __slots__ = ("_began", "_scale", "_taken")

    def __init__(self, taken: deque[float], scale: int) -> None:
        self._taken = taken
        self._scale = scale

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._taken.append(self._scale * (time.thread_time() - self._began))


class Budget:
    """Tells how often the looks that may wait are due.

    Each rank measures what a look costs, in CPU time of its training thread, and how long a step takes. At a full
    comparison the ranks show each other these figures, and all of them plan with the largest cost and the shortest
    step. Until then, and without a share, every look is due whenever its check asks.

    Args:
        share: Of a step's time, for all looks together; None where nothing is left out.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._taken: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._began = 0.0
        self._agreed: dict[str, float] = {}
        self._factors: dict[tuple[str, float], int] = {}

    def begin_step(self) -> None:
        """A step begins; the time since the last call was that of a step."""
        now = time.perf_counter()
        if self._began:
            self._steps.append(now - self._began)
        self._began = now

    def measure(self, look: str, scale: int = 1) -> _Measuring:
        """Stands around a look.

        Args:
            look: ``"state"``, ``"batch"`` or ``"everything"``.
            scale: So many looks make the whole whose cost counts: the windows of the state.
        """
        return _Measuring(self._taken[look], scale)

    def figures(self) -> dict[str, float]:
        """What this rank has measured, in seconds; nothing as long as that is too little."""
        if len(self._steps) < _SETTLED:
            return {}
        taken = {look: statistics.median(values) for look, values in self._taken.items()}
        return {"step": statistics.median(self._steps), **taken}

    def agree(self, told: Sequence[Mapping[str, float]]) -> bool:
        """Plans with the figures of all ranks, the same on each of them; whether that could be done."""
        if self._share is None or not all(told):
            return False
        self._factors.clear()
        looks = {name for figures in told for name in figures}
        self._agreed = {look: max(figures.get(look, 0.0) for figures in told) for look in looks}
        self._agreed["step"] = min(figures["step"] for figures in told)
        return True

    def exceeds(self, look: str, times: float = 1.0) -> int:
        """By what factor a look costs more than its part of the budget; at least 1.

        Args:
            look: As in ``measure``.
            times: The look is that much rarer, or smaller, already.
        """
        if self._share is None or look not in self._agreed:
            return 1
        found = self._factors.get((look, times))
        if found is None:
            allowed_s = self._share * _PARTS[look] * self._agreed["step"]
            found = self._factors[look, times] = max(1, math.ceil(self._agreed[look] / (times * allowed_s)))
        return found
