"""The phase a run is in, and its deadline on every process group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from lightning_distplus import _compat
from lightning_distplus.process import running_time
from lightning_distplus.timeouts import OnHang, Phase, Timeouts, group_timeout

__all__ = ["Phases"]

log = logging.getLogger(__name__)

_TORCHS_PATIENCE = timedelta(minutes=30)  # torch.distributed's own default for a group


class Phases:
    """Gives the phase's deadline, plus a margin, to every process group, also to those that a library makes.

    A deadline may grow at any moment: a rank that waits longer than its peers harms nobody. It may shrink only where
    all ranks have just met; otherwise a rank that is early would time out on one that is still in the longer phase.

    Args:
        timeouts: The deadlines; None leaves torch's time-outs alone.
        on_hang: With ``"report"`` the groups wait for a day.
        on_left: Told each phase that has ended, and how long it was, in seconds.
    """

    def __init__(
        self,
        timeouts: Timeouts | None,
        on_hang: OnHang = "abort",
        on_left: Callable[[Phase, float], None] = lambda phase, seconds: None,
    ) -> None:
        self._timeouts = timeouts
        self._on_hang = on_hang
        self._on_left = on_left
        self._current = Phase.SETUP
        self._since = running_time()
        self._deadlines: dict[Phase, timedelta] = {}
        self._patiences: dict[Phase, timedelta] = {}
        self._in_force = self._deadline
        self._spared: list[dist.ProcessGroup] = []

    @property
    def current(self) -> Phase:
        """The phase in which this rank is."""
        return self._current

    @current.setter
    def current(self, phase: Phase) -> None:
        if phase is not self._current:
            left, since = self._current, self._since
            self._current, self._since = phase, running_time()
            self._on_left(left, self._since - since)

    @property
    def patience(self) -> timedelta:
        """How long a rank waits for its peers in this phase, at a gate and in any message of the control plane.

        As long as the process groups: the deadline and a margin, so that the verdict comes first; a day with
        ``on_hang="report"``. With ``timeout=None`` as long as torch waits.
        """
        found = self._patiences.get(self._current)
        if found is None:
            found = self._patiences[self._current] = self.patience_in(self._current)
        return found

    def patience_in(self, phase: Phase) -> timedelta:
        """How long a rank waits for its peers in another phase."""
        if phase is Phase.RENDEZVOUS:  # nobody can report on a rank that is not there yet
            return (self._timeouts or Timeouts()).deadline(phase)
        if self._timeouts is None:
            return _TORCHS_PATIENCE
        return group_timeout(self._deadline_of(phase), self._on_hang)

    @property
    def deadline(self) -> timedelta | None:
        """The longest silence in this phase; None: no verdict is ever given."""
        return None if self._timeouts is None else self._deadline

    @property
    def last_deadline(self) -> timedelta | None:
        """The longest silence at the end of a run, where nobody awaits this rank: no shorter than that of a step."""
        return None if self._timeouts is None else self._deadline_of(Phase.TEARDOWN)

    @property
    def _deadline(self) -> timedelta:
        found = self._deadlines.get(self._current)
        if found is None:
            found = self._deadlines[self._current] = self._deadline_of(self._current)
        return found

    def _deadline_of(self, phase: Phase) -> timedelta:
        timeouts = self._timeouts or Timeouts()
        deadline = timeouts.deadline(phase)
        return max(deadline, timeouts.deadline(Phase.STEP)) if phase is Phase.TEARDOWN else deadline

    @property
    def group_timeout(self) -> timedelta | None:
        """What a group gets now; None where torch's default stays. Above the phase's, until all ranks have met."""
        return None if self._timeouts is None else group_timeout(self._in_force, self._on_hang)

    def expect_people(self) -> None:
        """From now on groups and the control plane wait for a day: somebody may stop a rank by hand.

        The verdict keeps its deadline. It knows a debugger, and a process that was paused; a group's time-out does not.
        """
        self._on_hang = "report"
        self._forget()
        self._set(self._deadline)

    def replace(self, timeouts: Timeouts) -> None:
        """Takes other deadlines from now on. All ranks have just met."""
        self._timeouts = timeouts
        self._forget()
        self._set(self._deadline)

    def enter(self, phase: Phase) -> None:
        """Enters a phase, from any rank at any moment; the groups' time-outs only grow."""
        self.current = phase
        if self._deadline > self._in_force:
            self._set(self._deadline)

    def enter_after_meeting(self, phase: Phase) -> None:
        """Enters a phase when all ranks have just met: the groups' time-outs grow or shrink."""
        self.current = phase
        if self._deadline != self._in_force:
            self._set(self._deadline)

    def _forget(self) -> None:
        """What was worked out of the deadlines before; the gate of each step asks for it."""
        self._deadlines.clear()
        self._patiences.clear()

    def _set(self, deadline: timedelta) -> None:
        self._in_force = deadline
        self.apply()

    def apply(self) -> None:
        """Sets the phase's time-out on every group of this process; call it again after groups were made."""
        timeout = self.group_timeout
        if timeout is not None:
            for group in _compat.process_groups():
                if group not in self._spared:
                    _compat.set_group_timeout(group, timeout)

    def spare(self, group: dist.ProcessGroup) -> None:
        """Leaves a group the time-out that it has: what runs on it does not follow the phases."""
        self._spared.append(group)
