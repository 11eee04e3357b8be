"""The thread that sees silence, collects the evidence of all ranks, gives the verdict and ends the process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import ExitCode
from lightning_distplus.liveness import ProcessState
from lightning_distplus.timeouts import Duration, parse_duration
from lightning_distplus.watchdog import stacks
from lightning_distplus.watchdog.board import Board
from lightning_distplus.watchdog.marks import Marks
from lightning_distplus.watchdog.verdict import Evidence, Verdict, judge

__all__ = ["Watchdog"]

log = logging.getLogger(__name__)

_TICK_S = 0.1
_ALERT_AFTER_S = 1.0
_COLLECT_S = 0.7  # how long the ranks have to send their evidence
_SUSPENDED_S = 3.0  # a tick that took so long: this process was stopped itself, and all clocks start anew
_PEER_GRACE_S = 3.0  # how long a peer's error may take to end this rank by itself
_LAST_S = 0.5  # the process that serves the store ends last

_INCIDENT = "hang"


class Watchdog:
    """Watches the training thread of this process, and judges with the watchdogs of the other ranks.

    A hang is a silence of the whole job: no rank has set a mark for the deadline. A rank that moves slowly is none.

    Args:
        plane: The control plane.
        marks: This rank's marks.
        deadline: The longest silence in the present phase, asked for at every tick; None: no verdict.
        report_after: A silence longer than this is reported once; it ends nothing. None: never.
        ends_run: Whether a verdict ends the process.
        folder: Where verdicts are written.
    """

    def __init__(
        self,
        plane: ControlPlane,
        marks: Marks,
        *,
        deadline: Callable[[], timedelta | None],
        report_after: Duration | None,
        ends_run: bool,
        folder: Path,
    ) -> None:
        self._plane = plane
        self._marks = marks
        self._deadline = deadline
        self._report_after = None if report_after is None else parse_duration(report_after)
        self._ends_run = ends_run
        self._folder = folder
        self._board = Board(plane.second_line(), marks)
        self._watched = threading.get_ident()
        self._stopping = threading.Event()
        self._reported_at = -1
        self._judged_at = -1
        self._awake_since = time.monotonic()
        self._last_tick = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="distplus-watchdog", daemon=True)

    def start(self) -> None:
        """Starts to watch the thread that made this object."""
        self._board.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends both threads; nothing is judged any more."""
        self._stopping.set()
        self._thread.join(timeout=2.0)
        self._board.stop()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_until_stopped()
        except Exception:  # the root of the thread: training goes on without a watchdog, and says so
            log.exception("rank %d: the watchdog has failed; nobody watches this rank", self._plane.world.rank)

    def _watch_until_stopped(self) -> None:
        heard_at: float | None = None
        while not self._stopping.wait(_TICK_S):
            self._notice_suspension()
            error = self._plane.first_error
            if error is not None and error.rank != self._plane.world.rank:
                heard_at = heard_at or time.monotonic()
                if time.monotonic() - heard_at > _PEER_GRACE_S and self._ends_run:
                    self._end(f"{error.describe()}\n{error.traceback}", error.as_heard().exit_code)
            elif error is None:
                self._look_at_silence()

    def _notice_suspension(self) -> None:
        now = time.monotonic()
        if now - self._last_tick > _SUSPENDED_S:
            self._awake_since = now
        self._last_tick = now

    def _look_at_silence(self) -> None:
        mark = self._marks.read()
        silence_s = min(mark.silence_s, time.monotonic() - self._awake_since)
        if silence_s < _ALERT_AFTER_S:
            self._board.alert.clear()
            return
        self._board.alert.set()
        report_s = None if self._report_after is None else self._report_after.total_seconds()
        if report_s is not None and silence_s > report_s and self._reported_at != mark.number:
            self._reported_at = mark.number
            self._report_stall(silence_s)
        deadline = self._deadline()
        if deadline is not None and silence_s > deadline.total_seconds() and self._judged_at != mark.number:
            self._consider(mark.number, deadline.total_seconds())

    def _report_stall(self, silence_s: float) -> None:
        lowest = min((rank for rank, seen in self._board.sightings.items()), default=self._plane.world.rank)
        if self._plane.world.rank == lowest:
            lines = [one.describe() for one in self._all_evidence().values()]
            log.warning(
                "no progress for %.0f s (nothing is ended by this report):\n  %s", silence_s, "\n  ".join(lines)
            )

    def _consider(self, number: int, deadline_s: float) -> None:
        """Gives the verdict, unless somebody moves."""
        self._board.post_evidence(number, asdict(self._own_evidence()))
        end = time.monotonic() + _COLLECT_S
        others = set(self._plane.world.ranks) - {self._plane.world.rank}
        while time.monotonic() < end and not self._stopping.is_set() and others - set(self._board.evidence):
            time.sleep(_TICK_S / 2)
        moving = [
            rank
            for rank, seen in self._board.sightings.items()
            if rank not in self._board.evidence and rank != self._plane.world.rank and seen.silence_s < deadline_s - 1.5
        ]
        if moving or self._marks.read().number != number or self._stopping.is_set():
            return
        evidence = self._all_evidence()
        if any(is_debugged(one.stack) for one in evidence.values()):
            self._judged_at = number
            log.warning("a rank stands in a debugger; nothing is ended")
            return
        self._judged_at = number
        self._give(judge(evidence, f"{_INCIDENT}-{int(time.time())}"))

    # -- evidence ----------------------------------------------------------------------------------------------------

    def _own_evidence(self) -> Evidence:
        mark, world = self._marks.read(), self._plane.world
        stack = stacks.stack_of(self._watched)
        return Evidence(
            rank=world.rank,
            host=world.host,
            pid=world.pid,
            state=ProcessState.RUNNING.value,
            answers=True,
            phase=mark.phase,
            operation=mark.operation,
            global_step=mark.global_step,
            silence_s=mark.silence_s,
            waits=stacks.is_waiting_for_peers(stack),
            location=stacks.user_location(stack),
            stack="".join(stacks.format_stack(stack)),
        )

    def _all_evidence(self) -> dict[int, Evidence]:
        found = {self._plane.world.rank: self._own_evidence()}
        for rank in self._plane.world.ranks:
            if rank in self._board.evidence and rank not in found:
                found[rank] = Evidence(**self._board.evidence[rank])
            elif rank not in found:
                found[rank] = self._seen_from_here(rank)
        return dict(sorted(found.items()))

    def _seen_from_here(self, rank: int) -> Evidence:
        """A rank that has sent nothing: what its last mark and this host's system say."""
        peer, seen = self._board.peers.get(rank), self._board.sightings.get(rank)
        mark = None if seen is None else seen.mark
        return Evidence(
            rank=rank,
            host=peer.host if peer else "unknown",
            pid=peer.pid if peer else 0,
            state=(peer.state() if peer else ProcessState.UNKNOWN).value,
            answers=False,
            phase=mark.phase if mark else "",
            operation=mark.operation if mark else "",
            global_step=mark.global_step if mark else 0,
            silence_s=seen.silence_s if seen else 0.0,
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _give(self, verdict: Verdict) -> None:
        if self._speaks_for_host(verdict):
            with suppress(OSError):
                path = verdict.write(self._folder, self._plane.world.host)
                _say(f"{verdict.render()}\n  file:  {path}")
        if self._ends_run:
            self._kill_who_cannot_end(verdict)
            if self._plane.world.rank == 0:
                time.sleep(_LAST_S)
            self._end(None, ExitCode.PEER_LOST if verdict.kind == "peer_lost" else ExitCode.HANG)

    def _speaks_for_host(self, verdict: Verdict) -> bool:
        """The lowest rank of this host whose Python runs."""
        host = self._plane.world.host
        able = [
            rank
            for rank, name in ((int(rank), name) for rank, name in verdict.hosts.items())
            if name == host and (rank == self._plane.world.rank or rank in self._board.evidence)
        ]
        return self._plane.world.rank == min(able)

    def _kill_who_cannot_end(self, verdict: Verdict) -> None:
        for rank in verdict.culprits:
            peer = self._board.peers.get(rank)
            if peer is None or rank in self._board.evidence or rank == self._plane.world.rank:
                continue
            if peer.state() in (ProcessState.RUNNING, ProcessState.STOPPED):  # the very process, on this host
                with suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)

    def _end(self, text: str | None, code: ExitCode) -> None:
        """Ends the process at once: its training thread may stand in a call that nothing interrupts."""
        if text is not None:
            _say(text)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(int(code))


def _say(text: str) -> None:
    """Straight to stderr: logging may be set to swallow it, and this is what the run ends with."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def is_debugged(stack: str) -> bool:
    """Whether a stack stands in Python's debugger."""
    return any(name in stack for name in ("/pdb.py", "/bdb.py", "/debugpy/", "/ipdb/"))
