"""One check of the divergence monitor, the run as it sees it, and the callback that brings checks to the gate."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import xxhash
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, GateRecord, connect_over, part
from lightning_distplus.errors import DivergenceError, install_exit_codes, refuse_other_trainer
from lightning_distplus.events import EventLog, folder_of_run
from lightning_distplus.majority import disagreement, first_difference, is_equal
from lightning_distplus.timeouts import Phase, Timeouts, group_timeout
from lightning_distplus.trainer_gate import BatchGate, GateParticipant
from lightning_distplus.watchdog.verdict import Verdict, name_incident
from lightning_distplus.world import World

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)
_BLOCKING = frozenset(
    {"moment", "epoch", "global_step", "micro_batch", "last_batch", "gradient_sum"}
    | {"collective", "structure", "arguments", "end"}  # of two calls that do not belong together
)
"""The ranks stand at different points: to go on would be to hang."""
_STOCK_PATIENCE = group_timeout(Timeouts().deadline(Phase.SETUP))
_REMEDY = re.compile(r"do: |Nothing was exchanged\. ")


def digest(value: Any) -> int:
    """64 bits of anything whose ``repr`` is the same on all ranks."""
    return xxhash.xxh3_64_intdigest(repr(value).encode())


class MonitoredRun:
    """The run, as the checks see it: what they need to meet the other ranks, and to tell of a difference.

    Here control plane, gate, ledger and deadlines are those of our strategy.

    Args:
        trainer: Its model is built; the engine has not wrapped it.
        monitor: Whose checks see it.
    """

    is_stock = False
    """Whether the strategy is Lightning's: the monitor opens the gate, and compares what must be equal at the start."""
    gate: BatchGate
    """Where the ranks meet; it is there once the engine has wrapped the model."""

    def __init__(self, trainer: Any, monitor: GateMonitor) -> None:
        self.trainer: Trainer = trainer
        self.module: LightningModule = trainer.lightning_module
        self.strategy: Any = trainer.strategy
        self.plane, self.folder = self.connect()
        self.rank = self.plane.world.rank
        self.on_divergence, self.skips, self.budget = monitor.on_divergence, monitor.skips, Budget(monitor.budget)
        self.parameters_every_n_steps = monitor.parameters_every_n_steps
        self.monitor = monitor
        self._warned: set[str] = set()

    @staticmethod
    def of(trainer: Trainer, monitor: GateMonitor) -> MonitoredRun:
        """With the means of our strategy where it is one."""
        return (MonitoredRun if hasattr(trainer.strategy, "phases") else _StockRun)(trainer, monitor)

    def connect(self) -> tuple[ControlPlane, Path]:
        """The control plane, and the folder of the artefacts."""
        return self.strategy.plane, self.strategy.home

    def find_gate(self) -> BatchGate:
        """The gate of this run; the strategy is set up."""
        return cast("BatchGate", self.strategy.gate)

    @property
    def is_attached(self) -> bool:
        """Whether the engine has wrapped the model, and the checks have hold of it."""
        return hasattr(self, "gate")

    @property
    def patience(self) -> timedelta:
        """How long a rank waits for its peers now."""
        return cast("timedelta", self.strategy.phases.patience)

    def note(self, kind: str, **fields: Any) -> None:
        """Writes one event into the ledger."""
        self.strategy.note(kind, **fields)

    def step_parts(self) -> Mapping[str, float]:
        """Seconds that this rank has spent in each part of its steps, added up; empty where nobody measures them."""
        return cast("Mapping[str, float]", self.strategy.times.parts())

    def report(self, error: BaseException) -> None:
        """Tells the peers of an error, unless the strategy does; never raises."""

    def close(self) -> None:
        """Puts everything back."""

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, in rank order; plain JSON values, at most 1 MiB."""
        return self.plane.gather_json(f"divergence/{name}", value, self.patience)

    def sample_ids(self) -> list[Any] | None:
        """The ids of the samples in the present micro-batch, where our data module delivered it."""
        delivered = getattr(getattr(self.trainer, "datamodule", None), "delivered", None)
        return None if delivered is None else list(delivered.ids.tolist())

    def differ(self, field: str, values: Mapping[int, Any], *, parameter: str | None = None, **how: Any) -> None:
        """Tells of a ``disagreement`` with these arguments."""
        self.tell(disagreement(field, values, **how), parameter)

    def tell(self, error: DivergenceError, parameter: str | None = None) -> None:
        """Writes the evidence down; every rank that has found the same difference calls this.

        Raises:
            DivergenceError: The one given, unless the user only wants to be warned, and the run can go on.
        """
        self.monitor.num_divergences += 1
        if self.on_divergence != "warn" or error.field in _BLOCKING:
            self._write(error, parameter, ends_run=True)
            error.has_verdict = True
            raise error
        if error.field not in self._warned:
            self._warned.add(error.field)
            self._write(error, parameter, ends_run=False)
            log.warning("rank %d: %s", self.rank, error)
        else:
            self.note("divergence", field=error.field, ranks=error.ranks, global_step=self.trainer.global_step)

    def _write(self, error: DivergenceError, parameter: str | None, *, ends_run: bool) -> None:
        """One line in each ledger, and one verdict per host; never raises."""
        world, step, message = self.plane.world, self.trainer.global_step, str(error)
        self.note("divergence", field=error.field, ranks=error.ranks, values=error.values, global_step=step)
        if world.local_rank != 0 and set(error.values) != {self.rank}:  # where it alone knows, it writes
            return
        plain = (int, float, str, bool, list, dict, type(None))
        values = {str(rank): one if isinstance(one, plain) else str(one) for rank, one in error.values.items()}
        verdict = Verdict(
            incident=f"{name_incident('divergence', self.plane.run_id)}-step{step}", run_id=self.plane.run_id,
            kind="divergence", culprits=error.ranks, waiting=sorted(set(world.ranks) - set(error.ranks)),
            phase="step", operation=error.field, location=None, global_step=step, elapsed_s=0.0,
            cause=message.splitlines()[0], remedy=_REMEDY.split(message)[-1].strip(), field=error.field, values=values,
            parameter=parameter, ends_run=ends_run,
        )  # fmt: skip
        with suppress(OSError):
            verdict.write(self.folder, world.host)


class _StockRun(MonitoredRun):
    """On a strategy of Lightning's the store of the default process group carries the messages."""

    is_stock = True
    _gate: BatchGate | None = None
    _has_failed = False

    def connect(self) -> tuple[ControlPlane, Path]:
        plane = connect_over(World.of(self.trainer), _compat.default_store(), self.patience)
        plane.listen()
        folder = folder_of_run(self.trainer.default_root_dir)
        self._events = EventLog(folder, plane.world.rank, run_id=plane.run_id)
        return plane, folder

    def find_gate(self) -> BatchGate:
        self._gate = BatchGate(self.trainer, self.plane, waits=self)
        return self._gate

    @property
    def patience(self) -> timedelta:
        return _STOCK_PATIENCE

    def note(self, kind: str, **fields: Any) -> None:
        self._events.write(kind, **fields)

    def step_parts(self) -> Mapping[str, float]:
        return {}

    def report(self, error: BaseException) -> None:
        self._has_failed = True
        if not isinstance(error, SIGTERMException):
            self.plane.report_failure(error)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        part(self.plane, self.patience, has_failed=self._has_failed)
        self._events.close()


class Check:
    """One check of the monitor. A hook does nothing unless it is overridden; all ranks call it at the same point.

    A check that finds a difference ends the run by ``MonitoredRun.tell``, on all ranks that know of it.
    """

    run: MonitoredRun
    """It is there from ``before_engine`` on."""

    def needs(self, hook: str) -> bool:
        """Whether it has a hook of the step, such as ``"say"``, in this run; asked once it is attached."""
        return getattr(type(self), hook) is not getattr(Check, hook)

    def before_engine(self) -> None:
        """The model is built; the engine has not wrapped it."""

    def attach(self) -> None:
        """The engine has wrapped the model (``trainer.strategy.model``); the checkpoint is not loaded yet."""

    def start(self) -> None:
        """Training starts: everything is restored, nothing has run."""

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The fields of the gate's record that this check fills for the step that begins with this micro-batch."""
        return {}

    def explain(self, field: str) -> dict[str, Any]:
        """What stands behind a field that differs: names to plain values, compared name by name on all ranks."""
        return {}

    def excuses(self, field: str) -> bool:
        """Whether what differs in a field is none after all; asked on all ranks, the same answer on each."""
        return False

    def forget(self) -> None:
        """Forgets what it has seen while somebody, such as ``LearningRateFinder``, trained without the callbacks."""

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

    def train_batch_end(self) -> None:
        """``on_train_batch_end``."""

    def before_save(self) -> None:
        """A checkpoint is about to be collected; all ranks have just met."""

    def metrics(self) -> dict[str, float]:
        """What goes to the logger, as ``distplus/...``."""
        return {}

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
        self.in_a_row = self.total = 0
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
        """A step is made, unless another check has left it out."""
        if not self.is_skipping:
            self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts of the run that is continued."""
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])


# -- the monitor's own cost --------------------------------------------------------------------------------------------

_KEPT = 32  # measurements of a look, and lengths of steps
_SETTLED = 20  # steps, before their length is known
_PARTS = {"state": 0.5, "batch": 0.25, "everything": 0.25}


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

    def begin_step(self) -> None:
        """A step begins; the time since the last call was that of a step."""
        now = time.perf_counter()
        if self._began:
            self._steps.append(now - self._began)
        self._began = now

    def took(self, look: str, began: float, scale: int = 1) -> None:
        """A look has ended.

        Args:
            look: A key of ``_PARTS``.
            began: ``time.thread_time()`` before it.
            scale: So many looks make the whole whose cost counts: the windows of the state.
        """
        self._taken[look].append(scale * (time.thread_time() - began))

    def figures(self) -> dict[str, float]:
        """What this rank has measured, in seconds; nothing as long as that is too little."""
        if len(self._steps) < _SETTLED:
            return {}
        taken = {look: statistics.median(values) for look, values in self._taken.items()}
        return {"step": statistics.median(self._steps), **taken}

    def agree(self, told: Sequence[Mapping[str, float]]) -> None:
        """Plans with the figures of all ranks, the same on each of them, once all have some."""
        if all(told):
            looks = {name for figures in told for name in figures}
            self._agreed = {look: max(figures.get(look, 0.0) for figures in told) for look in looks}
            self._agreed["step"] = min(figures["step"] for figures in told)

    def exceeds(self, look: str, times: float = 1.0) -> int:
        """By what factor a look costs more than its part of the budget; at least 1.

        Args:
            look: As in ``took``.
            times: The look is that much rarer, or smaller, already.
        """
        if self._share is None or look not in self._agreed:
            return 1
        allowed_s = self._share * _PARTS[look] * self._agreed["step"]
        return max(1, math.ceil(self._agreed[look] / (times * allowed_s)))


# -- the callback ------------------------------------------------------------------------------------------------------

OnDivergence = Literal["raise", "warn", "skip"]
# The hooks of a step that a check may have; Lightning's have the same names, after "on_".
_CHECK_HOOKS = ("say", "hear", "before_backward", "after_backward", "before_optimizer_step", "train_batch_end")
# The fields of a record that must agree, in this order: a field that differs is often the cause of those after it.
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


def _hook_of_step(name: str) -> Any:
    def hook(self: GateMonitor, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Hands it on to the checks that have this hook."""
        self._each(name, *arguments)

    return hook


def _hook_of_run(name: str) -> Any:
    def hook(self: GateMonitor, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hands it on to the checks."""
        if not trainer.sanity_checking:
            self.hand_on(name)

    return hook


class GateMonitor(Callback, GateParticipant):
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
        self._run: MonitoredRun | None = None
        self._hooks: dict[str, list[Callable[..., Any]]] = {hook: [] for hook in _CHECK_HOOKS}
        self._was_left_out = False
        self.spent_s = 0.0
        """What its hooks have taken of the steps so far, on the training thread."""
        self.num_compared = 0
        """Steps in which the ranks were compared."""
        self.num_divergences = 0

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
        self._run = MonitoredRun.of(trainer, self)
        self.num_divergences = 0
        _compat.wrap_method(trainer.strategy, "setup", self._set_up, "the ranks are not compared")

    def _set_up(self, inner: Callable[[Trainer], None], trainer: Trainer) -> None:
        """In the place of the strategy's ``setup``, once."""
        assert self._run is not None
        _compat.restore_method(trainer.strategy, "setup")
        for check in self.checks:
            check.run = self._run
            check.before_engine()
        inner(trainer)
        self._attach(self._run)

    def _attach(self, run: MonitoredRun) -> None:
        run.gate = run.find_gate()
        run.gate.add(self)
        for check in self.checks:
            check.attach()
        # Bound are those hooks of a step that its checks have: most have one or two.
        self._hooks = {hook: [getattr(one, hook) for one in self.checks if one.needs(hook)] for hook in _CHECK_HOOKS}
        callbacks: list[Any] = run.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)
        callbacks.insert(0, self)
        _compat.skip_step_hooks(self)
        _compat.wrap_method(run.trainer.strategy, "on_train_start", self._start, "ranks are not compared at the start")

    def _start(self, inner: Callable[[], None]) -> None:
        """The first comparison, behind that of a Resilient strategy: everything is restored, nothing has run."""
        inner()
        run = self._run
        if run is None or not self._is_called(run):
            return
        trainer: Any = run.trainer
        self.hand_on("start")
        # Lightning need not call what would do nothing; what a subclass has is its own.
        idle = [f"on_{hook}" for hook in _CHECK_HOOKS if not (self._hooks[hook] or hook == "train_batch_end")]
        idle += [] if self._hooks["train_batch_end"] or trainer.loggers else ["on_train_batch_end"]
        own = [name for name in idle if getattr(type(self), name, None) is getattr(GateMonitor, name, None)]
        _compat.skip_step_hooks(self, *own)
        if run.is_stock:
            run.gate.open()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _is_called(self, run: MonitoredRun) -> bool:
        """Whether its hooks are: ``LearningRateFinder`` trains before a run, or inside it, without its callbacks."""
        return self in run.trainer.callbacks  # type: ignore[attr-defined]

    def fields(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """What its checks say of a step."""
        run = self._run
        if run is None or not self._is_called(run):
            self._was_left_out = True
            return {}
        began = time.perf_counter()
        if self._was_left_out:
            self._was_left_out = False
            self.hand_on("forget")
        run.budget.begin_step()
        self.skips.is_skipping = False
        fields: dict[str, Any] = {}
        for say in self._hooks["say"]:
            fields.update(say(batch, batch_idx))
        self.spent_s += time.perf_counter() - began
        return fields

    def on_records(self, records: list[GateRecord]) -> None:
        """Names the first field in which the ranks differ; its checks hear what all have said."""
        run = self._run
        assert run is not None
        if len(set(map(_agreeing, records))) != 1:
            self._name_difference(run, records)
        self.num_compared += 1
        if self._is_called(run):
            self._each("hear", records)

    def on_disagreement(self, error: DivergenceError) -> None:
        """Writes the evidence down, and raises the error with it."""
        assert self._run is not None
        self._run.tell(error)

    def _name_difference(self, run: MonitoredRun, records: Sequence[GateRecord]) -> None:
        """Field by field, the same on all ranks; of a fingerprint, all of them lay open what is behind it."""
        for field, remedy in _REMEDIES.items():
            values = {rank: getattr(record, field) for rank, record in enumerate(records)}
            if not is_equal(values.values()) and not any(check.excuses(field) for check in self.checks):
                behind = {name: value for check in self.checks for name, value in check.explain(field).items()}
                name, found = first_difference(run.gather(f"behind {field}", behind)) or (field, values)
                where = f"before step {run.trainer.global_step}; nothing was averaged"
                run.differ(name, found, where=where, remedy=remedy)

    def _each(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of the step, and adds to what the monitor has taken."""
        began = time.perf_counter()
        for call in self._hooks[hook]:
            call(*arguments)
        self.spent_s += time.perf_counter() - began

    on_before_backward = _hook_of_step("before_backward")
    on_after_backward = _hook_of_step("after_backward")
    on_before_optimizer_step = _hook_of_step("before_optimizer_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hands it on to the checks, and their metrics to the loggers."""
        self._each("train_batch_end")
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._run is not None and every and (batch_idx + 1) % every == 0:
            metrics = self.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def metrics(self) -> dict[str, float]:
        """What goes to the logger, as ``distplus/...``."""
        return {f"distplus/{name}": value for check in self.checks for name, value in check.metrics().items()}

    # -- between steps -----------------------------------------------------------------------------------------------

    def hand_on(self, hook: str) -> None:
        """Calls a hook of all checks, while the run is connected."""
        if self._run is not None and self._run.is_attached:
            for check in self.checks:
                getattr(check, hook)()

    on_train_epoch_start = _hook_of_run("epoch_start")
    on_train_epoch_end = _hook_of_run("epoch_end")
    on_validation_start = _hook_of_run("validation_start")
    on_validation_end = _hook_of_run("validation_end")
    on_train_end = _hook_of_run("train_end")

    # -- ending ------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tells the peers, where the strategy does not, and steps aside; never raises."""
        if self._run is not None and self._run.is_attached:
            self._run.gate.is_open = False
            self._run.report(exception)
            self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts everything back; never raises."""
        self._detach()
        if self._run is not None:
            _compat.restore_method(trainer.strategy, "setup")
            _compat.restore_method(trainer.strategy, "on_train_start")
            self._run.close()
        self._run = None
        self._hooks = {hook: [] for hook in _CHECK_HOOKS}
        _compat.restore_step_hooks(self)

    def _detach(self) -> None:
        if self._run is not None and self._run.is_attached:
            for check in self.checks:
                with suppress(Exception):
                    check.detach()
