"""The part of a strategy that measures: ``timeout="auto"`` from the durations of all ranks, agreed at a gate.

Validation, testing and prediction have a phase of their own, which begins and is measured here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_distplus.control import ControlPlane, GateRecord, Wish
from lightning_distplus.phases import Phases
from lightning_distplus.timeouts import Calibration, Phase, Timeouts

__all__ = ["CalibratesDeadlines"]

log = logging.getLogger(__name__)


class CalibratesDeadlines:
    """Notes how long each phase takes, and puts the deadlines that follow in force on all ranks."""

    timeouts: Timeouts | None
    phases: Phases
    copy_to: str | None
    _plane: ControlPlane | None
    _calibration: Calibration | None
    _gate_passed_at: float | None = None
    _validation_began_at = 0.0

    def note(self, kind: str, **fields: Any) -> None:
        """Writes one event into the ledger."""
        raise NotImplementedError

    def on_validation_start(self) -> None:
        """Enters the validation phase."""
        self._validation_began_at = time.monotonic()
        self.phases.enter(Phase.VALIDATION)
        super().on_validation_start()  # type: ignore[misc]

    def on_validation_end(self) -> None:
        """Notes how long the validation took."""
        super().on_validation_end()  # type: ignore[misc]
        self._note_duration(Phase.VALIDATION, self._validation_began_at)

    def on_test_start(self) -> None:
        """Enters the validation phase."""
        self.phases.enter(Phase.VALIDATION)
        super().on_test_start()  # type: ignore[misc]

    def on_predict_start(self) -> None:
        """Enters the validation phase."""
        self.phases.enter(Phase.VALIDATION)
        super().on_predict_start()  # type: ignore[misc]

    def _note_duration(self, phase: Phase, began_at: float) -> None:
        if self._calibration is not None:
            self._calibration.note(phase, time.monotonic() - began_at)

    @property
    def _is_late(self) -> bool:
        """Asked at each gate: whether this rank wants the deadlines reviewed there."""
        return self._calibration is not None and self._calibration.is_late

    def _calibrate(self, records: Sequence[GateRecord]) -> None:
        """All ranks have just met at a gate: notes how long the last step took, and reviews the deadlines when due."""
        last, self._gate_passed_at = self._gate_passed_at, time.monotonic()
        if self._calibration is None:
            return
        if last is not None and self.phases.current is Phase.STEP:
            self._note_duration(Phase.STEP, last)
        if not self._calibration.is_due(somebody_is_late=any(record.wishes & Wish.LATE for record in records)):
            return
        assert self._plane is not None
        ranks = self._plane.gather_json("calibration", self._calibration.take(), self.phases.patience)
        if self._calibration.settle(ranks):
            self._put_in_force()
            log.info("rank %d: %s", self._plane.world.rank, self._calibration.describe())

    def _note_left(self, phase: Phase, seconds: float) -> None:
        """A phase has ended: notes those that occur once. All others are measured between two of their own moments."""
        if self._calibration is not None and phase in (Phase.SETUP, Phase.RESUME):
            self._calibration.note(phase, seconds)

    def _adopt_deadlines(self, found: Mapping[str, float]) -> None:
        """Takes over the deadlines of the checkpoint from which this run resumes. All ranks have just met."""
        if self._calibration is None:
            return
        if self.copy_to is not None:  # what was quick from the folder may have to be fetched
            found = {name: seconds for name, seconds in found.items() if name != Phase.RESUME.value}
        if found and found != self._calibration.deadlines_s:
            self._calibration.adopt(found)
            self._put_in_force()

    def _put_in_force(self) -> None:
        assert self._calibration is not None
        self.timeouts = self._calibration.timeouts()
        self.phases.replace(self.timeouts)
        self.note("calibrated", **self._calibration.to_event())
