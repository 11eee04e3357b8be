"""The watchdog: a thread that sees silence, collects the evidence of all ranks, gives the verdict and ends the run.

``Watchdog`` finds out and ends; ``Telling`` brings the verdict to the file, to the peers and, last, to the terminal.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_distplus import _compat, env, errors, process
from lightning_distplus.control import ControlPlane, Points
from lightning_distplus.control.collective_check import ended_early
from lightning_distplus.control.first_error import FirstError
from lightning_distplus.control.plane import Peer
from lightning_distplus.errors import DistplusError, ExitCode, HangDetected, PeerError, PeerLost
from lightning_distplus.process import ProcessState, running_time, until
from lightning_distplus.timeouts import Duration, parse_duration
from lightning_distplus.watchdog import flight_recorder, stacks
from lightning_distplus.watchdog.evidence import Evidence, Witness
from lightning_distplus.watchdog.heartbeat import BEAT_S, NUM_READERS, Board, has_slate
from lightning_distplus.watchdog.progress import Counts, Marks
from lightning_distplus.watchdog.stacks import StackPrinter
from lightning_distplus.watchdog.verdict import (
    Verdict,
    find_verdicts,
    judge,
    judge_failure,
    name_incident,
    print_block,
    print_once,
    shown_mark,
)
from lightning_distplus.world import name_ranks

log = logging.getLogger(__name__)
T = TypeVar("T")

_TICK_S = 0.1
_ALERT_AFTER_S = 1.0
_COLLECT_S = 0.7  # how long the ranks have to send their evidence
_COLLECT_BUSY_S = 1.8  # the same for ranks whose beats say that their Python runs
_MOVED_S = 1.0  # a rank whose silence is shorter than the deadline by more than this has moved
_UNSEEN_S = _ALERT_AFTER_S + BEAT_S + 0.3  # so much of a peer's silence goes by before this rank first looks
# Of many ranks one judges, and the others only where it does not: first the other readers, one after the other, then
# one rank of each node, in growing numbers, so that not all of a large job read what all of it says.
_NEXT_READER_S = 1.0
_STEP_IN_S = 5.0
_STEP_IN_FACTOR = 4
_PEER_GRACE_S = 3.0  # how long a peer's error may take to end this rank by itself
_JOIN_S = 5.0  # a verdict may be under way
_LAST_S = 0.5  # the process that serves the store ends last
_LINGER_S = 0.3  # so that the peers, which judge at the same moment, are not torn out of it
_SETTLED_TURNS = 7
_ASKS = 5  # for the stack of a process that would be killed: a busy host answers late
_SIGNS_OF_TIME_OUT = ("timed out", "timeout", "time-out")


class _JudgedTogether(RuntimeError):
    """C++ ends this process, or a collective has timed out here: the peers, who know more, judge with this rank."""

    has_verdict = True


class WatchedRun(Counts, Protocol):
    """The run, as the watchdog asks it; from threads of its own."""

    @property
    def deadline(self) -> timedelta | None:
        """How long a rank may be silent in the present phase; None: no verdict is given."""

    @property
    def last_deadline(self) -> timedelta | None:
        """The same at the end, of a rank that is alone because others have ended their run."""

    def on_verdict_shown(self, path: Path) -> None:
        """Hears of the file of a verdict that this rank has printed; never raises."""


class Watchdog:
    """Watches the training thread of this process, and judges with the watchdogs of the other ranks.

    A hang is a silence of the whole job: no rank has set a mark for the deadline. A rank that moves slowly is none.

    Args:
        plane: The control plane.
        marks: This rank's marks.
        run: The run that is watched.
        report_after: A silence longer than this is reported once; it ends nothing. None: never.
        ends_run: Whether a verdict ends the process.
        folder: Where verdicts are written.
        has_process: Whether this rank has a process of its own; the ranks of a simulation are threads.
    """

    def __init__(
        self,
        plane: ControlPlane,
        marks: Marks,
        run: WatchedRun,
        *,
        report_after: Duration | None,
        ends_run: bool,
        folder: Path,
        has_process: bool = True,
    ) -> None:
        self._plane = plane
        self._world = plane.world
        self._marks = marks
        self._run = run
        self._report_after_s = math.inf if report_after is None else parse_duration(report_after).total_seconds()
        self._ends_run = ends_run
        self._has_process = has_process
        self._printer = StackPrinter.arm() if has_process else None
        thread = threading.get_ident()
        self.board = Board(plane.second_line(), marks, thread=thread, printer=self._printer, counts=run)
        """What the ranks tell each other."""
        self._witness = Witness(plane, marks, self.board, thread=thread, printer=self._printer)
        self._telling = Telling(plane, self.board, folder, run)
        self._stopping = threading.Event()
        self._judges_together = threading.Lock()
        self._have_judged_together = threading.Event()
        self._aborts = threading.Lock()
        self._restore: list[Callable[[], None]] = []
        self._heard_at: float | None = None
        self._on_its_way_at = -math.inf
        """When the training thread was last seen on its way out."""
        self._reported_at = -1
        self._judged_at = -1
        self._posted: Evidence | None = None
        self._left_behind = (-1, 0)
        """A mark, and for how many turns this rank has stood there in a call to which somebody never comes."""
        self._thread = threading.Thread(target=self._watch, name="distplus-watchdog", daemon=True)

    def start(self) -> None:
        """Starts to watch the thread that made this object; call it before the first collective."""
        if self._has_process:
            self._telling.arm()
            flight_recorder.arm()
            self._restore += filter(None, [_compat.on_terminate(self._speak_before_abort)])
            # From now on data workers that are forked from this process end when it is killed. A worker notices the
            # death of its rank between two samples only; until then its copies of the connections keep all peers
            # waiting, in the collectives and, where this rank serves it, for the store.
            multiprocessing.util.register_after_fork(self, _end_with_parent)
        if (printer := self._printer) is not None:
            self._restore.append(
                _compat.prepare_workers(lambda loader: stacks.PrintsStacks.where_needed(loader, printer))
            )
        self.board.start(has_process=self._has_process)
        self._thread.start()

    def meet_peers(self, points: Points) -> None:
        """Call it once, when all ranks have started theirs: this one can then see peers of its host that are silent.

        From then on each beat tells where this rank stands between the checked calls of the run.
        """
        self.board.points = points
        self.board.open_slates(self._plane.peers_nearby())

    def stop(self) -> None:
        """Ends both threads; nothing is judged any more."""
        if self._plane.first_error is None:
            self._telling.disarm()
        self._stopping.set()
        self._thread.join(timeout=_JOIN_S)
        self.board.stop()
        while self._restore:
            self._restore.pop()()
        if self._printer is not None:
            self._printer.disarm()
            self._printer = None

    def end(self, how: str) -> None:
        """Says that the run has ended on this rank; peers that have not ended theirs are still watched."""
        self._marks.end(how)
        self.board.alert.set()  # publishes it now

    def rearm(self) -> None:
        """Call it where Lightning has put the handlers of all signals back: hooks follow in which a rank may hang."""
        if self._printer is not None:
            self._printer.rearm()

    def has_ended(self, ranks: Collection[int]) -> bool:
        """Whether all of these ranks have ended their run, as far as this one has seen."""
        return set(ranks) <= set(self.board.ended)

    def tell_failure(self, error: FirstError, *, is_told: bool = True, ends_others: bool = False) -> None:
        """Leaves the verdict on the first error of the job, which all ranks know unless the store was lost with it."""
        self._telling.tell_failure(error, is_told=is_told, ends_others=ends_others)

    def judge_time_out(self, error: BaseException) -> bool:
        """Called by the training thread where a collective has raised, for which no peer is known to be the cause.

        The groups that Lightning and the engines make wait longer than the watchdog; one that the user makes may have
        a shorter time-out of its own. The rank on which it passes is the one that waited: all ranks judge before it is
        blamed.

        Returns:
            Whether it is a time-out.
        """
        if not any(sign in errors.message_of(error).lower() for sign in _SIGNS_OF_TIME_OUT):
            return False
        self._witness.timed_out_at = traceback.extract_tb(error.__traceback__)
        self._plane.report_failure(
            _JudgedTogether(
                f"a collective has timed out at {self._witness.own().location}: {str(error).splitlines()[0]}. This "
                "rank is the one that waited. The verdict names the ranks that did not come."
            )
        )
        self._judge_together()
        return True

    # -- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(_TICK_S):
                self.turn()
            self._heed_peers()  # the training thread may have raised what a peer has judged, and be on its way out
        except Exception:  # the root of the thread: training goes on without a watchdog, and says so
            log.exception("rank %d: the watchdog has failed; nobody watches this rank", self._world.rank)

    def turn(self) -> None:
        """Looks once; the thread does so ten times a second. A verdict takes a second or two."""
        if self._plane.first_error is None:
            self._look_at_silence()
        self._heed_peers()

    def _heed_peers(self) -> None:
        error = self._plane.first_error
        if error is None or error.rank == self._world.rank:
            return
        if self._heard_at is None:
            self._heard_at = running_time()
            self._join(error)
        self._end_after_grace(error, self._heard_at)

    def _join(self, error: FirstError) -> None:
        """A peer has judged already, or its process is about to end: this rank gives the same verdict on its host."""
        if error.type == _JudgedTogether.__name__:
            self._judge_together()
        elif not error.message.startswith(JUDGED):
            self.tell_failure(error)
        elif (self.board.is_few or self._telling.speaks_for_host(error.ranks)) and (
            verdict := self._telling.told_by(error.rank)
        ):
            self._give(verdict)

    def _end_after_grace(self, error: FirstError, heard_at: float) -> None:
        """A rank that cannot raise what it has heard, because its training thread is stuck, ends.

        One that is on its way out, in ``on_exception`` or ``finally``, has the deadline of the end of a run.
        """
        now, last = running_time(), self._run.last_deadline
        if self._witness.is_on_its_way_out():
            self._on_its_way_at = now
        is_stuck = now - max(heard_at, self._on_its_way_at) > _PEER_GRACE_S
        is_late = last is not None and now - heard_at > last.total_seconds()
        if (is_stuck or is_late) and self._ends_run:
            self.tell_failure(error, ends_others=True)
            self._telling.say_if_full(f"{error.describe()}\n{error.traceback}")
            self._leave(error.as_heard().exit_code)

    def _look_at_silence(self) -> None:
        mark = self._marks.read()
        if mark.silence_s < _ALERT_AFTER_S:
            self.board.alert.clear()
            self.board.is_asked = False
            return
        self.board.alert.set()
        if self.board.is_asked:  # a peer considers a verdict
            self._post(mark.number)
        self._look_at_the_end(mark.number)
        if mark.silence_s > self._report_after_s and self._reported_at != mark.number:
            self._reported_at = mark.number
            self._report_stall(mark.silence_s)
        deadline_s = self._deadline_s()
        if mark.silence_s > deadline_s and self._judged_at != mark.number:
            self._consider(mark.number, deadline_s)

    def _deadline_s(self) -> float:
        """Whom nobody awaits any more, because others have ended, may take as long as the end of a run may."""
        deadline = self._run.deadline
        if deadline is not None and self.board.ended:
            deadline = max(deadline, self._run.last_deadline or deadline)
        return math.inf if deadline is None else deadline.total_seconds()

    def _look_at_the_end(self, number: int) -> None:
        """Raises for the training thread where it stands in a collective to which peers that have ended never come.

        The turns are counted, not the time: after a pause of this process what it waits for may just have arrived.
        """
        left = {} if self.board.is_silent or self._plane.first_error else self.board.left
        if not left or self._left_behind[0] != number:
            self._left_behind = (number, 0)
        if not left or (call := self._witness.collective_with(left)) is None:
            return
        self._left_behind = (number, self._left_behind[1] + 1)
        if self._left_behind[1] < _SETTLED_TURNS:
            return
        first = self._plane.report_failure(ended_early(left, {self._world.rank: call}))
        if first is not None and first.rank == self._world.rank:
            self.tell_failure(first)
            if self._ends_run:
                self._linger()
                self._telling.say_if_full(first.describe())
                self._leave(ExitCode.DIVERGENCE)

    def _linger(self) -> None:
        time.sleep(_LAST_S if self._world.rank == 0 else _LINGER_S)

    def _leave(self, code: ExitCode) -> None:
        """Ends this process at once: its training thread may stand in a call that nothing interrupts.

        Its data workers end with it, as at an orderly exit. One that hangs in a sample would live on, and with it its
        copies of all connections: peers would wait for an answer of a store that nobody serves.
        """
        self._telling.leave(code)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        process.end_workers()
        os._exit(int(code))

    def _post(self, number: int) -> None:
        """Sends the evidence of this silence, once."""
        if self._posted is None or self._posted.number != number:
            self._posted = self._witness.own()
            self.board.post_evidence(asdict(self._posted))

    def _report_stall(self, silence_s: float) -> None:
        alive = {rank for rank in tuple(self.board.sightings) if self.board.beats(rank)}  # its thread adds to them
        if self.board.reads and self._world.rank == min(alive, default=self._world.rank):
            log.warning(
                "no progress for %.0f s (nothing is ended by this report):\n  %s\n  load of host %s: %s",
                silence_s,
                "\n  ".join(self._witness.brief()),
                self._world.host,
                process.HostLoad.now().describe(),
            )

    # -- the verdict -------------------------------------------------------------------------------------------------

    def _consider(self, number: int, deadline_s: float) -> None:
        """Gives the verdict, unless somebody moves."""
        self._post(number)
        if not self._must_judge(deadline_s):
            return
        self.board.ask(number)
        self._collect(_COLLECT_S)
        self._witness.probe_hosts()
        deadline_s = max(deadline_s, self._deadline_s())  # this rank may have read only now that others have ended
        if self._marks.read().silence_s <= deadline_s or self._somebody_moves(deadline_s):
            return
        evidence = self._evidence()
        has_moved = self._marks.read().number != number
        if has_moved or self._stopping.is_set() or all(one.ended for one in evidence.values()):
            return
        self._judged_at = number
        if any(self._is_debugged(one) for one in evidence.values()):
            log.warning("a rank stands in a debugger; nothing is ended")
            return
        self._give(self._judge(evidence, "hang"))

    def _judge(self, evidence: dict[int, Evidence], kind: str) -> Verdict:
        return judge(evidence, name_incident(kind, self._plane.run_id), self._plane.run_id)

    def _evidence(self) -> dict[int, Evidence]:
        """What the peers know of this rank holds for this rank as well: all judge by the same."""
        own = {} if self._posted is None else {self._world.rank: self._posted}
        return {**self._witness.of_peers(), **own}

    def _must_judge(self, deadline_s: float) -> bool:
        """Of many ranks the first one judges; where it does not, others do."""
        if self.board.is_few:
            return True
        rank, node = self._world.rank, self._world.node_ranks
        if rank < NUM_READERS:
            patience_s = rank * _NEXT_READER_S
        elif rank == node[0]:
            patience_s = _STEP_IN_S * (1 + int(math.log(1 + rank // len(node), _STEP_IN_FACTOR)))
        else:
            return False
        is_due = self._marks.read().silence_s > deadline_s + patience_s
        self.board.reads |= is_due
        return is_due

    def _collect(self, seconds: float) -> None:
        """Waits for the evidence of the others; longer for those that beat, which can still speak on a busy host."""
        begin = running_time()
        asked_s = 0.0 if self.board.is_few else BEAT_S
        others = set(self._world.ranks) - {self._world.rank}
        while (missing := others - set(self.board.evidence)) or not self.board.has_posted:
            can_speak = any(self.board.beats(rank) for rank in missing)
            if running_time() - begin > (_COLLECT_BUSY_S if can_speak else seconds) + asked_s:
                return
            time.sleep(_TICK_S / 4)

    def _somebody_moves(self, deadline_s: float) -> bool:
        """Whether a peer has moved within the deadline, as far as its last beat tells."""
        for rank in set(self.board.sightings) - {self._world.rank}:
            beats = self.board.beats(rank)
            if beats or rank not in self.board.evidence:
                least_s = deadline_s - (_MOVED_S if beats else _UNSEEN_S)
                if self.board.sightings[rank].silence_s < least_s:
                    return True
        return False

    def _is_debugged(self, one: Evidence) -> bool:
        peer = self.board.peers.get(one.rank)
        return stacks.is_debugged(one.stack) or (peer is not None and peer.is_here and process.is_traced(one.pid))

    def _speak_before_abort(self, exception: str) -> None:
        """Tells the peers, from the thread on which C++ gives up, what this rank was doing; then the process ends.

        The training thread stands in the collective and cannot say anything; after this nobody can.
        """
        if not self._aborts.acquire(blocking=False):  # two threads may end the process at once
            time.sleep(2.0)
            return
        with suppress(Exception):  # whatever happens here, the process ends as it would have ended
            self._witness.ended_by = exception or "of an unknown type"
            own = self._witness.own()
            call = own.collective.describe() if own.collective else "no collective that is known"
            self._plane.report_failure(
                _JudgedTogether(
                    f"an exception in C++ ({own.was_ended_by}) ends this process, which stands in {call}, at "
                    f"{own.location}. In gloo it means that a peer's message does not fit: another shape, dtype or "
                    "order of collectives. The verdict names the rank that differs."
                )
            )
            self._judge_together()
            self._telling.leave(ExitCode.PEER_LOST)
            time.sleep(_LINGER_S)  # the peers write their verdict, now that all evidence is there

    def _judge_together(self) -> None:
        """C++ ends a rank, or a collective has timed out on it: all ranks say where they are before it is gone.

        The training thread and the watchdog may both come here. The second one waits: its process must not end before
        the first one has said where this rank stands.
        """
        self._witness.is_after_failure = True
        self.board.alert.set()
        self._post(self._marks.read().number)  # anew where the training thread has moved on in its error
        if not self._judges_together.acquire(blocking=False):
            self._have_judged_together.wait(_JOIN_S)
            return
        try:
            self._collect(_COLLECT_S)
            if not self.board.reads:
                return
            verdict = self._telling.settle(self._judge(self._evidence(), "abort"))
            if self._telling.speaks_for_host(verdict.silent):
                self._telling.tell(verdict)
            self._telling.await_settled(set(self.board.evidence))
        finally:
            self._have_judged_together.set()

    def _give(self, verdict: Verdict) -> None:
        self._telling.has_judged = self._ends_run
        verdict = replace(verdict, ends_run=self._ends_run)
        speaks = self._telling.speaks_for_host(verdict.silent)
        # Where another rank speaks, the end of this process would tear that one out of its verdict.
        has_to_tell = speaks or (self._ends_run and not self._telling.is_written(_SPOKEN_S))
        path = self._telling.tell(verdict) if has_to_tell else None
        if self._ends_run:
            self._telling.tell_peers(verdict)
            self._kill_who_cannot_end(verdict)
            self._linger()
            self._leave(ExitCode.PEER_LOST if verdict.kind == "peer_lost" else ExitCode.HANG)
        elif path is not None:
            print_block(verdict, path)
            tell = self._run.on_verdict_shown
            threading.Thread(target=tell, args=(path,), name="distplus-on-shown", daemon=True).start()

    def _kill_who_cannot_end(self, verdict: Verdict) -> None:
        """Kills culprits of this host, with what was forked from them, of which it is known that they cannot end.

        They are stopped by a signal; or they have printed the stack for which they were asked, or do so now, while
        their Python was mute, and could do it again.
        """
        for rank in set(verdict.culprits) & set(verdict.silent) - {self._world.rank}:
            peer, seen = self.board.peers.get(rank), self.board.last_seen(rank)
            if peer is None or not peer.is_here or seen is None or seen.mark.ended:
                continue
            pid, printer = peer.pid, seen.printer
            is_stuck = peer.state() is ProcessState.STOPPED
            if not is_stuck and printer is not None and process.catches_signal(pid, printer.number):
                has_shown = bool(verdict.stacks.get(str(rank)))
                is_stuck = has_shown or any(stacks.ask_for_stack(pid, printer) for _ in range(_ASKS))
            if is_stuck and peer.state() in (ProcessState.RUNNING, ProcessState.STOPPED) and has_slate(pid):
                for one in (*process.forks(pid), pid):
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)


def _end_with_parent(_: object) -> None:
    """Runs in a child. The system watches the thread that forked, so that one forked elsewhere is left alone."""
    is_of_main_thread = threading.current_thread().name == "MainThread"
    if multiprocessing.current_process().daemon and is_of_main_thread:
        process.end_with_parent()


# -- how a verdict gets out, and what a person reads when a run ends ---------------------------------------------------

# The verdict is shown once per host and last. Each rank writes its whole traceback to ``rank00000.traceback``. On the
# terminal the rank that raised shows its own frames, a rank that stopped because of another one says so in a line, and
# the lowest rank of the host that still runs waits for the others there and prints the verdict. Below ``distplus
# launch`` the launcher does, after its own lines.

JUDGED = "the watchdogs have judged:\n"
_TOLD_S = 1.0
_SPOKEN_S = 3.0  # how long the rank that speaks for a host may take longer than another one there
_FAILURE_S = 1.0  # the same where all of them have found that the store is lost
_RECENT_S = 20.0
_STORE_S = 0.3
_SETTLED = "watchdog/together/settled"
_at_exit: list[multiprocessing.util.Finalize] = []
"""Shows the verdict on the last run where no hook is asked: in a script that goes on."""


class Telling:
    """Tells verdicts for one rank: one rank of each host writes and prints. It also shows how this process ends."""

    def __init__(self, plane: ControlPlane, board: Board, folder: Path, run: WatchedRun) -> None:
        self._plane = plane
        self._line = plane.second_line()
        self._world = plane.world
        self._board = board
        self._folder = folder
        self._run = run
        self._began_at = time.time()
        self._found: tuple[Verdict, Path] | None = None
        self._is_over = False
        self.has_judged = False
        """Whether this rank gives a verdict of the watchdogs: what it raises from then on follows from that."""

    def speaks_for_host(self, silent: Iterable[int] = ()) -> bool:
        """Whether this is the lowest rank of its host whose process is there and whose Python runs."""
        here = {rank for rank, peer in self._peers_here(silent) if peer.state() is not ProcessState.GONE}
        return self._world.rank == min(here | {self._world.rank})

    def _peers_here(self, silent: Iterable[int]) -> list[tuple[int, Peer]]:
        out = {self._world.rank, *silent}
        return [
            (rank, one) for rank, one in self._board.peers.items() if one.host == self._world.host and rank not in out
        ]

    # -- to the file and to the peers --------------------------------------------------------------------------------

    def tell(self, verdict: Verdict) -> Path:
        """Writes it, where the folder takes a file; one that ends the run is printed when this process ends."""
        path = verdict.path(self._folder, self._world.host)
        self._found = (verdict, path) if verdict.ends_run else self._found
        with suppress(OSError):
            verdict.write(self._folder, self._world.host)
        return path

    def tell_failure(self, error: FirstError, *, is_told: bool, ends_others: bool) -> None:
        """Writes the verdict on an error, once on each host; it is printed when this process ends. Never raises.

        An error that is not told was found with the loss of the store, by each rank for itself: the lowest rank of this
        host that lives writes, and where it does not come to it, another one.
        """
        if self.has_judged:
            return
        try:
            known = (self._plane.run_id, self._board.peers, self._board.last_seen)
            verdict = judge_failure(error, self._world, *known, ends_others=ends_others)
            if verdict is None:
                return
            wait_s = 0.0 if self.speaks_for_host(verdict.culprits) else _FAILURE_S
            if not is_told and self.is_written(wait_s):
                return
            if not verdict.path(self._folder, self._world.host).exists():  # two at once write the same
                self.tell(verdict)
        except Exception:  # on the way out: the error itself must be seen
            log.exception("rank %d: no verdict can be given", self._world.rank)

    def _written(self, since: float) -> list[Path]:
        """The verdicts on the end of this run that ranks of this host have written since then, oldest first."""
        run_id, host = self._plane.run_id, self._world.host
        told = find_verdicts(self._folder, run_id=run_id, host=host, since=since, of_end=True)
        return [one["path"] for one in told]

    def is_written(self, wait_s: float) -> bool:
        """Waits for a verdict of another rank of this host on the end of the run, for so long at most."""
        return until(lambda: bool(self._written(time.time() - _RECENT_S)), wait_s)

    def tell_peers(self, verdict: Verdict) -> None:
        """Makes the verdict the job's first error: the end of this process must not look like the cause elsewhere."""
        kind = PeerLost if verdict.kind == "peer_lost" else HangDetected
        error = kind(f"{JUDGED}{verdict.render()}", verdict.culprits)
        error.has_verdict = True
        told = verdict if self._board.is_few else verdict.shortened()

        def tell() -> None:
            self._line.send(f"watchdog/verdict/{self._world.rank}", told.to_json().encode())
            self._plane.report_failure(error)

        _within(_STORE_S, tell)

    def told_by(self, rank: int) -> Verdict | None:
        """The verdict that a rank has told; None where it cannot be had in time."""
        told = _within(_TOLD_S, lambda: self._line.read(f"watchdog/verdict/{rank}"))
        return None if told is None else Verdict.from_json(told)

    def settle(self, verdict: Verdict) -> Verdict:
        """Makes all ranks that judge together give one verdict, the first: whoever has judged may end at once."""

        def claim() -> bytes:
            told = self._line.claim("watchdog/together", verdict.to_json().encode())
            self._line.sign_in(_SETTLED)
            return told

        told = _within(_TOLD_S, claim)
        return verdict if told is None else Verdict.from_json(told)

    def await_settled(self, ranks: set[int]) -> None:
        """Keeps the process that serves the store until these ranks have the verdict that all give."""
        if self._world.rank == self._plane.host_rank:
            others = {rank for rank in ranks if self._board.is_few or rank < NUM_READERS} - {self._world.rank}
            with suppress(PeerError, RuntimeError):
                until(lambda: others <= self._line.signed_in(_SETTLED), _SPOKEN_S)

    # -- to the terminal ---------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """From now on, uncaught errors of this process are shown here."""
        self._is_over = False
        errors.show_errors_with(self)
        _compat.stop_child_observer()
        _cancel_at_exit()  # of an earlier run
        _at_exit.append(multiprocessing.util.Finalize(None, self.show_block, kwargs={"waits": False}, exitpriority=0))

    def disarm(self) -> None:
        """The run has ended well: nothing is left to show."""
        errors.stop_showing_errors_with(self)
        self._is_over = True
        _cancel_at_exit()  # it would hold what this run has held

    @property
    def is_full(self) -> bool:
        """Whether the user wants every traceback on the terminal."""
        return env.DISTPLUS_TRACEBACK.get() == "full"

    def say_if_full(self, text: str) -> None:
        """Prints what only a user sees who wants every traceback."""
        if self.is_full:
            _say(text)

    def show(self, error: BaseException, printed: str) -> None:
        """Shows an uncaught error; the verdict, or what all ranks raise alike, comes last."""
        if not hasattr(sys, "ps1"):  # this process ends
            stacks.ignore_signal(signal.SIGTERM)  # which an agent sends to the others as soon as one rank has ended
        own = error if isinstance(error, DistplusError) else error.__cause__
        known = own if isinstance(own, DistplusError) else None
        text = ""
        if not self.is_full:
            path = self._leave_traceback(printed)
            text = stacks.fold_traceback(printed) if known is None else self._line_of(known.exit_code, known)
            if known is None and path is not None:
                text += f"\n(whole traceback: {path})"
        found = self.find_verdict()
        if known is not None and found is None and self.speaks_for_host():
            self._await_others()
            told = stacks.fold_traceback(errors.message_of(known))
            text = "" if self.is_full else f"\n{type(known).__name__}: {told}"
        if known is None or found is None or not self._says_all(*found):
            _say(text)
        self.show_block()

    def _says_all(self, verdict: Verdict, path: Path) -> bool:
        """Whether the verdict, which comes last, leaves nothing for this rank's own line."""
        return shown_mark(path).exists() or (not self._culprits() and self.speaks_for_host(verdict.silent))

    def leave(self, code: ExitCode) -> None:
        """Shows the end of a process that ends now, without its training thread."""
        stacks.ignore_signal(signal.SIGTERM)  # as above
        _silence_stdout()
        if self.show_block():
            return
        found = self.find_verdict()
        if found is None or not shown_mark(found[1]).exists():
            _say(self._line_of(code))

    def show_block(self, *, waits: bool = True) -> bool:
        """Prints the verdict on the rank that speaks for its host, once; whether it has. Never raises."""
        if self._is_over:
            return False
        self._is_over = True
        with suppress(Exception):  # the process ends
            verdict, path = self.find_verdict() or (None, self._folder)
            if verdict is None or not self.speaks_for_host(verdict.silent):
                return False
            if env.DISTPLUS_HOME_FILE.get() and path.exists():  # distplus launch prints it
                return False
            if waits:
                self._await_others(verdict.silent)
            is_of_notebook = multiprocessing.parent_process() is not None and _notebook() is not None  # which prints it
            if not is_of_notebook and not print_once(verdict, path):
                return False
            self._run.on_verdict_shown(path)
            return not is_of_notebook
        return False

    def find_verdict(self) -> tuple[Verdict, Path] | None:
        """The verdict on this run, by whichever rank of this host has written it; None where none can be read."""
        with suppress(Exception):  # the process ends
            if self._found is None and (paths := self._written(self._began_at)):
                self._found = (Verdict.from_json(paths[0].read_bytes()), paths[0])
        return self._found

    def _await_others(self, silent: Iterable[int] = ()) -> None:
        """Waits until the other ranks of this host have ended, and so said what they have to say.

        Not for as long as a peer has to end by itself: one that stands in a collective with this rank is let go only
        when this process ends.
        """
        others = [peer for _, peer in self._peers_here(silent)]
        until(lambda: all(peer.state() is ProcessState.GONE for peer in others), _PEER_GRACE_S / 2)

    def _leave_traceback(self, text: str) -> Path | None:
        """Writes the whole traceback of this rank; None where that fails."""
        path = self._folder / f"rank{self._world.rank:05d}.traceback"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path
        return None

    def _culprits(self) -> list[int]:
        """The other ranks because of which this one stops."""
        first = self._plane.first_error
        return [] if first is None else [rank for rank in first.ranks if rank != self._world.rank]

    def _line_of(self, code: ExitCode, error: BaseException | None = None) -> str:
        """What a rank says that has nothing to tell but that it ends."""
        culprits = self._culprits()
        why = f" because of {name_ranks(culprits)}" if culprits else f" with {type(error).__name__}" if error else ""
        return f"rank {self._world.rank} stopped{why}, exit {int(code)}"


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Asks on a thread of its own: where the process that served the store has ended, nobody may answer."""
    told: list[T] = []

    def run() -> None:
        with suppress(PeerError, RuntimeError):
            told.append(ask())

    asker = threading.Thread(target=run, daemon=True)
    asker.start()
    asker.join(timeout=seconds)
    return told[0] if told else None


def _say(text: str) -> None:
    """Straight to stderr: logging may be set to swallow it, and this is what the run ends with."""
    if text:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _silence_stdout() -> None:
    """Lets nothing more of this process, which ends, reach standard output, where a thread may redraw a bar."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        if sys.stdout.fileno() == 1:  # else a notebook's, or one that somebody reads
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _cancel_at_exit() -> None:
    while _at_exit:
        _at_exit.pop().cancel()


# -- in a notebook -----------------------------------------------------------------------------------------------------

_after_cells: list[Callable[[Any], None]] = []


def _notebook() -> Any:
    """The shell of IPython that runs this process or has forked it, as a notebook's does; None elsewhere."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def show_after_cells(folder: Path) -> None:
    """In a notebook, a cell that fails ends with the verdict that its ranks, which are forked from it, have left."""
    if (shell := _notebook()) is None:
        return
    began_at = time.time()

    def end_cell(result: Any) -> None:
        with suppress(Exception):  # the error of the cell has been shown
            for told in [] if result.success else find_verdicts(folder, since=began_at, of_end=True)[-1:]:
                print_once(Verdict.from_json(told["path"].read_bytes()), told["path"])

    while _after_cells:  # of an earlier Trainer
        shell.events.unregister("post_run_cell", _after_cells.pop())
    shell.events.register("post_run_cell", end_cell)
    _after_cells.append(end_cell)
