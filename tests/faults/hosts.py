"""Several hosts on one machine: joined network namespaces, each with a host name and a process table."""

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
class Hosts:
    """The names of the hosts and of their network namespaces; node n has the address 10.77.x.(n+1)."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def drop(self, *what: str) -> None:
        """Drops what comes to node 0 over the link, as a firewall does: all of it, or what a rule of ``ip`` names."""
        _ip("-n", self.names[0], "rule", "add", "pref", "2", "lookup", "local")
        _ip("-n", self.names[0], "rule", "del", "pref", "0")  # which stands before any other
        _ip("-n", self.names[0], "rule", "add", "pref", "1", "iif", "eth0", *what, "blackhole")

    @property
    def cut_command(self) -> list[str]:
        """Takes the link of node 1 down."""
        return ["ip", "-n", self.names[1], "link", "set", "eth0", "down"]

    def cut_off(self, node: int, other: int) -> None:
        """What one of two hosts sends to the other is dropped; both still reach everybody else."""
        _ip("-n", self.names[node], "route", "add", "blackhole", f"{self.addresses[other]}/32")

    def slow_down(self, node: int, rate: str) -> None:
        """Lets a host send at that rate only, for example ``20mbit``."""
        shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        _ip("netns", "exec", self.names[node], *shape)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@contextlib.contextmanager
def several_hosts(count: int, label: str = "") -> Iterator[Hosts]:
    """Makes hosts, and removes them: two at one cable, others at a switch. Skips the test where that is not permitted.

    Args:
        count: How many.
        label: Keeps the hosts of runs apart that stand side by side; a letter.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("several hosts on one machine need the program ip (iproute2) and the right to make namespaces")
    octet = os.getpid() % 250 + 1
    switch = f"distplus{os.getpid()}{label}s"
    names = tuple(f"distplus{os.getpid()}{label}n{node}" for node in range(count))
    hosts = Hosts(names, tuple(f"10.77.{octet}.{node + 1}" for node in range(count)))
    made = names if count == 2 else (switch, *names)
    try:
        try:
            for name in made:
                _ip("netns", "add", name)
            if count != 2:
                _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces or bridges are not permitted here: {error.stderr.strip()}")
        if count == 2:
            _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        else:
            _ip("-n", switch, "link", "set", "br0", "up")
        for node, (name, address) in enumerate(zip(names, hosts.addresses, strict=True)):
            if count != 2:
                port = f"port{node}"
                _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
                _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in made:
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
