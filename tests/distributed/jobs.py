"""Small training jobs that the distributed tests run in real processes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

import lightning_distplus
from lightning_distplus import _compat
from lightning_distplus.preflight.host import HOST_CHECKS

STRATEGIES = ("ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "ResilientDeepSpeed")
NUM_FEATURES = 8


class Model(pl.LightningModule):
    """Two layers with dropout; its loss is a pure function of weights, batch and random state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.net: nn.Module | None = None
        self.losses: list[str] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(self.seed)
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=mesh["data_parallel"])
        torch.manual_seed(100 + self.trainer.global_rank)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.losses.append(loss.item().hex())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(num_samples: int = 64, batch_size: int = 4) -> DataLoader:
    """The same samples on every rank, in the same order."""
    samples = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(7))
    return DataLoader(samples, batch_size=batch_size, generator=torch.Generator().manual_seed(8))


def strategy(name: str, **arguments: Any) -> Any:
    """A strategy by class name: one of ours, or one of Lightning's.

    Ours come without a monitor unless a test asks for one: `loader` gives all ranks the same samples, and faults are
    planted that the monitor would name before the part that a test is about.
    """
    home = lightning_distplus if name.startswith("Resilient") else pl.strategies
    if home is lightning_distplus:
        arguments = {"monitor": False, **arguments}
    return getattr(home, name)(**arguments)


def trainer(strategy: Any, world_size: int, folder: str, **arguments: Any) -> pl.Trainer:
    """A Trainer on the CPU that writes nothing by itself."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        default_root_dir=folder,
        **{**quiet, **arguments},
    )


def findings_of_preflight(run: Any) -> list[str]:
    """What the checks told of a run, but for those of the host: a busy machine writes slowly."""
    lines = [line for log in run.logs.values() for line in log.splitlines() if "preflight (" in line]
    return [line for line in lines if not any(f"preflight ({name})" in line for name in HOST_CHECKS)]


class GroupTimeouts(Callback):
    """Writes down the time-out in force on every group, at one moment of each phase."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def note(self, phase: str) -> None:
        groups = _compat.process_groups()
        self.seen[phase] = [_compat.read_group_timeout(group).total_seconds() for group in groups]

    def on_fit_start(self, *_: Any) -> None:
        self.note("setup")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.note("step")
        if batch_idx == 4:
            self.note("step after validation")

    def on_validation_batch_start(self, *_: Any) -> None:
        self.note("validation")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("before a save")

    def on_train_end(self, *_: Any) -> None:
        self.note("end")
