"""The mixin of all Resilient strategies: one rendezvous, a deadline per phase, a gate per step, committed saves."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat, env
from lightning_distplus.control import ControlPlane, GateRecord, Point, Points, Wish, end_together, part
from lightning_distplus.data.dataloader import LoaderResume
from lightning_distplus.divergence import RankDivergenceMonitor
from lightning_distplus.errors import (
    OTHER_LIGHTNING,
    DistplusError,
    ExitCode,
    PeerError,
    Preempted,
    install_exit_codes,
    message_of,
    require_choice,
    require_type,
)
from lightning_distplus.events import LEDGER_VERSION, EventLog, folder_of_run
from lightning_distplus.preemption import PreemptionHandler, checkpoint_folder
from lightning_distplus.process import age_of_process, introduce_starter
from lightning_distplus.report import after_verdict, leave_page
from lightning_distplus.report.health import RunHealth
from lightning_distplus.run_access import Phases
from lightning_distplus.strategies import defaults, start
from lightning_distplus.strategies.collectives import Collectives, cause_of, is_of_a_collective, point_of
from lightning_distplus.strategies.loading import LoadHooks, Search, Verification, choose_checkpoint, last_ones_aside
from lightning_distplus.strategies.marking import MarkingProfiler, ProtectionCosts, StepTimes, last_batch, progress_of
from lightning_distplus.strategies.saving import OnSaveFailure, SaveHooks, Writes
from lightning_distplus.timeouts import AUTO, Calibration, Duration, OnHang, Phase, Timeouts, resolve_timeouts
from lightning_distplus.trainer_gate import BatchGate, GateParticipant, Moment
from lightning_distplus.watchdog import Marks, PlaceOfFailure, Transfer, Watchdog
from lightning_distplus.watchdog.progress import Progress
from lightning_distplus.watchdog.stacks import line_of_the_caller
from lightning_distplus.watchdog.watchdog import WatchedRun, show_after_cells

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Base

    from lightning_distplus.preflight.host import RunLock
else:
    _Base = object

log = logging.getLogger(__name__)
_LATE, _SAVED = int(Wish.LATE), int(Wish.SAVED)  # plain numbers, which are compared in every step

# -- the first word of a failure ---------------------------------------------------------------------------------------


class FirstWord(Callback):
    """Tells all ranks what happened on this one, before any other callback can block in a collective.

    The strategy hears of an exception last, after every callback: a ``ModelCheckpoint(save_on_exception=True)`` would
    by then stand in a barrier that the others never reach, and the error would never be seen.
    """

    def __init__(self, strategy: ResilientStrategy) -> None:
        self._strategy = strategy
        _compat.skip_step_hooks(self)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Before any callback can wait for ranks that still train."""
        self._strategy.leave_epoch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on a rank may work alone: its deadline is that of the end of a run."""
        self._strategy.phases.enter(Phase.TEARDOWN)

    on_test_end = on_predict_end = on_train_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """As at the end of training, where validation is the whole run."""
        if trainer.state.fn == "validate":
            self.on_train_end(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has torn down its handlers of signals, and with them that by which a stack can be asked for."""
        if self._strategy.watchdog is not None:  # the hooks that follow are watched as well
            self._strategy.watchdog.rearm()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """As at the end of a fit."""
        self.on_fit_end(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Reports the error, and keeps the callbacks that follow from saving without their peers; never raises."""
        if isinstance(exception, SIGTERMException):
            return  # agreed at the gate: the others raise it as well
        if isinstance(exception, Preempted):
            self._end_saves(trainer, logging.INFO, "the run is stopping, and its checkpoint is committed")
            return
        cause, watchdog = None, self._strategy.watchdog
        with suppress(BaseException):
            # A collective that is called through the strategy raises the cause itself; one that a callback or a model
            # calls through torch.distributed gets here.
            cause = cause_of(self._strategy.plane, exception)
        if cause is not None:
            exception.__cause__ = exception.__cause__ or cause
        elif watchdog is not None and not isinstance(exception, DistplusError) and is_of_a_collective(exception):
            watchdog.judge_time_out(exception)  # the rank that waited is not the first cause
        error = self._strategy.plane.report_failure(cause or exception) or exception
        failed = getattr(error, "rank", self._strategy.global_rank)
        self._end_saves(trainer, logging.WARNING, f"rank {failed} has failed, and a save needs all ranks")

    def _end_saves(self, trainer: Any, level: int, why: str) -> None:
        rank = self._strategy.global_rank
        trainer.save_checkpoint = lambda filepath, *_arguments, **_named: log.log(
            level, "rank %d: %s is not saved: %s", rank, filepath, why
        )


# -- timeout="auto" ----------------------------------------------------------------------------------------------------


class _AtGate(GateParticipant):
    """The strategy's part in the gate of each step."""

    def __init__(self, strategy: ResilientStrategy) -> None:
        self._strategy = strategy

    def wish(self) -> int:
        """Says that a save in the background has ended, and that a deadline is near, which should grow."""
        calibration = self._strategy.measured.calibration
        is_late = calibration is not None and calibration.is_late
        return (_SAVED if self._strategy.saves.has_ended_behind else 0) | (_LATE if is_late else 0)

    def on_wait(self, moment: Moment) -> None:
        """Marks where the training thread is."""
        self._strategy.marks.set(moment.mark)

    def on_met(self, records: list[GateRecord]) -> None:
        """A good moment to shrink the deadline to that of a step."""
        self._strategy.pass_gate(records)


class _AsWatched(WatchedRun):
    """The run, as the watchdog asks it."""

    def __init__(self, strategy: ResilientStrategy) -> None:
        self._strategy = strategy

    @property
    def deadline(self) -> timedelta | None:
        return self._strategy.phases.deadline

    @property
    def last_deadline(self) -> timedelta | None:
        return self._strategy.phases.last_deadline

    def progress(self) -> Progress | None:
        module = self._strategy.lightning_module
        return self._strategy.transfer.progress() or progress_of(getattr(module, "_trainer", None))

    def on_verdict_shown(self, path: Path) -> None:
        after_verdict(path, self._strategy.on_verdict)


class MeasuredDeadlines:
    """Notes how long each phase takes, and puts the deadlines that follow in force; without a calibration nothing."""

    def __init__(self, strategy: ResilientStrategy, calibration: Calibration | None) -> None:
        self._strategy = strategy
        self.calibration = calibration
        self._gate_passed_at: float | None = None

    def note(self, phase: Phase, began_at: float) -> None:
        """Notes how long a phase has taken since a moment of the monotonic clock."""
        if self.calibration is not None:
            self.calibration.note(phase, time.monotonic() - began_at)

    def note_left(self, phase: Phase, seconds: float) -> None:
        """A phase has ended: notes those that occur once. All others are measured between two of their own moments."""
        if self.calibration is not None and phase in (Phase.SETUP, Phase.RESUME):
            self.calibration.note(phase, seconds)

    def review(self, records: Sequence[GateRecord]) -> None:
        """All ranks have just met at a gate: notes how long the last step took, and reviews the deadlines when due."""
        last, self._gate_passed_at = self._gate_passed_at, time.monotonic()
        if self.calibration is None:
            return
        strategy = self._strategy
        if last is not None and strategy.phases.current is Phase.STEP:
            self.note(Phase.STEP, last)
        if not self.calibration.is_due(somebody_is_late=any(record.wishes & _LATE for record in records)):
            return
        ranks = strategy.plane.gather_json("calibration", self.calibration.take(), strategy.phases.patience)
        if self.calibration.settle(ranks):
            self._put_in_force(self.calibration)
            log.info("rank %d: %s", strategy.global_rank, self.calibration.describe())

    def adopt(self, found: Mapping[str, float]) -> None:
        """Takes over the deadlines of the checkpoint from which this run resumes. All ranks have just met."""
        if self.calibration is None:
            return
        if self._strategy.copy_to is not None:  # what was quick from the folder may have to be fetched
            found = {name: seconds for name, seconds in found.items() if name != Phase.RESUME.value}
        if found and found != self.calibration.deadlines_s:
            self.calibration.adopt(found)
            self._put_in_force(self.calibration)

    def _put_in_force(self, calibration: Calibration) -> None:
        self._strategy.timeouts = calibration.timeouts()
        self._strategy.phases.replace(self._strategy.timeouts)
        self._strategy.note("calibrated", **calibration.to_event())


# -- the strategy ------------------------------------------------------------------------------------------------------

_DEFAULT_TIMEOUTS = Timeouts()
_START_OF_TRAINING = Point(operation="the start of training")


class ResilientStrategy(_Base):
    """The mixin of all Resilient strategies; it stands before the Lightning strategy in the bases.

    Args:
        timeout: One duration (sets the step's deadline), a deadline for each phase, ``"auto"`` (measured while it
            runs), or None (torch's own time-outs).
        preflight: Whether the launch is checked before the first process group is formed. A mapping switches single
            checks off, or makes their errors warnings: ``{"loopback": "off", "processes": "warn"}``.
        on_hang: ``"abort"`` ends a run that hangs; ``"report"`` only says so, and the groups wait for a day.
        on_save_failure: ``"continue"``: a save that fails while a fit runs is logged on all ranks, training goes on and
            the next save is the retry; ``"raise"`` ends the run.
        verify: What is checked of a checkpoint that is loaded: ``"full"`` reads every byte, and compares every tensor
            in memory with its fingerprint; ``"size"`` compares sizes, ``"off"`` looks at manifest and marker only.
        async_save: Whether a fit goes on as soon as a copy of the state is made, which a thread writes and commits. One
            save is in flight at most; the next one, the end of the fit and a preemption wait for it.
        monitor: Whether a fit that has no ``RankDivergenceMonitor`` gets one; or the one that it gets. One rank has
            nothing to compare, and a Trainer with ``barebones=True`` gets none by default.
        preemption: Whether a fit that has no ``PreemptionHandler`` gets one; or the one that it gets. Without a handler
            a SIGTERM ends all ranks at the same step with exit code 143, and nothing is saved.
        copy_to: A URL to which rank 0 copies what is committed, in a thread, the newest three; ``--ckpt_path auto``
            fetches from there what the folder of the checkpoints has lost. None: nobody does.
        data: ``"exact"``: a run that is resumed inside an epoch goes on in the training ``DataLoader`` at the batch at
            which the checkpoint was saved; ``"as_is"`` leaves loaders to Lightning, which begins the epoch anew.
        seed_samples: With ``data="exact"``: whether python's, numpy's and torch's generators are seeded for each sample
            from its place in the order, so that a random augmentation is exact too, with any number of workers.
        on_verdict: A URL that gets the JSON of each verdict, or a command that gets it as its input.
        log_figures: Whether the Trainer's loggers get the figures of the run, as ``distplus/...`` and at their own
            cadence, and its progress bar the age of the last checkpoint and a slow rank.
        metrics_port: The port on which rank 0 serves these figures to Prometheus; None: nobody does.
        **kwargs: Everything that the Lightning strategy takes.
    """

    wrapper_class: ClassVar[type | None] = None
    """The class to which the parent passes arguments that it does not know."""
    search: Search | None = None
    """Where the ranks look further, together, when the checkpoint that they were given is damaged."""

    def __init__(
        self,
        *,
        timeout: Timeouts | Duration | None = _DEFAULT_TIMEOUTS,
        preflight: bool | dict[str, Literal["off", "warn", False]] = True,
        on_hang: OnHang = "abort",
        on_save_failure: OnSaveFailure = "continue",
        verify: Verification = "full",
        async_save: bool = False,
        copy_to: str | None = None,
        monitor: RankDivergenceMonitor | bool = True,
        preemption: PreemptionHandler | bool = True,
        data: Literal["exact", "as_is"] = "exact",
        seed_samples: bool = True,
        on_verdict: str | None = None,
        log_figures: bool = True,
        metrics_port: int | None = None,
        **kwargs: Any,
    ) -> None:
        require_choice("on_hang", on_hang, OnHang)
        require_choice("verify", verify, Verification)
        require_type("async_save", async_save, bool)
        require_type("copy_to", copy_to, str, or_none=True)
        defaults.require_callback("monitor", monitor, RankDivergenceMonitor)
        defaults.require_callback("preemption", preemption, PreemptionHandler)
        require_choice("data", data, Literal["exact", "as_is"])
        require_type("seed_samples", seed_samples, bool)
        require_type("on_verdict", on_verdict, str, or_none=True)
        require_type("log_figures", log_figures, bool)
        require_type("metrics_port", metrics_port, int, or_none=True)
        self.timeouts = resolve_timeouts(_DEFAULT_TIMEOUTS if timeout == AUTO else timeout)
        self.preflight = start.read_preflight(preflight)
        self.on_hang: OnHang = on_hang
        self.verify: Verification = verify
        self.async_save = async_save
        self.copy_to = copy_to
        self.monitor = monitor
        self.preemption = preemption
        self.data = data
        self.seed_samples = seed_samples
        self.on_verdict = on_verdict or env.DISTPLUS_ON_VERDICT.get()
        self.log_figures = log_figures
        self.metrics_port = env.DISTPLUS_METRICS_PORT.integer() if metrics_port is None else metrics_port
        self.health = RunHealth()
        self.measured = MeasuredDeadlines(self, Calibration() if timeout == AUTO else None)
        self.phases = Phases(self.timeouts, on_hang, self.measured.note_left)
        self.marks = Marks(phase=self._phase)  # no lambda: a strategy may be pickled
        self.transfer = Transfer()
        self.times = StepTimes(self.note)
        self.costs = ProtectionCosts(self.note, self.marks)
        self.collectives = Collectives(self.marks)
        self.loads = LoadHooks(self)
        self.saves = SaveHooks(self, on_save_failure)
        self._plane: ControlPlane | None = None
        self.watchdog: Watchdog | None = None
        self._gate: BatchGate | None = None
        self._events: EventLog | None = None
        self.auto_folder: str | None = None
        """Where ``ckpt_path="auto"`` looks, from the first run on: Lightning then names a folder for this process."""
        self._run_lock: RunLock | None = None
        self._brought: list[Callback] = []
        self._loaders: LoaderResume | None = None
        self._validation_began_at = self._saved_before_s = self._began_at = 0.0
        self._first_step = 0
        self._has_failed = self._is_torn_down = self._ends_in_teardown = False
        """The last: whether no hook follows the teardown, as the run was interrupted or its last hook has returned."""
        start.refuse_unknown_arguments(type(self), kwargs)
        super().__init__(**kwargs)
        # The parent's own time-out only matters where it forms a group itself, which it never does under us.

    def __repr__(self) -> str:
        """The usual text; ``pytorch_lightning`` asks for it when its Trainer refuses what is no strategy of its own.

        Raises:
            TypeError: Says so plainly, in the place of that Trainer.
        """
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("pytorch_lightning."):
            raise TypeError(OTHER_LIGHTNING)
        return super().__repr__()

    @property
    def plane(self) -> ControlPlane:
        """The control plane; it is there from ``setup_environment`` on."""
        assert self._plane is not None, "the control plane is connected in setup_environment"
        return self._plane

    @property
    def gate(self) -> BatchGate:
        """The gate of each step; it is there from ``setup`` on, in a fit."""
        assert self._gate is not None, "the gate is made in setup, for a fit"
        return self._gate

    @property
    def num_failed_saves(self) -> int:
        """How many saves have failed in the fit that runs, or ran last."""
        return self.saves.failing.num_failed

    @property
    def home(self) -> Path:
        """Where the artefacts of this run go."""
        assert self.lightning_module is not None
        return folder_of_run(self.lightning_module.trainer.default_root_dir)

    def _phase(self) -> str:
        return self.phases.current.value

    def note(self, kind: str, **fields: Any) -> None:
        """Writes one event into the ledger, once it is open."""
        if self._events is not None:
            self._events.write(kind, **fields)
            self.health.take(kind, fields)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Checks the launch when the Trainer is made; some parents' launchers check too, and end with another code."""
        install_exit_codes()
        start.check_launch(self, tells_warnings=False)
        _compat.find_more_last_checkpoints(last_ones_aside)  # before the Trainer looks for ckpt_path="last"
        _compat.choose_checkpoints(choose_checkpoint)
        super()._configure_launcher()
        _compat.before_scripts_of_ranks(self.launcher, introduce_starter)
        _compat.handle_errors_of_forks(
            self.launcher, lambda trainer: show_after_cells(folder_of_run(trainer.default_root_dir))
        )

    def setup_environment(self) -> None:
        """Checks the launch, meets all ranks, forms the default process group on our store; then the parent's part."""
        install_exit_codes()
        self._has_failed = self._ends_in_teardown = self._is_torn_down = False
        self._began_at = time.time()
        start.check_launch(self)
        self.set_world_ranks()
        defaults.show_log(is_global_zero=self.is_global_zero)
        self._join(start.meet(self))
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        start.form_default_group(self)
        install_exit_codes()  # torch has just chained a hook of its own
        with _compat.default_group_timeout(self.phases.group_timeout):
            super().setup_environment()
        self.phases.apply()
        if self.lightning_module is not None:
            self._meet_trainer(self.lightning_module.trainer)

    def _meet_trainer(self, trainer: Any) -> None:
        """Puts in what has to be there before the run prepares its data and looks for its checkpoint."""
        barrier = functools.partial(start.preparation_barrier, self.plane, self.phases, self.marks)
        _compat.replace_preparation_barrier(trainer, barrier)
        _compat.agree_on_resume(trainer, self.loads.agree_on_resume)
        if trainer.state.fn == "fit":
            self._brought = defaults.bring_callbacks(self, trainer)
            self._loaders = next((one for one in self._brought if isinstance(one, LoaderResume)), None)

    def _join(self, plane: ControlPlane) -> None:
        """All ranks have met, before any process group: from here on they are watched, and heard of."""
        self._plane = self.collectives.plane = plane
        plane.listen()
        self.marks.forget()
        plane.locator = PlaceOfFailure(self.marks)
        if plane.is_attended:
            self.phases.expect_people()
        self._open_ledger()
        self._start_watchdog(plane)
        self.saves.begin(plane)
        if self.lightning_module is not None:
            start.check_host(self, self.lightning_module.trainer)
        if self.watchdog is not None:
            points = Points(plane, waits=self.phases, locate=line_of_the_caller)
            points.begin()
            self.watchdog.meet_peers(points)
            self.collectives.points = points

    def process_dataloader(self, dataloader: object) -> object:
        """The parent's part; a training loader then resumes exactly."""
        processed = super().process_dataloader(dataloader)
        return processed if self._loaders is None else self._loaders.take(processed)

    def setup(self, trainer: Trainer) -> None:
        """The parent's set-up; every process group that it makes gets the phase's deadline."""
        self._put_into(trainer)
        self._run_lock = start.check_folder(self, trainer)
        start.check_agreement(self, trainer)
        if trainer.state.fn == "fit":
            self._gate = BatchGate(trainer, self.plane, waits=self.phases)
            self._gate.add(_AtGate(self))
        with _compat.default_group_timeout(self.phases.group_timeout):
            super().setup(trainer)
        self.phases.apply()

    def _put_into(self, trainer: Any) -> None:
        """Puts in the profiler that sets marks, the callback that speaks first, and committed links and saves."""
        trainer.profiler = MarkingProfiler(trainer.profiler, self.marks, self.times, self._on_last_hook)
        trainer.callbacks.insert(0, FirstWord(self))
        for callback in trainer.checkpoint_callbacks:
            _compat.replace_checkpoint_link(callback, self.saves.link)
        trainer.save_checkpoint = self.saves.announced(trainer.save_checkpoint)

    def _start_watchdog(self, plane: ControlPlane) -> None:
        if self.world_size == 1 or self.watchdog is not None:
            return
        self.watchdog = Watchdog(
            plane,
            self.marks,
            _AsWatched(self),
            report_after=(self.timeouts or _DEFAULT_TIMEOUTS).report_after,
            ends_run=self.on_hang == "abort",
            folder=self.home,
        )
        self.watchdog.start()

    def _open_ledger(self) -> None:
        """Before the parents load a checkpoint, which some of them do ahead of ``setup``."""
        assert self.lightning_module is not None
        if self._events is not None:
            self._events.close()  # an event that came behind the end of an earlier run has opened it again
        self.auto_folder = self.auto_folder or str(checkpoint_folder(self.lightning_module.trainer))
        self._events = EventLog(self.home, self.global_rank, attempt=self.plane.attempt, run_id=self.plane.run_id)
        if self.local_rank == 0:
            start.tell_launcher(self.home, self.on_verdict)
        self.note(
            "start",
            ledger=LEDGER_VERSION,
            began_at=round(time.time() - age_of_process(), 3),
            host=self.plane.world.host,
            pid=os.getpid(),
            clock_offset_s=start.clock_offset(self.plane, self.phases.patience_in(Phase.RENDEZVOUS)),
            function=self.lightning_module.trainer.state.fn,
            auto_folder=self.auto_folder,
            strategy=type(self).__name__,
            world_size=self.world_size,
            backend=self._get_process_group_backend(),
        )

    # -- running -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Puts this rank's random number generators back after a resume, and opens the gate."""
        super().on_train_start()
        assert self._gate is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self.collectives.together(lambda: _START_OF_TRAINING, lambda: start.check_data(self, trainer))
        if self.is_global_zero:
            log.info("%s", defaults.summary(self, trainer))
        self._first_step = trainer.global_step
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self.times.begin(trainer.global_step, defaults.batch_sizes(trainer) if self.is_global_zero else {})
        self.costs.begin(next((one for one in callbacks if isinstance(one, RankDivergenceMonitor)), None))
        self._gate.open()
        self.saves.failing.begin(trainer)
        self.loads.restore_rng()

    def pass_gate(self, records: list[GateRecord]) -> None:
        """All ranks have just met: a good moment to shrink the deadline to that of a step."""
        self.marks.global_step = records[0].global_step
        if records[0].wishes & _SAVED and all(record.wishes & _SAVED for record in records):
            self.saves.settle()
        self.measured.review(records)
        assert self._gate is not None
        began = time.perf_counter()
        self.times.pass_gate(records[0].global_step, self._gate.waited_s)
        if self.is_global_zero:
            self.health.pass_gate(records[0].global_step, records)
        self.costs.ledger_s += time.perf_counter() - began
        self.costs.pass_gate(self._gate.waited_s)
        first_step_done = records[0].global_step > self._first_step
        self.phases.enter_after_meeting(Phase.STEP if first_step_done else Phase.SETUP)

    def on_train_end(self) -> None:
        """The parent's part.

        Raises:
            SaveFailed: The last save of the run failed, and none has succeeded since.
        """
        super().on_train_end()
        assert self.lightning_module is not None
        self.times.write(self.lightning_module.trainer.global_step)
        self.costs.write()
        self.saves.settle()
        self.saves.failing.end()
        self.saves.failing.require_saved()

    def on_validation_start(self) -> None:
        """Enters the validation phase."""
        self._validation_began_at = time.monotonic()
        self._saved_before_s = self.times.within("checkpoint")
        self.phases.enter(Phase.VALIDATION)
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Notes how long the validation took."""
        super().on_validation_end()
        self.measured.note(Phase.VALIDATION, self._validation_began_at)
        saved_s = self.times.within("checkpoint") - self._saved_before_s  # by a callback, at the end of the validation
        self.times.add("validation", time.monotonic() - self._validation_began_at - saved_s)

    def on_test_start(self) -> None:
        """Enters the validation phase, as a prediction does."""
        self.phases.enter(Phase.VALIDATION)
        super().on_test_start()

    def on_predict_start(self) -> None:
        """Enters the validation phase."""
        self.phases.enter(Phase.VALIDATION)
        super().on_predict_start()

    # -- steps, and the engine's collectives inside them -------------------------------------------------------------

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part, marked with its batch."""
        output = self.collectives.step("training_step", super().training_step, *arguments, **named)
        if self.is_global_zero:
            self.times.take_loss(output)
        return output

    def backward(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part, marked with its batch."""
        return self.collectives.backward(super().backward, *arguments, **named)

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part: forward, backward and the step itself."""
        return self.collectives.optimizer_step(super().optimizer_step, *arguments, **named)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part, marked with its batch."""
        return self.collectives.step("validation_step", super().validation_step, *arguments, **named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part, marked with its batch."""
        return self.collectives.step("test_step", super().test_step, *arguments, **named)

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part, marked with its batch."""
        return self.collectives.step("predict_step", super().predict_step, *arguments, **named)

    # -- Lightning's collectives -------------------------------------------------------------------------------------

    def barrier(self, *arguments: Any, **named: Any) -> None:
        """The parent's part, once all ranks are at a barrier of this name."""
        parent = super().barrier
        name = str((arguments[0] if arguments else named.get("name")) or "")
        self.collectives.together(lambda: point_of("barrier", name=name), lambda: parent(*arguments, **named))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The parent's part, once all ranks broadcast from the same one; what they hold may differ."""
        parent, source = super().broadcast, f"from rank {src}"
        return self.collectives.together(lambda: point_of("broadcast", arguments=source), lambda: parent(obj, src))

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The parent's part, once all ranks reduce equal shapes and dtypes, and log the same key."""
        parent, caller = super().reduce, sys._getframe(1)
        return self.collectives.reduce(lambda: parent(tensor, group, reduce_op), tensor, group, reduce_op, caller)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # the parent's name
        """The parent's part, once all ranks decide in the same way."""
        parent, how = super().reduce_boolean_decision, "all" if all else "any"
        return self.collectives.together(
            lambda: point_of("reduce_boolean_decision", arguments=how), lambda: parent(decision, all)
        )

    @property
    def all_gather(self) -> Callable[..., Any]:
        """The parent's method, once all ranks gather equal trees."""
        return self.collectives.all_gather(super().all_gather, sys._getframe(1))

    # -- loads -------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what rank 0 has chosen, after verifying it.

        Raises:
            CheckpointCorrupt: A file is torn, missing or changed, or what is in memory then is not what was saved.
            CheckpointUnsafe: A pickle in it might run code, and ``weights_only`` is not False.
            CheckpointMismatch: It was saved by a strategy whose layout this one cannot read.
        """
        return self.loads.load(checkpoint_path, weights_only, super().load_checkpoint)

    def fitting_checkpoint(self, path: Path) -> Path:
        """What this run can read of a verified checkpoint; rank 0 is asked.

        Raises:
            CheckpointMismatch: It is of another number of ranks, and the parent cannot redistribute it.
        """
        return path

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The parent's part, whose result is compared with what was saved.

        Raises:
            CheckpointMismatch: The checkpoint is of another model.
            CheckpointCorrupt: The weights in memory are not those that were saved.
        """
        self.loads.load_model(checkpoint, strict, super().load_model_state_dict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The parent's part, whose result is compared with what was saved.

        Raises:
            CheckpointCorrupt: The moments in memory are not those that were saved.
        """
        self.loads.load_optimizers(checkpoint, super().load_optimizer_state_dict)

    # -- saves -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The parent's part. A save begins with it: callbacks then add their state, before anything is written."""
        self.marks.set("the model's state for a checkpoint")
        self.phases.enter(Phase.CHECKPOINT)
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves through the parent into a stage beside the target, and commits what all ranks have written.

        Raises:
            SaveFailed: A rank could not save, and ``on_save_failure`` is "raise" or no fit runs. What was there before
                is untouched.
        """
        self.saves.save(checkpoint, filepath, storage_options)

    def write_checkpoint(
        self, checkpoint: dict[str, Any], stage: str | Path, storage_options: Any, writes: Writes
    ) -> None:
        """The parent's own save, into a stage."""
        super().save_checkpoint(checkpoint, stage, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint together with its manifest; but not while saves fail, nor the last valid one."""
        if "://" in str(filepath):
            super().remove_checkpoint(filepath)
        else:
            self.saves.remove(filepath)

    def require_saved(self) -> None:
        """Waits for the save in the background, and raises where the last save has failed, whatever the policy.

        Raises:
            SaveFailed: None has succeeded since.
        """
        self.saves.settle()
        self.saves.failing.require_saved()

    # -- ending ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks what happened here; never raises."""
        super().on_exception(exception)
        self._ends_in_teardown = True
        self.times.write()
        if isinstance(exception, Preempted):
            return  # agreed by all ranks, and noted by who stopped them
        if isinstance(exception, SIGTERMException):  # agreed at the gate: the others raise it as well
            exception.code = int(ExitCode.PREEMPTED)  # stock Lightning leaves it at 0
            log.warning(
                "rank %d ends at step %s, asked for by SIGTERM; nothing was saved, because no PreemptionHandler is "
                "there (preemption=True brings one to a fit). A restart continues from the last committed checkpoint.",
                self.global_rank,
                "?" if self.lightning_module is None else self.lightning_module.trainer.global_step,
            )
            self._note_failure(exception, ExitCode.PREEMPTED)
            return
        self._note_failure(exception, getattr(exception, "exit_code", ExitCode.FAILED))
        self._has_failed = True
        self.saves.failing.end()
        if self._plane is not None:
            told = self._plane.report_failure(exception)
            if self.watchdog is not None:
                first, ends_others = told or self._plane.own_error(exception), isinstance(exception, PeerError)
                self.watchdog.tell_failure(first, is_told=told is not None, ends_others=ends_others)
            for telemetry in (one for one in self._brought if isinstance(one, defaults.Telemetry)):
                telemetry.log_verdicts(since=self._began_at)

    def _note_failure(self, error: BaseException, exit_code: int) -> None:
        is_own = not isinstance(error, (PeerError, SystemExit))
        self.note(
            "failed",
            error=f"{type(error).__name__}: {message_of(error)}"[:1000],
            exit_code=int(exit_code),
            global_step=self.marks.global_step,
            samples=start.samples_in_hand(self.lightning_module._trainer) if is_own and self.lightning_module else [],
        )

    def teardown(self) -> None:
        """Ends what training needed. Lightning's last hooks may follow, and with them the end of the run."""
        self.saves.end(has_failed=self._has_failed)
        self.loads.end()
        if self._run_lock is not None:
            self._run_lock.release()
            self._run_lock = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._is_torn_down = True
        if self._ends_in_teardown:
            self._end_run()
        super().teardown()

    def leave_epoch(self, trainer: Trainer) -> None:
        """Meets all ranks where this one leaves an epoch in the middle of a batch, as ``StopIteration`` makes it do."""
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready > progress.completed:
            is_last = trainer.fit_loop.max_epochs == trainer.current_epoch + 1
            end = Point.at_end("run" if is_last else "epoch", last_batch(trainer))
            self.collectives.together(lambda: end, lambda: None)

    def _on_last_hook(self) -> None:
        """The run has succeeded on this rank, and ends here when it has on all.

        Raises:
            PeerFailed, PeerLost: A peer has failed in one of its last hooks.
        """
        if not self._is_torn_down:  # the Tuner's order
            self._ends_in_teardown = True
            return
        self._say_that_it_has_ended()
        watchdog = self.watchdog
        are_there = end_together(
            self.plane,
            self.phases.patience_in(Phase.TEARDOWN),
            have_ended=lambda ranks: watchdog is not None and watchdog.has_ended(ranks),
        )
        self._end_run(has_ended=True, has_left=not are_there)

    def _say_that_it_has_ended(self) -> None:
        self.phases.enter(Phase.TEARDOWN)
        module = self.lightning_module
        point = Point.at_end("run", None if module is None else last_batch(module._trainer))
        self.collectives.end(point)
        if self.watchdog is not None:
            self.watchdog.end(point.has_ended)

    def _end_run(self, *, has_ended: bool = False, has_left: bool = False) -> None:
        """Takes leave, unless that is done, and puts everything back; never raises."""
        if not self._has_failed and not has_ended:
            self._say_that_it_has_ended()
        if not (self._has_failed or self.is_global_zero):  # once it has left, rank 0 may take the store with it
            self._stop_watching()
        if self._plane is not None and not has_left:
            part(self._plane, self.phases.patience_in(Phase.TEARDOWN), has_failed=self._has_failed)
        self._stop_watching()
        self.collectives.end()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            _take_out_of(self.lightning_module._trainer, self._brought)
        self._brought, self._loaders = [], None
        self.costs.begin(None)  # it keeps no callback
        self.note("end", failed=self._has_failed)
        if self._events is not None:
            self._events.close()
        is_told_by_others = self._has_failed and self.world_size > 1  # who prints the verdict, or the launcher
        if self.is_global_zero and not is_told_by_others and not env.DISTPLUS_HOME_FILE.get():
            leave_page(self.home)

    def _stop_watching(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None


def _take_out_of(trainer: Any, brought: Sequence[Callback]) -> None:
    """Takes out what ``_put_into`` has put in, as much of it as is there, and the callbacks that were brought."""
    if isinstance(trainer.profiler, MarkingProfiler):
        trainer.profiler = trainer.profiler.inner
    ours = [callback for callback in trainer.callbacks if isinstance(callback, FirstWord) or callback in brought]
    trainer.callbacks = [callback for callback in trainer.callbacks if callback not in ours]
    vars(trainer).pop("save_checkpoint", None)
    for callback in trainer.checkpoint_callbacks:
        _compat.restore_checkpoint_link(callback)
