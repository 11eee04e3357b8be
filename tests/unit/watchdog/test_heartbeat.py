"""The board: what a rank has said of an earlier silence is not held against it, or for it, in a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import HashStore, PrefixStore

from lightning_distplus.control import ControlPlane
from lightning_distplus.control.plane import Peer
from lightning_distplus.watchdog.heartbeat import Board
from lightning_distplus.watchdog.progress import Marks
from lightning_distplus.world import World


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_evidence_of_an_earlier_silence_is_dropped_once_the_rank_has_moved() -> None:
    store = HashStore()
    planes = [ControlPlane(PrefixStore("job", store), World(rank=rank, size=2)) for rank in range(2)]
    marks = [Marks(phase=lambda: "step") for _ in planes]
    boards = [Board(plane, mark) for plane, mark in zip(planes, marks, strict=True)]
    for rank in range(2):
        planes[0].send(f"hello/{rank}", Peer(host="node0", pid=100 + rank).to_json().encode())
    try:
        for board in boards:
            board.alert.set()
            board.start()
        evidence = {"rank": 1, "number": marks[1].read().number}
        boards[1].post_evidence(evidence)
        assert until(lambda: boards[0].evidence == {1: evidence})
        marks[1].set("backward")
        assert until(lambda: boards[0].evidence == {})
    finally:
        for board in boards:
            board.stop()


def test_a_rank_of_another_host_knows_where_the_one_that_serves_the_store_is_before_anything_happens() -> None:
    store = HashStore()
    worlds = [World(rank=rank, size=2, num_nodes=2) for rank in range(2)]
    planes = [ControlPlane(PrefixStore("job", store), world) for world in worlds]
    for rank in range(2):
        planes[0].send(f"hello/{rank}", Peer(host=f"node{rank}", pid=100, boot=f"boot{rank}").to_json().encode())
    marks = [Marks(phase=lambda: "step") for _ in planes]
    boards = [Board(plane, mark, thread=threading.get_ident()) for plane, mark in zip(planes, marks, strict=True)]
    marks[0].set("backward")
    for board in boards:
        board.turn()
    seen = boards[1].last_seen(0)
    assert seen is not None
    assert (seen.mark.operation, boards[0].last_seen(1)) == ("backward", None)
    assert seen.place is not None
    assert seen.place.startswith(__file__)
