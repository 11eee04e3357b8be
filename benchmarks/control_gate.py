"""What the control plane costs: the gate of each step against the number of ranks, and a barrier of 1,024.

The ranks do nothing but pass gates, all at once, with equal records as in a healthy run; in a training step the gate
comes beside milliseconds of work. Up to eight ranks are processes; up to 1,024 are threads of one process, whose Python
runs one after the other. A straight line through those gives an upper bound for 16,384.
``python -m benchmarks.control_gate [--quick] [--processes 1 2 4 8]`` runs it alone.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed import HashStore

from benchmarks.figures import Figure, bootstrap_ci95, machine, median
from lightning_distplus import env
from lightning_distplus.control import Address, ControlPlane, GateRecord, StepGate, connect, disconnect
from lightning_distplus.control.exchange import RECORD_BYTES
from lightning_distplus.control.secret import Secret
from lightning_distplus.testing import spawn
from lightning_distplus.world import World

__all__ = ["run"]

_DEADLINE = timedelta(seconds=60)
_PROCESSES = (1, 2, 4, 8)
_CORES = 4  # beyond so many processes the target says nothing about two cores
_TARGET_MS = 0.3
_THREADS = (64, 128, 256, 512, 1024)
_COUNTED = 64  # beyond so many ranks the records are counted
_MODELLED = 16_384
_TARGET_BARRIER_S = 3.0


def run(quick: bool, processes: Sequence[int] = _PROCESSES) -> list[Figure]:
    """Passes 3,000 gates (quick: 300) with each number of processes; 5 barriers (quick: 1); some gates of threads."""
    figures = [figure for size in processes for figure in _gate_figures(size, 300 if quick else 3000)]
    barriers_s = [_barrier_of_threads(_THREADS[-1]) for _ in range(1 if quick else 5)]
    barrier = Figure(
        name=f"barrier, {_THREADS[-1]:,} threads", value=median(barriers_s), unit="s", target=_TARGET_BARRIER_S
    )
    gates_ms = {size: median(_gates_of_threads(size, 3 if quick else 20)) for size in _THREADS}
    return [
        *figures,
        barrier,
        *(Figure(name=f"gate, {size:,} threads", value=taken_ms, unit="ms") for size, taken_ms in gates_ms.items()),
        _modelled(gates_ms),
        Figure(name="gate, bytes that a rank sends", value=RECORD_BYTES, unit="B", target=128, note="of any number"),
    ]


def _modelled(gates_ms: dict[int, float]) -> Figure:
    """On the line through the gates of threads that count their records."""
    counted = {size: taken_ms for size, taken_ms in gates_ms.items() if size > _COUNTED}
    slope, offset = np.polyfit(list(counted), list(counted.values()), 1)
    note = f"{1e3 * slope:.0f} us for each rank, one after the other: an upper bound"
    return Figure(name=f"gate, {_MODELLED:,} ranks, modelled", value=offset + slope * _MODELLED, unit="ms", note=note)


def _gate_figures(size: int, num_gates: int) -> list[Figure]:
    """The median and the 90th percentile over the gates of all ranks."""
    found = spawn(pass_gates, size, args=(size, num_gates), deadline="120s").check().results
    taken_ms = [milliseconds for of_one_rank in found.values() for milliseconds in of_one_rank]
    name = f"gate, {size} process{'es' if size > 1 else ''}"
    return [
        Figure(
            name=f"{name}, median", value=median(taken_ms), unit="ms", ci95=bootstrap_ci95(taken_ms),
            target=_TARGET_MS if size <= _CORES else None,
        ),
        Figure(name=f"{name}, p90", value=statistics.quantiles(taken_ms, n=10)[-1], unit="ms"),
    ]  # fmt: skip


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


def _gates_of_threads(size: int, num_gates: int) -> list[float]:
    """Milliseconds from the first gate of each round to the last rank's leaving it; nodes of eight ranks."""
    planes = _planes_of_threads(size)
    gates = [StepGate(plane, name="benchmark") for plane in planes]
    taken_ms = []
    for step in range(num_gates):
        record = GateRecord(global_step=step, micro_batch=step, epoch=0)
        begin = time.perf_counter()
        _run_threads([(gate.exchange, (record, _DEADLINE)) for gate in gates])
        taken_ms.append((time.perf_counter() - begin) * 1e3)
    return taken_ms


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


def main() -> None:
    """Prints the figures of this benchmark alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer gates and barriers")
    parser.add_argument("--processes", type=int, nargs="+", default=_PROCESSES, help="numbers of processes")
    arguments = parser.parse_args()
    print(machine())
    for figure in run(arguments.quick, arguments.processes):
        interval = "" if figure.ci95 is None else "[{:.3f}, {:.3f}]".format(*figure.ci95)
        print(f"{figure.name:<28}{figure.value:>8.3f} {figure.unit:<3}{interval:<18}{figure.verdict}")


if __name__ == "__main__":
    main()
