"""Row R1 under DDP on three and four ranks: a sum of three depends on how DDP cuts its buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distplus import ResilientDDP
from lightning_distplus.data import ResumableDataModule
from lightning_distplus.testing import spawn
from tests.distributed.resume_jobs import SaveAt, quiet_trainer

NUM_STEPS = 4


class Model(pl.LightningModule):
    """Registers its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(41, 1), nn.Linear(1, 37), nn.Linear(37, 41)
        self.events: list[Any] = []  # for SaveAt

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.middle(self.first(batch.float().view(-1, 1) / 7).tanh()).tanh()
        return self.last(hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def weights_by_save(world_size: int, folder: str, start: str | None, arguments: dict[str, Any]) -> list[list[Tensor]]:
    """Trains, then resumes from the save of each step; the weights at the end of each run."""

    window = 1 if "static_graph" in arguments else 2  # torch's static graphs cannot begin with a no_sync()

    def run(path: Path | str | None, *callbacks: Any) -> list[Tensor]:
        model = Model()
        strategy = ResilientDDP(timeout="120s", **arguments)
        data = ResumableDataModule(torch.arange(96), batch_size=24 // world_size // window, seed=1)
        trainer = quiet_trainer(
            strategy=strategy, devices=world_size, max_steps=NUM_STEPS, callbacks=list(callbacks),
            accumulate_grad_batches=window, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, data, ckpt_path=path)
        assert trainer.global_step == NUM_STEPS
        return [parameter.detach().clone() for parameter in model.parameters()]

    saver = SaveAt("on_train_batch_end", Path(folder) / f"{world_size}")
    undisturbed = run(start, saver)
    return [undisturbed, *(run(path) for path, _ in saver.saves[window - 1 :: 2 * window])]


def on_ranks(world_size: int, folder: Path, start: str | None, arguments: dict[str, Any]) -> list[list[Tensor]]:
    job = spawn(weights_by_save, world_size, args=(world_size, str(folder), start, arguments), deadline="240s")
    found: list[list[Tensor]] = job.check().results[0]
    return found


def assert_all_equal(found: list[list[Tensor]]) -> None:
    assert len(found) > 1
    for resumed in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(resumed, found[0], strict=True))


@pytest.mark.deadline(400)
@pytest.mark.parametrize("arguments", [{}, pytest.param({"static_graph": True}, marks=pytest.mark.soak)], ids=str)
def test_a_resume_on_three_and_four_ranks_has_the_same_bits(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert_all_equal(on_ranks(4, tmp_path, None, arguments))
    assert_all_equal(on_ranks(3, tmp_path, str(tmp_path / "4" / "1.ckpt"), arguments))


@pytest.mark.soak
@pytest.mark.deadline(400)
def test_buckets_that_are_laid_out_anew_are_the_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_all_equal(on_ranks(3, tmp_path, None, {"rebuild_buckets": True}))
