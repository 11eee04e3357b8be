"""Whether the main address leads where it should: from every host to rank 0, and from rank 0's host to itself."""

from __future__ import annotations

import errno
import ipaddress
import socket

from lightning_distplus import env
from lightning_distplus.world import World

__all__ = ["SILENCE_S", "explain_silence", "is_local"]

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

    Args:
        world: This process, not rank 0.
        host: Where rank 0 should be.
        port: Its port there.
        error: How the last attempt to connect ended, after ``SILENCE_S`` of attempts.
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
