"""Two hosts, each a network namespace with a name of its own, that cannot meet (rows S3 and S6)."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import env
from lightning_distplus.errors import DistplusError, ExitCode
from lightning_distplus.testing import spawn
from tests.distributed import jobs

BOUND_S = 5.0
PORT = 29400
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them."""
    names = [f"dp{os.getpid()}n{node}" for node in range(2)]
    if shutil.which("ip") is None or _ip("netns", "add", names[0], check=False).returncode != 0:
        pytest.skip("network namespaces are missing: they need root and the program ip")
    try:
        _ip("netns", "add", names[1])
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name, check=False)


def _move_to(namespace: str, host: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as place:
        assert libc.setns(place.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(host)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How two nodes start, and what each must say."""

    node_ranks: tuple[int, int] = (0, 1)
    num_nodes: tuple[int, int] = (2, 2)
    address: str = ADDRESSES[0]
    busy: bool = False
    says: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    codes: tuple[int, int] = (ExitCode.PREFLIGHT, ExitCode.PREFLIGHT)
    bounded: tuple[int, ...] = field(default=(0, 1))


FAULTS = {
    "duplicate": Fault(
        node_ranks=(0, 0),
        says=(("Two processes call themselves rank 0 of 2", "host node0", "host node1", "NODE_RANK"),) * 2,
    ),
    "swapped": Fault(
        node_ranks=(1, 0),
        says=(
            ("MASTER_ADDR=10.77.0.1:29400, and that is this very host", "NODE_RANK is 1 here", "on node0"),
            ("Rank 0 runs on node1, and MASTER_ADDR=10.77.0.1 is another host", "Connection refused"),
        ),
    ),
    "number of nodes": Fault(num_nodes=(2, 3), says=(("world_size is ", "on node", "host node"),) * 2),
    "no such name": Fault(
        address="no-such-host.invalid",
        says=(("cannot listen on no-such-host.invalid",), ("cannot resolve MASTER_ADDR=no-such-host.invalid",)),
    ),
    "busy port": Fault(
        busy=True,
        says=(("cannot listen on 10.77.0.1:29400: Address already in use",), ("reached 10.77.0.1:29400, but what",)),
    ),
    "filtered": Fault(
        says=(
            ("1 of 2 ranks did not come: rank 1 (never seen, node 1)",),
            ("gets no answer from 10.77.0.1:29400, not even a refusal", "from node1 to 10.77.0.1:29400"),
        ),
        codes=(ExitCode.PEER_LOST, ExitCode.PREFLIGHT),  # nothing can reach rank 0: its own deadline ends it
        bounded=(1,),
    ),
}


def start(rank: int, names: list[str], fault: Fault, folder: str) -> None:
    """One process of one node, on its own host."""
    _move_to(names[rank], f"node{rank}")
    listener = socket.create_server((ADDRESSES[0], PORT)) if fault.busy and rank == 0 else None
    variables: dict[str, Any] = {
        "RANK": None, "LOCAL_RANK": None, "WORLD_SIZE": None, "NODE_RANK": fault.node_ranks[rank],
        "MASTER_ADDR": fault.address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "cable",
    }  # fmt: skip
    with env.changed(**variables):
        strategy = jobs.strategy("ResilientDDP", timeout={"rendezvous": "8s"})
        trainer = jobs.trainer(strategy, 1, folder, num_nodes=fault.num_nodes[rank], max_steps=2)
        begin = time.monotonic()
        try:
            trainer.fit(jobs.Model(), jobs.loader())
        except DistplusError as error:
            Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin}\n{error}")
            raise
        finally:
            if listener is not None:
                listener.close()


def test_two_hosts_by_hand_train_without_a_finding(hosts: list[str], tmp_path: Path) -> None:
    run = spawn(start, 2, args=(hosts, Fault(), str(tmp_path)), deadline="40s").check()
    assert "preflight (" not in "".join(run.logs.values())


@pytest.mark.parametrize("name", FAULTS)
def test_hosts_that_cannot_meet_say_why_and_name_each_other(name: str, hosts: list[str], tmp_path: Path) -> None:
    fault = FAULTS[name]
    if name == "filtered":  # what node 0 answers is dropped, as by a firewall
        _ip("-n", hosts[0], "route", "add", "blackhole", f"{ADDRESSES[1]}/32")

    run = spawn(start, 2, args=(hosts, fault, str(tmp_path)), deadline="40s")

    assert run.exit_codes == dict(enumerate(fault.codes)), run.logs
    for rank in range(2):
        seconds, text = (tmp_path / f"rank{rank}").read_text().split("\n", 1)
        assert rank not in fault.bounded or float(seconds) < BOUND_S
        for words in fault.says[rank]:
            assert words in text, text
