"""What the check of a collective costs: one exchange over the control plane before the collective itself.

The ranks do nothing but call, all at once and with equal points, as in a healthy run. Every arm takes what a caller
pays: the name, the structure and the frames of the call are made each time. In every arm one small all_reduce stands
for the collectives of the call, so that the ranks meet after Lightning's own part whether the call is checked or not:
else the check alone would pay for the ranks that share a core. Blocks of checked calls, of calls that are not checked,
and of checked calls again (A/A) alternate.
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
import torch.distributed as dist

from benchmarks.figures import Figure, median
from benchmarks.jobs import Model
from lightning_distplus import ResilientDDP
from lightning_distplus.testing import spawn

__all__ = ["measure", "run"]

_PROCESSES = (2, 4)
_TARGET_MS = 0.3
_BLOCK = 20
_ARMS = ("checked", "unchecked", "control")
Taken = dict[str, dict[str, list[float]]]
"""Kind of call -> arm -> milliseconds of a call, the median of each block."""


def run(quick: bool) -> list[Figure]:
    """Times 100 blocks of each kind (quick: 10) with 2 and 4 processes."""
    return [figure for size in _PROCESSES for figure in _figures(size, 10 if quick else 100)]


def _figures(size: int, num_blocks: int) -> list[Figure]:
    ranks = spawn(measure, size, args=(size, num_blocks), deadline="180s").check().results
    figures = []
    for kind in ranks[0]:
        arms = {arm: [taken for of_one in ranks.values() for taken in of_one[kind][arm]] for arm in _ARMS}
        added = [ours - theirs for ours, theirs in zip(arms["checked"], arms["unchecked"], strict=True)]
        spread = [ours - again for ours, again in zip(arms["checked"], arms["control"], strict=True)]
        name = f"{kind}, {size} processes"
        figures += [
            Figure.of(
                f"{name}: added", added, "ms", target=_TARGET_MS,
                note=f"p90 {statistics.quantiles(added, n=10)[-1]:.3f}, least {min(added):.3f}; "
                f"Lightning's own part and an all_reduce {median(arms['unchecked']):.3f}",
            ),
            Figure.of(f"{name}: A/A", spread, "ms"),
        ]  # fmt: skip
    return figures


def measure(size: int, num_blocks: int) -> Taken:
    """What each kind of call takes on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        timed = _Timed(num_blocks)
        trainer = pl.Trainer(
            strategy=ResilientDDP(preflight=False, monitor=False, preemption=False),
            accelerator="cpu", devices=size, default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            max_steps=1, callbacks=[timed],
        )  # fmt: skip
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8 * size, 64), batch_size=4))
    return timed.taken_ms


class _Timed(pl.Callback):
    """Times the calls; one all_reduce stands for the collectives of each, in every arm."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.taken_ms: Taken = {}

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
                self.taken_ms[kind] = self._blocks(strategy, call)

    def _blocks(self, strategy: Any, call: Callable[[], Any]) -> dict[str, list[float]]:
        points = strategy.collectives.points
        taken: dict[str, list[float]] = {arm: [] for arm in _ARMS}
        for number in range(self.num_blocks + 1):  # the first one warms up
            for arm in _ARMS:
                strategy.collectives.points = None if arm == "unchecked" else points
                call()  # the ranks meet again
                block = median([_milliseconds(call) for _ in range(_BLOCK)])
                if number:
                    taken[arm].append(block)
        strategy.collectives.points = points
        return taken


def _milliseconds(call: Callable[[], Any]) -> float:
    value = torch.ones(1)
    begin = time.perf_counter()
    call()
    dist.all_reduce(value)
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
