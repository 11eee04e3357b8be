"""What torch's Flight Recorder, which is on by default, adds to an all-reduce, and how long a dump takes.

It cannot be switched inside a process, so pairs of runs alternate: without it, with it. Thread CPU time is the quieter
figure on a shared machine.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.figures import Figure, median
from lightning_distplus.testing import spawn
from lightning_distplus.watchdog import flight_recorder

__all__ = ["run"]

_NUM_CALLS = 3000
_PAIRS = 7
_TARGET_DUMP_MS = 150.0


def run(quick: bool) -> list[Figure]:
    """Seven pairs of two runs with 3,000 all-reduces of two ranks (quick: one pair of 500)."""
    pairs, num_calls = (1, 500) if quick else (_PAIRS, _NUM_CALLS)
    wall_us, cpu_us, dump_ms = [], [], []
    for _ in range(pairs):
        (wall_without, cpu_without, _), (wall_with, cpu_with, taken_ms) = (
            _measure(size, num_calls) for size in (0, 2000)
        )
        wall_us.append(wall_with - wall_without)
        cpu_us.append(cpu_with - cpu_without)
        dump_ms.append(taken_ms)
    return [
        Figure.of("per all-reduce, thread CPU", cpu_us, "us"),
        Figure.of("per all-reduce, wall", wall_us, "us"),
        Figure.of("a dump of 2,000 entries", dump_ms, "ms", target=_TARGET_DUMP_MS),
    ]


def _measure(size: int, num_calls: int) -> tuple[float, float, float]:
    run = spawn(reduce, 2, args=(num_calls,), env={"TORCH_FR_BUFFER_SIZE": size}, deadline="60s").check()
    return tuple(median(values) for values in zip(*run.results.values(), strict=True))  # type: ignore[return-value]


def reduce(rank: int, num_calls: int) -> tuple[float, float, float]:
    """Microseconds of wall and of thread CPU time per call on this rank, and milliseconds of a dump."""
    flight_recorder.arm()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    values = torch.ones(256)
    for _ in range(num_calls // 10):
        dist.all_reduce(values)
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(num_calls):
        dist.all_reduce(values)
    wall_us, cpu_us = (time.perf_counter() - wall) * 1e6, (time.thread_time() - cpu) * 1e6
    begin = time.perf_counter()
    flight_recorder.dump()
    dump_ms = (time.perf_counter() - begin) * 1e3
    dist.destroy_process_group()
    return wall_us / num_calls, cpu_us / num_calls, dump_ms
