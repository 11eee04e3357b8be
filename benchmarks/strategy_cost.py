"""What a Resilient strategy adds to a step of about 20 ms, with the stock broadcast that it replaces credited.

The step gate is all that a Resilient strategy adds to a step of its parent. It is toggled inside one fit on two
processes, each pinned to a core: blocks of steps with our gate, with Lightning's broadcast, and with the broadcast
again (A/A), in random order, the same on both ranks.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

import lightning_distplus
from benchmarks import jobs
from benchmarks.figures import Figure, bootstrap_ci95, median
from lightning_distplus.testing import spawn

__all__ = ["ARMS", "BLOCK", "WARM_UP", "Toggle", "blocks_of", "differences", "figures_of", "measure", "run"]

STRATEGIES: dict[str, dict[str, Any]] = {
    "ResilientDDP": {},
    "ResilientFSDP": {},
    "ResilientModelParallel": {},
    "ResilientDeepSpeed": {"stage": 2},
}
Blocks = dict[str, dict[str, list[float]]]
"""Arm -> ``wall_us``, ``cpu_us``, ``gate_us`` -> one value for each block, per step."""

ARMS = ("ours", "stock", "control")
BLOCK = 5
WARM_UP = 20
_WORK_S = 0.017
_TARGET_US = 200.0
_TARGET_RATIO = 0.01


def run(quick: bool) -> list[Figure]:
    """One fit for each strategy, 100 alternations (quick: 20)."""
    return [figure for name in STRATEGIES for figure in figures_of(name, measure(name, 20 if quick else 100))]


def measure(
    name: str,
    alternations: int,
    work_s: float = _WORK_S,
    toggle: type[Toggle] | None = None,
    *,
    brings_callbacks: bool = False,
) -> dict[int, Blocks]:
    """Per rank: what a step of each block took, in its order."""
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        arguments = (name, alternations, work_s, folder, toggle or Toggle, brings_callbacks)
        result = spawn(_fit, 2, args=arguments, deadline="10m").check()
    return {rank: blocks_of(*result.results[rank]) for rank in sorted(result.results)}


def figures_of(name: str, ranks: Mapping[int, Blocks]) -> list[Figure]:
    """The figures of the rank to which the gate adds more wall time."""
    worse = max(ranks, key=lambda rank: median(differences(ranks[rank], "wall_us", "ours")))
    arms = ranks[worse]
    wall, cpu, spread = (
        differences(arms, *pair) for pair in (("wall_us", "ours"), ("cpu_us", "ours"), ("wall_us", "control"))
    )
    step_us = median(arms["stock"]["wall_us"])
    ratio, control = ([1 + value / step_us for value in values] for values in (wall, spread))
    excess = bootstrap_ci95(ratio)[1] - bootstrap_ci95(control)[1]
    calls = ", ".join(f"{arm} {median(arms[arm]['gate_us']):,.0f} us" for arm in ARMS)

    def figure(what: str, values: Sequence[float], unit: str, target: float | None = None, note: str = "") -> Figure:
        return Figure.of(f"{name}: {what}", values, unit, target=target, note=note)

    steps = f"rank {worse}, steps of {step_us / 1000:.1f} ms, {len(wall)} alternations"
    return [
        figure("added to a step", wall, "us", _TARGET_US, steps),
        figure("added CPU time", cpu, "us", note="of the training thread, without the work"),
        figure("wall, ours / stock", ratio, "", note=f"the call itself, waiting included: {calls}"),
        figure("wall, stock / stock", control, "", note="A/A: what nothing costs here"),
        Figure(name=f"{name}: upper bound beyond A/A's", value=excess, unit="", target=_TARGET_RATIO),
    ]


def differences(arms: Blocks, quantity: str, arm: str) -> list[float]:
    """``arm`` minus stock, one for each alternation."""
    return [mine - stock for mine, stock in zip(arms[arm][quantity], arms["stock"][quantity], strict=True)]


class Toggle(Callback):
    """Stands in the place of the gate and calls, in each step, that of the step's arm; notes the time at every call."""

    warm_up: Sequence[str] = ("stock",) * WARM_UP
    """The arms of the steps that are not measured."""

    def __init__(self, schedule: Sequence[str]) -> None:
        self.schedule = schedule
        self.marks: list[tuple[float, float, float]] = []  # wall and thread CPU time at entry, duration; in seconds
        self._gates: dict[str, Callable[[Any, int], None]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Takes its place at the first batch."""
        if not self._gates:
            self._model = pl_module
            self._gates = self.arms(trainer)
            trainer.strategy.on_train_batch_start = self._pass  # type: ignore[method-assign]

    def arms(self, trainer: pl.Trainer) -> dict[str, Callable[[Any, int], None]]:
        """What stands in the place of the gate, by arm."""
        loop: Any = trainer.fit_loop.epoch_loop
        broadcast = type(loop)._broadcast_sigterm_tensor.__get__(loop)

        def stock(batch: Any, batch_idx: int) -> None:
            broadcast()

        return {"ours": trainer.strategy.on_train_batch_start, "stock": stock, "control": stock}

    def _pass(self, batch: Any, batch_idx: int) -> None:
        # The loop calls it once more than there are steps in the schedule: that mark ends the last step.
        gate = self._gates[self.schedule[min(len(self.marks), len(self.schedule) - 1)]]
        cpu, start = time.thread_time(), time.perf_counter()
        gate(batch, batch_idx)
        self.marks.append((start, cpu - self._model.worked_s, time.perf_counter() - start))


def _fit(
    rank: int, name: str, alternations: int, work_s: float, folder: str, kind: type[Toggle], brings_callbacks: bool
) -> tuple[list[str], list[Any]]:
    """One rank: the arm of each step, and the marks."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    order = random.Random(0)
    blocks = [arm for _ in range(alternations) for arm in order.sample(ARMS, len(ARMS))]
    toggle = kind([*kind.warm_up, *(arm for arm in blocks for _ in range(BLOCK))])
    num_steps = len(toggle.schedule) + 2  # the first gate passes before the toggle is there; the last one only ends
    options = {"monitor": brings_callbacks, "preemption": brings_callbacks, **STRATEGIES[name]}
    trainer = jobs.trainer(
        getattr(lightning_distplus, name)(**options), folder, max_steps=num_steps, callbacks=[toggle]
    )
    data = torch.randn(8 * num_steps, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(rank))
    trainer.fit(jobs.Model(work_s), DataLoader(data, batch_size=8))
    return blocks, toggle.marks


def blocks_of(blocks: Sequence[str], marks: Sequence[Sequence[float]]) -> Blocks:
    """A step lasts from one call of the gate to the next; the median of a block ignores what others interrupt."""
    wall, cpu, gate = (np.asarray(column) * 1e6 for column in zip(*marks, strict=True))
    steps = {"wall_us": np.diff(wall), "cpu_us": np.diff(cpu), "gate_us": gate}
    warm_up = len(wall) - 1 - len(blocks) * BLOCK
    medians: Blocks = {arm: {quantity: [] for quantity in steps} for arm in ARMS}
    for number, arm in enumerate(blocks):
        first = warm_up + number * BLOCK
        for quantity, values in steps.items():
            medians[arm][quantity].append(median(values[first : first + BLOCK].tolist()))
    return medians
