"""Rendezvous: how the ranks of one job find one store, with a deadline, and why a process is refused."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import json
import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_distplus import env
from lightning_distplus._compat import HashStore, PrefixStore, Store, TCPStore, clone_store, open_tcp_store
from lightning_distplus.control.plane import ControlPlane, Peer
from lightning_distplus.control.secret import Secret, SignedStore, escaped, leave_secret, secrets_here, words_of
from lightning_distplus.errors import PeerLost, PeerMissing, RendezvousError
from lightning_distplus.process import is_attended, launcher_has_ended, starter_has_ended
from lightning_distplus.world import LAUNCHER, World

__all__ = [
    "CONNECT_EVERY_S",
    "SILENCE_S",
    "Address",
    "Refusals",
    "Unheard",
    "await_port",
    "came_apart",
    "connect",
    "connect_over",
    "connected",
    "disconnect",
    "explain_silence",
    "has_own_store",
    "is_local",
    "join",
    "listen_on",
    "port_remedy",
]

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
    """Where the store is, and what keeps jobs and attempts apart."""

    host: str
    port: int
    is_served_by_launcher: bool = False
    """Whether torchrun's agent serves it already; otherwise rank 0 does."""
    job: str = ""
    attempt: int = 0
    """How often this rank was started before. torchrun's agents count each on its own: one that joins begins at 0."""
    round: str = ""
    """Tells this meeting from others at the same store; by default the attempt does."""

    @property
    def prefix(self) -> str:
        """The prefix of all keys of this meeting."""
        return f"distplus/{self.job}/{self.round or self.attempt}"


_ATTENDED = "attended"
_SHOWN = "distplus/secret"  # what rank 0 has signed with the secret
_SHOW_EVERY_S = 0.25


def connected() -> ControlPlane | None:
    """This process's control plane, where one is open."""
    return _plane


def has_own_store() -> bool:
    """Whether this process's control plane has a store of its own, and did not meet over that of a process group."""
    return _plane is not None and _met_over is None


def connect(world: World, address: Address, deadline: timedelta, folder: Path | None = None) -> ControlPlane:
    """Meets all ranks at the store; a second call returns the plane of the first.

    Who cannot reach the store says so in the ``folder`` of the run too, for those hosts that share it.

    Raises:
        PeerMissing: Some ranks never came; ``.ranks`` names them.
        PeerLost: The process that serves the store ended meanwhile.
        RendezvousError: The port is busy, another job answers there, or this rank is taken.
    """
    global _plane
    with _lock:
        if _plane is not None and _met_over is None and _plane.world == world:
            return _plane
        _forget()  # this rank may serve that store, at the same port
        end = time.monotonic() + deadline.total_seconds()
        unheard = Unheard(folder, f"{address.prefix} {address.host}:{address.port}", world.rank)
        try:
            store = _open_store(world, address, deadline, unheard)
        except RendezvousError as error:
            unheard.leave(str(error))
            raise
        makes_secret = world.rank == 0
        joined = _introduce(store, world, address, _left_until(end), unheard, makes_secret=makes_secret)
        _meet(joined, _left_until(end), unheard)
        _plane = joined.plane
        return _plane


def connect_over(world: World, store: Store, deadline: timedelta) -> ControlPlane:
    """Meets all ranks at a store that they have in common already; a second call with it returns the same plane.

    Rank 0 serves it, and its keys are ours alone below the prefix ``distplus``.

    Raises:
        PeerMissing: Some ranks never came; ``.ranks`` names them.
        RendezvousError: Another process has taken this rank.
    """
    global _plane, _met_over
    with _lock:
        if _plane is not None and _met_over is store:
            return _plane
        _forget()  # that of a process group that is gone, and its store with it
        end = time.monotonic() + deadline.total_seconds()
        own = clone_store(store)
        own.set_timeout(_CALL_TIMEOUT)
        unheard = Unheard(None, "", world.rank)
        secret, file = _secret_of_job(own, world, deadline, unheard, makes=world.rank == 0)
        joined = _Joined(own, world, secret, Address(host="", port=0), "distplus")
        joined.plane.secret_file = file
        _claim_rank(joined.plane)
        joined.plane.run_id = _agree_on_run_id(joined)
        _meet(joined, _left_until(end), unheard)
        _plane, _met_over = joined.plane, store
        return _plane


class _Joined:
    """A store that this process has joined, with the secret of the job."""

    def __init__(self, store: Store, world: World, secret: Secret, address: Address, prefix: str = "") -> None:
        self.store = SignedStore(store, secret)
        """Without the prefix of this job and attempt."""
        self.address = address
        self.plane = ControlPlane(
            PrefixStore(prefix or address.prefix, store),
            world,
            host_rank=None if address.is_served_by_launcher else 0,
            secret=secret.within(prefix or address.prefix),
        )


def _introduce(
    store: Store, world: World, address: Address, deadline: timedelta, unheard: Unheard, *, makes_secret: bool
) -> _Joined:
    try:
        end = time.monotonic() + deadline.total_seconds()
        secret, file = _secret_of_job(store, world, deadline, unheard, makes=makes_secret)
        if address.is_served_by_launcher and world.size > 1:
            address = replace(address, round=_enter_round(SignedStore(store, secret), world, _left_until(end)))
        joined = _Joined(store, world, secret, address)
        joined.plane.secret_file = None if address.is_served_by_launcher else file  # the next attempt needs it
        try:
            _agree_on_job(joined, serves_store=makes_secret and not address.is_served_by_launcher)
            _claim_rank(joined.plane, address.host)
        except RendezvousError as error:
            _refusals(joined).leave(str(error))
            raise
        joined.plane.run_id = _agree_on_run_id(joined)
        joined.plane.attempt = _agree_on_attempt(joined)
        return joined
    except dist.DistNetworkError as error:
        raise PeerLost(
            f"Rank {world.rank} on {world.host} lost the connection to the store at {address.host}:{address.port} "
            "while the ranks were meeting. The process that serves it is gone; look at the last lines of its log.",
            [LAUNCHER] if address.is_served_by_launcher else [0],
        ) from error


def _secret_of_job(
    store: Store, world: World, deadline: timedelta, unheard: Unheard, *, makes: bool
) -> tuple[Secret, Path | None]:
    """The secret that the launcher has given, or that rank 0 leaves to the ranks of its host; else none.

    Rank 0 signs a key with it. What it has signed shows the others which one it is, and that this is their job's store.

    Returns:
        The secret, and the file of one that was made here.

    Raises:
        PeerMissing: Rank 0 has not come.
        RendezvousError: This process does not know the secret.
    """
    given = Secret.from_environment()
    if world.size == 1:
        return Secret(), None
    is_left_in_file = world.num_nodes == 1 and not given.is_given
    shown = SignedStore(store, Secret())
    begin, says = time.monotonic(), False
    while True:
        known = secrets_here() if is_left_in_file else iter([given])
        sealed = shown.read_raw(_SHOWN)
        if (fitting := next((one for one in known if one.fits(_SHOWN, sealed)), None)) is not None:
            return fitting, None
        if makes:
            if not (is_left_in_file or given.is_given or env.DISTPLUS_RUN_ID.get()):  # else the launcher has said so
                log.warning(
                    "rank %d: DISTPLUS_SECRET is not set, and no secret reaches other hosts without it: what the ranks "
                    "tell each other is not authenticated",
                    world.rank,
                )
            secret, file = _leave_secret(world) if is_left_in_file else (given, None)
            SignedStore(store, secret).set(_SHOWN, b"")
            return secret, file
        elapsed_s = time.monotonic() - begin
        if told := unheard.look(elapsed_s):
            raise RendezvousError(came_apart(told))
        if sealed is not None and elapsed_s > SILENCE_S and not says:
            says = True
            log.warning("%s; waiting", _unknown_secret(world, is_left_in_file))
        if elapsed_s >= deadline.total_seconds():
            if sealed is None:
                raise _without_rank_0(world, deadline, "the job's")
            raise RendezvousError(_unknown_secret(world, is_left_in_file))
        time.sleep(CONNECT_EVERY_S)


def _leave_secret(world: World) -> tuple[Secret, Path]:
    try:
        return leave_secret()
    except OSError as error:
        raise RendezvousError(
            f"Rank 0 on {world.host} can leave the other ranks no secret: {error}. Give all ranks the same random text "
            "in DISTPLUS_SECRET (openssl rand -hex 32)."
        ) from error


def _unknown_secret(world: World, is_left_in_file: bool) -> str:
    of_whom = "rank 0 of this user on this host" if is_left_in_file else "this DISTPLUS_SECRET"
    return (
        f"Rank {world.rank} on {world.host}: what stands at the job's store is not signed by {of_whom}. It is of "
        "another job, or of a stranger, or the ranks have different secrets: give them all the same DISTPLUS_SECRET, "
        "and each job its own MASTER_PORT"
    )


def _left_until(end: float) -> timedelta:
    return timedelta(seconds=max(0.0, end - time.monotonic()))


def _refusals(joined: _Joined) -> Refusals:
    """Of this job and meeting only: what was refused for being of another job concerns nobody."""
    key = f"distplus/{joined.address.round or joined.address.attempt}/refused/{joined.address.job}"
    return Refusals(joined.store, key, serves_store=joined.plane.world.rank == 0)


def _meet(joined: _Joined, deadline: timedelta, unheard: Unheard) -> None:
    """The first rank whose deadline passes tells the others: all name the same ranks, also after rank 0 has ended."""
    plane, refusals = joined.plane, _refusals(joined)
    show_at_s = 0.0
    door = _Door(joined) if plane.world.rank == 0 and joined.address.is_served_by_launcher else None

    def has_come(rank: int) -> bool:
        return plane.read(f"hello/{rank}") is not None

    def end_with(text: str) -> RendezvousError:
        if any(has_come(rank) for rank in plane.world.ranks if rank != plane.world.rank):
            refusals.leave(text, is_certain=True)
        return RendezvousError(came_apart(text))

    def look(elapsed_s: float) -> None:
        nonlocal show_at_s
        if plane.world.rank == 0 and elapsed_s >= show_at_s:
            show_at_s = elapsed_s + _SHOW_EVERY_S
            joined.store.claim(_SHOWN, b"")  # a stranger may have written over it
        if door is not None:
            door.answer(elapsed_s, has_come)
        refusals.raise_if_any(elapsed_s)
        if starter_has_ended(joined.address.job):
            raise RendezvousError(_without_starter(plane.world))
        if plane.world.rank == 0 and (text := unheard.look(elapsed_s, has_come)):
            raise end_with(text)

    plane.listen()
    plane.on_wait = look
    try:
        if is_attended():
            plane.send(_ATTENDED, b"1")
        try:
            plane.barrier("rendezvous", deadline)
        except PeerMissing as error:
            if (text := unheard.last_word(has_come)) is None:
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
    with _lock:
        _forget()


def _forget() -> None:
    global _plane, _met_over
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
        store = join(
            world, host, address.port, await_port(world, host, address.port, deadline, unheard, job=address.job)
        )
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
    store = open_tcp_store(
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
    try:
        nobody = Unheard(None, "", world.rank)
        _introduce(store, world, address, timedelta(seconds=_SECOND_ANSWER_S), nobody, makes_secret=False)
    except PeerMissing:  # nobody has shown a secret
        return


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


def _agree_on_job(joined: _Joined, *, serves_store: bool) -> None:
    """Refuses a stray rank of another job or of another world size.

    Who serves the store says what is right; where a launcher serves it, the first rank to come.
    """
    world, address = joined.plane.world, joined.address
    mine = {"job": address.job, "world_size": world.size, "host": world.host, "pid": world.pid}
    key = f"distplus/{address.round or address.attempt}/job"
    if serves_store:  # a stray rank may have come before it
        joined.store.set(key, json.dumps(mine).encode())
    found = words_of(joined.store.claim(key, json.dumps(mine).encode()))
    for field in ("job", "world_size"):
        if found[field] != mine[field]:
            raise RendezvousError(
                f"Rank {world.rank} on {world.host} (pid {world.pid}) belongs to another job than the one "
                f"at {address.host}:{address.port}: {field} is {mine[field]!r} here and {found[field]!r} there (set by "
                f"host {found['host']}, pid {found['pid']}). Give each job its own MASTER_PORT and start all ranks "
                "with the same world size."
            )


def _agree_on_run_id(joined: _Joined) -> str:
    """The id that the launcher gave, else one that the first rank makes; a store that outlives an attempt keeps it."""
    mine = env.DISTPLUS_RUN_ID.get() or uuid.uuid4().hex[:8]
    return escaped(joined.store.claim("distplus/run-id", mine.encode()).decode())


def _agree_on_attempt(joined: _Joined) -> int:
    """The number of this attempt, alike on all ranks; where the store outlives attempts, above that of the last one."""
    mine = joined.address.attempt
    if joined.plane.host_rank is None and joined.plane.world.rank == 0:  # in its round nobody comes before it
        last = joined.store.read("distplus/attempt")
        mine = mine if last is None else max(mine, int(last) + 1)
        joined.store.set("distplus/attempt", b"%d" % mine)
    return int(joined.plane.claim("attempt", b"%d" % mine))


def _claim_rank(plane: ControlPlane, store_host: str = "") -> None:
    world = plane.world
    mine = Peer.of(world, store_host)
    found = Peer.from_json(plane.claim(f"hello/{world.rank}", mine.to_json().encode()))
    if found != mine:
        raise RendezvousError(
            f"Two processes call themselves rank {world.rank} of {world.size}: {found} and {mine}. Give each node its "
            f"own NODE_RANK (0..{world.num_nodes - 1}), or let torchrun or srun set the ranks."
        )


# -- rounds at a store that outlives the ranks -------------------------------------------------------------------------

# torchrun's agent keeps its store, with all keys, over restarts and changes of the hosts. Restart counts do not tell
# the rounds apart: each agent counts its own (pytorch/pytorch#135712). So rank 0 makes up a name for each round. A rank
# knocks with a word that it has just made up, and hears the name together with that word: only the rank 0 of now can
# have said it, and no key of an earlier round is read.
_KNOCK, _ANSWER = "distplus/knock", "distplus/answer"
_KNOCK_AGAIN_S = 1.0  # a stranger may have written over it
_ANSWER_EVERY_S = 0.01


def _enter_round(store: SignedStore, world: World, deadline: timedelta) -> str:
    """The name of the round: made up by rank 0, heard by the others.

    Raises:
        PeerMissing: Rank 0 has not come.
    """
    if world.rank == 0:
        return uuid.uuid4().hex[:12]
    begin = time.monotonic()
    knock_at, word = begin, b""
    while (now := time.monotonic()) - begin < deadline.total_seconds():
        if now >= knock_at:
            knock_at, word = now + _KNOCK_AGAIN_S, uuid.uuid4().hex.encode()
            store.set(f"{_KNOCK}/{world.rank}", word)
        heard, _, name = (store.read(f"{_ANSWER}/{world.rank}") or b"").partition(b" ")
        if heard == word:
            return name.decode()
        time.sleep(CONNECT_EVERY_S)
    raise _without_rank_0(world, deadline, "the launcher's")


def _without_rank_0(world: World, deadline: timedelta, whose: str) -> PeerMissing:
    return PeerMissing(
        f"Rank {world.rank} on {world.host} waited {deadline.total_seconds():g} s at {whose} store for rank 0, which "
        "has not come. Look at the last lines of its log.",
        [0],
    )


class _Door:
    """Rank 0's side: tells the name of the round to those who knock, until all have come in."""

    def __init__(self, joined: _Joined) -> None:
        self._store = joined.store
        self._name = joined.address.round.encode()
        self._heard = dict.fromkeys(joined.plane.world.ranks[1:], b"")
        self._look_at_s = 0.0

    def answer(self, elapsed_s: float, has_come: Callable[[int], bool]) -> None:
        """Called while rank 0 waits. A second process of a rank that has come in hears of the next round only."""
        if elapsed_s < self._look_at_s:
            return
        self._look_at_s = elapsed_s + _ANSWER_EVERY_S
        for rank, heard in list(self._heard.items()):
            word = self._store.read(f"{_KNOCK}/{rank}")
            if has_come(rank):
                del self._heard[rank]
            elif word is not None and word != heard:
                self._heard[rank] = word
                self._store.set(f"{_ANSWER}/{rank}", word + b" " + self._name)


# -- the port of the store ---------------------------------------------------------------------------------------------


CONNECT_EVERY_S = 0.05
_ANSWER_S = 3.0  # a store answers in milliseconds, also while a thousand ranks come at once
_ANSWERS_PER_S = 200  # all ranks come at once, and one thread answers them
_ANSWER_MARGIN_S = 0.5


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens on the interface of ``host``; on all where that leads other hosts nowhere.

    So it is where no interface of this host has that address, where its name is not known yet (in Kubernetes), and
    where it is a loopback address here (Debian gives a host 127.0.1.1 by its own name) and a name to the others.

    Raises:
        OSError: The port is taken, the name does not resolve, or this user may not listen there.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_own_name = ipaddress.ip_address(place[0]).is_loopback and host not in (place[0], "localhost")
        if not is_own_name:
            return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        is_early = isinstance(error, socket.gaierror) and env.KUBERNETES_SERVICE_HOST.get() is not None
        if error.errno != errno.EADDRNOTAVAIL and not is_early:
            raise
    # Behind a service address (Kubernetes) the main address is not an interface of rank 0's host.
    log.info("rank 0: %s is no interface of this host that others reach; listening on all of them", host)
    return socket.create_server(("", port), backlog=4096)


def port_remedy(error: OSError) -> str:
    """What to do where ``listen_on`` has failed."""
    if error.errno == errno.EADDRINUSE:
        return (
            "Another process holds the port (an earlier run that did not end?): end it, or set MASTER_PORT to a free "
            "one on every node."
        )
    return "Set MASTER_ADDR to the host of rank 0, by a name that resolves, and MASTER_PORT to a free port above 1023."


def await_port(
    world: World, host: str, port: int, deadline: timedelta, unheard: Unheard, *, job: str = ""
) -> timedelta:
    """Tries until somebody listens; torch's own client overruns its time-out by seconds.

    Where the job is known by the process that started this one, that has to be there.

    Returns:
        The time left of the deadline, at least a second.

    Raises:
        PeerMissing: Nobody listens there.
        RendezvousError: Something other than an absent rank 0 explains the silence, or who started this rank is gone.
    """
    begin = time.monotonic()
    end = begin + deadline.total_seconds()
    while True:
        if starter_has_ended(job):
            raise RendezvousError(_without_starter(world))
        try:
            left_s = end - time.monotonic()
            socket.create_connection((host, port), timeout=min(max(left_s, 0.05), 1.0)).close()
            return timedelta(seconds=max(1.0, end - time.monotonic()))
        except OSError as error:
            elapsed_s = time.monotonic() - begin
            if elapsed_s >= SILENCE_S and (reason := explain_silence(world, host, port, error)):
                raise RendezvousError(reason) from error
            if launcher_has_ended():
                raise RendezvousError(
                    f"Rank {world.rank} on {world.host}: 'distplus launch', which has started this rank and served the "
                    f"store at {host}:{port}, has ended. Start it again."
                ) from error
            if told := unheard.look(elapsed_s):
                raise RendezvousError(explain_silence(world, host, port, error) or came_apart(told)) from error
            if time.monotonic() >= end:
                raise PeerMissing(
                    f"Rank {world.rank} on {world.host} waited {deadline.total_seconds():g} s for rank 0 at "
                    f"{host}:{port}: {error}. Rank 0 did not start, or MASTER_ADDR / MASTER_PORT differ "
                    "between the ranks, or a firewall closes the port.",
                    [0],
                ) from error
            time.sleep(CONNECT_EVERY_S)


def _without_starter(world: World) -> str:
    return (
        f"Rank {world.rank} on {world.host} (pid {world.pid}): rank 0, which has started this process and was to serve "
        "the store, is gone. Its own last lines say why."
    )


def came_apart(text: str) -> str:
    """What this rank says where another one cannot come, and has said why beside the store."""
    return f"The ranks cannot meet, because one process cannot reach the store. {text}"


def join(world: World, host: str, port: int, deadline: timedelta) -> TCPStore:
    """Becomes a client of the store. On a thread, because torch's client waits for ever for a server that is silent.

    Raises:
        RendezvousError: What listens there is no store.
    """
    seconds = min(deadline.total_seconds(), _ANSWER_S + world.size / _ANSWERS_PER_S)
    found: queue.SimpleQueue[TCPStore | dist.DistError] = queue.SimpleQueue()

    def make() -> None:
        try:
            timeout = timedelta(seconds=seconds)
            found.put(open_tcp_store(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
        except dist.DistError as error:
            found.put(error)

    threading.Thread(target=make, name="distplus-join", daemon=True).start()
    try:
        store = found.get(timeout=seconds + _ANSWER_MARGIN_S)
    except queue.Empty:
        store = None
    if isinstance(store, TCPStore):
        return store
    raise RendezvousError(
        f"Rank {world.rank} on {world.host} reached {host}:{port}, but what listens there does not answer as "
        f"the store of a job within {seconds:g} s. Another service holds the port: end it, or set MASTER_PORT to a "
        "free one on every node."
    ) from store


# -- where the main address leads --------------------------------------------------------------------------------------


SILENCE_S = 3.0
"""How long an address may lead nowhere before that is an error; rank 0 itself may come much later than the others."""


def is_local(host: str) -> bool:
    """Whether an address is one of this host's; a name that does not resolve is not."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(place)
    except OSError:
        return False
    return True


def explain_silence(world: World, host: str, port: int, error: OSError) -> str | None:
    """Why nobody will answer at the main address, however long this rank waits; None where waiting may help.

    A refusal comes from a host that is up: rank 0 is only late, unless this is that host. In Kubernetes names and
    addresses appear when the pod of rank 0 does, so that nothing is certain there.

    ``error`` is how the last attempt to connect has ended, after ``SILENCE_S`` of attempts.
    """
    if world.num_nodes == 1 or env.KUBERNETES_SERVICE_HOST.get() is not None:
        return None
    here = f"Rank {world.rank} on {world.host} (node rank {world.node_rank})"
    if isinstance(error, socket.gaierror):
        return (
            f"{here} cannot resolve MASTER_ADDR={host}: {error.strerror}. Set it, on every node, to a name or an IP "
            f"address of node 0 that all nodes know; 'getent hosts {host}' shows what this one knows."
        )
    if isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
        return (
            f"{here} gets no answer from {host}:{port}, not even a refusal: a firewall drops what goes from "
            f"{world.host} to {host}:{port}, or that host is down, or MASTER_ADDR is wrong ({error}). Open TCP between "
            f"the nodes, or set MASTER_PORT to an open one; 'nc -vz {host} {port}' on {world.host} tries it."
        )
    if error.errno == errno.ECONNREFUSED and not _is_loopback(host) and is_local(host):
        return (
            f"{here} waits for rank 0 at MASTER_ADDR={host}:{port}, and that is this very host, on which rank 0 does "
            f"not run: NODE_RANK is {world.node_rank} here. Set NODE_RANK=0 on {world.host}, or MASTER_ADDR to the "
            "host whose NODE_RANK is 0, the same on every node."
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


# -- notes of processes that cannot reach the store, beside it ---------------------------------------------------------

# Who cannot reach the store cannot say so in it. Most clusters share the folder of the run between hosts, so that the
# reason is heard there. Where none is shared, the deadline of the rendezvous ends the wait and names the rank.


_EVERY_S = 0.25
_EVERY_S_OF_MANY = 1.0  # every rank but 0 asks the file system while rank 0 is late
_VERSION = 1


class Unheard:
    """The notes of one meeting, one file a rank.

    A note that was there before this rank began may be that of an earlier start: it counts at the deadline only. The
    rank that has left it takes it away when it starts again. Rank 0 looks for the notes of all others, and each of them
    for that of rank 0. A ``meeting`` is job, attempt and address, so that no other run's note is read.
    """

    def __init__(self, folder: Path | None, meeting: str, rank: int) -> None:
        self._folder = folder
        self._stem = f"unmet-{hashlib.sha256(meeting.encode()).hexdigest()[:12]}-rank"
        self._mine = f"{self._stem}{rank:05d}.json"
        self._awaited = f"{self._stem}*.json" if rank == 0 else f"{self._stem}00000.json"
        self._every_s = _EVERY_S if rank == 0 else _EVERY_S_OF_MANY
        self._look_at_s = 0.0
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / self._mine).unlink(missing_ok=True)
        self._old = {name for _, name in self._read(self._awaited).values()}

    def leave(self, text: str) -> None:
        """Leaves why this rank does not come; a folder that takes no file is no further trouble."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside = self._folder / f".{self._mine}"
            aside.write_text(json.dumps({"version": _VERSION, "text": text, "id": uuid.uuid4().hex}))
            aside.rename(self._folder / self._mine)
        except OSError as error:
            log.info("no note could be left in %s: %s", self._folder, error)

    def look(self, elapsed_s: float, has_come: Callable[[int], bool] = lambda rank: False) -> str | None:
        """Called while this rank waits: what a rank that has not come says since this one began."""
        if elapsed_s < self._look_at_s:
            return None
        self._look_at_s = elapsed_s + self._every_s
        return self._first(self._awaited, has_come, but_for=self._old)

    def last_word(self, has_come: Callable[[int], bool]) -> str | None:
        """Called at the deadline: what a rank that has not come has said at any time."""
        return self._first(f"{self._stem}*.json", has_come)

    def _first(self, pattern: str, has_come: Callable[[int], bool], *, but_for: Collection[str] = ()) -> str | None:
        notes = sorted(self._read(pattern).items())
        return next((text for rank, (text, name) in notes if name not in but_for and not has_come(rank)), None)

    def _read(self, pattern: str) -> dict[int, tuple[str, str]]:
        """Text and name of each note, by rank; what cannot be read is no note."""
        found: dict[int, tuple[str, str]] = {}
        for path in [] if self._folder is None else sorted(self._folder.glob(pattern)):
            try:
                note = words_of(path.read_text())
                if note["version"] == _VERSION:
                    found[int(path.stem.removeprefix(self._stem))] = str(note["text"]), str(note["id"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.debug("%s is no note: %s", path, error)
        return found


# -- notes of processes that are refused, in the store -----------------------------------------------------------------


_LOOK_EVERY_S = 0.25
# Whoever still waits for others this long after a refusal has met the reason. One that disturbs nobody is not seen: a
# job whose ranks have all come does not look.
_GRACE_S = 1.5
_READING_S = 4 * _LOOK_EVERY_S


class Refusals:
    """The note of the first process that was refused; who may serve the store leaves after those who read in it."""

    def __init__(self, store: SignedStore, key: str, *, serves_store: bool) -> None:
        self._store = store
        self._key = key
        self._serves_store = serves_store
        self._grace_s = _GRACE_S + (_READING_S if serves_store else 0.0)
        self._look_at_s = 0.0
        self._seen_at_s: float | None = None
        self._note: dict[str, Any] = {}

    def leave(self, text: str, *, is_certain: bool = False) -> None:
        """Leaves a note; the first one stays. Who serves the store stays too, until those who wait have read it.

        Where it ``is_certain``, those who wait need not see first whether the ranks come all the same.
        """
        self._store.claim(self._key, json.dumps({"text": text, "is_certain": is_certain}).encode())
        if self._serves_store:
            time.sleep(_READING_S if is_certain else self._grace_s)

    def raise_if_any(self, elapsed_s: float) -> None:
        """Called while this rank waits: raises the text of the note, once it has been there for a while.

        Raises:
            RendezvousError: With the text.
        """
        if elapsed_s < self._look_at_s:
            return
        self._look_at_s = elapsed_s + _LOOK_EVERY_S
        if self._seen_at_s is None:
            note = self._store.read(self._key)
            if note is None:
                return
            self._note = words_of(note)
            self._seen_at_s = elapsed_s
        if self._note["is_certain"] or elapsed_s - self._seen_at_s >= self._grace_s:
            raise RendezvousError(f"The ranks cannot meet, because one process was refused. {self._note['text']}")
