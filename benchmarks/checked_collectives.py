"""What the check of a collective costs: one exchange over the control plane before the collective itself.

The ranks do nothing but check, all at once and with equal points, as in a healthy run. Every arm takes what a caller
pays: the name, the structure and the frames of the call are made each time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.figures import Figure, bootstrap_ci95, median
from benchmarks.jobs import Model
from lightning_distplus import ResilientDDP
from lightning_distplus.testing import spawn

__all__ = ["measure", "run"]

_PROCESSES = (2, 4)
_TARGET_MS = 0.3


def run(quick: bool) -> list[Figure]:
    """Times 2,000 checks of each kind (quick: 100) with 2 and 4 processes."""
    figures: list[Figure] = []
    for size in _PROCESSES:
        ranks = spawn(measure, size, args=(size, 100 if quick else 2000), deadline="180s").check().results
        for kind in ranks[0]:
            taken_ms = [milliseconds for of_one_rank in ranks.values() for milliseconds in of_one_rank[kind]]
            name = f"{kind}, {size} processes"
            figures += [
                Figure(
                    name=f"{name}, median", value=median(taken_ms), unit="ms", ci95=bootstrap_ci95(taken_ms),
                    target=_TARGET_MS,
                ),
                Figure(name=f"{name}, p90", value=statistics.quantiles(taken_ms, n=10)[-1], unit="ms"),
            ]  # fmt: skip
    return figures


def measure(size: int, num_calls: int) -> dict[str, list[float]]:
    """Milliseconds of each check on this rank, by kind of call; a tenth more warms up."""
    with tempfile.TemporaryDirectory() as folder:
        timed = _Timed(num_calls)
        trainer = pl.Trainer(
            strategy=ResilientDDP(preflight=False), accelerator="cpu", devices=size, default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            max_steps=1, callbacks=[timed],
        )  # fmt: skip
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8 * size, 64), batch_size=4))
    return timed.taken_ms


class _Timed(pl.Callback):
    """Times the checks alone: the parent's collective is left out of each call."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.taken_ms: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        with _without_collectives(trainer.strategy):
            strategy, value = trainer.strategy, torch.ones(4, 8)
            tree = {"scores": (value, value), "labels": [value]}
            kinds: dict[str, Callable[[], Any]] = {
                "barrier": lambda: strategy.barrier("benchmark"),
                "reduce": lambda: strategy.reduce(value),
                "all_gather of a tree": lambda: module.all_gather(tree),
            }
            for kind, call in kinds.items():
                self.taken_ms[kind] = [_milliseconds(call) for _ in range(self.num_calls * 11 // 10)]
                del self.taken_ms[kind][: self.num_calls // 10]


def _milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


class _without_collectives(AbstractContextManager[None]):  # noqa: N801  # reads as a statement
    """Takes the collectives out of Lightning's own strategy for a moment, in this process."""

    def __init__(self, strategy: Any) -> None:
        self._parent = next(cls for cls in type(strategy).__mro__ if cls.__module__.startswith("lightning.pytorch"))
        self._replaced = {
            "barrier": lambda *_, **__: None,
            "reduce": lambda _, tensor, *__, **___: tensor,
            "all_gather": lambda _, tensor, *__, **___: tensor,
        }

    def __enter__(self) -> None:
        self._own = {name: vars(self._parent).get(name) for name in self._replaced}
        for name, method in self._replaced.items():
            setattr(self._parent, name, method)

    def __exit__(self, *_: object) -> None:
        for name, method in self._own.items():
            if method is None:
                delattr(self._parent, name)
            else:
                setattr(self._parent, name, method)
