"""Row R12: a stock script with a plain DataLoader is killed inside an epoch, and comes back as if nothing had been."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import newest_valid
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import kept

NUM_SAMPLES = 40
STEPS = 14  # 10 in an epoch of 40 samples on 2 ranks: the last ones lie in the second epoch


class Images(Dataset):
    """Sample i is i and noise, which an augmentation draws from the generators of python, numpy and torch."""

    def __init__(self, *, is_augmented: bool = True) -> None:
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.full((jobs.NUM_FEATURES,), float(index))
        image[1:] = torch.linspace(-1, 1, jobs.NUM_FEATURES - 1) * (index + 1) / NUM_SAMPLES
        if self.is_augmented:
            image[1:] += torch.rand(jobs.NUM_FEATURES - 1) + random.random() + float(np.random.rand())
        return image


class Net(jobs.Model):
    """Trains on what is behind the number of a sample."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch * torch.tensor([0.0] + [1.0] * (jobs.NUM_FEATURES - 1)), batch_idx)
        self.log("step", float(self.trainer.global_step))
        return loss


class Diary(Callback):
    """Appends the samples of each batch to this rank's file."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "ids": batch[:, 0].int().tolist(),
            "loss": module.losses[-1],
        }
        with (self.folder / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(name: str, folder: str, is_augmented: bool, loaders: dict[str, str]) -> dict[str, Any]:
    """What a user's script does; ours is the strategy alone."""
    pl.seed_everything(7, workers=True)
    arguments: dict[str, Any] = {"stage": 2} if "DeepSpeed" in name else {}
    if name.startswith("Resilient"):
        arguments |= {"timeout": "40s", **loaders}
    loader = DataLoader(Images(is_augmented=is_augmented), batch_size=2, shuffle=True, num_workers=2)
    checkpoints = Path(folder) / "checkpoints"
    saver = ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=3, save_top_k=2, monitor="step", mode="max")
    trainer = jobs.trainer(
        jobs.strategy(name, **arguments),
        2,
        folder,
        max_steps=STEPS,
        enable_checkpointing=True,
        use_distributed_sampler=True,
        callbacks=[Diary(folder), saver, FaultCallback()],
    )
    model = Net()
    found = newest_valid(checkpoints) if name.startswith("Resilient") else None
    trainer.fit(model, loader, ckpt_path=str(found) if found else None)
    return {"weights": weights_digest(model), "step": trainer.global_step, "resumed_from": found and found.name}


def run(
    name: str, folder: Path, *, is_augmented: bool = True, faults: FaultPlan | None = None, **loaders: str
) -> SpawnResult:
    folder.mkdir(exist_ok=True)
    return spawn(train, 2, args=(name, str(folder), is_augmented, loaders), faults=faults, deadline="60s")


def diary_of(folder: Path, rank: int) -> dict[int, Any]:
    """What counted in each step: a step that was run again replaces the one that was lost."""
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return {line.pop("step"): line for line in map(json.loads, lines)}


@pytest.mark.deadline(180)
@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, ["ResilientDDP", "ResilientDeepSpeed"]))
def test_script_killed_inside_an_epoch_repeats_and_misses_nothing(name: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(name, whole).check()
    killed = run(name, broken, faults=FaultPlan().kill(rank=1, step=8, where="after_backward"))
    assert killed.faults_fired == 1
    assert killed.exit_codes[1] == -signal.SIGKILL
    resumed = run(name, broken).check()
    for rank in range(2):
        assert resumed.results[rank]["resumed_from"] is not None
        assert resumed.results[rank]["weights"] == expected.results[rank]["weights"]
        assert diary_of(broken, rank) == diary_of(whole, rank)
    ids = [
        index
        for rank in range(2)
        for line in diary_of(broken, rank).values()
        if not line["epoch"]
        for index in line["ids"]
    ]
    assert Counter(ids) == Counter(range(NUM_SAMPLES))


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, ["ResilientDDP"]))
def test_undisturbed_script_is_the_one_of_stock(name: str, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    mine = run(name, ours, is_augmented=False).check()
    # FSDP and ZeRO of stock do not run on a CPU: there ours runs as well, and leaves the loader to Lightning.
    of_stock = "DDPStrategy" if name == "ResilientDDP" else name
    theirs = run(of_stock, stock, is_augmented=False, data="as_is").check()
    for rank in range(2):
        assert diary_of(ours, rank) == diary_of(stock, rank)
        assert mine.results[rank]["weights"] == theirs.results[rank]["weights"]
