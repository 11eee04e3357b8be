"""What is known of one rank when nobody has moved for too long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_distplus.process import ProcessState
from lightning_distplus.watchdog.flight_recorder import Collective, Recording

__all__ = ["Evidence"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One rank's place in an incident; plain values, so that it travels as JSON."""

    rank: int
    host: str
    pid: int
    state: str
    """``ProcessState`` of its process, as its own host sees it."""
    answers: bool
    """Whether its Python still runs: its watchdog thread has sent its stack."""
    is_unheard: bool = False
    """Whether nothing can be said about its Python, because the store that carries the messages does not answer."""
    is_unreachable: bool = False
    """Whether no packet comes back from its host."""
    phase: str = ""
    operation: str = ""
    global_step: int = 0
    call: int = 0
    """``Mark.call``."""
    silence_s: float = 0.0
    waits: bool = False
    """Whether its training thread stands in a collective or in another wait for peers."""
    location: str | None = None
    stack: str = ""
    stands_in: dict[str, Any] | None = None
    """The ``Collective`` in which it waits."""
    recording: dict[str, Any] = field(default_factory=dict)
    """Its last collectives, as ``Recording.to_plain`` writes them."""
    load: dict[str, Any] = field(default_factory=dict)
    """``HostLoad`` of its host at that moment."""
    is_last_seen: bool = False
    """Whether location and stack are those of an earlier moment, because the rank itself cannot be asked any more."""
    is_recorded_only: bool = False
    """Whether nothing but its flight recorder is known, as with a dump that is read when the job is over."""
    ended: str = ""
    """``Mark.ended``: it awaits nobody, and nobody awaits it."""
    beat_s: float = 0.0
    """How old that moment is."""
    was_ended_by: str = ""
    """The C++ exception that ends its process, where that is what happened."""

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.state == ProcessState.GONE.value

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped by a signal."""
        return self.state == ProcessState.STOPPED.value

    @property
    def holds_lock(self) -> bool:
        """Whether its process runs and its Python does not, other than in a wait for peers, which gives up the lock."""
        return not (self.answers or self.is_unheard or self.waits or self.is_recorded_only)

    @property
    def collective(self) -> Collective | None:
        """The collective in which it waits, where it waits in one."""
        return Collective(**self.stands_in) if self.waits and self.stands_in else None

    @property
    def calls(self) -> Recording:
        """Its last collectives."""
        return Recording.from_plain(self.recording)

    def describe(self) -> str:
        """Where it is, in one line."""
        name = f"rank {self.rank}" + ("" if self.is_recorded_only else f" (host {self.host}, pid {self.pid})")
        return f"{name}: {self._state()}{self._place()}"

    def _state(self) -> str:
        if self.is_recorded_only:
            in_flight = len(self.calls.unfinished)
            return f"{in_flight or 'no'} calls in flight" if self.recording else "no dump"
        if self.ended:
            return self.ended
        if self.is_gone:
            return "its process is gone"
        if self.is_unreachable:
            return "its host does not answer"
        if self.is_stopped:
            return "its process is stopped (SIGSTOP, a debugger or a terminal)"
        if self.is_unheard:
            return "no word from it, because the store does not answer"
        if self.holds_lock:
            cause = "" if self.is_last_seen else " (a C call holds the GIL)"  # known where its stack was read
            return f"its process runs, and its Python does not answer{cause}"
        if not self.answers:
            return "waits for its peers, as seen from outside; its Python has not answered in time"
        call = f", call {self.call} of the run" if self.call else ""
        return f"in {self.operation!r}{call}, for {self.silence_s:.0f} s"

    def _place(self) -> str:
        if self.ended:
            return ""
        collective = self.collective
        call = f", in {collective.describe()}" if collective else ""
        if self.is_last_seen and self.operation:
            at = f" at {self.location}" if self.location else ""
            return f"{call}, last seen in {self.operation!r}{at}, {self.beat_s:.1f} s before"
        return call + (f", at {self.location}" if self.location else "")
