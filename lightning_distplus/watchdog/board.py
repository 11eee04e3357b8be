"""The board: each rank's last mark, published once a second on a thread of its own, and the evidence of an incident.

Every call to the store is made by this thread. When the process that serves the store is stopped, it blocks here, and
the thread that judges goes on without it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from lightning_distplus.control import ControlPlane
from lightning_distplus.control.peers import Peer
from lightning_distplus.errors import PeerError
from lightning_distplus.watchdog.far_stacks import StackPrinter
from lightning_distplus.watchdog.marks import Mark, Marks
from lightning_distplus.watchdog.pace import Pace, Progress
from lightning_distplus.watchdog.stacks import frame_of, place_of

__all__ = ["BEAT_S", "Board", "Sighting"]

log = logging.getLogger(__name__)

BEAT_S = 1.0
_ALERT_BEAT_S = 0.25
_ALERT_BEAT_PER_RANK_S = 2e-3
_FEW_RANKS = 64  # so many ranks all read what all others say; of more, only the first ones do
_NUM_READERS = 4
_ASKED = "watchdog/asked"
_SILENT_STORE_S = 2.0
_FOLLOWS_S = 5.0  # sightings that are further apart belong to different silences of this rank
_MISSED_BEATS_S = 1.6  # so long after a beat the peer's Python, its process or the way to it has stopped


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A peer's mark, as this process saw it last."""

    mark: Mark
    beat: int
    """Grows as long as the peer's Python runs."""
    changed_at: float
    """``time.monotonic()`` of this process when the beat last grew."""
    place: str | None = None
    """``file.py:line`` of the peer's training thread at that beat."""
    printer: StackPrinter | None = None
    """How to ask for its stack from its own host."""
    pace: str = ""
    """What it counts, how fast, and when it is there; "" where nothing is counted."""
    since: tuple[int, float] = (0, 0.0)
    """Number of the mark, and ``time.monotonic()``, at the first of the sightings that follow each other."""

    @property
    def marks_per_s(self) -> float:
        """How fast its training thread moves; 0 where it does not, or was not seen for long enough."""
        seconds = self.changed_at - self.since[1]
        return (self.mark.number - self.since[0]) / seconds if seconds > BEAT_S else 0.0

    @property
    def beats(self) -> bool:
        """Whether the peer's Python runs, and its messages arrive."""
        return time.monotonic() - self.changed_at < _MISSED_BEATS_S

    @property
    def silence_s(self) -> float:
        """How long the peer's training thread has not moved, as far as can be known here."""
        return self.mark.silence_s + (time.monotonic() - self.changed_at)


class Board:
    """Publishes this rank's marks and, while ``alert`` is set, reads those of all others.

    Args:
        plane: A control plane with a connection of its own.
        marks: This rank's marks.
        thread: The thread that trains; each beat tells where it is.
        printer: How this rank's stacks can be had from outside.
        progress: Tells how far the training thread has come; asked for at each beat.
    """

    def __init__(
        self,
        plane: ControlPlane,
        marks: Marks,
        *,
        thread: int = 0,
        printer: StackPrinter | None = None,
        progress: Callable[[], Progress | None] = lambda: None,
    ) -> None:
        self._plane = plane
        self._marks = marks
        self._watched = thread
        self._printer = printer
        self._progress = progress
        self._pace = Pace()
        self.alert = threading.Event()
        self.sightings: dict[int, Sighting] = {}
        self.peers: dict[int, Peer] = {}
        self.evidence: dict[int, dict[str, Any]] = {}
        self.last_answer_at = time.monotonic()
        """When the store last answered."""
        self.reads = plane.world.size <= _FEW_RANKS or plane.world.rank < _NUM_READERS
        """Whether this rank reads what the others say. The others hear of a verdict as they hear of an error."""
        self._asked = b""
        self.is_asked = False
        """Whether a rank that reads wants this rank's evidence for the present silence."""
        self._to_post: list[bytes] = []
        self._has_post = threading.Event()
        self._question: bytes | None = None
        self._stopping = threading.Event()
        self._beat = 0
        self._thread = threading.Thread(target=self._run, name="distplus-board", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless it is blocked in a store that does not answer."""
        self._stopping.set()
        self.alert.set()
        self._has_post.set()
        self._thread.join(timeout=2.0)

    @property
    def is_silent(self) -> bool:
        """Whether the store has stopped answering, so that nothing is known of anybody."""
        return time.monotonic() - self.last_answer_at > _SILENT_STORE_S

    @property
    def has_posted(self) -> bool:
        """Whether all evidence of this rank is out: a rank that ends earlier would leave its peers without it."""
        return not self._to_post

    def post_evidence(self, number: int, evidence: dict[str, Any]) -> None:
        """Sends this rank's evidence at once; it holds for the mark of this number only."""
        self._to_post.append(json.dumps({"number": number, "evidence": evidence}).encode())
        self._has_post.set()

    def _run(self) -> None:
        with suppress(PeerError, RuntimeError):  # the store is gone: whoever waits for it finds out
            self._learn_peers()
            while not self._stopping.is_set():
                self._publish()
                if self.alert.is_set():
                    self._listen()
                    self._look()
                self.last_answer_at = time.monotonic()
                pause_s = self._alert_beat_s if self.alert.is_set() else BEAT_S
                (self._has_post if self.alert.is_set() else self.alert).wait(pause_s)
                self._has_post.clear()

    def _learn_peers(self) -> None:
        ranks = self._plane.world.ranks
        hellos = self._plane.receive([f"hello/{rank}" for rank in ranks])  # all have met: all are there
        self.peers = {rank: Peer.from_json(hello) for rank, hello in zip(ranks, hellos, strict=True)}

    def _publish(self) -> None:
        self._beat += 1
        self._pace.note(self._progress())
        beat = {
            "beat": self._beat,
            "mark": asdict(self._marks.read()),
            "place": place_of(frame_of(self._watched)),
            "pace": self._pace.describe(),
            "printer": None if self._printer is None else self._printer.to_plain(),
        }
        self._plane.send(f"watchdog/beat/{self._plane.world.rank}", json.dumps(beat).encode())
        while self._to_post:
            self._plane.send(f"watchdog/evidence/{self._plane.world.rank}", self._to_post[0])
            self._to_post.pop(0)

    @property
    def _alert_beat_s(self) -> float:
        size = self._plane.world.size
        return max(_ALERT_BEAT_S, BEAT_S if size > _FEW_RANKS else 0.0, _ALERT_BEAT_PER_RANK_S * size * self.reads)

    def ask(self, number: int) -> None:
        """Asks every rank that does not move for its evidence."""
        if self._plane.world.size > _FEW_RANKS:
            self._question = f"{self._plane.world.rank}/{number}".encode()

    def _listen(self) -> None:
        if self._plane.world.size <= _FEW_RANKS:
            self.is_asked = bool(set(self.evidence) - {self._plane.world.rank})
            return
        if self._question is not None:
            self._plane.send(_ASKED, self._question)
            self._question = None
        asked = self._plane.read(_ASKED) or b""
        self.is_asked = self.is_asked or asked != self._asked
        self._asked = asked

    def _look(self) -> None:
        if not self.reads:
            return
        for rank in self._plane.world.ranks:
            data = self._plane.read(f"watchdog/beat/{rank}")
            if data is not None:
                self._see(rank, json.loads(data))
            posted = self._plane.read(f"watchdog/evidence/{rank}")
            if posted is not None:
                self._weigh(rank, json.loads(posted))

    def _weigh(self, rank: int, posted: dict[str, Any]) -> None:
        """Keeps what was said of the present silence; a rank that has moved since then has said nothing of this one."""
        seen = self.sightings.get(rank)
        if seen is not None and seen.mark.number == posted["number"]:
            self.evidence[rank] = posted["evidence"]
        else:
            self.evidence.pop(rank, None)

    def _see(self, rank: int, data: dict[str, Any]) -> None:
        last = self.sightings.get(rank)
        if last is None or data["beat"] != last.beat:
            now, mark = time.monotonic(), Mark(**data["mark"])
            follows = last is not None and now - last.changed_at < _FOLLOWS_S
            self.sightings[rank] = Sighting(
                mark=mark,
                beat=data["beat"],
                changed_at=now,
                since=last.since if last is not None and follows else (mark.number, now),
                place=data["place"],
                pace=data["pace"],
                printer=None if data["printer"] is None else StackPrinter(**data["printer"]),
            )
