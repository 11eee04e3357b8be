"""How a process reaches the port of the job's store: it listens there, or waits until somebody does, and joins."""

from __future__ import annotations

import errno
import ipaddress
import logging
import queue
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from lightning_distplus import env
from lightning_distplus._compat import TCPStore
from lightning_distplus.control.reach import SILENCE_S, explain_silence
from lightning_distplus.control.unheard import Unheard
from lightning_distplus.errors import PeerMissing, RendezvousError
from lightning_distplus.launcher_link import launcher_has_ended
from lightning_distplus.world import World

__all__ = ["CONNECT_EVERY_S", "await_port", "came_apart", "join", "listen_on", "port_remedy"]

log = logging.getLogger(__name__)

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


def await_port(world: World, host: str, port: int, deadline: timedelta, unheard: Unheard) -> timedelta:
    """Tries until somebody listens; torch's own client overruns its time-out by seconds.

    Args:
        world: This process.
        host: Where the store is.
        port: Its port there.
        deadline: How long to try.
        unheard: Where rank 0 says that it cannot serve.

    Returns:
        The time left of the deadline, at least a second.

    Raises:
        PeerMissing: Nobody listens there.
        RendezvousError: Something other than an absent rank 0 explains the silence.
    """
    begin = time.monotonic()
    end = begin + deadline.total_seconds()
    while True:
        try:
            left_s = end - time.monotonic()
            socket.create_connection((host, port), timeout=min(max(left_s, 0.05), 1.0)).close()
            return timedelta(seconds=max(1.0, end - time.monotonic()))
        except OSError as error:
            reason = explain_silence(world, host, port, error) if _is_silent(begin) else None
            if reason is not None:
                raise RendezvousError(reason) from error
            if launcher_has_ended():
                raise RendezvousError(
                    f"Rank {world.rank} on {world.host}: 'distplus launch', which has started this rank and served the "
                    f"store at {host}:{port}, has ended. Start it again."
                ) from error
            if told := unheard.look(time.monotonic() - begin):
                raise RendezvousError(explain_silence(world, host, port, error) or came_apart(told)) from error
            if time.monotonic() >= end:
                raise PeerMissing(
                    f"Rank {world.rank} on {world.host} waited {deadline.total_seconds():g} s for rank 0 at "
                    f"{host}:{port}: {error}. Rank 0 did not start, or MASTER_ADDR / MASTER_PORT differ "
                    "between the ranks, or a firewall closes the port.",
                    [0],
                ) from error
            time.sleep(CONNECT_EVERY_S)


def came_apart(text: str) -> str:
    """What this rank says where another one cannot come, and has said why beside the store."""
    return f"The ranks cannot meet, because one process cannot reach the store. {text}"


def _is_silent(since: float) -> bool:
    return time.monotonic() - since >= SILENCE_S


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
            found.put(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
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
