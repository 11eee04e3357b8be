"""Row S11: a stranger writes pickles, junk, errors, verdicts and heartbeats to every port of a job, which goes on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus.events import read_events
from lightning_distplus.process import children
from lightning_distplus.testing import spawn, weights_digest
from lightning_distplus.testing.spawning import free_port
from tests.distributed import jobs
from tests.distributed.launch_jobs import launch, results, undisturbed

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

ESCAPES = "\x1b[2J\x1b]0;forged\x07 forged"
ERROR = {"rank": 1, "host": ESCAPES, "pid": 1, "type": "PeerLost", "message": ESCAPES, "traceback": ESCAPES,
         "ranks": [0], "differs": {}, "at": time.time(), "place": {}, "has_verdict": True}
MARK = {"number": 9, "phase": "step", "operation": "forged", "global_step": 9, "silence_s": 99.0, "call": 0,
        "ended": "has ended its run, forged"}
BEAT = {"beat": 10**9, "mark": MARK, "place": ESCAPES, "pace": "forged", "moves": False,
        "printer": {"number": 9, "descriptor": 1, "thread": 1}, "posted": 9, "whereabouts": None, "at": 0.0}
VERDICT = {"incident": "hang-forged-1", "kind": "hang", "culprits": [1], "waiting": [0], "phase": "step",
           "operation": "forged", "location": ESCAPES, "global_step": 1, "elapsed_s": 9.0, "cause": ESCAPES,
           "remedy": ESCAPES}
END = {"rank": 1, "sequence": "end", "begun": {"end": 1, "points": 10**6, "gates": 10**6}, "ranks": [],
       "point": {"operation": "the end of its run"}}
BOOT = open("/proc/sys/kernel/random/boot_id").read().strip()
GONE = {"host": "forged", "pid": 2**22 - 1, "started": 1, "boot": BOOT, "address": "127.0.0.1"}

def get(link, key):
    link.sendall(b"\3" + text(key))
    return exactly(link, struct.unpack("<Q", exactly(link, 8))[0])

def forge(link, keys):
    '''What ends, signals or names, in each attempt of a job; also what a rank has signed for another key.'''
    for prefix in {key.rpartition(b"hello/")[0] for key in keys if b"/hello/" in key}:
        copies = [get(link, key) for key in keys if key.startswith(prefix + b"hello/")]
        forged = {b"first-error": ERROR, b"watchdog/together": VERDICT, b"attended": 1, b"watchdog/asked": "1/9"}
        for rank in (b"0", b"1"):
            forged |= {
                b"watchdog/beat/" + rank: BEAT, b"watchdog/verdict/" + rank: VERDICT, b"hello/" + rank: GONE,
                b"watchdog/evidence/" + rank: {"number": 9, "evidence": {}}, b"points/run-1/at/" + rank: END,
                b"bell/" + rank + b"/1": "error", b"bell/" + rank + b"/2": "error",
            }
        for key, value in forged.items():
            value = json.dumps(value).encode()
            link.sendall(b"\1" + text(prefix + key) + text(random.choice([value, value, b"\0" * 16 + value, *copies])))
        for key in keys:
            of_all = (prefix + b"gate/", prefix + b"barrier/", prefix + b"points/")
            if key.startswith(of_all) or key.endswith((b"/arrived", b"/left", b"heard-by")):
                link.sendall(b"\x09" + text(key) + text(b"1,forged,\xff"))
    for key in keys:
        if key.endswith((b"distplus/run-id", b"distplus/card", b"/attempt", b"/knock/1", b"/answer/1")):
            link.sendall(b"\1" + text(key) + text(b'"forged"'))

def strike(port):
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as link:
        link.sendall(random.randbytes(100))
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as link:
        link.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        keys = keys_of(link)
        for key in keys:
            if b"rendezvous" in key and b"/barrier/" not in key:  # what torch's launcher unpickles
                link.sendall(b"\1" + text(key) + text(base64.b64encode(PICKLE)))
        forge(link, keys)
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


def sockets_of(*pids: int | str) -> Iterator[tuple[str, str, str]]:
    """The TCP sockets of processes, as the kernel shows them: own address, that of the peer, state."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            held |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    for table in ("tcp", "tcp6"):
        for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if f"socket:[{words[9]}]" in held:
                yield words[1], words[2], words[3]


def listening(launcher: int) -> dict[int, str]:
    """The ports on which a job listens, and the address of each in the kernel's hexadecimal."""
    family = [launcher]
    for pid in family:
        family += children(pid)
    places = [own.partition(":") for own, _, state in sockets_of(*family) if state == LISTENING]
    return {int(port, 16): address for address, _, port in places}


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
        code, log = launch(tmp_path, "0.5", then=then)
    finally:
        stranger.kill()
    output, errors = stranger.communicate(timeout=30)
    assert not marker.exists()
    assert set(seen.values()) == {"0100007F"}, seen
    assert code == 0, log
    assert max(json.loads(output.splitlines()[-1]).values()) >= 2, (output, errors)  # he has struck where the ranks met
    assert results(tmp_path) == undisturbed()


STEPS = 24
CONNECTIONS = 4  # of a rank to the store; see ControlPlane.second_line


def train_beside_a_stranger(folder: str) -> tuple[str, int]:
    """The weights, and how many connections this rank had to the store while it trained."""
    port, held = f":{int(os.environ['MASTER_PORT']):04X}", []

    def count(*_: Any) -> None:
        held.extend(peer for _, peer, _ in sockets_of("self") if peer.endswith(port))

    slow = jobs.At("on_train_batch_start", lambda *_: time.sleep(0.125))
    # A save takes part in the calls that are compared.
    callbacks = [slow, jobs.At("on_train_end", count), ModelCheckpoint(folder, every_n_train_steps=6)]
    timeout = {"step": "20s", "setup": "60s"}
    trainer = jobs.fit("ResilientDDP", 2, folder, timeout=timeout, max_steps=STEPS, max_epochs=-1, callbacks=callbacks)
    assert trainer.global_step == STEPS
    return weights_digest(trainer.lightning_module), len(held)


def test_what_a_stranger_writes_to_the_store_ends_signals_and_names_nothing(tmp_path: Path) -> None:
    port, ports = free_port(), tmp_path / "ports"
    ports.write_text(str(port))
    stranger = send_a_stranger(ports, tmp_path / "struck")
    try:
        run = spawn(
            train_beside_a_stranger, 2, args=(str(tmp_path),), env={"MASTER_PORT": port}, deadline="60s"
        ).check()
    finally:
        stranger.kill()
    output, errors = stranger.communicate(timeout=30)
    assert max(json.loads(output.splitlines()[-1]).values()) >= 2, (output, errors)  # he has struck where the ranks met
    assert run.results[0] == run.results[1]
    assert run.results[1][1] == CONNECTIONS
    told = "".join(run.logs.values())
    assert told.count("messages at the job's store that nobody of this job has signed were ignored") == 2
    assert "\x1b" not in told
    assert "forged" not in told
    events = read_events(tmp_path / "distplus")
    assert {event["kind"] for event in events} - {"steps", "costs", "removed"} == {"start", "saved", "end"}
    assert "forged" not in {event["run_id"] for event in events}
