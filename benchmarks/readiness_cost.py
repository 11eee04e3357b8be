"""What readiness to stop costs the training thread in each step, beside stock's broadcast in each batch.

The handler answers the gate, which travels anyway, and is one more callback. Both are timed on two processes: its
answers within a fit, and after it Lightning's calls of all hooks of a step, with the handler among the callbacks and
without it. In a fit of the stock strategy its broadcast is timed, with the wait for the other process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from benchmarks import jobs
from benchmarks.figures import Figure
from lightning_distplus import PreemptionHandler, ResilientDDP
from lightning_distplus.testing import spawn

__all__ = ["ready", "run", "stock"]

_TARGET_US = 40.0
_WARM_UP = 10
_WORK_S = 0.005
_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def run(quick: bool) -> list[Figure]:
    """One fit of each kind, of 300 steps (quick: 60)."""
    steps = 60 if quick else 300
    answers, hooks = spawn(ready, 2, args=(steps,), deadline="120s").check().results[0]
    broadcasts = spawn(stock, 2, args=(steps,), deadline="120s").check().results[0]
    readiness, note = [answer + hooks for answer in answers], f"{len(answers)} steps"
    return [
        Figure.of("readiness to stop, a step", readiness, "us", target=_TARGET_US, note=note),
        Figure.of("  of it the answer to the gate", answers, "us", note=note),
        Figure(name="  of it the hooks of one more callback", value=hooks, unit="us", note="the fastest of 200"),
        Figure.of("stock: broadcast and synchronisation, a batch", broadcasts, "us", note=f"{len(broadcasts)} steps"),
    ]


class _Timed:
    """A function that notes how long it takes, in microseconds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.took_us: list[float] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = self.function(*arguments, **named)
        self.took_us.append((time.perf_counter() - begin) * 1e6)
        return result


class _AtTrainStart(Callback):
    """Calls back when everything is attached; ours come before it."""

    def __init__(self, attach: Callable[[pl.Trainer], None]) -> None:
        self.attach = attach

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Once."""
        self.attach(trainer)


def ready(rank: int, steps: int) -> tuple[list[float], float]:
    """Per step the answer to the gate; and the hooks of one more callback; microseconds."""
    handler = PreemptionHandler()
    answers: list[_Timed] = []

    def attach(trainer: pl.Trainer) -> None:
        answers.append(_Timed(handler.wish))
        vars(handler)["wish"] = answers[0]

    class Hooks(Callback):
        """Times the calls of a step's hooks on both lists of callbacks, where the strategy still marks them."""

        us = 0.0

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            present = trainer.callbacks  # type: ignore[attr-defined]
            with_it, without = _hooks_us(trainer, [handler]), _hooks_us(trainer, [])
            trainer.callbacks = present  # type: ignore[attr-defined]
            self.us = with_it - without

    hooks = Hooks()
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        _fit(
            jobs.trainer(
                ResilientDDP(monitor=False, preemption=False),
                folder,
                max_steps=steps,
                callbacks=[handler, _AtTrainStart(attach), hooks],
            )
        )
    return answers[0].took_us[_WARM_UP:], hooks.us


def _hooks_us(trainer: Any, callbacks: list[Callback]) -> float:
    trainer.callbacks = callbacks
    fastest = float("inf")
    for _ in range(200):
        begin = time.perf_counter()
        for name in _HOOKS:
            call._call_callback_hooks(trainer, name, *_arguments_of(name))
        fastest = min(fastest, (time.perf_counter() - begin) * 1e6)
    return fastest


def _arguments_of(name: str) -> tuple[Any, ...]:
    return {"on_train_batch_start": (None, 1), "on_train_batch_end": (None, None, 1), "on_after_backward": ()}.get(
        name, (None,)
    )


def stock(rank: int, steps: int) -> list[float]:
    """Per batch the broadcast by which stock Lightning spreads a SIGTERM; microseconds."""
    broadcasts: list[_Timed] = []

    def attach(trainer: pl.Trainer) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        broadcasts.append(_Timed(loop._broadcast_sigterm_tensor))
        loop._broadcast_sigterm_tensor = broadcasts[0]

    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        _fit(jobs.trainer(DDPStrategy(), folder, max_steps=steps, callbacks=[_AtTrainStart(attach)]))
    return broadcasts[0].took_us[_WARM_UP:]


def _fit(trainer: pl.Trainer) -> None:
    data = torch.randn(2000, jobs.NUM_FEATURES)
    trainer.fit(jobs.Model(work_s=_WORK_S), DataLoader(data, batch_size=2))  # type: ignore[arg-type]
