"""Data parallelism by tensor parallelism, 2 x 2: peers share their batches, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.distributed.resume_jobs import SampleDiary, ids_of, quiet_trainer, token_data, write_tokens
from tests.distributed.test_elastic import SaveAfter

GRID = {"data_parallel_size": 2, "tensor_parallel_size": 2}
NUM_STEPS = 6
SAVES = {4: 2, 9: 4}  # number of micro-batches after which it is written: first step of the resumed run
INSIDE_A_WINDOW = 9  # its first micro-batch is done again with other dropout


class Parallel(SampleDiary):
    """Two layers cut by columns and by rows, dropout between them, and a norm that only the data-parallel axis cuts."""

    def configure_model(self) -> None:
        if self.layer is not None:
            return
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4), nn.LayerNorm(4))
        mesh = self._device_mesh
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.layer, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.layer, mesh=mesh["data_parallel"])
        torch.manual_seed(100 + self.trainer.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps.setdefault(self.trainer.global_step, []).append(ids_of(batch))
        return (self.layer(batch["input_ids"].float() / 1000) - 1).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    sources: Any, folder: str, load: str | None, callbacks: list[Any], **grid: int
) -> tuple[dict[int, list[list[int]]], str]:
    strategy = jobs.strategy("ResilientModelParallel", timeout="60s", **grid)
    model = Parallel()
    options = {"max_steps": NUM_STEPS, "default_root_dir": folder, "callbacks": callbacks}
    trainer = quiet_trainer(strategy=strategy, devices=4, **options)
    trainer.fit(model, token_data(sources=sources, global_batch_size=8), ckpt_path=load)
    state = {f"{name}.{key}": value for name, part in moments(trainer).items() for key, value in part.items()}
    return model.steps, weights_digest({**dict(model.named_parameters()), **state})


def moments(trainer: Any) -> dict[str, dict[str, Any]]:
    (optimizer,) = trainer.optimizers
    return {str(place): state for place, state in enumerate(optimizer.state.values())}


def train(sources: Any, folder: str) -> Any:
    return fit(sources, folder, None, [SaveAfter(save, f"{folder}/{save}.ckpt") for save in SAVES], **GRID)


def resume(sources: Any, folder: str) -> Any:
    runs = {save: fit(sources, folder, f"{folder}/{save}.ckpt", [], **GRID) for save in SAVES}
    inside = f"{folder}/{INSIDE_A_WINDOW}.ckpt"
    elastic = fit(sources, folder, inside, [], data_parallel_size=4, tensor_parallel_size=1)
    return runs, elastic


@pytest.mark.deadline(220)
def test_two_by_two_ranks_resume_exactly_and_go_on_as_four_by_one(tmp_path: Path) -> None:
    sources = [
        {"path": write_tokens(tmp_path / "prose", 301), "weight": 0.7, "name": "prose"},
        {"path": write_tokens(tmp_path / "code", 121, start=400), "weight": 0.3, "name": "code"},
    ]
    job = (sources, str(tmp_path))
    undisturbed = spawn(train, 4, args=job, deadline="100s").check().results
    steps = {rank: found for rank, (found, _) in undisturbed.items()}
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    assert {len(micro_batches) for micro_batches in steps[0].values()} == {2}
    assert not {*steps[0][0][0]} & {*steps[2][0][0]}

    resumed = spawn(resume, 4, args=job, deadline="100s").check().results
    for save, first in SAVES.items():
        for rank, (runs, _) in resumed.items():
            expected = {step: steps[rank][step] for step in range(first, NUM_STEPS)}
            assert runs[save][0] == expected, (save, rank)
            assert (runs[save][1] == undisturbed[rank][1]) is (save != INSIDE_A_WINDOW), (save, rank)

    # The same global batch: the two micro-batches of two ranks are one micro-batch of four.
    for step in range(SAVES[INSIDE_A_WINDOW], NUM_STEPS):
        whole = [sample for place in range(2) for rank in (0, 2) for sample in steps[rank][step][place]]
        assert [sample for rank in range(4) for sample in resumed[rank][1][0][step][0]] == whole


def fit_unsharded(folder: str) -> list[list[int]]:
    """A model of which nothing is sharded, trained and resumed: the steps of both runs. Stock cannot load it."""
    runs, path = [], None
    for max_steps in (2, 4):
        strategy = jobs.strategy("ResilientModelParallel", data_parallel_size=1, tensor_parallel_size=2)
        trainer = quiet_trainer(strategy=strategy, devices=2, default_root_dir=folder, max_steps=max_steps)
        trainer.fit(model := SampleDiary(), token_data(sources=f"{folder}/tokens"), ckpt_path=path)
        path = f"{folder}/saved.ckpt"
        trainer.save_checkpoint(path)
        runs.append([*model.steps])
    return runs


def test_a_model_without_shards_is_loaded_again(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", 301)
    results = spawn(fit_unsharded, 2, args=(str(tmp_path),), deadline="60s").check().results
    assert list(results.values()) == [[[0, 1], [2, 3]]] * 2
