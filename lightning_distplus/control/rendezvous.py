"""Rendezvous: how the ranks of one job find one store, with a deadline, and why a process is refused.

Rank 0 serves the store, or finds that of torchrun's agent, and leaves its card there, signed with the secret of the
job: which job and attempt this is, and the name of this meeting. The others compare the card with what they know
themselves. Then each takes its rank, and all meet at a barrier. Rank 0 alone looks for what keeps others away, and
tells it as the first error of the job.
"""

from __future__ import annotations

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_distplus import env
from lightning_distplus._compat import HashStore, PrefixStore, Store, TCPStore, clone_store, open_tcp_store
from lightning_distplus.control.plane import ControlPlane, Peer
from lightning_distplus.control.secret import Secret, SignedStore, escaped, leave_secret, secrets_here, words_of
from lightning_distplus.errors import PeerLost, PeerMissing, RendezvousError
from lightning_distplus.process import age_of_process, is_attended, launcher_has_ended, starter_has_ended
from lightning_distplus.world import LAUNCHER, World

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_SECOND_ANSWER_S = 1.5  # for a second rank 0, which knows already that another process serves
# Bounds calls that never wait in a healthy job (get of a key that is there, clone); our waits bring their own deadline.
_CALL_TIMEOUT = timedelta(seconds=60)
_CONNECT_EVERY_S = 0.05
_ANSWER_S = 3.0  # a store answers in milliseconds, also while a thousand ranks come at once
_ANSWERS_PER_S = 200  # all ranks come at once, and one thread answers them
_ANSWER_MARGIN_S = 0.5
_SILENCE_S = 3.0  # so long may an address lead nowhere; rank 0 itself may come much later than the others
_LOOK_EVERY_S = 0.25
# Whoever still waits for others this long after a refusal has met the reason. One that disturbs nobody is not seen: a
# job whose ranks have all come does not look.
_GRACE_S = 1.5

_CARD = "distplus/card"
_REFUSED, _ATTENDED = "refused", "attended"

_lock = threading.Lock()
_plane: ControlPlane | None = None
_met_over: Store | None = None  # the store that was given to connect_over
_tried_at: float | None = None  # when this process has last tried to meet the others


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the store is, and what keeps jobs and attempts apart."""

    host: str
    port: int
    is_served_by_launcher: bool = False
    """Whether torchrun's agent serves it already; otherwise rank 0 does."""
    job: str = ""
    attempt: int = 0
    """How often this rank was started before."""
    is_counted_apart: bool = False
    """Whether attempts may differ between the ranks: each of torchrun's agents counts its own, and one that joins
    begins at 0."""


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
    global _plane, _tried_at
    with _lock:
        if _plane is not None and _met_over is None and _plane.world == world:
            return _plane
        _forget()  # this rank may serve that store, at the same port
        meeting = _Meeting(world, address, deadline, folder)
        try:
            _plane = meeting.meet(meeting.open_store())
        finally:
            _tried_at = time.time()
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
        _plane = _Meeting(world, Address(host="", port=0), deadline).meet(clone_store(store))
        _met_over = store
        return _plane


def disconnect() -> None:
    """Leaves this process's control plane; the next ``connect`` makes a new one."""
    with _lock:
        _forget()


def _forget() -> None:
    global _plane, _met_over
    if _plane is not None:
        _plane.stop_listening()
    _plane = _met_over = None


# -- one meeting -------------------------------------------------------------------------------------------------------

# torchrun's agent keeps its store, with all keys, over restarts and changes of the hosts. Restart counts do not tell
# the meetings apart: each agent counts its own (pytorch/pytorch#135712). So a rank knocks there with a word that it has
# just made up, and hears the card together with that word: only the rank 0 of now can have said it, and no key of an
# earlier meeting is read.
_KNOCK, _ANSWER = "distplus/knock", "distplus/answer"
_KNOCK_AGAIN_S = 1.0  # a stranger may have written over it
_ANSWER_EVERY_S = 0.01


class _Meeting:
    """One process on its way to the others, within one deadline."""

    def __init__(self, world: World, address: Address, deadline: timedelta, folder: Path | None = None) -> None:
        self._world = world
        self._address = address
        self._deadline = deadline
        self._begun_at = time.monotonic()
        name = f"{address.job}/{address.attempt} {address.host}:{address.port}"
        # The others may have begun a moment earlier, but not before this process was started.
        self._notes = Notes(folder, name, world.rank, before=_tried_at or time.time() - age_of_process())
        self._is_alone = world.num_nodes == 1 and not address.is_served_by_launcher
        self._host = _LOOPBACK if self._is_alone else address.host
        self._here = f"Rank {world.rank} on {world.host}"
        self._heard = dict.fromkeys(world.ranks[1:], b"")  # by rank 0: the word of each that has knocked
        self._look_at_s = self._answer_at_s = 0.0
        self._refused_at_s: float | None = None

    def open_store(self) -> Store:
        """The store of the job: served here, or reached.

        Raises:
            PeerMissing, RendezvousError: Nobody answers there, or why this process cannot serve it.
        """
        try:
            if self._world.size == 1:
                return HashStore()
            if self._world.rank == 0 and not self._address.is_served_by_launcher:
                return self._serve()
            self._await_port()
            return self._join(max(self._left(), timedelta(seconds=1)))
        except RendezvousError as error:
            self._notes.leave(str(error))
            raise

    def meet(self, store: Store) -> ControlPlane:
        """Takes this rank in the job, and waits for all others."""
        store.set_timeout(_CALL_TIMEOUT)
        try:
            plane = self._introduce(store, leads=self._world.rank == 0)
        except dist.DistNetworkError as error:
            raise PeerLost(
                f"{self._here} lost the connection to the store at {self._address.host}:{self._address.port} while the "
                "ranks were meeting. The process that serves it is gone; look at the last lines of its log.",
                [LAUNCHER] if self._address.is_served_by_launcher else [0],
            ) from error
        self._await_all(plane)
        return plane

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_at

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.0, self._deadline.total_seconds() - self._elapsed_s()))

    # -- the card of rank 0 --------------------------------------------------------------------------------------------

    def _introduce(self, store: Store, *, leads: bool) -> ControlPlane:
        secret, file = self._choose_secret(store) if leads else (self._recognise_secret(store), None)
        signed = SignedStore(store, secret)
        card = self._make_card(signed) if leads else self._read_card(signed)
        prefix = f"distplus/{self._address.job}/{card['meeting']}"
        is_agents = self._address.is_served_by_launcher
        plane = ControlPlane(
            PrefixStore(prefix, store), self._world, host_rank=None if is_agents else 0, secret=secret.within(prefix)
        )
        try:
            self._require_same_job(card)
            self._claim_rank(plane)
        except RendezvousError as error:
            plane.claim(_REFUSED, str(error).encode())
            raise
        plane.run_id, plane.attempt = card["run_id"], card["attempt"]
        plane.secret_file = None if is_agents else file  # the next attempt needs it
        self._signed, self._card = signed, json.dumps(card).encode()
        if leads:  # now that nobody else can call itself rank 0
            signed.set(_CARD, self._card)
        return plane

    def _make_card(self, signed: SignedStore) -> dict[str, Any]:
        """Rank 0 says what is right. A store that outlives attempts keeps the run's name, and counts them for all."""
        world, attempt = self._world, self._address.attempt
        if self._address.is_served_by_launcher:
            last = signed.read("distplus/attempt")
            attempt = attempt if last is None else max(attempt, int(last) + 1)
            signed.set("distplus/attempt", b"%d" % attempt)
        run_id = signed.claim("distplus/run-id", (env.DISTPLUS_RUN_ID.get() or uuid.uuid4().hex[:8]).encode())
        return {
            "job": self._address.job,
            "world_size": world.size,
            "attempt": attempt,
            "run_id": escaped(run_id.decode()),
            "meeting": uuid.uuid4().hex[:12] if self._address.is_served_by_launcher else str(attempt),
            "host": world.host,
            "pid": world.pid,
        }

    def _read_card(self, signed: SignedStore) -> dict[str, Any]:
        """That of the rank 0 of now: a store that outlives attempts may hold an older one."""
        rank, knock_at, word = self._world.rank, 0.0, b""
        while self._left():
            if not self._address.is_served_by_launcher:
                if (card := signed.read(_CARD)) is not None:
                    return dict(words_of(card))
            else:
                if time.monotonic() >= knock_at:
                    knock_at, word = time.monotonic() + _KNOCK_AGAIN_S, uuid.uuid4().hex.encode()
                    signed.set(f"{_KNOCK}/{rank}", word)
                heard, _, card = (signed.read(f"{_ANSWER}/{rank}") or b"").partition(b" ")
                if heard == word:
                    return dict(words_of(card))
            time.sleep(_CONNECT_EVERY_S)
        raise self._without_rank_0()

    def _without_rank_0(self) -> PeerMissing:
        return PeerMissing(
            f"{self._here} waited {self._deadline.total_seconds():g} s at the job's store for rank 0, which has not "
            "come. Look at the last lines of its log.",
            [0],
        )

    def _require_same_job(self, card: dict[str, Any]) -> None:
        world, address = self._world, self._address
        mine = {"job": address.job, "world_size": world.size, "attempt": address.attempt}
        if address.is_served_by_launcher or address.is_counted_apart:
            del mine["attempt"]
        for field, value in mine.items():
            if card[field] != value:
                raise RendezvousError(
                    f"{self._here} (pid {world.pid}) belongs to another job than the one at "
                    f"{address.host}:{address.port}: {field} is {value!r} here and {card[field]!r} there (set by host "
                    f"{card['host']}, pid {card['pid']}). Give each job its own MASTER_PORT and start all ranks with "
                    "the same world size."
                )

    def _claim_rank(self, plane: ControlPlane) -> None:
        world = self._world
        mine = Peer.of(world, self._address.host)
        found = Peer.from_json(plane.claim(f"hello/{world.rank}", mine.to_json().encode()))
        if found != mine:
            raise RendezvousError(
                f"Two processes call themselves rank {world.rank} of {world.size}: {found} and {mine}. Give each node "
                f"its own NODE_RANK (0..{world.num_nodes - 1}), or let torchrun or srun set the ranks."
            )

    # -- the secret of the job: that of the launcher, or one that rank 0 leaves to the ranks of its host ---------------

    def _choose_secret(self, store: Store) -> tuple[Secret, Path | None]:
        """Rank 0's: that of an earlier attempt at this store, else the given one, else a new one and its file."""
        if self._world.size == 1:
            return Secret(), None
        if (known := self._fitting(store)[0]) is not None:
            return known, None
        if not self._finds_secrets():
            given = Secret.from_environment()
            if not (given.is_given or env.DISTPLUS_RUN_ID.get()):  # else the launcher has said so
                log.warning(
                    "rank %d: DISTPLUS_SECRET is not set, and no secret reaches other hosts without it: what the ranks "
                    "tell each other is not authenticated",
                    self._world.rank,
                )
            return given, None
        try:
            return leave_secret()
        except OSError as error:
            raise RendezvousError(
                f"{self._here} can leave the other ranks no secret: {error}. Give all ranks the same random text in "
                "DISTPLUS_SECRET (openssl rand -hex 32)."
            ) from error

    def _recognise_secret(self, store: Store) -> Secret:
        """The secret with which rank 0 has signed its card: so this is the store of the job."""
        says = False
        while True:
            secret, is_signed = self._fitting(store)
            if secret is not None:
                return secret
            if told := self._notes.look(self._elapsed_s()):
                raise RendezvousError(_came_apart(told))
            if is_signed and not says and self._elapsed_s() > _SILENCE_S:
                says = True
                log.warning("%s; waiting", self._unknown_secret())
            if not self._left():
                raise RendezvousError(self._unknown_secret()) if is_signed else self._without_rank_0()
            time.sleep(_CONNECT_EVERY_S)

    def _finds_secrets(self) -> bool:
        return self._world.num_nodes == 1 and not Secret.from_environment().is_given

    def _fitting(self, store: Store) -> tuple[Secret | None, bool]:
        """The secret that this process knows and that has signed the card, and whether anything stands there."""
        known = secrets_here() if self._finds_secrets() else iter([Secret.from_environment()])
        sealed = SignedStore(store, Secret()).read_raw(_CARD)
        return next((one for one in known if one.fits(_CARD, sealed)), None), sealed is not None

    def _unknown_secret(self) -> str:
        of_whom = "rank 0 of this user on this host" if self._finds_secrets() else "this DISTPLUS_SECRET"
        return (
            f"{self._here}: what stands at the job's store is not signed by {of_whom}. It is of another job, or of a "
            "stranger, or the ranks have different secrets: give them all the same DISTPLUS_SECRET, and each job its "
            "own MASTER_PORT"
        )

    # -- waiting for all -----------------------------------------------------------------------------------------------

    def _await_all(self, plane: ControlPlane) -> None:
        """The first rank that fails tells the others: all say the same, also after rank 0 has ended."""
        self._plane = plane
        plane.listen()
        plane.watcher = self
        try:
            if is_attended():
                plane.send(_ATTENDED, b"1")
            try:
                plane.barrier("rendezvous", self._left())
            except PeerMissing as error:
                if (text := self._notes.last_word(self._has_come)) is None:
                    raise
                raise RendezvousError(_came_apart(text)) from error
            plane.is_attended = plane.read(_ATTENDED) is not None
        except BaseException as error:
            with suppress(RuntimeError):  # the store is gone
                plane.report_failure(error, to=filter(self._has_come, self._world.ranks))
            plane.stop_listening()
            raise
        finally:
            plane.watcher = None

    def _has_come(self, rank: int) -> bool:
        return self._plane.read(f"hello/{rank}") is not None

    def while_waiting(self, elapsed_s: float) -> None:
        """What has to be done, and what ends the wait for all; mostly rank 0 looks."""
        if self._world.rank == 0 and self._address.is_served_by_launcher and elapsed_s >= self._answer_at_s:
            self._answer_at_s = elapsed_s + _ANSWER_EVERY_S
            self._answer()
        if elapsed_s < self._look_at_s:
            return
        self._look_at_s = elapsed_s + _LOOK_EVERY_S
        if starter_has_ended(self._address.job):
            raise RendezvousError(self._without_starter())
        if self._world.rank == 0:
            self._signed.claim(_CARD, self._card)  # a stranger may have written over it
            if (told := self._notes.look(self._elapsed_s(), self._has_come)) is not None:
                raise RendezvousError(_came_apart(told))
            if (refused := self._plane.read(_REFUSED)) is not None:
                self._refused_at_s = elapsed_s if self._refused_at_s is None else self._refused_at_s
                if elapsed_s - self._refused_at_s >= _GRACE_S:
                    text = escaped(refused.decode(errors="replace"))
                    raise RendezvousError(f"The ranks cannot meet, because one process was refused. {text}")

    def _answer(self) -> None:
        """Tells the card to those that knock. A second process of a rank that has come hears of the next meeting."""
        for rank, heard in list(self._heard.items()):
            word = self._signed.read(f"{_KNOCK}/{rank}")
            if self._has_come(rank):
                del self._heard[rank]
            elif word is not None and word != heard:
                self._heard[rank] = word
                self._signed.set(f"{_ANSWER}/{rank}", word + b" " + self._card)

    # -- rank 0 serves -------------------------------------------------------------------------------------------------

    def _serve(self) -> TCPStore:
        """Serves the store on one address only: loopback on one host, else the interface of the main address."""
        host, port = self._host, self._address.port
        try:
            listener = listen_on(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self._refuse_second_rank_0()
            remedy = (
                "Another process holds the port (an earlier run that did not end?): end it, or set MASTER_PORT to a "
                "free one on every node."
                if error.errno == errno.EADDRINUSE
                else "Set MASTER_ADDR to the host of rank 0, by a name that resolves, and MASTER_PORT to a free port "
                "above 1023."
            )
            raise RendezvousError(f"{self._here} cannot listen on {host}:{port}: {error.strerror}. {remedy}") from error
        is_elsewhere = host != _LOOPBACK and not is_local(host)
        store = open_tcp_store(
            _LOOPBACK if is_elsewhere else host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_CALL_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        if is_elsewhere:
            self._refuse_another_host(store)
        return store

    def _refuse_second_rank_0(self) -> None:
        """Introduces this process where another rank 0 serves, or is just about to: that refuses it, for both."""
        try:
            there = self._join(timedelta(seconds=_SECOND_ANSWER_S))
        except RendezvousError:
            return  # it is no store: the port is merely taken
        with suppress(PeerMissing):  # nobody has left a card
            _Meeting(self._world, self._address, timedelta(seconds=_SECOND_ANSWER_S))._introduce(there, leads=False)

    def _refuse_another_host(self, mine: TCPStore) -> None:
        """Rank 0 serves on a host that the main address does not name: fine behind a service, else a mistake."""
        world, host, port = self._world, self._address.host, self._address.port
        mine.set("distplus/server", f"{world.host} {world.pid}")
        seen: OSError | str = ""
        end = time.monotonic() + _SILENCE_S
        while time.monotonic() < end:
            try:
                socket.create_connection((host, port), timeout=1.0).close()
            except OSError as error:
                seen = error
                time.sleep(_CONNECT_EVERY_S)
                continue
            there = self._join(_CALL_TIMEOUT)
            if there.check(["distplus/server"]) and bytes(there.get("distplus/server")) == mine.get("distplus/server"):
                return
            self._refuse_second_rank_0()
            seen = "another store answers there"
            break
        if env.KUBERNETES_SERVICE_HOST.get() is None:
            raise RendezvousError(
                f"Rank 0 runs on {world.host}, and MASTER_ADDR={host}:{port} leads to another host, not here ({seen}). "
                f"Set NODE_RANK=0 on {host}, or MASTER_ADDR to {world.host}, the same on every node."
            )
        log.warning("rank 0: %s does not lead to this pod (%s); waiting for the others", host, seen)

    # -- the others come -----------------------------------------------------------------------------------------------

    def _await_port(self) -> None:
        """Tries until somebody listens; torch's own client overruns its time-out by seconds."""
        host, port = self._host, self._address.port
        while True:
            if starter_has_ended(self._address.job):
                raise RendezvousError(self._without_starter())
            try:
                timeout = min(max(self._left().total_seconds(), 0.05), 1.0)
                socket.create_connection((host, port), timeout=timeout).close()
                return
            except OSError as error:
                reason = self._why_never(error) if self._elapsed_s() >= _SILENCE_S else None
                if reason is None and launcher_has_ended():
                    reason = (
                        f"{self._here}: 'distplus launch', which has started this rank and served the store at "
                        f"{host}:{port}, has ended. Start it again."
                    )
                if reason is None and (told := self._notes.look(self._elapsed_s())):
                    reason = self._why_never(error) or _came_apart(told)
                if reason is not None:
                    raise RendezvousError(reason) from error
                if not self._left():
                    raise PeerMissing(
                        f"{self._here} waited {self._deadline.total_seconds():g} s for rank 0 at {host}:{port}: "
                        f"{error}. Rank 0 did not start, or MASTER_ADDR / MASTER_PORT differ between the ranks, or a "
                        "firewall closes the port.",
                        [0],
                    ) from error
                time.sleep(_CONNECT_EVERY_S)

    def _why_never(self, error: OSError) -> str | None:
        return explain_silence(self._world, self._host, self._address.port, error)

    def _without_starter(self) -> str:
        return (
            f"{self._here} (pid {self._world.pid}): rank 0, which has started this process and was to serve the store, "
            "is gone. Its own last lines say why."
        )

    def _join(self, deadline: timedelta) -> TCPStore:
        """Becomes a client of the store. On a thread: torch's client waits for ever for a server that is silent."""
        host, port = self._host, self._address.port
        seconds = min(deadline.total_seconds(), _ANSWER_S + self._world.size / _ANSWERS_PER_S)
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
            f"{self._here} reached {host}:{port}, but what listens there does not answer as the store of a job within "
            f"{seconds:g} s. Another service holds the port: end it, or set MASTER_PORT to a free one on every node."
        ) from store


def _came_apart(text: str) -> str:
    """What a rank says where another one cannot come, and has said why beside the store."""
    return f"The ranks cannot meet, because one process cannot reach the store. {text}"


# -- where the main address leads --------------------------------------------------------------------------------------


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

    ``error`` is how the last attempt to connect has ended, after seconds of attempts.
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
_EVERY_S_OF_MANY = 1.0  # every rank but 0 asks the file system while rank 0 is late


class Notes:
    """The notes of one meeting, one file a rank.

    A note from ``before`` may be that of an earlier start: it counts at the deadline only. The rank that has left it
    takes it away when it starts again. Rank 0 looks for the notes of all others, and each of them for that of rank 0.
    A ``meeting`` is job, attempt and address, so that no other run's note is read.
    """

    def __init__(self, folder: Path | None, meeting: str, rank: int, before: float = 0.0) -> None:
        self._folder = folder
        self._before = before
        self._stem = f"unmet-{hashlib.sha256(meeting.encode()).hexdigest()[:12]}-rank"
        self._mine = f"{self._stem}{rank:05d}.txt"
        self._awaited = f"{self._stem}*.txt" if rank == 0 else f"{self._stem}00000.txt"
        self._every_s = _LOOK_EVERY_S if rank == 0 else _EVERY_S_OF_MANY
        self._look_at_s = 0.0
        if folder is not None:
            with suppress(OSError):
                (folder / self._mine).unlink(missing_ok=True)

    def leave(self, text: str) -> None:
        """Leaves why this rank does not come; a folder that takes no file is no further trouble."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside = self._folder / f".{self._mine}"
            aside.write_text(text)
            aside.rename(self._folder / self._mine)
        except OSError as error:
            log.info("no note could be left in %s: %s", self._folder, error)

    def look(self, elapsed_s: float, has_come: Callable[[int], bool] = lambda rank: False) -> str | None:
        """Called while this rank waits: what a rank of this start says that has not come."""
        if elapsed_s < self._look_at_s:
            return None
        self._look_at_s = elapsed_s + self._every_s
        return self._first(self._awaited, has_come, since=self._before)

    def last_word(self, has_come: Callable[[int], bool]) -> str | None:
        """Called at the deadline: what a rank that has not come has said at any time."""
        return self._first(f"{self._stem}*.txt", has_come)

    def _first(self, pattern: str, has_come: Callable[[int], bool], *, since: float = 0.0) -> str | None:
        for path in [] if self._folder is None else sorted(self._folder.glob(pattern)):
            with suppress(OSError, ValueError):  # what cannot be read is no note
                text, rank = escaped(path.read_text()), int(path.stem.removeprefix(self._stem))
                if path.stat().st_mtime >= since and not has_come(rank):
                    return text
        return None
