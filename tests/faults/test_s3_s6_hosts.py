"""Hosts that cannot meet, or of which one or one link is bad: namespaces with names of their own.

Rows S3 and S6.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import env
from lightning_distplus.cli.preflight import run_preflight
from lightning_distplus.errors import DistplusError, ExitCode
from lightning_distplus.preflight import Finding, Status
from lightning_distplus.preflight.network import Pair, judge, pair_hosts, second_round
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.hosts import Hosts, run_on, several_hosts
from tests.pairs import kept

BOUND_S = 5.0
PORT = 29400


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How two nodes start, and what each must say."""

    node_ranks: tuple[int, int] = (0, 1)
    num_nodes: tuple[int, int] = (2, 2)
    address: str = ""
    """MASTER_ADDR; that of node 0 by default."""
    known_on: tuple[int, ...] = ()
    """The nodes on which that name resolves."""
    calls_itself: str = ""
    """To what it resolves on node 0; its address in the network by default."""
    busy: bool = False
    drops: tuple[str, ...] | None = None
    """What a firewall on node 0 drops, by the words of ``ip rule``; no word: everything."""
    shares_folder: bool = True
    deadline: str = "60s"
    """Of the rendezvous."""
    names_interface: bool = True
    """Whether GLOO_SOCKET_IFNAME is set."""
    says: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


FAULTS = {
    "duplicate": Fault(
        node_ranks=(0, 0),
        says=(("Two processes call themselves rank 0 of 2", "host {0}", "host {1}", "NODE_RANK"),) * 2,
    ),
    "swapped": Fault(
        node_ranks=(1, 0),
        says=(
            ("MASTER_ADDR={2}:29400, and that is this very host", "NODE_RANK is 1 here", "on {0}"),
            ("Rank 0 runs on {1}, and MASTER_ADDR={2}:29400 leads to another host", "Connection refused"),
        ),
    ),
    "number of nodes": Fault(
        num_nodes=(2, 3), says=(("Rank 1 on {1}", "world_size is 3 here and 2 there", "host {0}"),) * 2
    ),
    "no such name": Fault(
        address="no-such-host.invalid",
        says=(("cannot listen on no-such-host.invalid",), ("cannot resolve MASTER_ADDR=no-such-host.invalid",)),
    ),
    "a host that does not know its own name": Fault(
        names_interface=False,
        says=(("Host {0} does not know its own name", "Host {1} does", "export GLOO_SOCKET_IFNAME=eth0"),) * 2,
    ),
    "busy port": Fault(
        busy=True,
        says=(("cannot listen on {2}:29400: Address already in use",), ("reached {2}:29400, but what",)),
    ),
    "everything is dropped": Fault(
        drops=(), says=(("gets no answer from {2}:29400, not even a refusal", "from {1} to {2}:29400"),) * 2
    ),
    "a name that only node 0 knows": Fault(
        address="node-zero",
        known_on=(0,),
        says=(("Rank 1 on {1} (node rank 1) cannot resolve MASTER_ADDR=node-zero", "getent hosts node-zero"),) * 2,
    ),
    "a name that only node 1 knows": Fault(
        address="node-zero", known_on=(1,), says=(("Rank 0 on {0} cannot listen on node-zero:29400",),) * 2
    ),
}


def start(rank: int, hosts: Hosts, fault: Fault, folder: str) -> None:
    """One process of one node, on its own host."""
    own = Path(folder) if fault.shares_folder else Path(folder, f"host{rank}")
    own.mkdir(exist_ok=True)
    run_on(hosts.names[rank], lambda: fit(rank, hosts, fault, folder, str(own)))


def fit(rank: int, hosts: Hosts, fault: Fault, notes: str, folder: str) -> None:
    if rank in fault.known_on:
        known = Path(folder, f"hosts{rank}")
        leads_to = fault.calls_itself if fault.calls_itself and rank == 0 else hosts.addresses[0]
        known.write_text(f"127.0.0.1 localhost\n{leads_to} {fault.address}\n")
        subprocess.run(["mount", "--bind", str(known), "/etc/hosts"], check=True, timeout=10)  # on this host only
    is_busy = fault.busy and rank == 0
    variables: dict[str, Any] = {
        "RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None, "NODE_RANK": fault.node_ranks[rank],
        "MASTER_ADDR": fault.address or hosts.addresses[0], "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0" if fault.names_interface else None,
    }  # fmt: skip
    with (
        socket.create_server((hosts.addresses[0], PORT)) if is_busy else contextlib.nullcontext(),
        env.changed(**variables),
    ):
        strategy = jobs.strategy("ResilientDDP", timeout={"rendezvous": fault.deadline})
        trainer = jobs.trainer(strategy, 1, folder, num_nodes=fault.num_nodes[rank], max_steps=2)
        Path(notes, f"begun{rank}").write_text(str(time.monotonic()))
        try:
            trainer.fit(jobs.Model(), jobs.loader())
        except DistplusError as error:
            Path(notes, f"rank{rank}").write_text(f"{time.monotonic()}\n{error}")
            raise


# As Debian has it: node 0 calls itself 127.0.1.1, by the name by which others find it.
DEBIAN = Fault(address="node-zero", known_on=(0, 1), calls_itself="127.0.1.1")


@pytest.mark.parametrize("layout", [pytest.param(Fault(), marks=pytest.mark.soak), DEBIAN], ids=["address", "name"])
def test_two_hosts_by_hand_train_without_a_finding(layout: Fault, tmp_path: Path) -> None:
    with several_hosts(2) as hosts:
        run = spawn(start, 2, args=(hosts, layout, str(tmp_path)), deadline="40s").check()
    assert jobs.findings_of_preflight(run) == []


LONG = ("a name that only node 1 knows",)  # beside one that is like it


@pytest.mark.parametrize("name", kept([*FAULTS], [name for name in FAULTS if name not in LONG]))
def test_hosts_that_cannot_meet_say_why_and_name_each_other(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with several_hosts(2) as hosts:
        if fault.drops is not None:
            hosts.drop(*fault.drops)
        run = spawn(start, 2, args=(hosts, fault, str(tmp_path)), deadline="40s")

    assert run.exit_codes == dict.fromkeys(range(2), int(ExitCode.PREFLIGHT)), run.logs
    both_began = max(float((tmp_path / f"begun{rank}").read_text()) for rank in range(2))
    for rank in range(2):
        ended, text = (tmp_path / f"rank{rank}").read_text().split("\n", 1)
        assert float(ended) - both_began < BOUND_S
        for words in fault.says[rank]:
            assert words.format(*hosts.names, hosts.addresses[0]) in text, text


FILTERED = Fault(drops=("ipproto", "tcp", "dport", str(PORT)), shares_folder=False, deadline="8s")


def test_a_filtered_port_without_a_shared_folder_names_the_rank_at_the_deadline(tmp_path: Path) -> None:
    with several_hosts(2) as hosts:
        hosts.drop(*(FILTERED.drops or ()))
        run = spawn(start, 2, args=(hosts, FILTERED, str(tmp_path)), deadline="40s")

    assert run.exit_codes == {0: int(ExitCode.PEER_LOST), 1: int(ExitCode.PREFLIGHT)}, run.logs
    assert "1 of 2 ranks did not come: rank 1 (never seen, node 1)" in (tmp_path / "rank0").read_text()
    assert f"gets no answer from {hosts.addresses[0]}:{PORT}, not even a refusal" in (tmp_path / "rank1").read_text()


# -- ``distplus preflight`` on four hosts at one switch ----------------------------------------------------------------

NODES = 4
PREFLIGHT_S = 30.0  # 10 s are planned; four hosts share two busy cores here


def preflight(rank: int, hosts: Hosts, folder: str) -> None:
    run_on(hosts.names[rank], lambda: preflight_of(rank, hosts, folder))


def preflight_of(rank: int, hosts: Hosts, folder: str) -> None:
    variables: dict[str, Any] = {
        "RANK": None, "LOCAL_RANK": 0, "WORLD_SIZE": NODES, "NODE_RANK": rank, "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": 29400, "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    begin = time.monotonic()
    with env.changed(**variables):
        options = ["--json", "--off", "torch", "--off", "disk", "--devices", "1", "--nodes", str(NODES)]
        code = run_preflight([*options, "--folder", folder, "--deadline", "30s"])
    Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin} {code}")


@pytest.mark.parametrize(
    ("fault", "check", "words", "is_error"),
    [
        pytest.param("none", "", "", False, marks=pytest.mark.soak),
        ("link", "network", "Hosts {2} and {3} do not reach each other.", True),
        pytest.param("host", "network", "Host {2} is slow with the others.", False, marks=pytest.mark.soak),
    ],
)
def test_a_bad_host_is_told_from_a_bad_link(fault: str, check: str, words: str, is_error: bool, tmp_path: Path) -> None:
    with several_hosts(NODES) as hosts:
        if fault == "link":
            hosts.cut_off(2, 3)
        elif fault == "host":
            hosts.slow_down(2, "20mbit")
        run = spawn(preflight, NODES, args=(hosts, str(tmp_path)), deadline="90s")

    assert set(run.exit_codes.values()) == {0}, run.logs
    codes = [float(word) for rank in range(NODES) for word in (tmp_path / f"rank{rank}").read_text().split()]
    assert max(codes[::2]) < PREFLIGHT_S
    assert set(codes[1::2]) == {float(ExitCode.PREFLIGHT if is_error else 0)}, run.logs[0]
    report = json.loads(run.logs[0][run.logs[0].index("{\n") : run.logs[0].rindex("}") + 1])
    found = [one for one in report["findings"] if one["status"] != "note" and one["check"] == "network"]
    assert [one for one in report["findings"] if "4 hosts were paired" in one["subject"]]
    if fault == "none":
        assert [one for one in found if one["status"] == "error"] == []
    else:
        assert words.format(*hosts.names) in [one["subject"] for one in found if one["check"] == check], [
            one["detail"] for one in found
        ]


def told(first: list[Pair], second: list[Pair], count: int) -> list[tuple[Status, str]]:
    found: list[Finding] = list(judge(first, second, [f"h{place}" for place in range(count)]))
    return [(one.status, one.subject) for one in found if one.status is not Status.NOTE]


def well(low: int, high: int) -> Pair:
    return Pair(low=low, high=high, round_trip_ms=0.1, mb_per_s=1000.0)


def slow(low: int, high: int) -> Pair:
    return Pair(low=low, high=high, round_trip_ms=0.1, mb_per_s=10.0)


def cut(low: int, high: int) -> Pair:
    return Pair(low=low, high=high, error="RuntimeError: timed out")


def test_the_second_round_pairs_suspects_with_hosts_that_were_well() -> None:
    assert pair_hosts(5) == [(0, 1), (2, 3)]
    assert second_round([well(0, 1), cut(2, 3)], 4) == [(0, 2), (1, 3)]
    assert second_round([well(0, 1), well(2, 3)], 5) == [(0, 4)]
    assert second_round([cut(0, 1)], 2) == []
    assert second_round([well(0, 1), slow(2, 3)], 4) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("first", "second", "count", "words"),
    [
        ([well(0, 1), well(2, 3)], [], 4, []),
        ([well(0, 1), cut(2, 3)], [well(0, 2), well(1, 3)], 4, ["Hosts h2 and h3 do not reach each other."]),
        ([well(0, 1), cut(2, 3)], [cut(0, 2), well(1, 3)], 4, ["Host h2 cannot be reached by the others."]),
        ([well(0, 1), cut(2, 3)], [slow(0, 2), well(1, 3)], 4, ["Hosts h2 and h3 do not reach each other."]),
        ([cut(0, 1)], [], 2, ["Hosts h0 and h1 do not reach each other."]),
        ([well(0, 1)], [cut(0, 2)], 3, ["Hosts h0 and h2 do not reach each other."]),
    ],
)
def test_who_fails_twice_is_the_bad_one(first: list[Pair], second: list[Pair], count: int, words: list[str]) -> None:
    assert told(first, second, count) == [(Status.ERROR, text) for text in words]
