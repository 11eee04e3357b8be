"""The small training job that the benchmarks run on two CPU processes."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch

__all__ = ["NUM_FEATURES", "Model", "trainer"]

NUM_FEATURES = 64


class Model(pl.LightningModule):
    """A step that computes for a fixed time, so that what others do on this machine falls out of the differences."""

    def __init__(self, work_s: float = 0.0) -> None:
        super().__init__()
        self.work_s = work_s
        self.worked_s = 0.0
        """CPU time of this thread that the multiplications took so far: all that others leave of the time."""
        self.net: torch.nn.Module | None = None
        self.matrix = torch.randn(NUM_FEATURES, NUM_FEATURES)

    def configure_model(self) -> None:
        """One layer, sharded where the strategy has a mesh."""
        if self.net is None:
            self.net = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES)
            mesh = getattr(self, "_device_mesh", None)
            if mesh is not None:
                torch.distributed.fsdp.fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Multiplies matrices until the time is over."""
        began, end = time.thread_time(), time.perf_counter() + self.work_s
        while time.perf_counter() < end:
            self.matrix @ self.matrix
        self.worked_s += time.thread_time() - began
        assert self.net is not None
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(strategy: Any, folder: str, **arguments: Any) -> pl.Trainer:
    """A Trainer for two CPU processes that shows and writes nothing by itself."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **arguments,
    )
