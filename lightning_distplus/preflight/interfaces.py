"""Network interfaces of this host: which one leads to the main address, and whether those that are named exist."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lightning_distplus import env
from lightning_distplus.liveness import address_towards
from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status
from lightning_distplus.preflight.running import Check

__all__ = ["INTERFACE_CHECKS", "Interface", "interface_towards", "own_name"]

_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # Linux: the IPv4 address of an interface, and its MTU


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One interface; empty where none was found."""

    name: str = ""
    address: str = ""
    mtu: int = 0


def interface_towards(host: str) -> Interface:
    """The interface from which packets to a host leave."""
    address = address_towards(host)
    for _, name in socket.if_nameindex():
        if address and _address_of(name) == address:
            return Interface(name=name, address=address, mtu=_mtu_of(name))
    return Interface(address=address)


def _address_of(name: str) -> str:
    found = _asked(name, _SIOCGIFADDR)
    return socket.inet_ntoa(found[20:24]) if found else ""


def _mtu_of(name: str) -> int:
    found = _asked(name, _SIOCGIFMTU)
    return int(struct.unpack("16xi", found[:20])[0]) if found else 0


def _asked(name: str, what: int) -> bytes:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return fcntl.ioctl(asking.fileno(), what, struct.pack("256s", name.encode()[:15]))
    return b""


def interfaces(facts: Facts) -> Iterator[Finding]:
    """The interfaces that variables name must be there; gloo wants whole names, NCCL takes beginnings."""
    there = [name for _, name in socket.if_nameindex()]
    wanted = facts.text(env.GLOO_SOCKET_IFNAME)
    missing = [name for name in (wanted or "").split(",") if name and name not in there]
    if missing:
        yield _missing(facts, env.GLOO_SOCKET_IFNAME, f"no interface {', '.join(missing)}", there, Status.ERROR)
    wanted = facts.text(env.NCCL_SOCKET_IFNAME)
    if wanted is not None and not [name for name in there if _takes(wanted, name)]:
        status = Status.ERROR if facts.accelerator == "cuda" else Status.WARNING
        yield _missing(facts, env.NCCL_SOCKET_IFNAME, "no interface that this admits", there, status)


def _takes(wanted: str, name: str) -> bool:
    """NCCL's rules: beginnings of names, whole ones after =, and what to leave out after ^."""
    is_excluded = wanted.startswith("^")
    text = wanted.removeprefix("^")
    is_whole = text.startswith("=")
    parts = [part for part in text.removeprefix("=").split(",") if part]
    found = any(name == part.partition(":")[0] if is_whole else name.startswith(part) for part in parts)
    return found is not is_excluded


def _missing(facts: Facts, variable: env.Variable, what: str, there: list[str], status: Status) -> Finding:
    return Finding(
        status=status,
        subject=f"{variable.name}={facts.text(variable)}, and host {facts.host} has {what}.",
        detail=f"its interfaces: {', '.join(there)}",
        remedy=f"Set {variable.name} to the one that leads to the other hosts, or unset it",
    )


def own_name(facts: Facts) -> Iterator[Finding]:
    """Where no interface is named, gloo tells the others to come where this host's own name leads."""
    if not facts.spans_hosts or facts.text(env.GLOO_SOCKET_IFNAME) is not None:
        return
    address = _own_address(facts.host)
    if address and not ipaddress.ip_address(address).is_loopback:
        return
    name = interface_towards(facts.text(env.MASTER_ADDR) or "").name
    outward = name if name not in ("", "lo") else "<the interface of this network>"
    yield Finding(
        # NCCL finds an interface by itself; only groups of the CPU (saves in the background) are gloo's there.
        status=Status.ERROR if facts.accelerator == "cpu" else Status.WARNING,
        subject=f"Host {facts.host} {f'calls itself {address}' if address else 'does not know its own name'}: gloo "
        "tells the other hosts a loopback address, and they cannot connect to it.",
        detail=f"'getent hosts {facts.host}' leads to {address or 'no address of it'}; "
        + facts.shown(env.GLOO_SOCKET_IFNAME),
        remedy=f"export GLOO_SOCKET_IFNAME={outward}, or give {facts.host} its address of this network in /etc/hosts",
    )


def _own_address(host: str) -> str:
    """The first address of this host to which its name leads, as gloo looks for it; empty where there is none."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(place)
                return str(place[0])
    return ""


INTERFACE_CHECKS: Mapping[str, Check] = {"interfaces": interfaces}
"""The check of the named interfaces; it opens no connection."""
