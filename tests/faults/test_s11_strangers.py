"""Row S11: a stranger writes pickles and junk to every port of a launched job; nothing of it runs, and it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_distplus.process import children
from tests.faults.test_restarting import launch, results, undisturbed

NOBODY = 65534
LISTENING = "0A"
SECONDS = 3.0  # of training; a step takes half of one
# Knows torch's protocol; needs no package. Argument 1: a file with the ports of the job.
STRANGER = r"""
import base64, encodings.idna, json, os, pickle, random, socket, struct, sys, time
ports, marker, user = open(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)

class Strike:
    def __reduce__(self):
        return os.system, (f"touch {marker}",)

PICKLE = pickle.dumps(Strike())
JUNK = (b"", b"\xff" * 40, b"7", PICKLE)

def listening():
    ports.seek(0)
    return [int(one) for one in ports.read().split()]

def text(data):
    return struct.pack("<Q", len(data)) + data

def exactly(link, size):
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data

def keys_of(link):
    link.sendall(b"\x11")
    (count,) = struct.unpack("<Q", exactly(link, 8))
    return [exactly(link, struct.unpack("<Q", exactly(link, 8))[0]) for _ in range(min(count, 10000))]

def strike(port):
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as link:
        link.sendall(random.randbytes(100))
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as link:
        link.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        keys = keys_of(link)
        for key in keys:
            if b"rendezvous" in key:  # what torch's launcher unpickles; the ranks' keys are not signed yet
                link.sendall(b"\1" + text(key) + text(base64.b64encode(PICKLE)))
        for name in (b"a key", b"/torch.rendezvous.x"):
            link.sendall(b"\1" + text(name) + text(random.choice(JUNK)))
        link.sendall(b"\x0d" + b"ping")
        exactly(link, 4)  # all of it has arrived
        return sum(b"hello/" in key for key in keys)

struck = {}
while True:
    for port in listening():
        try:
            struck[port] = max(struck.get(port, 0), strike(port))
        except OSError:
            struck.setdefault(port, 0)
    print(json.dumps(struck), flush=True)
    time.sleep(0.2)
"""


def listening(launcher: int) -> dict[int, str]:
    """The ports on which a job listens, and the address of each in the kernel's hexadecimal."""
    family, found = [launcher], {}
    for pid in family:
        family += children(pid)
    held = set()
    for pid in family:
        with contextlib.suppress(OSError):
            held |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    for table in ("tcp", "tcp6"):
        for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if words[3] == LISTENING and f"socket:[{words[9]}]" in held:
                address, _, port = words[1].partition(":")
                found[int(port, 16)] = address
    return found


def send_a_stranger(ports: Path, marker: Path) -> subprocess.Popen[str]:
    """Another user of this host, where this one may start processes of others; else one without the secret."""
    user = NOBODY if os.geteuid() == 0 else 0
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", STRANGER, str(ports), str(marker), str(user)],
        cwd="/", env={}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.deadline(150)
def test_nothing_of_a_stranger_on_the_host_of_a_launched_job_runs(tmp_path: Path) -> None:
    marker, ports = tmp_path / "struck", tmp_path / "ports"
    ports.touch()
    stranger = send_a_stranger(ports, marker)
    seen: dict[int, str] = {}

    def then(launcher: subprocess.Popen[str]) -> None:
        trains_since = float("inf")
        while launcher.poll() is None and time.monotonic() < trains_since + SECONDS:
            seen.update(listening(launcher.pid))
            ports.write_text(" ".join(map(str, seen)))
            if trains_since == float("inf") and any(tmp_path.glob("checkpoints/*")):
                trains_since = time.monotonic()
            time.sleep(0.1)
        stranger.kill()

    try:
        code, log = launch(tmp_path, str(tmp_path), "0.5", then=then)
    finally:
        stranger.kill()
    output, errors = stranger.communicate(timeout=30)
    assert not marker.exists()
    assert set(seen.values()) == {"0100007F"}, seen
    assert code == 0, log
    assert max(json.loads(output.splitlines()[-1]).values()) >= 2, (output, errors)  # he has struck where the ranks met
    assert results(tmp_path) == undisturbed()
