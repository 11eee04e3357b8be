"""Two hosts on one machine: network namespaces joined by a veth pair, each with a host name and a process table."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TwoHosts:
    """The names of the hosts and of their network namespaces; node n has the address 10.77.x.(n+1)."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def cut(self, node: int) -> None:
        """Takes the link of one host down."""
        _ip("-n", self.names[node], "link", "set", "eth0", "down")

    def drop(self, *what: str) -> None:
        """Drops what comes to node 0 over the link, as a firewall does: all of it, or what a rule of ``ip`` names."""
        _ip("-n", self.names[0], "rule", "add", "pref", "2", "lookup", "local")
        _ip("-n", self.names[0], "rule", "del", "pref", "0")  # which stands before any other
        _ip("-n", self.names[0], "rule", "add", "pref", "1", "iif", "eth0", *what, "blackhole")

    @property
    def cut_command(self) -> list[str]:
        return ["ip", "-n", self.names[1], "link", "set", "eth0", "down"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@contextlib.contextmanager
def two_hosts(label: str = "") -> Iterator[TwoHosts]:
    """Makes the hosts, and removes them; skips the test where that is not permitted.

    Args:
        label: Keeps the hosts of runs apart that stand side by side; a letter.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts on one machine need the program ip (iproute2) and the right to make network namespaces")
    octet = os.getpid() % 250 + 1
    names = (f"distplus{os.getpid()}{label}a", f"distplus{os.getpid()}{label}b")
    hosts = TwoHosts(names, (f"10.77.{octet}.1", f"10.77.{octet}.2"))
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, hosts.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)


@dataclass(frozen=True)
class Hosts:
    """Several hosts at one switch; node n has the address 10.78.x.(n+1)."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def cut_off(self, node: int, other: int) -> None:
        """What one of two hosts sends to the other is dropped; both still reach everybody else."""
        _ip("-n", self.names[node], "route", "add", "blackhole", f"{self.addresses[other]}/32")

    def set_mtu(self, node: int, size_bytes: int) -> None:
        """Gives the interface of a host another MTU."""
        _ip("-n", self.names[node], "link", "set", "eth0", "mtu", str(size_bytes))

    def slow_down(self, node: int, rate: str) -> None:
        """Lets a host send at that rate only, for example ``20mbit``."""
        shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        _ip("netns", "exec", self.names[node], *shape)


@contextlib.contextmanager
def several_hosts(count: int) -> Iterator[Hosts]:
    """Makes the hosts and their switch, and removes them; skips the test where that is not permitted."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("several hosts on one machine need the program ip (iproute2) and the right to make namespaces")
    octet = os.getpid() % 250 + 1
    switch = f"distplus{os.getpid()}s"
    names = tuple(f"distplus{os.getpid()}n{node}" for node in range(count))
    hosts = Hosts(names, tuple(f"10.78.{octet}.{node + 1}" for node in range(count)))
    try:
        try:
            for name in (switch, *names):
                _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces or bridges are not permitted here: {error.stderr.strip()}")
        _ip("-n", switch, "link", "set", "br0", "up")
        for node, (name, address) in enumerate(zip(names, hosts.addresses, strict=True)):
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{node}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{node}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)


def run_on(name: str, call: Callable[[], Any], pid_file: str | None = None) -> None:
    """Runs a function in a child that lives on this host, and ends this process as the child ends.

    Network, host name and process table are those of the host; the file system is shared, as on a cluster.

    Args:
        name: The host.
        call: What to run.
        pid_file: Where the number of the child is kept, as this machine counts; its own host counts from 1.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS | _CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "setns or unshare")
    socket.sethostname(name)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
        call()
        os._exit(0)
    if pid_file is not None:
        Path(pid_file).write_text(str(child))
    _, status = os.waitpid(child, 0)
    raise SystemExit(os.waitstatus_to_exitcode(status))
