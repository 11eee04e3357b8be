"""What the divergence monitor adds to a step, with the stock broadcast credited; its passes over memory; its rivals.

The monitor is toggled inside one fit with DDP on two processes, each pinned to a core, in blocks of steps as in
``strategy_cost``: everything on with default settings, Lightning's broadcast alone, and the broadcast again (A/A).
Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` single calls are timed: DDP on gloo dies of a segmentation fault (torch 2.13).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks import jobs, strategy_cost
from benchmarks.figures import Figure
from lightning_distplus import RankDivergenceMonitor, ResilientDDP
from lightning_distplus.divergence.gradients import BucketHook, GradientCheck, LocalGradients
from lightning_distplus.divergence.replicas import Windows
from lightning_distplus.testing import spawn

__all__ = ["run"]

_STEPS_S = {"20 ms": 0.017, "100 ms": 0.097}
_LAYERS, _WIDTH = 10, 1000  # ten million parameters
_FEW_TOKENS, _TOKENS = 256, 2048  # in a micro-batch: four sequences of 512, and an eighth of that
_QUICK_TOKENS = 16, 32  # a backward of 2,048 takes seconds on a busy core
_TARGET_SHARE = 1.0  # percent
_STATE_PARAMETERS = 100_000_000
_TARGET_WINDOW_MS = 1.5
_TARGET_SLOWDOWN = 2.0  # against a plain sum over the same bytes


def run(quick: bool) -> list[Figure]:
    """Two fits with 80 alternations (quick: one with 8), and passes over memory: three to four minutes."""
    steps = list(_STEPS_S.items())[:1] if quick else list(_STEPS_S.items())
    figures = [figure for name, work_s in steps for figure in _step_figures(name, work_s, 8 if quick else 80)]
    return [
        *figures,
        *_gradient_figures(*((3, *_QUICK_TOKENS) if quick else (20, _FEW_TOKENS, _TOKENS))),
        *_window_figures(*((3, 16) if quick else (20, 1))),
        *_rival_figures(quick),
    ]


# -- a step ------------------------------------------------------------------------------------------------------------


def _step_figures(name: str, work_s: float, alternations: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        found = spawn(_fit, 2, args=(alternations, work_s, folder), deadline="10m").check().results
    ranks = {rank: strategy_cost.blocks_of(*found[rank]) for rank in sorted(found)}
    return strategy_cost.figures_of(f"monitor, {name}", ranks)


class _Toggle(strategy_cost.Toggle):
    """Switches the checks on and off with the gate."""

    def __init__(self, schedule: list[str], monitor: RankDivergenceMonitor) -> None:
        super().__init__(schedule)
        self._monitor = monitor

    def arms(self, trainer: Any) -> dict[str, Callable[[Any, int], None]]:
        """The gates; the checks rest while another one than ours is called."""
        return {arm: self._with_checks(gate, is_on=arm == "ours") for arm, gate in super().arms(trainer).items()}

    def _with_checks(self, gate: Callable[[Any, int], None], *, is_on: bool) -> Callable[[Any, int], None]:
        monitor, checks = self._monitor, list(self._monitor.checks)
        gradient_checks = [check for check in checks if isinstance(check, GradientCheck)]

        def switched(batch: Any, batch_idx: int) -> None:
            assert monitor._run is not None
            monitor._run.gate.is_open = is_on
            monitor.checks = checks if is_on else []
            for check in gradient_checks:
                assert check._hook is not None
                check._hook._gradients = check._gradients if is_on else None
            gate(batch, batch_idx)

        return switched


def _fit(rank: int, alternations: int, work_s: float, folder: str) -> tuple[list[str], list[Any]]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    order = random.Random(0)
    arms, block = strategy_cost.ARMS, strategy_cost.BLOCK
    blocks = [arm for _ in range(alternations) for arm in order.sample(arms, len(arms))]
    monitor = RankDivergenceMonitor()
    schedule = [*["stock"] * strategy_cost.WARM_UP, *(arm for arm in blocks for _ in range(block))]
    toggle = _Toggle(schedule, monitor)
    num_steps = len(schedule) + 2
    data = torch.randn(8 * num_steps, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(rank))
    trainer = jobs.trainer(
        ResilientDDP(monitor=False, preemption=False), folder, max_steps=num_steps, callbacks=[monitor, toggle]
    )
    trainer.fit(jobs.Model(work_s), DataLoader(data, batch_size=8))
    return blocks, toggle.marks


# -- passes over memory ------------------------------------------------------------------------------------------------


def _fastest_ms(repeats: int, **calls: Callable[[], object]) -> dict[str, float]:
    """The fastest of many, in turn: what else runs on this machine makes a pass over memory slower, never faster."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if number:
                taken[name].append((time.perf_counter() - begin) * 1e3)
    return {name: min(values) for name, values in taken.items()}


def _gradient_figures(repeats: int, few_tokens: int, many_tokens: int) -> list[Figure]:
    """The look at the gradients of ten million parameters, where DDP has just put them into its buckets.

    It costs the same whatever the micro-batch is, so that its share depends on how many tokens a backward has.
    """
    few, many = (_fastest_of_backward(tokens, repeats) for tokens in (few_tokens, many_tokens))
    look_ms = min(few["look"] - few["scale"], many["look"] - many["scale"])
    shares = [
        Figure(
            name=f"non-finite, share of backward, {tokens} tokens", value=100 * look_ms / took["backward"], unit="%",
            target=_TARGET_SHARE if tokens == _TOKENS else None,
            note=f"fastest of {repeats}: {look_ms:.2f} of {took['backward']:.0f} ms; 10 M parameters",
        )
        for tokens, took in ((few_tokens, few), (many_tokens, many))
    ]  # fmt: skip
    plain_ms = min(few["sum"], many["sum"])
    return [
        *shares,
        Figure(name="non-finite, time / plain sum", value=look_ms / plain_ms, unit="", target=_TARGET_SLOWDOWN,
               note=f"a plain sum there: {plain_ms:.2f} ms"),
    ]  # fmt: skip


def _fastest_of_backward(tokens: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        (took,) = spawn(_backward, 1, args=(folder, tokens, repeats), deadline="5m").check().results.values()
    return {name: min(values) for name, values in took.items()}


class _TimedHook(BucketHook):
    """Looks and scales, only scales, or sums up, and notes how long that takes."""

    arm = "look"
    taken_ms = 0.0

    def _look_and_scale(self, part: torch.Tensor, own: Sequence[Any], size: int) -> bool | torch.Tensor:
        begin = time.perf_counter()
        if self.arm == "look":
            super()._look_and_scale(part, own, size)
        elif self.arm == "scale":
            part.mul_(1 / size)
        else:
            part.sum()
        self.taken_ms += (time.perf_counter() - begin) * 1e3
        return True


def _backward(rank: int, folder: str, tokens: int, repeats: int) -> dict[str, list[float]]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=1)
    net = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    model = torch.nn.parallel.DistributedDataParallel(net)
    hook = _TimedHook(LocalGradients(), {id(one): name for name, one in net.named_parameters()}, model.process_group)
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # type: ignore[arg-type]
    batch = torch.randn(tokens, _WIDTH)
    took: dict[str, list[float]] = {"look": [], "scale": [], "sum": [], "backward": []}
    for number in range(3 * repeats):
        hook.arm, hook.taken_ms = ("look", "scale", "sum")[number % 3], 0.0
        loss = model(batch).pow(2).mean()
        begin = time.perf_counter()
        loss.backward()
        took["backward"].append((time.perf_counter() - begin) * 1e3)
        took[hook.arm].append(hook.taken_ms)
        hook.was_flagged()
    del model
    dist.destroy_process_group()
    return took


def _window_figures(repeats: int, smaller: int) -> list[Figure]:
    """One window of sixteen of the weights' fingerprint, as CPUs take it."""
    weights = [torch.randn(_STATE_PARAMETERS // smaller // 10) for _ in range(10)]
    windows = Windows(weights, 16)
    parts = [weights[piece.number].view(-1)[piece.start : piece.stop] for piece in windows.pieces[3]]
    size_mb = sum(part.numel() for part in parts) * 4 / 1e6
    took = _fastest_ms(
        3 * repeats,
        window=lambda: windows.fingerprint(3),
        sum=lambda: [part.sum() for part in parts],
    )
    note = f"fastest of {3 * repeats}: {size_mb:.0f} MB; a plain sum {took['sum']:.2f} ms"
    return [
        Figure(name="state window", value=took["window"], unit="ms", target=_TARGET_WINDOW_MS, note=note),
        Figure(name="state window, time / plain sum", value=took["window"] / took["sum"], unit="",
               target=_TARGET_SLOWDOWN),
    ]  # fmt: skip


# -- rivals ------------------------------------------------------------------------------------------------------------


def _rival_figures(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        found = spawn(_rivals, 2, args=(folder, 50 if quick else 500), deadline="120s").check().results
    return [Figure.of(f"rival: {name}", taken, "us") for name, taken in found[0].items()]


def _rivals(rank: int, folder: str, repeats: int) -> dict[str, list[float]]:
    record = {"step": 1, "epoch": 0, "structure": "float32[8, 64]"}
    numbers = torch.ones(16)
    rivals: dict[str, Callable[[], object]] = {
        "monitored_barrier, once a step": lambda: dist.monitored_barrier(timeout=timedelta(seconds=60)),
        "all_gather_object, once a step": lambda: dist.all_gather_object([None, None], record),
        "all_reduce of 64 bytes": lambda: dist.all_reduce(numbers.fill_(1.0)),
    }
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {name: _repeat(call, repeats) for name, call in rivals.items()}
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG says it
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet again", rank=rank, world_size=2)
    found["the same under DETAIL, at each call"] = _repeat(rivals["all_reduce of 64 bytes"], repeats)
    dist.destroy_process_group()
    return found


def _repeat(call: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each call."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e6)
    return taken
