"""The gate of each step in a Trainer, in place of the broadcast that Lightning issues for each batch."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, GateRecord, StepGate, Waits, Wish, active_points
from lightning_distplus.errors import DivergenceError
from lightning_distplus.majority import disagreement

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_MOMENT_BITS = 4
_MOMENT = (1 << _MOMENT_BITS) - 1


class Moment(IntEnum):
    """The points of a run at which ranks meet. A rank that comes to another one than its peers has left the path."""

    STEP = 1, "the start of a step"
    DECISION = 2, "a decision after a step"
    VALIDATION = 3, "the start of a validation"
    VALIDATION_END = 4, "the end of a validation"
    EPOCH_END = 5, "the end of an epoch"
    SAVE = 6, "a save"
    END = 7, "the end of training"
    FORWARD = 8, "the end of training_step"
    GRADIENTS = 9, "the end of the backward"
    METRICS = 10, "the reduction of logged metrics"

    text: str
    mark: str

    def __new__(cls, number: int, text: str = "") -> Moment:
        """A number that knows what is printed for it."""
        moment = int.__new__(cls, number)
        moment._value_, moment.text, moment.mark = number, text, f"the gate at {text}"
        return moment

    def __str__(self) -> str:
        return self.text


class Flag(IntFlag):
    """What a rank says beside the moment."""

    NONE = 0
    LAST_BATCH = 1 << _MOMENT_BITS
    WANTS_STOP = 2 << _MOMENT_BITS
    WANTS_VALIDATION = 4 << _MOMENT_BITS
    BATCH_FAILED = 8 << _MOMENT_BITS
    NOT_FINITE = 16 << _MOMENT_BITS


_LASTING = int(Flag.WANTS_STOP | Flag.WANTS_VALIDATION)


def moment_of(record: GateRecord) -> Moment:
    """The moment at which a rank made this record."""
    return Moment(record.decisions & _MOMENT)


def flags_of(record: GateRecord) -> Flag:
    """What the rank said beside the moment."""
    return Flag(record.decisions & ~_MOMENT)


# -- the gate ----------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
_MUST_AGREE = (
    "decisions", "epoch", "global_step", "micro_batch", "learning_rate", "loss_scale", "settings", "collectives",
    "consumed_samples", "data_fingerprint", "batch_structure", "state_fingerprint",
)  # fmt: skip
# What every step asks for, in plain numbers and text: an operation of an ``IntFlag`` costs a microsecond.
_DECISION = int(Moment.DECISION)
_STOP, _PREEMPT = int(Wish.STOP), int(Wish.PREEMPT)
_PLACE = attrgetter("decisions", "epoch", "global_step", "micro_batch")  # must be the same on all ranks
_HOOK = "on_train_batch_start"
_DECISIONS, _WISHES = attrgetter("decisions"), attrgetter("wishes")
# Keeps the runs of one process apart, whatever Trainers they use; all ranks count alike.
_runs = itertools.count(1)


class GateParticipant:
    """Takes part in the gate of a run (``BatchGate.add``), with those of these methods that it needs."""

    def wish(self) -> int:
        """What this rank asks for at each gate: values of ``Wish``."""
        return 0

    def on_wait(self, moment: Moment) -> None:
        """This rank begins to wait for the others."""

    def fields(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Further fields of ``GateRecord`` for the record of a step."""
        return {}

    def on_met(self, records: list[GateRecord]) -> None:
        """All ranks have met at the start of a step; nobody has acted on the records yet."""

    def on_preemption(self, ranks: list[int]) -> None:
        """These ranks have to stop: this participant saves and raises, on all ranks, before the step has begun."""

    def on_records(self, records: list[GateRecord]) -> None:
        """The records of a step, before the Trainer goes on."""

    def on_disagreement(self, error: DivergenceError) -> None:
        """The ranks stand at different places: the moment to write evidence down. The gate raises the error then."""


class BatchGate:
    """Compares the ranks when they have fetched the first batch of an optimizer step, and agrees on stopping.

    Stock Lightning broadcasts one bit from rank 0 before each batch, on the default group, and broadcasts inside its
    SIGTERM handler. Both go: a SIGTERM on any rank becomes this rank's wish at the next gate, and all ranks stop there.

    Args:
        trainer: The Trainer, before its signal handlers are registered.
        plane: The control plane.
        waits: Knows how long to wait; asked at each gate.
    """

    def __init__(self, trainer: Trainer, plane: ControlPlane, *, waits: Waits) -> None:
        self._trainer = trainer
        self._gate = StepGate(plane, name=f"run-{next(_runs)}", must_agree=_MUST_AGREE)
        self._waits = waits
        self._sigterm_seen = False
        self._last: GateRecord | None = None
        self.is_open = False
        self.waited_s = 0.0
        """How long this rank waited for the others at the gate of the present step."""
        self.wishes = Flag.NONE
        """What some rank has asked for at a gate, and not all have done yet."""
        self._participants: list[GateParticipant] = []
        _compat.replace_sigterm_notifier(trainer, self._note_sigterm)

    def add(self, participant: GateParticipant) -> None:
        """Lets somebody take part from now on; who does already stays where it is."""
        if participant not in self._participants:
            self._participants.append(participant)

    def remove(self, participant: GateParticipant) -> None:
        """Lets somebody take part no more."""
        self._participants.remove(participant)

    def open(self) -> None:
        """Meets all ranks and takes the place of the stock broadcast; where it has it already, it begins anew.

        Training may start more than once in a fit: ``LearningRateFinder`` trains before it.

        Raises:
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        self._gate.open(self._waits.patience)
        self._last = None
        if self.is_open:
            return
        _compat.replace_batch_broadcast(self._trainer, lambda: None)
        strategy, consequence = self._trainer.strategy, "ranks are not compared before each step"
        self.is_open = _compat.wrap_method(strategy, _HOOK, self._on_train_batch_start, consequence)

    def close(self) -> None:
        """Puts everything back."""
        self.is_open = False
        _compat.restore_method(self._trainer.strategy, _HOOK)
        _compat.restore_batch_broadcast(self._trainer)
        _compat.restore_sigterm_notifier(self._trainer)

    @property
    def reads_all_records(self) -> bool:
        """Whether the records are those of the ranks; above 64 ranks that agree they are copies of this rank's own."""
        return self._gate.reads_all

    def meet(self, moment: Moment, flags: Flag = Flag.NONE, **fields: Any) -> list[GateRecord]:
        """Meets all ranks at a named moment.

        A rank with a decision to make (``Moment.DECISION``) may meet others that have gone on to their next moment:
        they take note of its wish and meet again there, where it joins them.

        Args:
            moment: Where this rank stands.
            flags: What it says beside that.
            **fields: Further fields of the record.

        Returns:
            The records of all ranks. For a decision they may be of another moment.

        Raises:
            DivergenceError: The ranks stand at different moments, steps or batches, or one waits at a point to which
                this rank has not come.
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        while True:
            for one in self._participants:
                one.on_wait(moment)
            record, points = self._record(moment, flags, fields), active_points()
            if points is not None:  # who waits at one of them sees who waits here, and a wait for one of them ends
                points.enter_gate(record)
            try:
                records = self._gate.exchange(record, self._waits.patience)
            finally:
                if points is not None:
                    points.leave_gate()
            said = set(map(_DECISIONS, records))
            for decisions in said:
                if decisions & _LASTING:
                    self.wishes |= Flag(decisions & _LASTING)
            if moment is Moment.DECISION or all(decisions & _MOMENT != _DECISION for decisions in said):
                break
        if moment is not Moment.DECISION:
            self._require_one_place(records)
        return records

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler: no collective, no lock; it notes the wish and passes the signal on."""
        launcher: Any = self._trainer.strategy.launcher
        if not self._sigterm_seen and launcher is not None:
            launcher.kill(signal.Signals(signum))
        self._sigterm_seen = True

    def _on_train_batch_start(self, inner: Callable[[Any, int], None], batch: Any, batch_idx: int) -> None:
        """In the place of the strategy's hook, the last one before the first collective of a batch."""
        inner(batch, batch_idx)
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if (progress.current.ready - 1) % self._trainer.accumulate_grad_batches == 0:
            self._begin_step(batch, batch_idx, is_last=progress.is_last_batch)

    def _begin_step(self, batch: Any, batch_idx: int, *, is_last: bool) -> None:
        fields: dict[str, Any] = {}
        for one in self._participants:
            fields |= one.fields(batch, batch_idx)
        came_at = time.monotonic()
        records = self.meet(Moment.STEP, Flag.LAST_BATCH if is_last else Flag.NONE, **fields)
        self.waited_s = time.monotonic() - came_at
        self._last = records[0]
        for one in self._participants:
            one.on_met(records)
        wishes = list(map(_WISHES, records))
        if any(wishes) and (leaving := [rank for rank, wish in enumerate(wishes) if wish & _PREEMPT]):
            for one in self._participants:
                one.on_preemption(leaving)
        for one in self._participants:
            one.on_records(records)
        if any(wishes) and (stopping := [rank for rank, wish in enumerate(wishes) if wish & _STOP]):
            log.warning("all ranks stop at step %d: SIGTERM on ranks %s", self._trainer.global_step, stopping)
            raise SIGTERMException

    def _record(self, moment: Moment, flags: Flag, fields: dict[str, Any]) -> GateRecord:
        wishes = _STOP if self._sigterm_seen else 0
        for one in self._participants:
            wishes |= one.wish()
        return GateRecord(
            global_step=self._trainer.global_step,
            micro_batch=max(0, self._trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1),
            epoch=self._trainer.current_epoch,
            wishes=wishes,
            decisions=int(moment) | int(flags),
            **fields,
        )

    # -- where all must stand ----------------------------------------------------------------------------------------

    def _require_one_place(self, records: Sequence[GateRecord]) -> None:
        """Raises unless all ranks stand at the same moment of the same step."""
        if len(set(map(_PLACE, records))) == 1:
            return
        moments = [str(moment_of(record)) for record in records]
        if len(set(moments)) > 1:
            places = [
                f"{moment} (epoch {record.epoch}, micro-batch {record.micro_batch}, {record.global_step} steps done)"
                for moment, record in zip(moments, records, strict=True)
            ]
            self._tell("moment", places, remedy="look for code that runs, returns or raises on some ranks only")
        for field, expected in self._expected().items():
            remedy = "a rank skipped or repeated a step: look for code that returns or raises on one rank only"
            self._tell(field, [getattr(record, field) for record in records], remedy=remedy, expected=expected)
        if moment_of(records[0]) is Moment.STEP:
            self._tell(
                "last_batch",
                [bool(flags_of(record) & Flag.LAST_BATCH) for record in records],
                remedy="the ranks have different numbers of batches; ResumableDataModule(uneven=...) cuts them alike, "
                "a DistributedSampler drops or pads",
            )

    def _expected(self) -> dict[str, int | None]:
        """What all ranks must say after what they said at the gate before; None where more than one value is sound."""
        last = self._last
        if last is None:
            return dict.fromkeys(("epoch", "global_step", "micro_batch"))
        micro_batch = last.micro_batch + self._trainer.accumulate_grad_batches
        return {"epoch": None, "global_step": last.global_step + 1, "micro_batch": micro_batch}

    def _tell(self, field: str, values: Sequence[Any], *, remedy: str, expected: Any = None) -> None:
        if len(set(values)) > 1:
            where = f"before step {self._trainer.global_step}; nothing was averaged"
            error = disagreement(field, dict(enumerate(values)), where=where, remedy=remedy, expected=expected)
            for one in self._participants:
                one.on_disagreement(error)
            raise error
