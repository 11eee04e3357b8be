"""The rendezvous in real processes: all ranks meet, or each of them says who is missing or in the way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_distplus import _compat, env
from lightning_distplus.control import Address, ControlPlane, connect, disconnect
from lightning_distplus.errors import DistplusError, PeerLost
from lightning_distplus.testing import spawn, weights_digest
from lightning_distplus.world import World
from tests.distributed import jobs
from tests.faults.hosts import several_hosts
from tests.processes import wait_until

NO_DEADLINE = timedelta(seconds=20)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """How one process comes to the rendezvous."""

    rank: int
    size: int
    job: str = "job"
    num_nodes: int = 1
    late_s: float = 0.0
    until: Path | None = None
    """The file that ends its stay; whoever is refused writes it."""
    deadline: timedelta = NO_DEADLINE


def enter(rank: int, entrants: dict[int, Entrant]) -> dict[str, Any] | None:
    """Meets the others as ``entrants[rank]`` says, and tells what came of it; who is not among them stays away."""
    entrant = entrants.get(rank)
    if entrant is None:
        return None
    time.sleep(entrant.late_s)
    told: dict[str, Any] = {"entered": time.time(), "error": ""}
    world = World(rank=entrant.rank, size=entrant.size, num_nodes=entrant.num_nodes)
    try:
        connect(world, _address(entrant.job), entrant.deadline)
    except DistplusError as error:
        told |= {"error": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", [])}
    told["left"] = time.time()
    if not told["error"]:
        wait_until(entrant.until.exists if entrant.until else lambda: True)
        disconnect()
    elif entrant.until:
        entrant.until.touch()
    return told


def _address(job: str = "", attempt: int = 0) -> Address:
    return Address(
        host=env.MASTER_ADDR.get() or "",
        port=env.MASTER_PORT.integer() or 0,
        is_served_by_launcher=env.TORCHELASTIC_USE_AGENT_STORE.get() == "True",
        job=job,
        attempt=attempt,
    )


def _run(entrants: dict[int, Entrant]) -> dict[int, dict[str, Any]]:
    found = spawn(enter, max(entrants) + 1, args=(entrants,), deadline="30s").check().results
    return {rank: found[rank] for rank in entrants}


@pytest.mark.parametrize("missing", [[1, 2], [0]], ids=str)
def test_every_rank_that_came_names_those_that_did_not_and_their_nodes(missing: list[int]) -> None:
    """Row S8. One rank enters half a second after the others: it hears of it from the first whose deadline passes."""
    deadline = timedelta(seconds=1.5)
    present = [rank for rank in range(4) if rank not in missing]
    entrants = {rank: Entrant(rank=rank, size=4, num_nodes=2, deadline=deadline) for rank in present}
    entrants[3] = replace(entrants[3], late_s=0.5)

    found = _run(entrants)

    assert {outcome["error"] for outcome in found.values()} == {"PeerMissing"}
    assert [outcome["ranks"] for outcome in found.values()] == [missing] * len(present)
    last = max(outcome["entered"] for outcome in found.values())
    assert max(outcome["left"] for outcome in found.values()) < last + deadline.total_seconds() + 1
    told = "2 of 4 ranks did not come: rank 1 (never seen, node 0), rank 2 (never seen, node 1)"
    assert all((told if missing != [0] else "for rank 0 at 127.0.0.1:") in one["text"] for one in found.values())


def test_a_stray_rank_of_another_job_is_refused(tmp_path: Path) -> None:
    until = tmp_path / "refused"
    job = {rank: Entrant(rank=rank, size=2, until=until) for rank in range(2)}
    found = _run({**job, 2: Entrant(rank=1, size=2, job="other", late_s=0.3, until=until)})
    assert (found[0]["error"], found[1]["error"], found[2]["error"]) == ("", "", "RendezvousError")
    assert "job is 'other' here and 'job' there" in found[2]["text"]


def lose(rank: int, lost: int) -> tuple[list[int], float, str]:
    plane = connect(World(rank=rank, size=3), _address(), NO_DEADLINE)
    plane.listen()
    if rank == lost:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        plane.barrier("never", NO_DEADLINE)
    except PeerLost as error:
        plane.report_failure(error)
        return error.ranks, time.monotonic() - begin, str(error)
    finally:
        disconnect()
    raise AssertionError("the barrier opened")


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (0, "lost the connection to rank 0, which serves the job's store, during the barrier 'never'"),
        (1, "waits for the barrier 'never', and the process of rank 1"),
    ],
)
def test_a_rank_that_is_killed_is_named_within_two_seconds(lost: int, text: str) -> None:
    run = spawn(lose, 3, args=(lost,), deadline="30s")
    assert run.exit_codes == {rank: -signal.SIGKILL if rank == lost else 0 for rank in range(3)}
    for ranks, elapsed_s, found in run.results.values():
        assert ranks == [lost]
        assert elapsed_s < 2
        assert text in found


def form_group_and_die(rank: int, num_deaths: int, folder: str) -> int:
    """Rank 0 is killed after each of the first attempts has formed its group."""
    attempt = env.TORCHELASTIC_RESTART_COUNT.integer() or 0
    plane = connect(World(rank=rank, size=2), _address(env.TORCHELASTIC_RUN_ID.get() or "", attempt), NO_DEADLINE)
    _form_group(plane)
    value = torch.tensor(rank + 1)
    dist.all_reduce(value)
    (Path(folder) / f"attempt{attempt:02d}-rank{rank}").write_text(str(int(value)))
    plane.barrier("all have written", NO_DEADLINE)
    if attempt < num_deaths:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
    dist.destroy_process_group()
    plane.farewell(NO_DEADLINE)
    disconnect()
    return attempt


def _form_group(plane: ControlPlane) -> None:
    _compat.init_default_group(
        "gloo",
        store=plane.store_for("default-group"),
        rank=plane.world.rank,
        world_size=plane.world.size,
        timeout=NO_DEADLINE,
        device=torch.device("cpu"),
    )


def _restart(num_deaths: int, folder: Path) -> None:
    run = spawn(
        form_group_and_die, 2, args=(num_deaths, str(folder)), mode="torchrun", max_restarts=num_deaths,
        deadline=30 + 10 * num_deaths,
    ).check()  # fmt: skip
    assert run.results == {0: num_deaths, 1: num_deaths}
    formed = sorted(path.name for path in folder.iterdir() if path.read_text() == "3")
    assert formed == [f"attempt{attempt:02d}-rank{rank}" for attempt in range(num_deaths + 1) for rank in range(2)]


def test_the_ranks_form_their_group_again_after_a_restart_of_torchrun(tmp_path: Path) -> None:
    _restart(1, tmp_path)


def meet_and_die(rank: int, size: int, port: int, attempts: list[int], is_killed: bool) -> tuple[int, list[bytes]]:
    """One round at a store that keeps its keys; each agent has counted its own restarts."""
    address = Address(host="127.0.0.1", port=port, is_served_by_launcher=True, job="job", attempt=attempts[rank])
    time.sleep(0.3 * (rank == 0))  # the others knock first
    plane = connect(World(rank=rank, size=size), address, NO_DEADLINE)
    _form_group(plane)
    pids = plane.gather("pids", b"%d" % os.getpid(), NO_DEADLINE)
    assert pids[rank] == b"%d" % os.getpid()
    if is_killed:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            plane.barrier("never", NO_DEADLINE)
    else:
        plane.farewell(NO_DEADLINE)
    disconnect()
    return plane.attempt, pids


def test_hosts_that_come_and_go_meet_anew_at_a_store_that_keeps_its_keys() -> None:
    """torchrun counts no restart where a host has joined, and a host that has joined begins to count at 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen: list[bytes] = []
    for number, (attempts, is_killed) in enumerate((([0, 0], False), ([0, 0, 0], True), ([1, 0, 0], False))):
        size = len(attempts)
        run = spawn(meet_and_die, size, args=(size, store.port, attempts, is_killed), deadline="30s")
        assert run.exit_codes == {
            rank: -signal.SIGKILL if is_killed and rank == size - 1 else 0 for rank in range(size)
        }
        found = run.results
        assert {attempt for attempt, _ in found.values()} == {number}
        assert all(pids == found[0][1] for _, pids in found.values())
        assert not set(found[0][1]) & set(seen)
        seen += found[0][1]


@pytest.mark.soak
@pytest.mark.deadline(300)
def test_the_ranks_form_their_group_again_after_20_of_20_restarts(tmp_path: Path) -> None:
    _restart(20, tmp_path)


# -- a name server that does not answer: ranks of one host know each other by number -----------------------------------

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000


def train(rank: int, name: str, folder: str) -> tuple[str, bool]:
    """The weights, and whether the name server of the host was asked in the fit, as it is by who asks for a name."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(os.open(f"/run/netns/{name}", os.O_RDONLY), _CLONE_NEWNET) == 0
    assert libc.unshare(_CLONE_NEWNS) == 0
    settings = Path(folder) / f"resolv.conf.{rank}"
    settings.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", settings, "/etc/resolv.conf"], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        if rank == 0:
            server.bind(("127.0.0.1", 53))
        server.setblocking(False)
        jobs.fit("ResilientDDP", 2, folder, (model := jobs.Model()), max_steps=3)
        was_asked = rank == 0 and has_mail(server)
        if rank == 0:
            threading.Thread(target=ask, daemon=True).start()
            wait_until(lambda: has_mail(server), lambda: "the name server that counts is not the one that is asked", 20)
        return weights_digest(model), was_asked


def ask() -> None:
    """As torch does for each address to which it connects; it waits for seconds."""
    with contextlib.suppress(OSError):
        socket.getnameinfo(("::ffff:127.0.0.1", 80), 0)


def has_mail(server: socket.socket) -> bool:
    try:
        return bool(server.recv(512))
    except BlockingIOError:
        return False


def test_no_name_server_is_asked_for_a_numeric_address(tmp_path: Path) -> None:
    with several_hosts(1) as hosts:
        result = spawn(train, 2, args=(hosts.names[0], str(tmp_path)), deadline="90s").check()
    (first, was_asked), (second, _) = result.results[0], result.results[1]
    assert first == second
    assert not was_asked
    assert "hostname" not in "".join(result.logs.values()), "torch warns about names that it does not get"
