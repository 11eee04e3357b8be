"""A small run over a plain DataLoader under a Resilient strategy, for the tests of its exact resume."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_distplus import ResilientDDP
from tests.distributed import resume_jobs
from tests.distributed.resume_jobs import quiet_trainer


class Diary(resume_jobs.Diary):
    """Notes every batch with the counters of the Trainer.

    Args:
        plans_schedule: Whether the number of steps is asked for before the loops are restored.
        draws: Whether each step draws random numbers, as dropout does; one that is done again draws others.
    """

    def __init__(self, *, plans_schedule: bool, draws: bool) -> None:
        super().__init__(plans_schedule=plans_schedule)
        self.draws = draws

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples = torch.cat([one.reshape(-1, 2) for one in _tensors(batch)])
        self.note("train", batch_idx, tuple(samples[:, 0].int().tolist()), tuple(samples[:, 1].tolist()))
        noise = torch.rand(1) * np.random.rand() if self.draws else 1
        return (self.layer(samples) * noise).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.note("validate", batch_idx, tuple(batch[:, 0].int().tolist()))


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif batch is not None:
        for one in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(one)


def fit(
    loader: Any,
    *,
    ckpt_path: str | Path | None = None,
    plans_schedule: bool = False,
    draws: bool = True,
    strategy: Callable[[], Any] = ResilientDDP,
    seed: int = 5,
    validates: bool = True,
    **arguments: Any,
) -> Diary:
    """One fit on one rank, in this process."""
    pl.seed_everything(seed)
    model = Diary(plans_schedule=plans_schedule, draws=draws)
    settings = {"strategy": strategy(), "max_epochs": 3, **arguments}
    val = DataLoader(torch.zeros(3, 2)) if validates else None
    random.random()
    with tempfile.TemporaryDirectory() as root:
        quiet_trainer(**{"default_root_dir": root, **settings}).fit(model, loader(), val, ckpt_path=ckpt_path)
    return model
