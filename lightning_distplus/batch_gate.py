"""The step gate in a Trainer: it takes the place of the broadcast that Lightning issues before every batch."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, GateRecord, StepGate, Wish

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["BatchGate"]

log = logging.getLogger(__name__)

# Keeps the runs of one process apart, whatever Trainers they use; all ranks count alike.
_runs = itertools.count(1)


class BatchGate:
    """Compares the ranks before each optimizer step and agrees on stopping.

    Stock Lightning broadcasts one bit from rank 0 before each batch, on the default group, and broadcasts inside its
    SIGTERM handler. Both go: a SIGTERM on any rank becomes this rank's wish at the next gate, and all ranks stop there.

    Args:
        trainer: The Trainer, before its signal handlers are registered.
        plane: The control plane.
        deadline: How long to wait at a gate, asked for at each one.
        on_passed: Called with the records once all ranks have met at a gate.
        mark: Told that this rank waits at a gate.
    """

    def __init__(
        self,
        trainer: Trainer,
        plane: ControlPlane,
        *,
        deadline: Callable[[], timedelta],
        on_passed: Callable[[list[GateRecord]], None],
        mark: Callable[[str], None] = lambda operation: None,
    ) -> None:
        self._trainer = trainer
        self._gate = StepGate(plane, name=f"run-{next(_runs)}")
        self._deadline = deadline
        self._on_passed = on_passed
        self._mark = mark
        self._sigterm_seen = False
        self.wants_preemption: Callable[[], bool] = lambda: False
        """Asked at each gate: whether this rank has to stop with a checkpoint."""
        self.preempt: Callable[[list[int]], None] = lambda ranks: None
        """Called on all ranks, before any batch of a step, with the ranks that have to; it saves and raises."""
        self._handler = _compat.replace_sigterm_notifier(trainer, self._note_sigterm)

    def open(self) -> None:
        """Meets all ranks and takes the place of the stock broadcast.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        self._gate.open(self._deadline())
        _compat.replace_batch_broadcast(self._trainer, self._pass)

    def close(self) -> None:
        """Puts everything back."""
        _compat.restore_batch_broadcast(self._trainer)
        _compat.restore_sigterm_notifier(self._trainer)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler: no collective, no lock; it notes the wish and passes the signal on."""
        launcher: Any = self._trainer.strategy.launcher
        if not self._sigterm_seen and launcher is not None:
            launcher.kill(signal.Signals(signum))
        self._sigterm_seen = True

    def _pass(self) -> None:
        """Runs at the head of every micro-batch; one gate for each optimizer step."""
        micro_batch = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if micro_batch % self._trainer.accumulate_grad_batches != 0:
            return
        self._mark("the step gate")
        records = self._gate.exchange(self._record(), self._deadline())
        self._on_passed(records)
        if preempted := [rank for rank, record in enumerate(records) if record.wishes & Wish.PREEMPT]:
            self.preempt(preempted)
        stopping = [rank for rank, record in enumerate(records) if record.wishes & Wish.STOP]
        if stopping:
            log.warning("all ranks stop at step %d: SIGTERM on ranks %s", self._trainer.global_step, stopping)
            raise SIGTERMException

    def _record(self) -> GateRecord:
        loop = self._trainer.fit_loop.epoch_loop
        return GateRecord(
            global_step=self._trainer.global_step,
            micro_batch=loop.batch_progress.current.ready,
            epoch=self._trainer.current_epoch,
            wishes=self._wishes(),
        )

    def _wishes(self) -> Wish:
        wishes = Wish.STOP if self._sigterm_seen else Wish.NONE
        return wishes | Wish.PREEMPT if self.wants_preemption() else wishes
