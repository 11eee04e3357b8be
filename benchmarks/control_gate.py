"""What the control plane costs: the gate of each step against the number of ranks, and a barrier of 1,024.

The ranks do nothing but pass gates, all at once, with records that agree as in a healthy run; in a training step the
gate comes beside milliseconds of work. Up to eight ranks are processes of one host. Between hosts each is one light
process, since one rank of a host speaks to the store, which is a process of its own. The 1,024 ranks of the barrier are
threads of one process.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Any

from torch.distributed import HashStore, TCPStore

from benchmarks.figures import Figure, median
from lightning_distplus import env
from lightning_distplus.control import Address, ControlPlane, GateRecord, StepGate, connect, disconnect
from lightning_distplus.control.exchange import RECORD_BYTES
from lightning_distplus.control.plane import Peer
from lightning_distplus.control.secret import Secret
from lightning_distplus.testing import spawn
from lightning_distplus.world import World

__all__ = ["run"]

_DEADLINE = timedelta(seconds=60)
_PROCESSES = (1, 2, 4, 8)
_CORES = 4  # beyond so many processes the target says nothing about two cores
_TARGET_MS = 0.3
_HOSTS = (16, 64, 128)
_TARGET_CALLS = 3.0
_TARGET_STORE_US = 50.0
_MODELLED = 2048  # hosts of eight ranks
_THREADS = 1024
_TARGET_BARRIER_S = 3.0


def run(quick: bool) -> list[Figure]:
    """Passes 3,000 gates (quick: 300) with each number of processes, 200 (30) of hosts, and 5 barriers (1)."""
    figures = [figure for size in _PROCESSES for figure in _gate_figures(size, 300 if quick else 3000)]
    of_hosts = {size: _pass_gates_of_hosts(size, 30 if quick else 200) for size in _HOSTS}
    barriers_s = [_barrier_of_threads(_THREADS) for _ in range(1 if quick else 5)]
    name = f"barrier, {_THREADS:,} threads"
    return [
        *figures,
        *(figure for size, found in of_hosts.items() for figure in found.figures(size)),
        _modelled(of_hosts),
        Figure(name=name, value=median(barriers_s), unit="s", target=_TARGET_BARRIER_S),
        Figure(name="gate, bytes that a rank sends", value=RECORD_BYTES, unit="B", target=128, note="of any number"),
    ]


@dataclass(frozen=True)
class _OfHosts:
    """What the gates between hosts have cost; each host and gate alike."""

    taken_ms: list[float]
    num_calls: float
    store_us: float

    def figures(self, size: int) -> list[Figure]:
        name = f"gate, {size} hosts"
        return [
            Figure.of(f"{name}, median", self.taken_ms, "ms"),
            Figure(name=f"{name}, calls", value=self.num_calls, unit="", target=_TARGET_CALLS, note="a host and gate"),
            Figure(
                name=f"{name}, store CPU", value=self.store_us, unit="us", target=_TARGET_STORE_US,
                note=f"a host and gate; {size * self.store_us / 1e3:.1f} ms a gate",
            ),
        ]  # fmt: skip


def _modelled(of_hosts: dict[int, _OfHosts]) -> Figure:
    value = _MODELLED * max(found.store_us for found in of_hosts.values()) / 1e3
    note = "a gate, at the most that a host has cost; without rank 0's looks at the records of all"
    return Figure(name=f"gate, {_MODELLED:,} hosts, store CPU", value=value, unit="ms", note=note)


def _gate_figures(size: int, num_gates: int) -> list[Figure]:
    """The median and the 90th percentile over the gates of all ranks."""
    found = spawn(pass_gates, size, args=(size, num_gates), deadline="120s").check().results
    taken_ms = [milliseconds for of_one_rank in found.values() for milliseconds in of_one_rank]
    name = f"gate, {size} process{'es' if size > 1 else ''}"
    return [
        Figure.of(f"{name}, median", taken_ms, "ms", target=_TARGET_MS if size <= _CORES else None),
        Figure(name=f"{name}, p90", value=statistics.quantiles(taken_ms, n=10)[-1], unit="ms"),
    ]


def pass_gates(rank: int, size: int, num_gates: int) -> list[float]:
    """Milliseconds of each gate on this rank, after a tenth more to warm up."""
    address = Address(host="127.0.0.1", port=env.MASTER_PORT.integer() or 0)
    plane = connect(World(rank=rank, size=size), address, _DEADLINE)
    gate = StepGate(plane, name="benchmark")
    gate.open(_DEADLINE)
    taken_ms = []
    for step in range(num_gates + num_gates // 10):
        record = GateRecord(global_step=step, micro_batch=step, epoch=0, consumed_samples=8 * step)
        begin = time.perf_counter()
        gate.exchange(record, _DEADLINE)
        taken_ms.append((time.perf_counter() - begin) * 1e3)
    plane.farewell(_DEADLINE)
    disconnect()
    return taken_ms[num_gates // 10 :]


def _barrier_of_threads(size: int) -> float:
    """Seconds until all ranks have left the barrier."""
    planes = _planes_of_threads(size)
    begin = time.perf_counter()
    _run_threads([(plane.barrier, ("benchmark", _DEADLINE)) for plane in planes])
    return time.perf_counter() - begin


def _pass_gates_of_hosts(size: int, num_gates: int) -> _OfHosts:
    """Forked from here, so that a hundred of them have room; nothing of this process runs meanwhile."""
    context = multiprocessing.get_context("fork")
    (told, tell), meeting = context.Pipe(duplex=False), context.Barrier(size + 1)
    results = context.SimpleQueue()
    store = context.Process(target=_serve, args=(tell, meeting), daemon=True)
    store.start()
    port = told.recv()
    hosts = [
        context.Process(target=_be_host, args=(rank, size, port, num_gates, meeting, results), daemon=True)
        for rank in range(size)
    ]
    for host in hosts:
        host.start()
    found = [results.get() for _ in hosts]
    store_s = told.recv()
    for process in (*hosts, store):
        process.join()
    taken_ms = [milliseconds for of_one, _ in found for milliseconds in of_one]
    num_calls = sum(calls for _, calls in found)
    each = size * num_gates
    return _OfHosts(taken_ms, num_calls / each, store_s * 1e6 / each)


def _serve(tell: Connection, meeting: Barrier) -> None:
    """Tells the port, and then the seconds of CPU time from the first gate to the last."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell.send(store.port)
    meeting.wait()
    begin = time.process_time()
    meeting.wait()
    meeting.wait()
    tell.send(time.process_time() - begin)
    meeting.wait()


class _CountingPlane(ControlPlane):
    num_calls = 0

    def _call(self, *arguments: Any) -> Any:
        self.num_calls += 1
        return super()._call(*arguments)


def _be_host(rank: int, size: int, port: int, num_gates: int, meeting: Barrier, results: SimpleQueue[Any]) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    plane = _CountingPlane(store, World(rank=rank, size=size, host=f"host{rank}"), secret=Secret("of the benchmark"))
    plane.send(f"hello/{rank}", Peer.of(plane.world).to_json().encode())
    gate = StepGate(plane, name="benchmark")
    gate.open(_DEADLINE)
    taken_ms = []
    for step in range(num_gates + 5):  # the first ones warm up
        if step == 5:
            meeting.wait()
            meeting.wait()
            plane.num_calls = 0
        record = GateRecord(global_step=step, micro_batch=step, epoch=0, consumed_samples=8 * step, lead_s=rank)
        begin = time.perf_counter()
        gate.exchange(record, _DEADLINE)
        taken_ms.append((time.perf_counter() - begin) * 1e3)
    num_calls = plane.num_calls
    meeting.wait()
    results.put((taken_ms[5:], num_calls))
    meeting.wait()


def _planes_of_threads(size: int) -> list[ControlPlane]:
    store, secret = HashStore(), Secret("of the benchmark")  # as between hosts: every record is signed
    return [
        ControlPlane(store, World(rank=rank, size=size, num_nodes=size // 8), secret=secret) for rank in range(size)
    ]


def _run_threads(calls: Sequence[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
    threads = [threading.Thread(target=function, args=arguments) for function, arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
