"""What the watchdogs of 1,024 ranks do to one store, and how soon they report a stall and name the rank that hangs.

The ranks live in one process, below one global lock, on a real store. The four that read what all say have threads of
their own; a few threads play all others, turn by turn, through the same code. Messages are counted on their way.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore

from benchmarks.figures import Figure
from lightning_distplus.control import ControlPlane
from lightning_distplus.control.plane import Peer
from lightning_distplus.watchdog import Marks, Watchdog
from lightning_distplus.watchdog.heartbeat import NUM_READERS
from lightning_distplus.watchdog.watchdog import WatchedRun
from lightning_distplus.world import World, name_ranks

__all__ = ["Outcome", "measure", "run"]

_PER_NODE = 8
_NUM_PLAYERS = 2
_TURN_S = 0.1
_LONGEST_S = 60.0
_TARGET_REPORT_S = 5.0
_TARGET_MESSAGES = 1.0
_CALLS = ("set", "get", "append", "add", "check", "compare_set", "multi_get", "delete_key")


@dataclass(kw_only=True)
class Outcome:
    """What one run has shown."""

    num_ranks: int
    guilty: int
    at_rest: list[float] = field(default_factory=list)
    """Messages per second of each rank while all train."""
    in_silence: list[float] = field(default_factory=list)
    """The same from the last mark to the verdict."""
    reports: list[tuple[float, str]] = field(default_factory=list)
    """Stall reports: seconds after ``report_after``, and what they say."""
    verdict: dict[str, Any] = field(default_factory=dict)
    verdict_s: float = float("inf")
    """Seconds after the deadline."""


def run(quick: bool) -> list[Figure]:
    """Ten seconds at rest, then one rank hangs and all others wait for it; quick: 128 ranks, three seconds."""
    sizes, rest_s = ((128,), 3.0) if quick else ((128, 512, 1024), 10.0)
    with redirect_stderr(StringIO()):  # the verdicts, as text
        return [figure for size in sizes for figure in _figures(measure(size, rest_s=rest_s))]


def _figures(seen: Outcome) -> list[Figure]:
    name = f"{seen.num_ranks:,} ranks"
    culprits = seen.verdict.get("culprits", [])
    named = "exactly the guilty rank" if culprits == [seen.guilty] else f"{name_ranks(culprits)}, not {seen.guilty}"
    others = seen.in_silence[NUM_READERS:]
    report_s = min((seconds for seconds, _ in seen.reports), default=float("inf"))
    return [
        Figure(
            name=f"{name}: store traffic at rest", value=statistics.fmean(seen.at_rest), unit="messages/rank/s",
            target=_TARGET_MESSAGES, note=f"the busiest rank {max(seen.at_rest):.2f}",
        ),
        Figure(
            name=f"{name}: store traffic in a stall", value=statistics.fmean(others), unit="messages/rank/s",
            note=f"the {NUM_READERS} that read all: {max(seen.in_silence[:NUM_READERS]):.0f} at most",
        ),
        Figure(
            name=f"{name}: stall report after report_after", value=report_s, unit="s", target=_TARGET_REPORT_S,
            note=f"{len(seen.reports)} report",
        ),
        Figure(name=f"{name}: verdict after the deadline", value=seen.verdict_s, unit="s", note=f"names {named}"),
    ]  # fmt: skip


def measure(
    num_ranks: int,
    *,
    rest_s: float,
    settled_s: float = 2.5,
    report_after_s: float = 3.0,
    deadline_s: float = 8.0,
) -> Outcome:
    """One run.

    Args:
        num_ranks: How many ranks to simulate, eight on each node; more than 64, of which only some judge.
        rest_s: How long they train, and are counted, before one hangs.
        settled_s: How long they train before that.
        report_after_s: Of the watchdogs.
        deadline_s: Of the watchdogs.
    """
    seen = Outcome(num_ranks=num_ranks, guilty=num_ranks * 2 // 3)
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder, _job(seen, Path(folder)) as job:
        job.start(report_after_s, deadline_s)
        with _heard_reports() as heard, _training(job.marks, seen.guilty) as hang:
            time.sleep(settled_s)
            seen.at_rest = job.messages_per_s(lambda: time.sleep(rest_s))
            hang()
            silent_at = time.monotonic()
            seen.in_silence = job.messages_per_s(lambda: _await_verdict(Path(folder), silent_at, deadline_s, seen))
        seen.reports = [(at - silent_at - report_after_s, text) for at, text in heard]
    return seen


def _await_verdict(folder: Path, silent_at: float, deadline_s: float, seen: Outcome) -> None:
    while time.monotonic() - silent_at < deadline_s + _LONGEST_S:
        for path in folder.glob("verdict-*.json"):
            seen.verdict_s = time.monotonic() - silent_at - deadline_s
            seen.verdict = json.loads(path.read_text())
            return
        time.sleep(0.02)


@dataclass
class _Limits(WatchedRun):
    deadline: timedelta | None
    last_deadline: timedelta | None = None


class _CountingStore:
    """One rank's store: counts the calls, which are messages, and shares a connection with other ranks."""

    def __init__(self, store: Any, counter: list[None]) -> None:
        self._store = store
        self._counter = counter

    def clone(self) -> _CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in _CALLS:
            return method

        def call(*arguments: Any) -> Any:
            self._counter.append(None)  # atomic under the global lock
            return method(*arguments)

        return call


class _Job:
    """Ranks over one store: watchdogs, and the threads on which they and the training threads run."""

    def __init__(self, seen: Outcome, folder: Path) -> None:
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._guilty = seen.guilty
        self._folder = folder
        self._sent: list[list[None]] = [[] for _ in range(seen.num_ranks)]
        self.marks = [Marks(phase=lambda: "step") for _ in self._sent]
        self._watchdogs: dict[int, Watchdog] = {}
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self._meeting = HashStore()

    def start(self, report_after_s: float, deadline_s: float) -> None:
        """All watchdogs watch; the training thread of the guilty rank hangs, those of the others wait for it."""
        lines = [PrefixStore("job", self._server.clone()) for _ in range(NUM_READERS + _NUM_PLAYERS)]
        ranks = range(len(self._sent))
        plane = ControlPlane(lines[0], World(rank=0, size=len(self._sent)))
        for rank in ranks:
            plane.send(f"hello/{rank}", Peer(host=f"node{rank // _PER_NODE}", pid=rank).to_json().encode())

        def watch(some: Sequence[int], then: Callable[[], None]) -> None:
            ready = threading.Event()

            def train() -> None:
                for rank in some:
                    line = lines[rank if rank < NUM_READERS else NUM_READERS + rank % _NUM_PLAYERS]
                    self._watchdogs[rank] = self._watchdog(rank, line, report_after_s, deadline_s)
                ready.set()
                then()

            self._run(train)
            ready.wait()

        watch([rank for rank in ranks if rank != self._guilty], self._wait_for_the_guilty)
        watch([self._guilty], self._done.wait)
        for rank in range(NUM_READERS):
            self._watchdogs[rank].start()
        for player in range(_NUM_PLAYERS):
            played = [self._watchdogs[rank] for rank in ranks if rank >= NUM_READERS and rank % _NUM_PLAYERS == player]
            self._run(lambda played=played: self._play(played))

    def _run(self, function: Callable[[], Any]) -> None:
        self._threads.append(threading.Thread(target=function))
        self._threads[-1].start()

    def _watchdog(self, rank: int, store: Any, report_after_s: float, deadline_s: float) -> Watchdog:
        size = len(self._sent)
        world = World(
            rank=rank, size=size, local_rank=rank % _PER_NODE, node_rank=rank // _PER_NODE,
            num_nodes=size // _PER_NODE, host=f"node{rank // _PER_NODE}", pid=rank,
        )  # fmt: skip
        return Watchdog(
            ControlPlane(_CountingStore(store, self._sent[rank]), world),  # type: ignore[arg-type]
            self.marks[rank],
            _Limits(timedelta(seconds=deadline_s)),
            report_after=report_after_s,
            ends_run=False,
            folder=self._folder,
            has_process=False,
        )

    def _wait_for_the_guilty(self) -> None:
        ControlPlane(self._meeting, World(rank=0, size=2)).barrier("the guilty", timedelta(hours=1))

    def _play(self, watchdogs: Sequence[Watchdog]) -> None:
        """Turn by turn, what the two threads of each of these ranks would do."""
        due = [time.monotonic() + index / len(watchdogs) for index in range(len(watchdogs))]
        while not self._done.wait(_TURN_S):
            for index, watchdog in enumerate(watchdogs):
                watchdog.turn()
                if time.monotonic() >= due[index] or not watchdog.board.has_posted:
                    due[index] = time.monotonic() + watchdog.board.turn()

    def messages_per_s(self, happening: Callable[[], None]) -> list[float]:
        """Each rank's messages while something happens."""
        before, begin = [len(sent) for sent in self._sent], time.monotonic()
        happening()
        elapsed_s = time.monotonic() - begin
        return [(len(sent) - start) / elapsed_s for sent, start in zip(self._sent, before, strict=True)]

    def stop(self) -> None:
        """Ends all threads."""
        self._done.set()
        for rank in range(NUM_READERS):
            if rank in self._watchdogs:
                self._watchdogs[rank].stop()
        ControlPlane(self._meeting, World(rank=1, size=2)).barrier("the guilty", timedelta(minutes=1))
        for thread in self._threads:
            thread.join()


@contextmanager
def _job(seen: Outcome, folder: Path) -> Iterator[_Job]:
    job = _Job(seen, folder)
    try:
        yield job
    finally:
        job.stop()


@contextmanager
def _training(marks: Sequence[Marks], guilty: int) -> Iterator[Callable[[], None]]:
    """Every rank sets a mark five times a second until the yielded function is called: then one hangs in its data."""
    done = threading.Event()

    def train() -> None:
        while not done.wait(0.2):
            for mark in marks:
                mark.set("backward")

    thread = threading.Thread(target=train)
    thread.start()

    def hang() -> None:
        done.set()
        thread.join()
        for mark in marks:
            mark.set("backward")
        marks[guilty].set("train_dataloader_next")

    try:
        yield hang
    finally:
        done.set()
        thread.join()


@contextmanager
def _heard_reports() -> Iterator[list[tuple[float, str]]]:
    """The stall reports of all watchdogs, with their moments."""
    heard: list[tuple[float, str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no progress" in record.getMessage():
                heard.append((time.monotonic(), record.getMessage()))

    logger, listener = logging.getLogger("lightning_distplus.watchdog.watchdog"), Listener()
    logger.addHandler(listener)
    try:
        yield heard
    finally:
        logger.removeHandler(listener)
