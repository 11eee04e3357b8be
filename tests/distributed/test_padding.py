"""Padded samples weigh nothing: means and metrics over 2 ranks are those of the samples alone. Row D3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchmetrics import MeanMetric

from lightning_distplus import ResilientDDP
from lightning_distplus.testing import spawn
from tests.distributed.resume_jobs import SampleDiary, map_data, quiet_trainer


class Weighted(SampleDiary):
    """Takes means as docs/guides/data.md says."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.nn.ModuleDict({"of_train": MeanMetric(), "of_val": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.note("of_train", batch)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("of_val", batch)

    def note(self, name: str, batch: Any) -> None:
        samples, weights = batch
        self.means[name].update(samples[:, 0], weights)
        self.log(name, self.means[name], on_step=False, on_epoch=True)


def fit_padded(rank: int, folder: str) -> dict[str, float]:
    strategy = ResilientDDP(timeout="30s")
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, default_root_dir=folder)
    trainer.fit(Weighted(), map_data(17, batch_size=5, uneven="pad"))
    return {name: value.item() for name, value in trainer.logged_metrics.items()}


def test_means_over_ranks_do_not_count_padded_samples(tmp_path: Path) -> None:
    results = spawn(fit_padded, 2, args=(str(tmp_path),), deadline="40s").check().results
    for means in results.values():
        assert means == {"of_train": sum(range(17)) / 17, "of_val": sum(range(5)) / 5}
