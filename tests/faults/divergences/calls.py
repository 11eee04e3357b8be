"""Rows D12, D13 and D15: models, generators and collectives of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from tests.distributed import jobs
from tests.faults.divergences.registry import (
    OUR_DDP,
    Run,
    diverges,
)

# -- D12 and D13: models and generators --------------------------------------------------------------------------------


class _Unlike(jobs.Model):
    def __init__(self, run: Run, how: str) -> None:
        super().__init__()
        self.run = run
        self.how = how

    def configure_model(self) -> None:
        how = self.how if self.run.is_guilty else ""
        parts = {"first": torch.nn.Linear(jobs.NUM_FEATURES, 8), "other": torch.nn.Linear(8, 8)}
        for name in ["other", "first"] if how == "order" else ["first", "other"]:
            setattr(self, name, parts[name])
        if how == "dtype":
            self.other.double()
        if how == "buffer":
            self.register_buffer("scale", torch.ones(3))
        if how == "frozen":
            self.other.bias.requires_grad = False
        self.net = self.first

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch)
        return self.other(hidden.to(self.other.weight.dtype)).float().pow(2).mean()


for _how, _number in (("order", 35), ("dtype", 36), ("buffer", 0), ("frozen", 0)):

    def _build_unlike(run: Run, how: str) -> None:
        run.module = _Unlike(run, how)

    _plant: Any = partial(_build_unlike, how=_how)
    _plant.__name__ = f"model_is_built_with_another_{_how}"
    diverges("D12", "model", number=_number)(_plant)


class _Seed(Callback):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_fit_start(self, *_: Any) -> None:
        torch.manual_seed(self.seed)


@diverges("D13", "the state of the torch generator", number=12, blame="pair")
def generator_is_anothers(run: Run) -> None:
    run.callbacks.append(_Seed((run.rank + run.is_guilty) % run.size))
    run.monitor["rng_policy"] = {"torch": "distinct"}


@diverges("D13", "the state of the torch generator")
def generator_differs(run: Run) -> None:
    run.callbacks.append(_Seed(int(run.is_guilty)))
    run.monitor["rng_policy"] = {"torch": "same"}


# -- D15: collectives of one's own -------------------------------------------------------------------------------------


class _Exchange(Callback):
    """A collective of the user's after each batch; the guilty rank once makes another one."""

    def __init__(self, run: Run, usual: Callable[[], object], odd: Callable[[], object]) -> None:
        self.run = run
        self.usual = usual
        self.odd = odd

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        is_due = trainer.global_step == self.run.step
        if is_due:
            self.run.note()
        self.odd() if is_due and self.run.is_guilty else self.usual()


def _exchanges(run: Run, usual: Callable[[], object], odd: Callable[[], object]) -> None:
    run.monitor["trace_collectives"] = True
    run.callbacks.append(_Exchange(run, usual, odd))


@diverges("D15", "arguments", number=37)
def operation_differs(run: Run) -> None:
    ones = torch.ones(4)
    _exchanges(run, lambda: dist.all_reduce(ones), lambda: dist.all_reduce(ones, dist.ReduceOp.MAX))


@diverges("D15", "arguments")
def root_differs(run: Run) -> None:
    ones, other = torch.ones(4), (run.guilty + 1) % run.size
    _exchanges(run, lambda: dist.broadcast(ones, src=run.guilty), lambda: dist.broadcast(ones, src=other))


@diverges("D15", "structure", number=9)
def shape_differs(run: Run) -> None:
    _exchanges(run, lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(2)))


@diverges("D15", "collective")
def call_differs(run: Run) -> None:
    _exchanges(run, lambda: dist.all_reduce(torch.ones(4)), lambda: dist.barrier())


@diverges("D15", "collective", number=33, blame="guilty")
def call_is_made_alone(run: Run) -> None:
    _exchanges(run, lambda: None, lambda: dist.all_reduce(torch.ones(4)))


@diverges("D15", "collective", number=21, blame="guilty")
def barrier_is_called_alone(run: Run) -> None:
    _exchanges(run, lambda: None, lambda: dist.barrier())


@diverges("D15", "collectives", on=OUR_DDP, is_before=False)
def call_is_begun_alone(run: Run) -> None:
    """The guilty rank does not wait for it: its peers' next sum of gradients would be summed with it."""
    run.strike(lambda trainer, module: dist.all_reduce(torch.ones(4), async_op=True))
