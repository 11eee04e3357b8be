"""Stopping when asked: all ranks save one committed checkpoint at one agreed step, and exit with 143."""

from __future__ import annotations

import itertools
import logging
import multiprocessing.util
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord, StepGate, Wish
from lightning_distplus.errors import Preempted, refuse_other_trainer
from lightning_distplus.events import ckpt_path_for
from lightning_distplus.process import end_workers
from lightning_distplus.timeouts import Duration, parse_duration
from lightning_distplus.trainer_gate import GateParticipant

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)
_TICK_S = 0.5
_COMMAND_S = 10.0


# -- signals to stop ---------------------------------------------------------------------------------------------------

# A data worker inherits the handlers of the process that forked it. It outlives a signal to the whole group, because
# the step that is under way still needs its batches. Not for ever: its parent ends workers with SIGTERM too.
_WORKER_OUTLIVES_S = 300


class StopRequests:
    """Takes signals, remembers the first one, and hands each on to the handler that was there before.

    A repeated signal changes nothing: schedulers repeat them, and torchrun's agent sends a SIGTERM of its own. A
    second SIGINT is a person who does not want to wait, and ends the process at once.

    Raises:
        ValueError: A name is not that of a signal that can be taken.
    """

    def __init__(self, signals: Iterable[str]) -> None:
        self._signals = [_parse(name) for name in signals]
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = 0
        self.reason: str | None = None
        """What asked first, for example ``"SIGTERM"``; None while nothing has."""
        self.asked_at = 0.0
        """``monotonic()`` of the first request."""

    def attach(self) -> None:
        """Takes the signals. Only the main thread can; on another one the signals stay where they are, and it says so.

        A handler that was not set from Python (``faulthandler.register``) could not be called after ours: it stays.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals do not stop this run: it does not run on the main thread, which alone gets them")
            return
        if self._pid == 0:  # data workers outlive a SIGTERM, which is how multiprocessing ends them at the exit
            multiprocessing.util.Finalize(None, end_workers, exitpriority=0)
        self._pid = os.getpid()
        for number in self._signals:
            previous = signal.getsignal(number)
            if previous is None:
                log.warning("%s does not stop this run: a handler that is not Python's has it", number.name)
                continue
            self._previous[number] = previous
            signal.signal(number, self._note)

    def detach(self, *, is_ending: bool = False) -> None:
        """Puts the earlier handlers back.

        Where the process is about to exit, the signals are ignored from here on, because torchrun's agent terminates
        all ranks as soon as it sees the first one end, and the exit codes would differ.
        """
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_IGN if is_ending else previous)
        self._previous.clear()

    def outlive(self) -> None:
        """In a data worker, once torch has set its handlers there: a SIGTERM to all processes does not end it."""
        if signal.SIGTERM in self._previous:
            signal.signal(signal.SIGTERM, self._note)

    def request(self, reason: str) -> None:
        """Asks for a stop; from any thread. The first reason stays."""
        if self.reason is None:
            self.asked_at = monotonic()
            self.reason = reason

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """The handler: no lock, no log, no collective."""
        number = signal.Signals(signum)
        if os.getpid() != self._pid:
            if number is signal.SIGTERM:
                signal.alarm(_WORKER_OUTLIVES_S)
            return
        if number is signal.SIGINT and self.reason == number.name:
            _end_now(number)
        self.request(number.name)
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(signum, frame)


def _parse(name: str) -> signal.Signals:
    number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(
            f"signals holds {name!r}; each one is the name of a signal that a process can take, "
            "such as SIGTERM, SIGINT, SIGUSR1 or SIGUSR2."
        )
    return signal.Signals(number)


def _end_now(number: signal.Signals) -> None:
    os.write(2, b"interrupted twice: ends now, without a checkpoint of this step\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# -- the callback ------------------------------------------------------------------------------------------------------

_ASKED = int(Wish.PREEMPT)
_evaluations = itertools.count(1)  # all ranks count alike


class PreemptionHandler(Callback, GateParticipant):
    """Turns a signal on any rank into one checkpoint of all ranks and exit code 143 on each of them.

    A signal handler only leaves a note. The note travels in the gate of the next step, so that all ranks learn of it at
    the same step; there they save ``preempt-step=<N>.ckpt`` beside the other checkpoints, and end. A rank whose peer is
    dead never comes through that gate: a SIGTERM that follows a crash is no preemption.

    Args:
        signals: Their names. The handlers that were there before are called as well, save Lightning's own.
        grace: How long after the signal the platform kills. Ends nothing: when it has passed without a commit, the log
            says where the rank stands, which tells whether the grace or the step is to be changed.
        notice_file: A file whose existence asks for a stop.
        notice_command: A command, as a list, whose success asks for a stop: a query of a cloud's metadata.
        notice_every: How often file and command are asked for, on the first rank of each host.
        keep: So many checkpoints of preemptions stay in the folder; older ones go when a new one is committed.
    """

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"),
        *,
        grace: Duration | None = None,
        notice_file: str | Path | None = None,
        notice_command: Sequence[str] | None = None,
        notice_every: Duration = "5s",
        keep: int = 1,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the checkpoint of the last preemption stays.")
        if isinstance(signals, str) or isinstance(notice_command, str):
            raise ValueError("signals and notice_command are lists: ['SIGTERM'], ['curl', '-sf', 'http://...'].")
        self._requests = StopRequests(signals)
        self._grace = None if grace is None else parse_duration(grace)
        self._notice_file = None if notice_file is None else Path(notice_file)
        self._notice_command = notice_command
        self._notice_every = parse_duration(notice_every)
        self._keep = keep
        self._stopping: threading.Event | None = None  # the thread of the notices
        self._has_warned = False
        self._evaluation: StepGate | None = None
        self._trainer: Any = None
        self._first_step = 0
        self._is_ending = False
        self._logged_steps: int | None = None

    def request(self, reason: str) -> None:
        """Asks for a stop at the next step, from any thread of any rank."""
        self._requests.request(reason)

    # -- coming and going ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the signals, and Lightning's own handlers out of the way.

        Raises:
            ValueError: The strategy has no gate at which the ranks could agree.
            TypeError: The Trainer is of ``pytorch_lightning``.
        """
        refuse_other_trainer(trainer)
        if trainer.world_size > 1 and not hasattr(trainer.strategy, "phases"):
            raise ValueError(
                f"PreemptionHandler works with the Resilient strategies; {type(trainer.strategy).__name__} has no gate "
                f"at which its {trainer.world_size} ranks could agree to stop. Use ResilientDDP, ResilientFSDP, "
                "ResilientModelParallel or ResilientDeepSpeed."
            )
        if self._stopping is not None:
            return
        self._trainer = trainer
        self._logged_steps = None
        self._is_ending = False
        _compat.restore_step_hooks(self)
        _compat.skip_step_hooks(self)
        _compat.replace_stock_signals(trainer, self._detach)
        self._requests.attach()
        _compat.add_to_worker_signals(self._requests.outlive)
        self._stopping = threading.Event()
        looks = trainer.local_rank == 0 and bool(self._notice_file or self._notice_command)
        if looks or self._grace is not None:
            arguments = (self._stopping, looks)
            threading.Thread(target=self._watch, args=arguments, name="distplus-notices", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the handlers back."""
        self._detach()

    def _detach(self) -> None:
        if self._stopping is not None:
            self._stopping.set()
            self._stopping = None
        _compat.restore_worker_signals()
        self._requests.detach(is_ending=self._is_ending)

    # -- notices: a file that is there, a command that succeeds --------------------------------------------------------

    def _watch(self, stopping: threading.Event, looks: bool) -> None:
        """Looks for them, on a thread; says so once when the grace after a request has passed and nobody stops this."""
        look_at, every_s = monotonic(), self._notice_every.total_seconds()
        while not stopping.wait(min(_TICK_S, every_s)):
            if self._requests.reason is not None:
                if self._grace is None:
                    return
                if monotonic() - self._requests.asked_at > self._grace.total_seconds():
                    self._report_late(self._grace)
                    return
            elif looks and monotonic() >= look_at:
                look_at = monotonic() + every_s
                if self._notice_file is not None and self._notice_file.exists():
                    self._requests.request(f"the notice file {self._notice_file}")
                elif self._notice_command is not None and self._succeeds(self._notice_command):
                    self._requests.request(f"the notice command {self._notice_command[0]}")

    def _succeeds(self, command: Sequence[str]) -> bool:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "check": False}
        try:
            return subprocess.run(list(command), timeout=_COMMAND_S, **quiet).returncode == 0
        except (OSError, subprocess.TimeoutExpired) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("the notice command cannot be asked: %s. It is tried again; training goes on.", error)
            return False

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the gate of each step."""
        self._first_step = trainer.global_step
        if trainer.world_size > 1:
            trainer.strategy.gate.add(self)  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Puts the loggers' step back after a resume. One process alone has no gate."""
        if self._logged_steps is not None:
            _compat.restart_steps_for_loggers(trainer, self._logged_steps)
            self._logged_steps = None
        is_window_start = batch_idx % trainer.accumulate_grad_batches == 0
        if trainer.world_size == 1 and is_window_start and self._is_asked():
            self.on_preemption([0])
        if trainer.world_size > 1 and type(self).on_train_batch_start is PreemptionHandler.on_train_batch_start:
            _compat.skip_step_hooks(self, "on_train_batch_start")

    def wish(self) -> int:
        """Whether this rank has to stop."""
        return _ASKED if self._is_asked() else 0

    def _is_asked(self) -> bool:
        return self._requests.reason is not None

    def on_preemption(self, ranks: list[int]) -> None:
        """Saves and ends; on all ranks, between two steps.

        Raises:
            Preempted: The checkpoint is committed.
        """
        trainer, asked_at = self._trainer, self._requests.asked_at or monotonic()
        here = self._requests.reason or "nothing"
        message = "rank %d stops at step %d: asked for by ranks %s (%s here)"
        log.warning(message, trainer.global_rank, trainer.global_step, ranks, here)
        path = self._save()
        if path is not None and trainer.is_global_zero:
            how = ckpt_path_for(path, getattr(trainer.strategy, "auto_folder", ""))  # Lightning's own have no "auto"
            log.warning('saved: the same command with ckpt_path="%s" goes on from %s', how, path)
        self._end(path=path and str(path), ranks=ranks, saved_after_s=round(monotonic() - asked_at, 3))

    def _save(self) -> Path | None:
        """The checkpoint to continue from: a new one, unless nothing has happened since the one that was loaded.

        Before the first step there is nothing to keep.
        """
        trainer = self._trainer
        if trainer.global_step == 0:
            return None
        folder = checkpoint_folder(trainer)
        loaded = None if trainer.ckpt_path is None else Path(trainer.ckpt_path)
        if loaded is not None and trainer.global_step == self._first_step and loaded.parent == folder:
            return loaded
        _forget_fetched_batch(trainer)
        path = folder / f"preempt-step={trainer.global_step}.ckpt"
        self._logged_steps = _compat.steps_for_loggers(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        if hasattr(trainer.strategy, "require_saved"):  # a save in the background, or one that failed, raises no error
            trainer.strategy.require_saved()
        if trainer.is_global_zero:
            self._remove_older(folder, path)
        return path

    def state_dict(self) -> dict[str, Any]:
        """In a checkpoint of this callback: how many steps the loggers have seen.

        Lightning counts the last step again in a run that resumes behind a validation (lightning 2.6.6,
        ``training_epoch_loop.py`` 396-410): its own saves happen before that step is counted.
        """
        return {} if self._logged_steps is None else {"version": 1, "logged_steps": self._logged_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remembers it until the first batch.

        Raises:
            ValueError: A newer version has written it.
        """
        version = state_dict.get("version", 1)
        if version != 1:
            raise ValueError(
                f"the checkpoint's PreemptionHandler state is version {version}; this one reads version 1."
            )
        self._logged_steps = state_dict.get("logged_steps")

    def _remove_older(self, folder: Path, newest: Path) -> None:
        others = [path for path in folder.glob("preempt-step=*.ckpt") if path != newest]
        for path in sorted(others, key=lambda path: path.stat().st_mtime)[: max(0, len(others) - self._keep + 1)]:
            self._trainer.strategy.remove_checkpoint(path)

    def _end(self, **fields: Any) -> None:
        self._note("preempted", global_step=self._trainer.global_step, reason=self._requests.reason, **fields)
        if self._stopping is not None:
            self._stopping.set()
        self._is_ending = True
        self._requests.detach(is_ending=True)
        raise Preempted

    # -- validate, test, predict ---------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens a gate for each batch of ``Trainer.validate``; the validation within a fit is not interrupted."""
        if trainer.state.fn == "validate":
            self._open_evaluation(trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens a gate for each batch."""
        self._open_evaluation(trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens a gate for each batch."""
        self._open_evaluation(trainer.num_predict_batches)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Ends on all ranks where one was asked to."""
        if trainer.state.fn == "fit":
            return
        if trainer.world_size == 1:
            ranks = [0] if self._is_asked() else []
        elif self._evaluation is None:
            return
        else:
            record = GateRecord(global_step=trainer.global_step, micro_batch=0, epoch=0, wishes=self.wish())
            records = self._evaluation.exchange(record, trainer.strategy.phases.patience)  # type: ignore[attr-defined]
            ranks = [rank for rank, one in enumerate(records) if one.wishes & _ASKED]
        if ranks:
            log.warning("rank %d stops: asked for by ranks %s; there is nothing to save", trainer.global_rank, ranks)
            self._end(path=None, ranks=ranks)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _open_evaluation(self, num_batches: Sequence[int | float]) -> None:
        """Ranks with different numbers of batches cannot meet at each one: they are not interrupted."""
        trainer = self._trainer
        self._evaluation = None
        if trainer.world_size == 1:
            return
        plane, patience = trainer.strategy.plane, trainer.strategy.phases.patience
        said = plane.gather_json("evaluation-batches", {"num_batches": [str(n) for n in num_batches]}, patience)
        if any(one != said[0] for one in said):
            log.warning("the ranks have different numbers of batches: a signal does not interrupt this evaluation")
            return
        self._evaluation = StepGate(plane, name=f"evaluation-{next(_evaluations)}", must_agree=())
        self._evaluation.open(patience)

    # -- telling -------------------------------------------------------------------------------------------------------

    def _report_late(self, grace: timedelta) -> None:
        """The grace has passed: says what took so long. On the thread of the notices."""
        marks = getattr(self._trainer.strategy, "marks", None)
        where = "" if marks is None else f"; this rank is in {marks.read().operation!r}"
        rank, grace_s, reason = self._trainer.global_rank, grace.total_seconds(), self._requests.reason
        log.error(
            "rank %d: %g s after %s no checkpoint of this stop is committed%s. The run goes on until it is killed; a "
            "restart continues from the last committed checkpoint. Ask earlier (a notice), or save more often.",
            rank, grace_s, reason, where,
        )  # fmt: skip
        self._note("preemption_late", grace_s=grace_s, reason=reason)

    def _note(self, kind: str, **fields: Any) -> None:
        if hasattr(self._trainer.strategy, "note"):
            self._trainer.strategy.note(kind, **fields)


def checkpoint_folder(trainer: Any) -> Path:
    """The folder of the first ModelCheckpoint, else ``<default_root_dir>/checkpoints``: where ``auto`` looks."""
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    if savers and savers[0].dirpath:
        return Path(savers[0].dirpath)
    return Path(trainer.default_root_dir) / "checkpoints"


def _forget_fetched_batch(trainer: Any) -> None:
    """A batch that was fetched, and not trained on, is fetched again by the run that resumes."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.current.ready > progress.current.processed:
        progress.current.ready -= 1
        progress.total.ready -= 1
        progress.is_last_batch = False
