"""What is saved before the first step, or with an optimizer that keeps no state, can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import in_turn

WAYS = [
    ("ResilientDDP", {}),
    ("ResilientFSDP", {}),
    ("ResilientFSDP", {"state_dict_type": "full"}),
    ("ResilientModelParallel", {}),
    ("ResilientModelParallel", {"save_distributed_checkpoint": False}),
    ("ResilientDeepSpeed", {"stage": 1}),
    ("ResilientDeepSpeed", {"stage": 3}),
]


class Stateless(jobs.Model):
    """Trained by SGD without momentum, whose learning rate has changed."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 3e-2


class SavesBeforeTheFirstStep(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            trainer.save_checkpoint(self.path)


def save_and_resume(rank: int, name: str, arguments: dict[str, Any], keeps_state: bool, folder: str) -> dict[str, Any]:
    path, model = f"{folder}/saved.ckpt", jobs.Model if keeps_state else Stateless
    callbacks = [SavesBeforeTheFirstStep(path)] if keeps_state else []
    first = jobs.trainer(jobs.strategy(name, **arguments), 2, folder, max_steps=2, callbacks=callbacks)
    first.fit(model(), jobs.loader())
    if not keeps_state:
        first.save_checkpoint(path)
    second = jobs.trainer(jobs.strategy(name, **arguments), 2, folder, max_steps=3)
    resumed = model(seed=1)
    try:
        second.fit(resumed, jobs.loader(), ckpt_path=path)
    except IndexError as error:
        return {"error": str(error)}
    return {
        "steps": second.global_step,
        "batches": len(resumed.losses),
        "lr": resumed.optimizers().param_groups[0]["lr"],
    }


@pytest.mark.parametrize(("keeps_state", "way"), in_turn([True, False], WAYS))
def test_a_checkpoint_of_an_optimizer_without_state_is_resumed(
    keeps_state: bool, way: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Saved before the first step, or by SGD."""
    name, arguments = way
    run = spawn(save_and_resume, 2, args=(name, arguments, keeps_state, str(tmp_path)), deadline="60s").check()
    expected = {"steps": 3, "batches": 3, "lr": 1e-2} if keeps_state else {"steps": 3, "batches": 1, "lr": 3e-2}
    assert run.results == {0: expected, 1: expected}


@pytest.mark.soak
def test_stock_cannot_load_what_it_has_saved(tmp_path: Path) -> None:
    arguments = {"save_distributed_checkpoint": False, "data_parallel_size": 2, "tensor_parallel_size": 1}
    run = spawn(save_and_resume, 2, args=("ModelParallelStrategy", arguments, False, str(tmp_path)), deadline="60s")
    assert set(map(str, run.check().results.values())) == {str({"error": "list index out of range"})}
