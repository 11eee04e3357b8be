"""Evidence: what is known of each rank when nobody has moved for too long."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any

from lightning_distplus.control import ControlPlane
from lightning_distplus.process import HostLoad, ProcessState, children, host_answers, running_time
from lightning_distplus.watchdog import flight_recorder, stacks
from lightning_distplus.watchdog.flight_recorder import Collective, Recording, p2p_call, waits_for_work
from lightning_distplus.watchdog.heartbeat import Board
from lightning_distplus.watchdog.progress import Marks
from lightning_distplus.watchdog.stacks import StackPrinter, ask_for_stack
from lightning_distplus.world import name_ranks, ranks_by_text


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
    number: int = 0
    """This and the next six are those of its ``Mark``."""
    phase: str = ""
    operation: str = ""
    global_step: int = 0
    silence_s: float = 0.0
    call: int = 0
    ended: str = ""
    waits: bool = False
    """Whether its training thread stands in a collective or in another wait for peers."""
    location: str | None = None
    stack: str = ""
    stands_in: dict[str, Any] | None = None
    recording: dict[str, Any] = field(default_factory=dict)
    """Its last collectives, as ``Recording.to_plain`` writes them."""
    load: dict[str, Any] = field(default_factory=dict)
    is_last_seen: bool = False
    """Whether location and stack are those of an earlier moment, because the rank itself cannot be asked any more."""
    beat_s: float = 0.0
    """How old that moment is."""
    is_recorded_only: bool = False
    """Whether nothing but its flight recorder is known, as with a dump that is read when the job is over."""
    was_ended_by: str = ""
    """The C++ exception that ends its process, where that is what happened."""

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.state == ProcessState.GONE

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped by a signal."""
        return self.state == ProcessState.STOPPED

    @property
    def holds_lock(self) -> bool:
        """Whether its process runs and its Python does not, other than in a wait for peers, which gives up the lock."""
        return not (self.answers or self.is_unheard or self.waits or self.is_recorded_only)

    @property
    def collective(self) -> Collective | None:
        """The collective in which it waits, where it waits in one."""
        return Collective(**self.stands_in) if self.waits and self.stands_in else None

    @cached_property
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


# -- what this process can say of itself and of its peers --------------------------------------------------------------


_KEPT_CALLS = 256  # of each rank, for the comparison: some steps of a large model
_KEPT_CALLS_OF_MANY = 32
_BRIEF_LINES = 8
_PROBE_S = 0.5
_WAIT = ".wait("
_CONTROL_PLANE = "lightning_distplus/control/plane.py"


class Witness:
    """Knows this process at first hand, and its peers by their messages, their host's system and their network."""

    def __init__(
        self, plane: ControlPlane, marks: Marks, board: Board, *, thread: int, printer: StackPrinter | None
    ) -> None:
        self._world = plane.world
        self._host_rank = plane.host_rank
        self.ended_by = ""
        """The C++ exception that ends this process; empty as long as it lives."""
        self.timed_out_at: list[traceback.FrameSummary] = []
        """Where a collective has timed out, innermost frame last; empty where none has."""
        self.is_after_failure = False
        """Whether a collective has failed somewhere: who handles the error of one has waited in it until then."""
        self._marks = marks
        self._board = board
        self._thread = thread
        self._printer = printer
        self._answering_hosts: dict[str, bool] = {}
        self._error_around = stacks.error_in(thread)  # a run may begin in an ``except`` of the user's

    def own(self) -> Evidence:
        """This rank, at this moment."""
        mark = self._marks.read()
        frame = stacks.frame_of(self._thread)
        failed_at = self.timed_out_at or self._failed_at()
        stack = [*stacks.stack_of(self._thread), *failed_at]
        recording = flight_recorder.dump().last(_KEPT_CALLS if self._board.is_few else _KEPT_CALLS_OF_MANY)
        # In `.item()` or a kernel of the optimizer, Python shows no wait: what it waits for is in flight all the same.
        waits = (
            bool(failed_at)
            or stacks.is_waiting_for_peers(stack)
            or bool(recording.unfinished)
            or _waits_on_a_handle(stack, frame)
        )
        standing = (p2p_call(frame) or next(iter(recording.unfinished), None)) if waits else None
        text, location = "".join(traceback.format_list(stack)), stacks.user_location(stack)
        if not waits and stacks.is_fetching_data(stack) and (worker := self._hanging_worker()):
            pid, of_worker = worker
            text += f"the data worker, pid {pid}:\n{''.join(traceback.format_list(of_worker))}"
            location = stacks.user_location(of_worker) or location
        return Evidence(
            rank=self._world.rank,
            host=self._world.host,
            pid=self._world.pid,
            state=ProcessState.RUNNING.value,
            answers=True,
            waits=waits,
            location=location,
            stack=text,
            stands_in=None if standing is None else asdict(standing),
            recording=recording.to_plain(with_members=self._board.is_few),
            load=asdict(HostLoad.now()),
            was_ended_by=self.ended_by,
            **vars(mark),
        )

    def is_on_its_way_out(self) -> bool:
        """Whether the training thread handles an error of this run and stands in no wait for peers."""
        return self._new_error() is not None and not stacks.is_waiting_for_peers(stacks.stack_of(self._thread))

    def _new_error(self) -> BaseException | None:
        error = stacks.error_in(self._thread)
        return None if error is self._error_around else error

    def _failed_at(self) -> list[traceback.FrameSummary]:
        """Where the collective was called whose error the training thread handles after a failure; else empty."""
        error = self._new_error() if self.is_after_failure else None
        stack = list(traceback.extract_tb(error.__traceback__)) if error else []
        return stack if stacks.is_waiting_for_peers(stack) else []

    def collective_with(self, ranks: Collection[int]) -> str | None:
        """Where this rank stands in a collective of a group to which one of these ranks belongs; None: in none."""
        own = self.own()
        call = own.collective
        if call is None or _CONTROL_PLANE in own.stack:  # that looks for itself who does not come
            return None
        members = own.calls.groups.get(call.group)
        if members and not set(members) & set(ranks):
            return None
        return f"in {own.operation}" + (f" at {own.location}" if own.location else "")

    def of_peers(self) -> dict[int, Evidence]:
        """Every other rank: what it has said itself, else what can be seen of it from here."""
        told = dict(self._board.evidence)  # the board's thread drops what a rank has said as soon as that rank moves
        return {
            rank: Evidence(**told[rank]) if rank in told else self._seen_from_here(rank)
            for rank in self._world.ranks
            if rank != self._world.rank
        }

    def brief(self) -> list[str]:
        """Where the ranks are, those in the same place in one line, the smallest groups first; asks nobody."""
        groups = ranks_by_text({rank: self._place_of(rank) for rank in self._world.ranks})
        lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in sorted(groups.items(), key=lambda one: len(one[1]))]
        more = [f"and {len(lines) - _BRIEF_LINES} more places"] if len(lines) > _BRIEF_LINES else []
        return [*lines[:_BRIEF_LINES], *more]

    def _place_of(self, rank: int) -> str:
        seen, mark = self._board.sightings.get(rank), self._marks.read()
        if rank == self._world.rank:
            place, pace, moves = stacks.place_of(stacks.frame_of(self._thread)), self._board.own_pace, False
        elif seen is not None and self._board.beats(rank):
            moves = seen.moves or seen.silence_s < mark.silence_s / 2  # while this rank stood still
            mark, place, pace = seen.mark, seen.place, seen.pace if moves else ""
        else:
            return self._seen_from_here(rank, asks=False).describe().partition(": ")[2]
        call = f", call {mark.call} of the run" if mark.call else ""
        moving = f", and moves ({pace})" if pace else ", and moves" if moves else ""
        return f"in {mark.operation!r}{call}" + (f" at {place}" if place else "") + moving

    def probe_hosts(self) -> None:
        """Asks the hosts of peers that have gone quiet for a sign of life; half a second at most."""

        def probe(address: str) -> None:
            self._answering_hosts[address] = host_answers(address, _PROBE_S)

        far = {rank: one.address for rank, one in self._board.peers.items() if one.address and not one.is_here}
        quiet = {far[rank] for rank in set(far) - set(self._board.evidence) if not self._board.beats(rank)}
        threads = [threading.Thread(target=probe, args=(address,), daemon=True) for address in quiet]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=2 * _PROBE_S)

    def _seen_from_here(self, rank: int, *, asks: bool = True) -> Evidence:
        """A rank that has sent nothing: what its last beat, this host's system and the network say.

        A mere report does not ask for its stack, and so leaves it alone.
        """
        peer, seen = self._board.peers.get(rank), self._board.last_seen(rank)
        state = peer.state() if peer else ProcessState.UNKNOWN
        stack: Sequence[traceback.FrameSummary] = []
        is_running = state is ProcessState.RUNNING
        if asks and is_running and peer and seen and seen.printer and not seen.mark.ended:
            stack = ask_for_stack(peer.pid, seen.printer)
        is_unreachable = peer is not None and self._answering_hosts.get(peer.address) is False
        is_silent_host = rank == self._host_rank and self._board.is_silent and peer is not None and not peer.is_here
        if is_silent_host and not is_unreachable:  # its host is there: the process that serves the store is stopped
            state = ProcessState.STOPPED
        return Evidence(
            rank=rank,
            host=peer.host if peer else "unknown",
            pid=peer.pid if peer else 0,
            state=state.value,
            answers=False,
            is_unheard=self._board.is_silent,
            is_unreachable=is_unreachable,
            waits=stacks.is_waiting_for_peers(stack),
            location=stacks.user_location(stack) if stack else seen.place if seen else None,
            stack="".join(traceback.format_list(stack)),
            is_last_seen=not stack,
            beat_s=running_time() - seen.changed_at if seen else 0.0,
            **({} if seen is None else {**vars(seen.mark), "silence_s": seen.silence_s}),
        )

    def _hanging_worker(self) -> tuple[int, list[traceback.FrameSummary]] | None:
        """The first data worker of this process that reads a sample, and its stack."""
        if self._printer is None:
            return None
        for child in children(self._world.pid):
            for pid in (child, *children(child)):  # those of a forkserver are its children
                stack = ask_for_stack(pid, self._printer)
                if stacks.is_fetching_data(stack):
                    return pid, stack
        return None


def _waits_on_a_handle(stack: Sequence[traceback.FrameSummary], frame: FrameType | None) -> bool:
    """Whether the thread stands in ``work.wait()``, which has no frame of its own, for a call that is not complete."""
    line: Any = stack[-1].line if stack else None
    return bool(line) and _WAIT in line and waits_for_work(frame)
