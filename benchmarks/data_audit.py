"""What SampleAudit costs the training thread, per micro-batch of a real run on packed tokens."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from benchmarks.figures import Figure
from lightning_distplus.data import MegatronWriter, SampleAudit, Source, TokenDataModule

__all__ = ["run"]

_TARGET_US = 50.0
_SKIPPED = 50  # steps to warm up


def run(quick: bool) -> list[Figure]:
    """Times the callback's hooks in 5,000 steps (quick: 500), micro-batch 8, a mixture of two sources."""
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        audit = _Timed()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, default_root_dir=folder, max_steps=500 if quick else 5000, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[audit],
        )  # fmt: skip
        trainer.fit(_Model(), TokenDataModule([*_sources(Path(folder))], seq_len=32, micro_batch_size=8))
    taken_us = [nanoseconds / 1000 for nanoseconds in audit.taken_ns[_SKIPPED:]]
    mean_us = sum(taken_us) / len(taken_us)
    return [
        Figure.of("audit, median", taken_us, "us", target=_TARGET_US),
        Figure(
            name="audit, mean", value=mean_us, unit="us", target=_TARGET_US, note="sums of 256 micro-batches included"
        ),
    ]


def _sources(folder: Path) -> list[Source]:
    for name in "ab":
        with MegatronWriter(folder / name) as writer:
            writer.add_document(np.arange(100_000) % 1000)
    return [Source(path=str(folder / name)) for name in "ab"]


class _Timed(SampleAudit):
    """Adds up the time of the two hooks of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_ns: list[int] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        begin = time.perf_counter_ns()
        super().on_train_batch_start(*arguments)
        self.taken_ns.append(time.perf_counter_ns() - begin)

    def on_train_batch_end(self, *arguments: Any) -> None:
        begin = time.perf_counter_ns()
        super().on_train_batch_end(*arguments)
        self.taken_ns[-1] += time.perf_counter_ns() - begin


class _Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch["input_ids"].float()).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)
