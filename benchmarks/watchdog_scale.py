"""What 1,024 watchdogs do to one store: messages at rest, and the time until a stall is reported.

The ranks are threads of one process, so that Python's global lock is shared by all: a real job is faster.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from benchmarks.figures import Figure
from lightning_distplus.control import ControlPlane
from lightning_distplus.control.peers import Peer
from lightning_distplus.watchdog import Marks, Watchdog
from lightning_distplus.world import World

__all__ = ["run"]

_NUM_RANKS = 1024
_NUM_RANKS_QUICK = 128
_REST_S = 10.0
_REPORT_AFTER_S = 3.0
_TARGET_REPORT_S = 5.0
_TARGET_MESSAGES = 1.0
_LONGEST_S = 60.0
_COUNTED = ("set", "get", "append", "add", "check", "compare_set", "multi_get", "delete_key")


class _CountingStore:
    """A store that counts the calls made to it and to its clones."""

    def __init__(self, store: Any, counter: list[int]) -> None:
        self._store = store
        self._counter = counter

    def clone(self) -> _CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in _COUNTED:
            return method

        def call(*arguments: Any) -> Any:
            self._counter.append(1)  # atomic under the global lock
            return method(*arguments)

        return call


def run(quick: bool) -> list[Figure]:
    """Ten seconds at rest, then all ranks fall silent; quick: 128 ranks, three seconds."""
    num_ranks, rest_s = (_NUM_RANKS_QUICK, 3.0) if quick else (_NUM_RANKS, _REST_S)
    counter: list[int] = []
    store = _CountingStore(HashStore(), counter)
    for rank in range(num_ranks):
        store.set(f"hello/{rank}", Peer(host="node", pid=1).to_json())
    marks = [Marks(phase=lambda: "step") for _ in range(num_ranks)]
    watchdogs = [_watchdog(store, World(rank=rank, size=num_ranks, pid=1), marks[rank]) for rank in range(num_ranks)]
    with _reports() as reported, _moving(marks) as stop:
        for watchdog in watchdogs:
            watchdog.start()
        time.sleep(3.0)
        counter.clear()
        begin = time.monotonic()
        time.sleep(rest_s)
        messages = len(counter) / num_ranks / (time.monotonic() - begin)
        stop()
        silent_at = time.monotonic()
        reported.wait(_LONGEST_S)
        report_s = time.monotonic() - silent_at - _REPORT_AFTER_S
    for watchdog in watchdogs:
        watchdog._stopping.set()
    for watchdog in watchdogs:
        watchdog.stop()
    name = f"{num_ranks:,} ranks"
    return [
        Figure(name=f"{name}, store traffic at rest", value=messages, unit="messages/rank/s", target=_TARGET_MESSAGES),
        Figure(
            name=f"{name}, stall report after report_after",
            value=report_s if reported.is_set() else float("inf"),
            unit="s",
            target=_TARGET_REPORT_S,
        ),
    ]


def _watchdog(store: Any, world: World, marks: Marks) -> Watchdog:
    return Watchdog(
        ControlPlane(store, world),
        marks,
        deadline=lambda: timedelta(seconds=_LONGEST_S * 10),
        report_after=_REPORT_AFTER_S,
        ends_run=False,
        folder=Path(tempfile.gettempdir()),
        has_process=False,
    )


@contextmanager
def _moving(marks: list[Marks]) -> Iterator[Callable[[], None]]:
    """Every rank sets a mark ten times a second until the yielded function is called."""
    done = threading.Event()

    def move() -> None:
        while not done.wait(0.1):
            for mark in marks:
                mark.set("backward")

    thread = threading.Thread(target=move)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join()

    try:
        yield stop
    finally:
        stop()


@contextmanager
def _reports() -> Iterator[threading.Event]:
    """An event that is set when a watchdog reports a stall."""
    heard = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "no progress" in text and "ranks 0, 1, 2" in text and "does not answer" not in text:
                heard.set()

    log, listener = logging.getLogger("lightning_distplus.watchdog.watchdog"), Listener()
    log.addHandler(listener)
    try:
        yield heard
    finally:
        log.removeHandler(listener)
