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
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import ResilientDDP
from lightning_distplus.testing import weights_digest
from tests.distributed import resume_jobs
from tests.distributed.resume_jobs import SaveAt, quiet_trainer


class Augmented(Dataset):
    """Sample i is (i, random numbers of each generator)."""

    def __init__(self, num_samples: int = 17) -> None:
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.read.append(index)
        if isinstance(index, list):
            return torch.stack([self[one] for one in index])
        return torch.tensor([float(index), random.random() + np.random.rand() + torch.rand(()).item()])


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


def final_counters(model: Diary) -> dict[str, Any]:
    """All counters of the Trainer's loops, and the weights, after a fit."""
    loop = model.trainer.fit_loop
    optimizer = loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    return {
        "epochs": loop.epoch_progress.state_dict(),
        "batches": loop.epoch_loop.batch_progress.state_dict(),
        "steps": optimizer.step.total.state_dict(),
        "zero_grads": optimizer.zero_grad.total.state_dict(),
        "validation": loop.epoch_loop.val_loop.batch_progress.total.state_dict(),
        "weights": weights_digest(model),
    }


def assert_every_save_resumes_exactly(loader: Callable[[], Any], hook: str, folder: Path, **arguments: Any) -> int:
    """Resumes from every save: the events must be the last ones of the undisturbed run, and none may be missing."""
    saver = SaveAt(hook, folder)
    undisturbed = fit(loader, callbacks=[saver], **arguments)
    window = undisturbed.trainer.accumulate_grad_batches
    for path, num_before in saver.saves:
        resumed = fit(loader, ckpt_path=path, **arguments)
        left = undisturbed.events[num_before:]
        if not resumed.events:  # Lightning leaves a finished run as it is, also what was due after its last step
            assert not any(event[0] == "train" for event in left)
            continue
        # The hook of the module that follows the hook of the callback is not repeated.
        may_lack = hook in ("on_train_epoch_end", "on_train_epoch_start")
        assert len(resumed.events) >= len(left) - may_lack, path.name
        assert resumed.events == undisturbed.events[len(undisturbed.events) - len(resumed.events) :], path.name
        repeated = sum(event[0] == "train" for event in resumed.events) - sum(event[0] == "train" for event in left)
        assert 0 <= repeated < window + (hook == "on_before_optimizer_step"), path.name
        assert final_counters(resumed) == final_counters(undisturbed), path.name
    return len(saver.saves)
