"""A name server that does not answer: ranks of one host meet without it, since they know each other by number."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.faults.hosts import several_hosts

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000


def on_host_with_silent_resolver(name: str, folder: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(os.open(f"/run/netns/{name}", os.O_RDONLY), _CLONE_NEWNET) == 0
    assert libc.unshare(_CLONE_NEWNS) == 0
    settings = Path(folder) / f"resolv.conf.{os.getpid()}"
    settings.write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", settings, "/etc/resolv.conf"], check=True)


def train(rank: int, name: str, folder: str) -> tuple[str, bool, bool]:
    on_host_with_silent_resolver(name, folder)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        if rank == 0:
            server.bind(("127.0.0.1", 53))
        server.setblocking(False)
        trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=3)
        trainer.fit(model := jobs.Model(), jobs.loader())
        was_asked = rank == 0 and has_mail(server)
        if rank == 0:
            threading.Thread(target=ask, daemon=True).start()
            time.sleep(0.5)
        return weights_digest(model), was_asked, rank == 0 and has_mail(server)


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
    (first, asked_by_fit, asked_later), (second, _, _) = result.results[0], result.results[1]
    assert first == second
    assert asked_later, "the name server that counts is not the one that is asked"
    assert not asked_by_fit
    assert "hostname" not in "".join(result.logs.values()), "torch warns about names that it does not get"
