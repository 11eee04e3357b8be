"""The board: what a rank has said of an earlier silence is not held against it, or for it, in a later one."""

from __future__ import annotations

import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore

from lightning_distplus.control import ControlPlane, beat_key
from lightning_distplus.control.plane import Peer
from lightning_distplus.watchdog.evidence import Evidence, Witness
from lightning_distplus.watchdog.heartbeat import Board, Sighting
from lightning_distplus.watchdog.progress import Marks
from lightning_distplus.watchdog.watchdog import Watchdog, WatchedRun
from lightning_distplus.world import World
from tests.processes import wait_until


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
        wait_until(lambda: boards[0].evidence == {1: evidence}, within_s=10.0)
        marks[1].set("backward")
        wait_until(lambda: boards[0].evidence == {}, within_s=10.0)
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


def test_an_earlier_beat_that_is_shown_again_proves_no_life() -> None:
    store = HashStore()
    planes = [ControlPlane(PrefixStore("job", store), World(rank=rank, size=2)) for rank in range(2)]
    boards = [Board(plane, Marks(phase=lambda: "step")) for plane in planes]
    for rank in range(2):
        planes[0].send(f"hello/{rank}", Peer(host="node0", pid=100 + rank).to_json().encode())
    boards[0].alert.set()
    boards[1].turn()
    earlier = planes[0].read(beat_key(1))
    assert earlier is not None
    boards[1].turn()
    boards[0].turn()
    seen = boards[0].sightings[1]
    planes[0].send(beat_key(1), earlier)
    boards[0].turn()
    assert boards[0].sightings[1] is seen


class DropsWhatIsLookedFor(dict[int, Any]):
    """What a rank has said, as another thread finds it that looks twice: the board has dropped it meanwhile."""

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.pop(rank, None) is not None


def test_evidence_that_the_board_drops_while_this_rank_judges_ends_no_watchdog() -> None:
    plane, marks = ControlPlane(HashStore(), World(rank=0, size=2)), Marks(phase=lambda: "step")
    board = Board(plane, marks)
    told = Evidence(rank=1, host="node0", pid=7, state="running", answers=True)
    board.evidence = DropsWhatIsLookedFor({1: asdict(told)})
    witness = Witness(plane, marks, board, thread=threading.get_ident(), printer=None)
    assert witness.of_peers() == {1: told}


class Grows(dict[int, Sighting]):
    """What was seen of the peers, while the board meets another one at each look."""

    def get(self, rank: int, default: Any = None) -> Any:
        seen = super().get(rank, default)
        self[len(self)] = seen
        return seen


class Endless(WatchedRun):
    deadline: timedelta | None = None
    last_deadline: timedelta | None = None


def test_a_peer_that_is_first_seen_during_a_stall_report_ends_no_watchdog(tmp_path: Path) -> None:
    store = HashStore()
    planes = [ControlPlane(PrefixStore("job", store), World(rank=rank, size=3)) for rank in range(3)]
    marks = [Marks(phase=lambda: "step") for _ in planes]
    dog = Watchdog(
        planes[0], marks[0], Endless(), report_after=0.01, ends_run=False, folder=tmp_path, has_process=False
    )
    for plane, mark in zip(planes[1:], marks[1:], strict=True):
        Board(plane, mark).turn()
    dog.board.alert.set()
    dog.board.turn()
    dog.board.sightings = Grows({rank: dog.board.sightings[rank] for rank in (0, 1)})
    marks[0]._last = (1, "backward", marks[0]._last[2] - 5.0)
    dog.turn()
    assert len(dog.board.sightings) > 2
