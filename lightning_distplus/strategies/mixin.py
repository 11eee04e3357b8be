"""What makes a strategy resilient: one rendezvous, a deadline per phase, a gate per step, committed saves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat
from lightning_distplus.calibration import AUTO, Calibration
from lightning_distplus.choices import require_choice, require_type
from lightning_distplus.control import ControlPlane, GateRecord, Point, Points, Wish, end_together, part
from lightning_distplus.data.dataloader_resume import LoaderResume
from lightning_distplus.ending import install_exit_codes
from lightning_distplus.errors import DistplusError, ExitCode, PeerError, Preempted, message_of
from lightning_distplus.events import EventLog, folder_of_run
from lightning_distplus.phases import Phases
from lightning_distplus.preparing import PreparationBarrier
from lightning_distplus.strategies.agreeing import check_agreement, check_data
from lightning_distplus.strategies.checked import ChecksCollectives, line_of_the_caller
from lightning_distplus.strategies.checkpointing import CommitsCheckpoints
from lightning_distplus.strategies.failing_saves import FailingSaves, OnSaveFailure
from lightning_distplus.strategies.hosting import check_folder, check_host
from lightning_distplus.strategies.progressing import last_batch, progress_of
from lightning_distplus.strategies.provenance import configuration_digest
from lightning_distplus.strategies.restoring import Verification
from lightning_distplus.strategies.saving import CommittedSaves
from lightning_distplus.strategies.starting import (
    address_of,
    check_launch,
    form_default_group,
    meet,
    read_preflight,
    refuse_unknown_arguments,
    samples_in_hand,
    tell_launcher,
)
from lightning_distplus.strategies.streaming_io import stream_single_files
from lightning_distplus.strategies.trainer_parts import bound_preparation, put_in, take_out
from lightning_distplus.timeouts import Duration, OnHang, Phase, Timeouts, resolve_timeouts
from lightning_distplus.trainer_gate import BatchGate
from lightning_distplus.watchdog import Marks, Transfer, Watchdog, place_of_failure

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_distplus.preflight.run_lock import RunLock

__all__ = ["ResilientStrategy"]

log = logging.getLogger(__name__)

_DEFAULT_TIMEOUTS = Timeouts()
_START_OF_TRAINING = Point(operation="the start of training")


class ResilientStrategy(ChecksCollectives, CommitsCheckpoints):
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
        copy_to: A URL to which rank 0 copies what is committed, in a thread, the newest three; ``--ckpt_path auto``
            fetches from there what the folder of the checkpoints has lost. None: nobody does.
        data: ``"exact"``: a run that is resumed inside an epoch goes on in the training ``DataLoader`` at the batch at
            which the checkpoint was saved; ``"as_is"`` leaves loaders to Lightning, which begins the epoch anew.
        seed_samples: With ``data="exact"``: seed python's, numpy's and torch's generators for each sample from its
            place in the order, so that a random augmentation is exact too, with any number of workers.
        **kwargs: Everything that the Lightning strategy takes.
    """

    wrapper_class: ClassVar[type | None] = None
    """The class to which the parent passes arguments that it does not know."""

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
        data: Literal["exact", "as_is"] = "exact",
        seed_samples: bool = True,
        **kwargs: Any,
    ) -> None:
        require_choice("on_hang", on_hang, OnHang)
        require_choice("verify", verify, Verification)
        require_type("async_save", async_save, bool)
        require_type("copy_to", copy_to, str, or_none=True)
        require_choice("data", data, Literal["exact", "as_is"])
        require_type("seed_samples", seed_samples, bool)
        self._calibration = Calibration() if timeout == AUTO else None
        self.timeouts = resolve_timeouts(_DEFAULT_TIMEOUTS if timeout == AUTO else timeout)
        self.preflight = read_preflight(preflight)
        self.on_hang: OnHang = on_hang
        self.verify: Verification = verify
        self._failing_saves = FailingSaves(on_save_failure)
        self.async_save = async_save
        self.copy_to = copy_to
        self.data = data
        self.seed_samples = seed_samples
        self._loaders: LoaderResume | None = None
        self.phases = Phases(self.timeouts, on_hang, self._note_left)
        self._plane: ControlPlane | None = None
        self._points: Points | None = None
        self._marks = Marks(phase=self._phase)
        self._transfer = Transfer()
        self._watchdog: Watchdog | None = None
        self._gate: BatchGate | None = None
        self._saves: CommittedSaves | None = None
        self._events: EventLog | None = None
        self._first_step = 0
        self._has_failed = False
        self._ends_in_teardown = False
        """Whether no hook of the run follows the teardown: it was interrupted, or its last hook has returned."""
        self._is_torn_down = False
        self._run_lock: RunLock | None = None
        refuse_unknown_arguments(type(self), kwargs)
        super().__init__(**kwargs)
        # The parent's own time-out only matters where it forms a group itself, which it never does under us.

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

    # -- starting ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Checks the launch when the Trainer is made; some parents' launchers check too, and end with another code."""
        install_exit_codes()
        check_launch(self, tells_warnings=False)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Checks the launch, meets all ranks, forms the default process group on our store; then the parent's part."""
        install_exit_codes()
        self._has_failed = self._ends_in_teardown = self._is_torn_down = False
        check_launch(self)
        self.set_world_ranks()
        assert self.accelerator is not None
        self._plane = meet(self)
        self._plane.listen()
        self._marks.forget()
        self._plane.place_of = lambda error: place_of_failure(self._marks, error)
        if self._plane.is_attended:
            self.phases.expect_people()
        self._open_ledger()
        self._start_watchdog(self._plane)
        self._saves = self._make_saves(self._plane)
        stream_single_files(self)
        if self.lightning_module is not None:
            check_host(self, self.lightning_module.trainer)
        if self.world_size > 1:
            self._points = Points(self._plane, patience=lambda: self.phases.patience, locate=line_of_the_caller)
            self._points.begin()
            assert self._watchdog is not None
            self._watchdog.meet_peers(self._points)
        self.accelerator.setup_device(self.root_device)
        form_default_group(self)
        install_exit_codes()  # torch has just chained a hook of its own
        with _compat.default_group_timeout(self.phases.group_timeout):
            super().setup_environment()
        self.phases.apply()
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            bound_preparation(trainer, self._preparation_barrier, self._agree_on_resume)
            resume = LoaderResume.add_to(trainer, seeds_samples=self.seed_samples) if self.data == "exact" else None
            self._loaders = resume

    def process_dataloader(self, dataloader: object) -> object:
        """The parent's part; a training loader then resumes exactly."""
        processed = super().process_dataloader(dataloader)
        return processed if self._loaders is None else self._loaders.take(processed)

    def _preparation_barrier(self) -> PreparationBarrier:
        self._marks.set("prepare_data")
        return PreparationBarrier(self.plane, self.phases)

    def setup(self, trainer: Trainer) -> None:
        """The parent's set-up; every process group that it makes gets the phase's deadline."""
        watchdog = self._watchdog
        put_in(
            trainer,
            self._marks,
            self.plane,
            judge_time_out=lambda error: watchdog is not None and watchdog.judge_time_out(error),
            link_checkpoint=self._link_checkpoint,
            announcing=self._announcing,
            on_last_hook=self._on_last_hook,
        )
        self._run_lock = check_folder(self, trainer)
        check_agreement(self, trainer)
        self._configuration = configuration_digest(trainer)
        if trainer.state.fn == "fit":
            self._gate = BatchGate(
                trainer,
                self.plane,
                deadline=lambda: self.phases.patience,
                mark=self._marks.set,
                on_passed=self._after_gate,
                points=self._points,
            )
        with _compat.default_group_timeout(self.phases.group_timeout):
            super().setup(trainer)
        self.phases.apply()

    def _start_watchdog(self, plane: ControlPlane) -> None:
        if self.world_size == 1 or self._watchdog is not None:
            return
        self._watchdog = Watchdog(
            plane,
            self._marks,
            deadline=lambda: self.phases.deadline,
            report_after=(self.timeouts or _DEFAULT_TIMEOUTS).report_after,
            ends_run=self.on_hang == "abort",
            folder=self.home,
            last_deadline=lambda: self.phases.last_deadline,
            progress=lambda: self._transfer.progress() or progress_of(getattr(self.lightning_module, "_trainer", None)),
        )
        self._watchdog.start()

    def _open_ledger(self) -> None:
        """Before the parents load a checkpoint, which some of them do ahead of ``setup``."""
        assert self.lightning_module is not None
        attempt = address_of(self).attempt
        self._close_ledger()  # an event that came behind the end of an earlier run has opened it again
        self._events = EventLog(self.home, self.global_rank, attempt=attempt, run_id=self.plane.run_id)
        if self.local_rank == 0:
            tell_launcher(self.home)
        self.note(
            "start",
            function=self.lightning_module.trainer.state.fn,
            strategy=type(self).__name__,
            world_size=self.world_size,
            backend=self._get_process_group_backend(),
        )

    def _close_ledger(self) -> None:
        if self._events is not None:
            self._events.close()

    # -- running -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Puts this rank's random number generators back after a resume, and opens the gate."""
        super().on_train_start()
        assert self._gate is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._together(lambda: _START_OF_TRAINING, lambda: check_data(self, trainer))
        self._first_step = trainer.global_step
        self._gate.open()
        self._gate.has_saved = lambda: self._in_flight is not None and self._in_flight.has_ended
        self._gate.is_late = lambda: self._is_late
        self._failing_saves.begin(trainer)
        self._committed_saves.restore_rng()

    def _after_gate(self, records: list[GateRecord]) -> None:
        """All ranks have just met: a good moment to shrink the deadline to that of a step."""
        self._marks.global_step = records[0].global_step
        if all(record.wishes & Wish.SAVED for record in records):
            self.settle_save()
        self._calibrate(records)
        first_step_done = records[0].global_step > self._first_step
        self.phases.enter_after_meeting(Phase.STEP if first_step_done else Phase.SETUP)

    def on_train_end(self) -> None:
        """The parent's part.

        Raises:
            SaveFailed: The last save of the run failed, and none has succeeded since.
        """
        super().on_train_end()
        self.settle_save()
        self._failing_saves.end()

    # -- ending ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks what happened here; never raises."""
        super().on_exception(exception)
        self._ends_in_teardown = True
        if isinstance(exception, Preempted):
            return  # agreed by all ranks, and noted by who stopped them
        is_own = not isinstance(exception, (PeerError, SystemExit))
        self.note(
            "failed",
            error=f"{type(exception).__name__}: {message_of(exception)}"[:1000],
            exit_code=int(getattr(exception, "exit_code", ExitCode.FAILED)),
            global_step=self._marks.global_step,
            samples=samples_in_hand(self.lightning_module._trainer) if is_own and self.lightning_module else [],
        )
        if isinstance(exception, SIGTERMException):
            return  # agreed at the gate: the others raise it as well
        self._has_failed = True
        self._failing_saves.abandon()
        if self._plane is not None:
            told = self._plane.report_failure(exception)
            if self._watchdog is not None:
                self._watchdog.tell_failure(told or self._plane.own_error(exception), is_told=told is not None)

    def teardown(self) -> None:
        """Ends what training needed. Lightning's last hooks may follow, and with them the end of the run."""
        self._end_saves()
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
            self._together(lambda: Point.at_end("run" if is_last else "epoch", last_batch(trainer)), lambda: None)

    def watch_last_hooks(self) -> None:
        """Lightning has torn down its handlers of signals, and with them that by which a stack can be asked for."""
        if self._watchdog is not None:
            self._watchdog.rearm()

    def _on_last_hook(self) -> None:
        """The run has succeeded on this rank, and ends here when it has on all.

        Raises:
            PeerFailed, PeerLost: A peer has failed in one of its last hooks.
        """
        if not self._is_torn_down:  # the Tuner's order
            self._ends_in_teardown = True
            return
        assert self._plane is not None
        self._say_that_it_has_ended()
        watchdog = self._watchdog
        end_together(
            self._plane,
            self.phases.patience_in(Phase.TEARDOWN),
            have_ended=lambda ranks: watchdog is not None and watchdog.has_ended(ranks),
        )
        self._end_run(has_left=True)

    def _say_that_it_has_ended(self) -> None:
        self.phases.enter(Phase.TEARDOWN)
        module = self.lightning_module
        point = Point.at_end("run", None if module is None else last_batch(module._trainer))
        if self._points is not None:
            self._points.end(point)
            self._points = None
        if self._watchdog is not None:
            self._watchdog.end(point.has_ended)

    def _end_run(self, *, has_left: bool = False) -> None:
        """Takes leave, unless that is done, and puts everything back; never raises."""
        if not self._has_failed and not has_left:
            self._say_that_it_has_ended()
        if self._plane is not None and not has_left:
            part(self._plane, self.phases.patience_in(Phase.TEARDOWN), has_failed=self._has_failed)
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._points is not None:
            self._points.end()
            self._points = None
        take_out(None if self.lightning_module is None else self.lightning_module._trainer)
        self.note("end", failed=self._has_failed)
        self._close_ledger()

    def _end_saves(self) -> None:
        """A run that ends in order waits for its save in the background; one that has failed does not."""
        try:
            if not self._has_failed:
                self.settle_save()
        except DistplusError as error:
            log.error("rank %d ends without the checkpoint in the background: %s", self.global_rank, error)
        self._failing_saves.abandon()
        self._give_up_staging()
        if self._saves is not None:
            self._saves.close(has_failed=self._has_failed)
