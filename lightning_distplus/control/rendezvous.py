"""How the ranks of one job find one store: one port, a deadline of its own, and the names of those who never came."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_distplus import env
from lightning_distplus._compat import HashStore, PrefixStore, Store, TCPStore
from lightning_distplus.control.joining import CONNECT_EVERY_S, await_port, came_apart, join, listen_on, port_remedy
from lightning_distplus.control.peers import Peer
from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.control.post import Post
from lightning_distplus.control.reach import SILENCE_S, is_local
from lightning_distplus.control.refusals import Refusals
from lightning_distplus.control.unheard import Unheard
from lightning_distplus.errors import PeerLost, PeerMissing, RendezvousError
from lightning_distplus.process import is_attended
from lightning_distplus.world import LAUNCHER, World

__all__ = ["Address", "connect", "connect_over", "connected", "disconnect", "has_own_store"]

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_SECOND_ANSWER_S = 1.5  # for rank 0, which knows already that the port is taken
# Bounds calls that never wait in a healthy job (get of a key that is there, clone); our waits bring their own deadline.
_CALL_TIMEOUT = timedelta(seconds=60)

_lock = threading.Lock()
_plane: ControlPlane | None = None
_met_over: Store | None = None  # the store that was given to connect_over


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the store is, and what keeps jobs and attempts apart.

    torchrun's own store keeps its keys over restarts, so that keys without the attempt would be heard by the next one.
    """

    host: str
    port: int
    is_served_by_launcher: bool = False
    """Whether torchrun's agent serves it already; otherwise rank 0 does."""
    job: str = ""
    attempt: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of all keys of this attempt."""
        return f"distplus/{self.job}/{self.attempt}"


_ATTENDED = "attended"


def connected() -> ControlPlane | None:
    """This process's control plane, where one is open."""
    return _plane


def has_own_store() -> bool:
    """Whether this process's control plane has a store of its own, and did not meet over that of a process group."""
    return _plane is not None and _met_over is None


def connect(world: World, address: Address, deadline: timedelta, folder: Path | None = None) -> ControlPlane:
    """Meets all ranks at the store; a second call returns the plane of the first.

    Args:
        world: This process.
        address: Where the store is.
        deadline: How long to wait for the last rank.
        folder: Where the run writes. Who cannot reach the store says so there too, for those hosts that share it.

    Raises:
        PeerMissing: Some ranks never came; ``.ranks`` names them.
        PeerLost: The process that serves the store ended meanwhile.
        RendezvousError: The port is busy, another job answers there, or this rank is taken.
    """
    global _plane, _met_over
    with _lock:
        if _plane is not None and _met_over is None and _plane.world == world:
            return _plane
        if _plane is not None:
            _plane.stop_listening()
            _plane = _met_over = None  # this rank may serve that store, at the same port
        end = time.monotonic() + deadline.total_seconds()
        post = Post(address.host, address.port, address.prefix, world.rank) if world.num_nodes > 1 else None
        meeting = f"{address.prefix} {address.host}:{address.port}"
        with contextlib.closing(Unheard(folder, meeting, world.rank, post)) as unheard:
            try:
                store = _open_store(world, address, deadline, unheard)
            except RendezvousError as error:
                unheard.leave(str(error), knows_address=not isinstance(error.__cause__, socket.gaierror))
                raise
            plane = _introduce(store, world, address)
            left = timedelta(seconds=max(0.0, end - time.monotonic()))
            _meet(plane, left, _refusals(store, world, address), unheard)
        _plane, _met_over = plane, None
        return plane


def connect_over(world: World, store: Store, deadline: timedelta) -> ControlPlane:
    """Meets all ranks at a store that they have in common already; a second call with it returns the same plane.

    Args:
        world: This process.
        store: Rank 0 serves it; its keys are ours alone below the prefix ``distplus``.
        deadline: How long to wait for the last rank.

    Raises:
        PeerMissing: Some ranks never came; ``.ranks`` names them.
        RendezvousError: Another process has taken this rank.
    """
    global _plane, _met_over
    with _lock:
        if _plane is not None and _met_over is store:
            return _plane
        if _plane is not None:  # of a process group that is gone, and its store with it
            _plane.stop_listening()
        prefixed = PrefixStore("distplus", store.clone())
        prefixed.set_timeout(_CALL_TIMEOUT)
        _claim_rank(prefixed, world)
        plane = ControlPlane(prefixed, world)
        plane.run_id = _agree_on_run_id(store)
        _meet(plane, deadline)
        _plane, _met_over = plane, store
        return plane


def _introduce(store: Store, world: World, address: Address) -> ControlPlane:
    prefixed = PrefixStore(address.prefix, store)
    try:
        try:
            _agree_on_job(store, world, address)
            _claim_rank(prefixed, world, address.host)
        except RendezvousError as error:
            _refusals(store, world, address).leave(str(error))
            raise
        plane = ControlPlane(prefixed, world, host_rank=None if address.is_served_by_launcher else 0)
        plane.run_id = _agree_on_run_id(store)
        return plane
    except dist.DistNetworkError as error:
        raise PeerLost(
            f"Rank {world.rank} on {world.host} lost the connection to the store at {address.host}:{address.port} "
            "while the ranks were meeting. The process that serves it is gone; look at the last lines of its log.",
            [LAUNCHER] if address.is_served_by_launcher else [0],
        ) from error


def _refusals(store: Store, world: World, address: Address) -> Refusals:
    """Of this job and attempt only: what was refused for being of another job concerns nobody."""
    return Refusals(store, f"distplus/{address.attempt}/refused/{address.job}", serves_store=world.rank == 0)


def _meet(
    plane: ControlPlane, deadline: timedelta, refusals: Refusals | None = None, unheard: Unheard | None = None
) -> None:
    """The first rank whose deadline passes tells the others: all name the same ranks, also after rank 0 has ended."""

    def has_come(rank: int) -> bool:
        return plane.read(f"hello/{rank}") is not None

    def end_with(text: str) -> RendezvousError:
        if refusals is not None and any(has_come(rank) for rank in plane.world.ranks if rank != plane.world.rank):
            refusals.leave(text, is_certain=True)
        return RendezvousError(came_apart(text))

    def look(elapsed_s: float) -> None:
        if refusals is not None:
            refusals.raise_if_any(elapsed_s)
        if unheard is not None and plane.world.rank == 0 and (text := unheard.look(elapsed_s, has_come)):
            raise end_with(text)

    plane.listen()
    plane.on_wait = look
    try:
        if is_attended():
            plane.append(_ATTENDED, b"1")
        try:
            plane.barrier("rendezvous", deadline)
        except PeerMissing as error:
            text = None if unheard is None else unheard.last_word(has_come)
            if text is None:
                raise
            raise end_with(text) from error
        plane.is_attended = plane.read(_ATTENDED) is not None
    except RendezvousError:  # each rank reads it itself
        plane.stop_listening()
        raise
    except BaseException as error:
        plane.report_failure(error)
        plane.stop_listening()
        raise
    finally:
        plane.on_wait = None


def disconnect() -> None:
    """Leaves this process's control plane; the next ``connect`` makes a new one."""
    global _plane, _met_over
    with _lock:
        if _plane is not None:
            _plane.stop_listening()
        _plane = _met_over = None


def _open_store(world: World, address: Address, deadline: timedelta, unheard: Unheard) -> Store:
    if world.size == 1:
        return HashStore()
    if world.rank == 0 and not address.is_served_by_launcher:
        store = _serve(world, address)
    else:
        host = _LOOPBACK if world.num_nodes == 1 and not address.is_served_by_launcher else address.host
        store = join(world, host, address.port, await_port(world, host, address.port, deadline, unheard))
    store.set_timeout(_CALL_TIMEOUT)
    return store


def _serve(world: World, address: Address) -> TCPStore:
    """Serves the store on one address only: loopback on one host, else the interface of the main address."""
    host = _LOOPBACK if world.num_nodes == 1 else address.host
    try:
        listener = listen_on(host, address.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _refuse_second_rank_0(host, world, address)
        raise RendezvousError(
            f"Rank 0 on {world.host} cannot listen on {host}:{address.port}: {error.strerror}. {port_remedy(error)}"
        ) from error
    is_elsewhere = host != _LOOPBACK and not is_local(host)
    store = TCPStore(
        _LOOPBACK if is_elsewhere else host,
        address.port,
        is_master=True,
        wait_for_workers=False,
        timeout=_CALL_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    if is_elsewhere:
        _refuse_another_host(store, world, address)
    return store


def _refuse_second_rank_0(host: str, world: World, address: Address) -> None:
    """Where another rank 0 serves this job's store already, both are named, there too."""
    try:
        store = join(world, host, address.port, timedelta(seconds=_SECOND_ANSWER_S))
    except RendezvousError:
        return  # it is no store: the port is merely taken
    _refuse_if_another_is_rank_0(store, world, address)


def _refuse_if_another_is_rank_0(store: Store, world: World, address: Address) -> None:
    """Introduces this process where another rank 0 has done so, or is just about to: that refuses it, for both."""
    end = time.monotonic() + _SECOND_ANSWER_S
    while not PrefixStore(address.prefix, store).check(["hello/0"]):
        if time.monotonic() >= end:
            return
        time.sleep(CONNECT_EVERY_S)
    _introduce(store, world, address)


def _refuse_another_host(mine: TCPStore, world: World, address: Address) -> None:
    """Rank 0 serves on a host that the main address does not name: fine behind a service, else a mistake.

    Raises:
        RendezvousError: Another rank 0 answers at the main address, or nobody does.
    """
    mine.set("distplus/server", f"{world.host} {world.pid}")
    seen: OSError | str = ""
    end = time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        try:
            socket.create_connection((address.host, address.port), timeout=1.0).close()
        except OSError as error:
            seen = error
            time.sleep(CONNECT_EVERY_S)
            continue
        there = join(world, address.host, address.port, _CALL_TIMEOUT)
        if not there.check(["distplus/server"]) or bytes(there.get("distplus/server")) != mine.get("distplus/server"):
            _refuse_if_another_is_rank_0(there, world, address)
            seen = "another store answers there"
            break
        return
    if env.KUBERNETES_SERVICE_HOST.get() is None:
        raise RendezvousError(
            f"Rank 0 runs on {world.host}, and MASTER_ADDR={address.host}:{address.port} leads to another host, not "
            f"here ({seen}). Set NODE_RANK=0 on {address.host}, or MASTER_ADDR to {world.host}, the same on every node."
        )
    log.warning("rank 0: %s does not lead to this pod (%s); waiting for the others", address.host, seen)


def _agree_on_job(store: Store, world: World, address: Address) -> None:
    """Refuses a stray rank of another job or of another world size; the first rank to come says what is right."""
    mine = {"job": address.job, "world_size": world.size, "host": world.host, "pid": world.pid}
    found = _claim(store, f"distplus/{address.attempt}/job", mine)
    for field in ("job", "world_size"):
        if found[field] != mine[field]:
            raise RendezvousError(
                f"Rank {world.rank} on {world.host} (pid {world.pid}) belongs to another job than the one "
                f"at {address.host}:{address.port}: {field} is {mine[field]!r} here and {found[field]!r} there (set by "
                f"host {found['host']}, pid {found['pid']}). Give each job its own MASTER_PORT and start all ranks "
                "with the same world size."
            )


def _agree_on_run_id(store: Store) -> str:
    """The id that the launcher gave, else one that the first rank makes; a store that outlives an attempt keeps it."""
    mine = env.DISTPLUS_RUN_ID.get() or uuid.uuid4().hex[:8]
    return bytes(store.compare_set("distplus/run-id", "", mine)).decode()


def _claim_rank(store: Store, world: World, store_host: str = "") -> None:
    mine = Peer.of(world, store_host)
    found = Peer.from_json(store.compare_set(f"hello/{world.rank}", "", mine.to_json()))
    if found != mine:
        raise RendezvousError(
            f"Two processes call themselves rank {world.rank} of {world.size}: {found} and {mine}. Give each node its "
            f"own NODE_RANK (0..{world.num_nodes - 1}), or let torchrun or srun set the ranks."
        )


def _claim(store: Store, key: str, value: dict[str, Any]) -> dict[str, Any]:
    """Sets a key where nobody has set it, and returns what is there now."""
    return dict(json.loads(store.compare_set(key, "", json.dumps(value))))
