"""More than 64 ranks: a few read what all say, and what one rank sends and reads does not grow with their number."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from benchmarks import watchdog_scale
from lightning_distplus.control import ControlPlane
from lightning_distplus.control.plane import Peer
from lightning_distplus.watchdog.heartbeat import NUM_READERS
from lightning_distplus.watchdog.verdict import Verdict
from lightning_distplus.world import World


def test_one_of_many_ranks_reports_and_names_the_one_that_hangs_and_nobody_asks_for_each_of_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = watchdog_scale.measure(96, rest_s=1.5, settled_s=1.5, report_after_s=1.5, deadline_s=3.0)
    assert seen.verdict["culprits"] == [seen.guilty]
    assert len(seen.verdict["waiting"]) == 95
    assert "train_dataloader_next" in seen.verdict["operation"]
    assert 1 <= len(seen.reports) <= NUM_READERS  # one, unless its beats are late
    _, report = seen.reports[0]
    assert f"rank {seen.guilty}: in 'train_dataloader_next'" in report
    assert "in 'backward'" in report
    assert sum(seen.at_rest) / 96 <= 2.0  # one each second; the window holds two of some ranks
    assert max(seen.in_silence[NUM_READERS:]) <= 5.0  # a beat and a look at what is asked each second, and evidence
    assert max(seen.in_silence[:NUM_READERS]) <= 40.0  # four looks a second, whatever the number of ranks
    assert 1 <= capfd.readouterr().err.count(" HANGS") <= NUM_READERS


def test_what_the_other_hosts_are_told_of_ten_thousand_ranks_is_small_and_prints_the_same() -> None:
    ranks = range(10_000)
    verdict = Verdict(
        incident="hang-1", kind="hang", culprits=[7777], waiting=[rank for rank in ranks if rank != 7777],
        phase="step", operation="backward", location="train.py:5", global_step=3, elapsed_s=9.0, cause="", remedy="",
        hosts={str(rank): f"node{rank // 8}" for rank in ranks}, stacks={str(rank): "a frame\n" * 50 for rank in ranks},
        lines=[f"rank {rank} in 'backward'" for rank in (7777, *(set(ranks) - {7777}))],
        locations={str(rank): "train.py:5" for rank in ranks}, collectives={str(rank): None for rank in ranks},
        load={f"node{node}": {"load_1m": 1.0} for node in range(1250)}, load_of_culprit="load 1.0 on 2 cores",
    )  # fmt: skip
    told = Verdict.from_json(verdict.shortened().to_json())
    assert len(told.to_json()) < 200_000
    assert told.culprits == [7777]
    assert told.stacks["7777"] == verdict.stacks["7777"]
    assert told.load == {node: {"load_1m": 1.0} for node in ("node972", "node0", "node1")}
    shown, all_shown = told.render().splitlines(), verdict.render().splitlines()
    assert [line for line in shown if "more ranks" not in line] == [line for line in all_shown if "more ra" not in line]


class CountingStore:
    """Counts the calls and the connections."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: list[str] = []
        self.num_clones = 0

    def clone(self) -> CountingStore:
        self.num_clones += 1
        return self

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.store, name)


def plane_of(rank: int, size: int, num_nodes: int) -> tuple[ControlPlane, CountingStore]:
    store = CountingStore(HashStore())
    return ControlPlane(store, World(rank=rank, size=size, num_nodes=num_nodes)), store  # type: ignore[arg-type]


def test_a_rank_of_a_large_job_asks_for_the_processes_of_its_own_node_and_only_once() -> None:
    plane, store = plane_of(rank=21, size=1024, num_nodes=128)
    for rank in range(1024):
        plane.send(f"hello/{rank}", Peer(host=f"node{rank // 8}", pid=rank).to_json().encode())
    store.calls.clear()
    for _ in range(3):
        assert {rank: peer.pid for rank, peer in plane.peers_nearby().items()} == {r: r for r in range(16, 24)}
        plane.raise_if_gone("a barrier")
    assert store.calls == ["check", "multi_get"]


def test_hundreds_of_keys_are_read_in_a_few_round_trips_also_where_one_is_missing() -> None:
    plane, store = plane_of(rank=0, size=1024, num_nodes=128)
    keys = [f"beat/{rank}" for rank in range(1024)]
    for rank, key in enumerate(keys):
        if rank != 700:
            plane.send(key, str(rank).encode())
    store.calls.clear()
    values = plane.read_each(keys)
    assert [rank for rank, value in enumerate(values) if value is None] == [700]
    assert all(value == str(rank).encode() for rank, value in enumerate(values) if value is not None)
    assert len(store.calls) == 3 * 2 + 8 + 7 * 2 + 2  # of the last 256, a half that is whole at each of eight looks
    plane.send(keys[700], b"700")
    store.calls.clear()
    assert plane.read_each(keys)[700] == b"700"
    assert len(store.calls) == 4 * 2


def test_all_second_lines_share_one_connection_and_who_listens_has_one_more() -> None:
    plane, store = plane_of(rank=1, size=2, num_nodes=1)
    for _ in range(3):
        plane.second_line()
    assert store.num_clones == 1
    plane.listen()
    assert store.num_clones == 2
    plane.stop_listening()
    assert store.num_clones == 2
