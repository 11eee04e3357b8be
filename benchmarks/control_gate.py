"""What the control plane costs: the gate of each step, and a barrier and counted gates of 1,000 ranks as threads.

The ranks do nothing but pass gates, all at once, with equal records as in a healthy run; in a training step the gate
comes beside milliseconds of work.
``python -m benchmarks.control_gate [--quick] [--processes 1 2 4]`` runs it alone.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore

from benchmarks.figures import Figure, bootstrap_ci95, machine, median
from lightning_distplus import env
from lightning_distplus.control import Address, ControlPlane, GateRecord, StepGate, connect, disconnect
from lightning_distplus.testing import spawn
from lightning_distplus.world import World

__all__ = ["run"]

_DEADLINE = timedelta(seconds=60)
_PROCESSES = (1, 2, 4)
_TARGET_MS = 0.3
_NUM_THREADS = 1000
_TARGET_BARRIER_S = 3.0


def run(quick: bool, processes: Sequence[int] = _PROCESSES) -> list[Figure]:
    """Passes 3,000 gates (quick: 300) with each number of processes; 5 barriers (quick: 1)."""
    figures = [figure for size in processes for figure in _gate_figures(size, 300 if quick else 3000)]
    barriers_s = [_barrier_of_threads() for _ in range(1 if quick else 5)]
    barrier = Figure(
        name=f"barrier, {_NUM_THREADS:,} threads", value=median(barriers_s), unit="s", target=_TARGET_BARRIER_S
    )
    gate_ms = median(_gates_of_threads(3 if quick else 20))
    return [*figures, barrier, Figure(name=f"gate, {_NUM_THREADS:,} threads", value=gate_ms, unit="ms")]


def _gate_figures(size: int, num_gates: int) -> list[Figure]:
    """The median and the 90th percentile over the gates of all ranks."""
    found = spawn(pass_gates, size, args=(size, num_gates), deadline="120s").check().results
    taken_ms = [milliseconds for of_one_rank in found.values() for milliseconds in of_one_rank]
    name = f"gate, {size} process{'es' if size > 1 else ''}"
    return [
        Figure(
            name=f"{name}, median", value=median(taken_ms), unit="ms", ci95=bootstrap_ci95(taken_ms),
            target=_TARGET_MS,
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


def _barrier_of_threads() -> float:
    """Seconds until all ranks have left the barrier."""
    planes = _planes_of_threads()
    begin = time.perf_counter()
    _run_threads([(plane.barrier, ("benchmark", _DEADLINE)) for plane in planes])
    return time.perf_counter() - begin


def _gates_of_threads(num_gates: int) -> list[float]:
    """Milliseconds from the first gate of each round to the last rank's leaving it; nodes of eight ranks."""
    planes = _planes_of_threads()
    gates = [StepGate(plane, name="benchmark") for plane in planes]
    taken_ms = []
    for step in range(num_gates):
        record = GateRecord(global_step=step, micro_batch=step, epoch=0)
        begin = time.perf_counter()
        _run_threads([(gate.exchange, (record, _DEADLINE)) for gate in gates])
        taken_ms.append((time.perf_counter() - begin) * 1e3)
    return taken_ms


def _planes_of_threads() -> list[ControlPlane]:
    store = HashStore()
    return [
        ControlPlane(store, World(rank=rank, size=_NUM_THREADS, num_nodes=_NUM_THREADS // 8))
        for rank in range(_NUM_THREADS)
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
