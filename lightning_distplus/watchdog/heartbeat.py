"""Heartbeats: each rank's last mark, published once a second, and the evidence of an incident.

One thread makes every call to the store. When the process that serves the store is stopped, it blocks there, and the
thread that judges goes on without it.

Of more than 64 ranks only a few read what all others say, hundreds of keys in a round trip, so that the work of a rank
and the traffic of the job grow with the number of ranks and not with its square.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from lightning_distplus.control import ControlPlane, Points, beat_key
from lightning_distplus.control.exchange import DIRECT_RANKS
from lightning_distplus.control.plane import Peer
from lightning_distplus.control.secret import words_of
from lightning_distplus.errors import PeerError
from lightning_distplus.process import open_memory, running_time
from lightning_distplus.watchdog.progress import Counts, Mark, Marks, Pace
from lightning_distplus.watchdog.stacks import StackPrinter, frame_of, place_of

log = logging.getLogger(__name__)

BEAT_S = 1.0
_LOOK_S = 0.25
_LOOK_PER_RANK_S = 1e-4  # reading what a rank says takes some 20 microseconds
NUM_READERS = 4
"""So many read what all others say, where there are more than ``DIRECT_RANKS``."""
_WATCH_HOST_EVERY_S = 8.0  # so that all ranks together send the store less than a message a second each
_ASKED = "watchdog/asked"
_SILENT_STORE_S = 2.0
_beats = itertools.count(1)  # of this process, over all its runs
_MISSED_BEATS_S = 1.35  # so much later, at the look before the last one: its Python, or the way to it, has stopped


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A peer's mark, as this process saw it last."""

    mark: Mark
    beat: int
    """Grows as long as the peer's Python runs."""
    changed_at: float
    """``running_time()`` of this process when the beat last grew."""
    place: str | None = None
    """``file.py:line`` of the peer's training thread at that beat."""
    printer: StackPrinter | None = None
    """How to ask for its stack from its own host."""
    pace: str = ""
    """What it counts, how fast, and when it is there; "" where nothing is counted."""
    moves: bool = False
    """Whether that moves, although it sets no marks."""

    @property
    def silence_s(self) -> float:
        """How long the peer's training thread has not moved, as far as can be known here."""
        return self.mark.silence_s + (running_time() - self.changed_at)


class Board:
    """Publishes this rank's marks and, while ``alert`` is set, reads those of all others.

    Args:
        plane: A control plane with a connection of its own.
        marks: This rank's marks.
        thread: The thread that trains; each beat tells where it is.
        printer: How this rank's stacks can be had from outside.
        counts: Knows how far the training thread has come; asked at each beat.
    """

    def __init__(
        self,
        plane: ControlPlane,
        marks: Marks,
        *,
        thread: int = 0,
        printer: StackPrinter | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._plane = plane
        self._marks = marks
        self._watched = thread
        self._printer = printer
        self._counts = counts
        self._pace = Pace()
        self.alert = threading.Event()
        self.sightings: dict[int, Sighting] = {}
        self.peers: dict[int, Peer] = {}
        self._watched_host_at = -math.inf
        self.evidence: dict[int, dict[str, Any]] = {}
        self.last_answer_at = running_time()
        self.reads = plane.world.size <= DIRECT_RANKS or plane.world.rank < NUM_READERS
        """Whether this rank reads what the others say. The others hear of a verdict as they hear of an error."""
        self.is_few = plane.world.size <= DIRECT_RANKS
        self._looked_at = (0.0, 0.0)
        """When this rank last looked, and the time before."""
        self._asked = b""
        self.is_asked = False
        """Whether a rank that reads wants this rank's evidence for the present silence."""
        self._to_post: list[bytes] = []
        self._posted = -1
        self._has_post = threading.Event()
        self._question: bytes | None = None
        self._stopping = threading.Event()
        self._slate: int | None = None
        """A descriptor, as are those of the peers on this host."""
        self._slates: dict[int, int] = {}
        self.points: Points | None = None
        """The calls of all ranks through Lightning, once the ranks have met."""
        self.left: dict[int, str] = {}
        """Peers that come to nothing any more for which this rank could wait in a step, and what they have ended."""
        self._thread = threading.Thread(target=self._run, name="distplus-board", daemon=True)

    def start(self, *, has_process: bool = True) -> None:
        """Starts the thread; peers find the slate of a rank that has a process of its own."""
        if has_process:
            self._slate = os.memfd_create(_NAME)
        with suppress(PeerError, RuntimeError):
            self._publish()  # before the ranks meet: none of them can take the end of an earlier run for that of this
        self._thread.start()

    def open_slates(self, peers: Mapping[int, Peer]) -> None:
        """Takes hold of those of the peers on this host; all ranks have started, and this one begins to train."""
        for rank, peer in peers.items():
            is_other = rank != self._plane.world.rank and peer.host == self._plane.world.host
            is_ours = self._slate is not None and is_other and peer.is_here
            if is_ours and (descriptor := open_slate(peer.pid)) is not None:
                self._slates[rank] = descriptor

    def stop(self) -> None:
        """Ends the thread, unless it is blocked in a store that does not answer."""
        self._stopping.set()
        self.alert.set()
        self._has_post.set()
        self._thread.join(timeout=2.0)
        if self._slate is not None and not self._thread.is_alive():
            for descriptor in (self._slate, *self._slates.values()):
                os.close(descriptor)
            self._slate, self._slates = None, {}

    def last_seen(self, rank: int) -> Sighting | None:
        """A peer's last beat: by the store, or by its slate where that knows a later one."""
        seen = self.sightings.get(rank)
        beat = read_slate(self._slates[rank]) if rank in self._slates else None
        if beat is None or (seen is not None and seen.beat >= beat["beat"]):
            return seen
        age_s = time.monotonic() - beat["at"]  # this clock is the same for all processes of a host
        return _sighting(beat, running_time() - age_s)

    @property
    def ended(self) -> dict[int, str]:
        """The peers that have ended their run, and how; a rank says so before its watchdog stops."""
        known = {*self.sightings, *self._slates} - {self._plane.world.rank}
        seen = {rank: self.last_seen(rank) for rank in sorted(known)}
        return {rank: one.mark.ended for rank, one in seen.items() if one is not None and one.mark.ended}

    @property
    def is_silent(self) -> bool:
        """Whether the store has stopped answering, so that nothing is known of anybody."""
        return running_time() - self.last_answer_at > _SILENT_STORE_S

    def beats(self, rank: int) -> bool:
        """Whether the peer's Python runs and its messages arrive; that this rank is late is not held against it."""
        seen, before = self.sightings.get(rank), self._looked_at[1]
        return seen is not None and before - seen.changed_at < _MISSED_BEATS_S and not self.is_silent

    @property
    def own_pace(self) -> str:
        """What this rank counts that moves by itself, for a report of its own; else ""."""
        return self._pace.describe() if self._pace.moves else ""

    @property
    def has_posted(self) -> bool:
        """Whether all evidence of this rank is out: a rank that ends earlier would leave its peers without it."""
        return not self._to_post

    def post_evidence(self, evidence: dict[str, Any]) -> None:
        """Sends this rank's evidence at once; it holds for the mark of its ``number`` only."""
        self._to_post.append(json.dumps(evidence).encode())
        self._posted = evidence["number"]
        self._has_post.set()

    def _run(self) -> None:
        with suppress(PeerError, RuntimeError):  # the store is gone: whoever waits for it finds out
            while not self._stopping.is_set():
                pause_s = self.turn()
                (self._has_post if self.alert.is_set() else self.alert).wait(pause_s)
                self._has_post.clear()
            self._publish()  # how the run has ended here

    def turn(self) -> float:
        """Says where this rank is and, in an alert, finds out where the others are.

        Returns:
            Seconds until the next turn, unless an alert or something to post comes first.
        """
        if not self.peers:
            self.peers = self._plane.peers_nearby()
        self._publish()
        if self.alert.is_set():
            self._listen()
            self.left = {} if self.points is None else self.points.ended(self._plane)
            if self.reads:
                self._look()
        elif (host := self._plane.host_rank) is not None and self._must_watch(host):
            self._watched_host_at = running_time()
            if (data := self._plane.read(beat_key(host))) is not None:
                self._see(host, words_of(data))
        self.last_answer_at = running_time()
        if not self.alert.is_set() or not self.reads:
            return BEAT_S
        return max(_LOOK_S, _LOOK_PER_RANK_S * self._plane.world.size)

    def _must_watch(self, host: int) -> bool:
        """Whether this rank alone can tell, on its host, where the one that serves the store from another host was.

        What that one says goes through itself: once it is stopped or gone, nothing can be asked any more.
        """
        is_due = running_time() >= self._watched_host_at + _WATCH_HOST_EVERY_S
        if not is_due or self._plane.world.rank != self._plane.world.node_ranks[0]:
            return False
        peer = self._plane.peers_of([host]).get(host)
        return peer is not None and not peer.is_here

    def _publish(self) -> None:
        posts = list(self._to_post)
        if posts:
            self._plane.send(f"watchdog/evidence/{self._plane.world.rank}", posts[-1])
        beat = self._next_beat()
        if self._slate is not None:
            write_slate(self._slate, beat)
        self._plane.send(beat_key(self._plane.world.rank), json.dumps(beat).encode())
        del self._to_post[: len(posts)]

    def _next_beat(self) -> dict[str, Any]:
        self._pace.note(None if self._counts is None else self._counts.progress())
        return {
            "beat": next(_beats),
            "mark": asdict(self._marks.read()),
            "place": place_of(frame_of(self._watched)),
            "pace": self._pace.describe(),
            "moves": self._pace.moves,
            "printer": None if self._printer is None else asdict(self._printer),
            "posted": self._posted,
            "whereabouts": None if self.points is None else self.points.beat(),
            "at": time.monotonic(),
        }

    def ask(self, number: int) -> None:
        """Asks every rank that does not move for its evidence."""
        if not self.is_few:
            self._question = f"{self._plane.world.rank}/{number}".encode()
            self._has_post.set()

    def _listen(self) -> None:
        if self.is_few:
            self.is_asked = bool(set(self.evidence) - {self._plane.world.rank})
            return
        if self._question is not None:
            self._plane.send(_ASKED, self._question)
            self._question = None
        asked = self._plane.read(_ASKED) or b""
        self.is_asked = self.is_asked or asked != self._asked
        self._asked = asked

    def _look(self) -> None:
        ranks = self._plane.world.ranks
        if len(self.peers) < len(ranks):
            self.peers = self._plane.peers_of(ranks)
        news = []
        for rank, data in zip(ranks, self._plane.read_each([beat_key(rank) for rank in ranks]), strict=True):
            if data is not None and self._see(rank, words_of(data)):
                news.append(rank)
        posts = self._plane.read_each([f"watchdog/evidence/{rank}" for rank in news])
        for rank, posted in zip(news, posts, strict=True):
            told = {} if posted is None else words_of(posted)
            if told and told["number"] == self.sightings[rank].mark.number:
                self.evidence[rank] = told
        self._looked_at = (running_time(), self._looked_at[0])

    def _see(self, rank: int, data: dict[str, Any]) -> bool:
        """Keeps a peer's beat; whether it has evidence of its present silence that is not known here.

        A rank that has moved since it posted has said nothing of this silence.
        """
        last, seen = self.sightings.get(rank), _sighting(data, running_time())
        if last is None or seen.beat > last.beat:  # an older one is shown again by a stranger
            self.sightings[rank] = seen
        if data["posted"] != seen.mark.number:
            self.evidence.pop(rank, None)
            return False
        return self.evidence.get(rank, {}).get("number") != seen.mark.number


def _sighting(beat: dict[str, Any], at: float) -> Sighting:
    told = {name: beat[name] for name in ("beat", "place", "pace", "moves")}
    printer = None if beat["printer"] is None else StackPrinter(**beat["printer"])
    return Sighting(mark=Mark(**beat["mark"]), changed_at=at, printer=printer, **told)


# -- the last beat in memory of the host -------------------------------------------------------------------------------

# A process that is stopped says nothing, and where it serves the store nobody hears of the others' beats either. What
# the peers of its host hold open outlives the process that wrote it.


_NAME = "distplus-slate"
_SIZE_BYTES = 16 << 10
_LOOKS = 5


def write_slate(descriptor: int, beat: dict[str, Any]) -> None:
    """Replaces what stands there; a beat that does not fit is left out."""
    text = json.dumps(beat).encode()
    if len(text) <= _SIZE_BYTES:
        os.pwrite(descriptor, text.ljust(_SIZE_BYTES), 0)


def open_slate(pid: int) -> int | None:
    """A descriptor of another process's slate; None where it has none yet, or may not be looked at."""
    return open_memory(pid, _NAME)


def has_slate(pid: int) -> bool:
    """Whether a process of this user is a rank under a watchdog."""
    if (descriptor := open_slate(pid)) is None:
        return False
    os.close(descriptor)
    return True


def read_slate(descriptor: int) -> dict[str, Any] | None:
    """The last beat; None where none was written."""
    with suppress(OSError, ValueError):
        for _ in range(_LOOKS):  # two looks that differ: it is being written
            data = os.pread(descriptor, _SIZE_BYTES, 0)
            if data == os.pread(descriptor, _SIZE_BYTES, 0):
                beat: dict[str, Any] = json.loads(data)
                return beat
    return None
