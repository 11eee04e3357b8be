"""What computing the order of the data costs, in time per index and in memory per sample."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

from benchmarks.figures import Figure, median
from lightning_distplus.data.batches import EpochPlan, Geometry, Order
from lightning_distplus.data.order import EpochOrder, MixedOrder, Mixture
from lightning_distplus.world import DataParallel

__all__ = ["run"]

_SAMPLES = 10**9
_STOCK_SAMPLES = 10**7
_BLOCKS = (64, 1024, 4096)
_TARGET_BLOCK = 4096
_TARGET_NS = 100.0
_WEIGHTS, _SIZES = (0.693584, 0.306416), (7 * 10**8, 3 * 10**8)
_INDICES_PER_REPEAT = 2**17


def run(quick: bool) -> list[Figure]:
    """Times order and mixture at several block sizes, then the memory; torch.randperm in the same run."""
    repeats = 3 if quick else 15
    orders = {"order": _plain(_SAMPLES), "mixture of 2": _mixed()}
    figures = []
    for name, order in orders.items():
        figures += [_per_index(name, order, block, repeats) for block in _BLOCKS]
        figures.append(_as_the_loader_uses_it(name, order, repeats))
    return figures + _stock(1 if quick else 3) + _memory()


def _plain(num_samples: int) -> Order:
    return EpochOrder(num_samples=num_samples, seed=1, epoch=3)


def _mixed() -> Order:
    return MixedOrder(Mixture(_WEIGHTS, seed=1), _SIZES, seed=1, shuffle=True)


def _per_index(name: str, order: Order, block: int, repeats: int) -> Figure:
    """Consecutive blocks from a far position on, as a loader asks for them."""
    calls = _INDICES_PER_REPEAT // block
    firsts = iter(range(_SAMPLES // 2, _SAMPLES, block))

    def call() -> int:
        for first in islice(firsts, calls):
            order(np.arange(first, first + block, dtype=np.int64))
        return calls * block

    target = _TARGET_NS if block == _TARGET_BLOCK else None
    return Figure(name=f"{name}, blocks of {block}", value=_ns_each(call, repeats), unit="ns/index", target=target)


def _as_the_loader_uses_it(name: str, order: Order, repeats: int) -> Figure:
    """Whole micro-batches of one of two ranks: positions, ids, and their cut into batches."""
    geometry = Geometry(micro_batch=8, accumulation=4, ranks=DataParallel(rank=1, size=2))
    num_batches = _SAMPLES // geometry.micro_step
    plan = EpochPlan(
        order=order,
        geometry=geometry,
        first_batch=num_batches // 2,
        first_position=num_batches // 2 * geometry.micro_step,
        num_batches=num_batches,
    )
    batches = iter(plan)

    def call() -> int:
        return sum(len(ids) for _, ids in islice(batches, _INDICES_PER_REPEAT // geometry.micro_batch))

    return Figure(
        name=f"{name}, as the loader uses it",
        value=_ns_each(call, repeats),
        unit="ns/index",
        note=f"micro-batches of {geometry.micro_batch} on one of {geometry.ranks.size} ranks",
    )


def _ns_each(call: Callable[[], int], repeats: int) -> float:
    """Median time of one index; ``call`` returns how many it computed. The first call is not counted."""
    call()
    times_ns = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        num_indices = call()
        times_ns.append((time.perf_counter_ns() - start) / num_indices)
    return median(times_ns)


def _stock(repeats: int) -> list[Figure]:
    """What a DistributedSampler does at the start of each epoch, before the first sample."""
    times_ns = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        permutation = torch.randperm(_STOCK_SAMPLES)
        times_ns.append((time.perf_counter_ns() - start) / _STOCK_SAMPLES)
    bytes_each = permutation.nbytes / _STOCK_SAMPLES
    note = f"for comparison, {_STOCK_SAMPLES:,} samples, all of them before the first"
    return [
        Figure(name="torch.randperm", value=median(times_ns), unit="ns/index", note=note),
        Figure(name="torch.randperm, memory", value=bytes_each, unit="bytes/sample", note=note),
    ]


def _memory() -> list[Figure]:
    """Peak of the same pass over 10^9 and over 10^6 samples: what grows with their number is the cost per sample."""
    small = 10**6
    _peak_bytes(small)  # what numpy allocates once
    peaks = {size: _peak_bytes(size) for size in (small, _SAMPLES)}
    grown = max(0, peaks[_SAMPLES] - peaks[small]) / (_SAMPLES - small)
    note = f"peak {peaks[_SAMPLES]:,} bytes at 10^9 samples, {peaks[small]:,} at 10^6"
    # Below a thousandth of a bit: a few bytes of a longer integer are no cost per sample.
    return [Figure(name="order, memory", value=round(grown, 4), unit="bytes/sample", target=0.0, note=note)]


def _peak_bytes(num_samples: int) -> int:
    tracemalloc.start()
    try:
        order = _plain(num_samples)
        for first in range(0, 2**18, _TARGET_BLOCK):
            order(np.arange(first, first + _TARGET_BLOCK, dtype=np.int64))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
