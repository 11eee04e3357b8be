"""Row H3 between hosts: the rank that speaks to the store for its host is killed, or stopped, inside the gate."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.control import Address, GateRecord, StepGate, connect
from lightning_distplus.errors import DistplusError
from lightning_distplus.testing import SpawnResult, spawn
from lightning_distplus.world import World
from tests.faults.hosts import Hosts, run_on, several_hosts
from tests.faults.side_by_side import Runs, side_by_side

PORT, SIZE, PER_HOST, VICTIM = 29411, 4, 2, 2
GATES, FAULT_AFTER_S, LATE_S = 50, 0.3, 1.0
DEADLINE = timedelta(seconds=3)
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
CASES = [(fault, late) for fault in FAULTS for late in (3, 1)]


def pass_gates(rank: int, hosts: Hosts, folder: str, fault: int, late: int) -> None:
    """The victim comes to the last gate and is gone there, while a rank of its host or of the other is to come."""
    world = World(rank=rank, size=SIZE, local_rank=rank % PER_HOST, node_rank=rank // PER_HOST, num_nodes=2)
    plane = connect(world, Address(host=hosts.addresses[0], port=PORT), timedelta(seconds=30))
    plane.listen()
    gate = StepGate(plane, name="run")
    gate.open(timedelta(seconds=30))
    came_at, passed = 0.0, 0
    try:
        while True:
            if passed == GATES and rank == late:
                time.sleep(LATE_S)
            if passed == GATES and rank == VICTIM:
                threading.Timer(FAULT_AFTER_S, os.kill, (os.getpid(), fault)).start()
            came_at = time.monotonic()
            gate.exchange(GateRecord(global_step=passed, micro_batch=passed, epoch=0, lead_s=rank), DEADLINE)
            passed += 1
    except DistplusError as error:
        seconds = time.monotonic() - came_at
        plane.report_failure(error)
        told = {"ranks": getattr(error, "ranks", None), "passed": passed, "seconds": seconds, "text": str(error)}
        Path(folder, f"told-{rank}").write_text(json.dumps({"type": type(error).__name__, **told}))
        plane.stop_listening()


def live(rank: int, hosts: Hosts, folder: str, fault: int, late: int) -> None:
    """One host and its ranks, which are children of its first process: that takes no signal from itself."""

    def start_ranks() -> None:
        pids = {}
        for one in range(rank * PER_HOST, (rank + 1) * PER_HOST):
            if (pid := os.fork()) == 0:
                pass_gates(one, hosts, folder, fault, late)
                os._exit(0)
            pids[one] = pid
        for one in sorted(pids, key=lambda one: one == VICTIM):
            if one == VICTIM:
                os.kill(pids[one], signal.SIGKILL)
            os.waitpid(pids[one], 0)

    run_on(hosts.names[rank], start_ranks)


def run_case(fault: str, late: int, folder: Path) -> tuple[SpawnResult, dict[int, dict[str, Any]]]:
    with several_hosts(2, f"{fault[0]}{late}") as hosts:
        arguments = (hosts, str(folder), int(FAULTS[fault]), late)
        run = spawn(live, 2, args=arguments, deadline="60s", env={"DISTPLUS_SECRET": "of the test"})
    return run, {int(path.name[-1]): json.loads(path.read_text()) for path in folder.glob("told-*")}


ended = side_by_side(
    {"killed": lambda folder: run_case("killed", 3, folder), "stopped": lambda folder: run_case("stopped", 3, folder)}
)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_speaks_for_its_host_holds_nobody_up_and_is_named(fault: str, ended: Runs) -> None:
    _require_right(fault, *ended(fault))


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize(("fault", "late"), CASES)
def test_it_is_always_so(fault: str, late: int, turn: int, tmp_path: Path) -> None:
    _require_right(fault, *run_case(fault, late, tmp_path))


def _require_right(fault: str, run: SpawnResult, told: dict[int, dict[str, Any]]) -> None:
    kind = "PeerLost" if fault == "killed" else "PeerMissing"
    assert {rank: (one["type"], one["ranks"]) for rank, one in told.items()} == {
        rank: (kind, [VICTIM]) for rank in range(SIZE) if rank != VICTIM
    }, (told, run.logs)
    # It had come: the gate goes on without it, and the next one misses it.
    assert {one["passed"] for one in told.values()} == {GATES + 1}, told
    assert max(one["seconds"] for one in told.values()) < DEADLINE.total_seconds() + 1
