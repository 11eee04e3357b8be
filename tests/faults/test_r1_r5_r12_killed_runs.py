"""Rows R1, R5 and R12: a run is killed inside an epoch, over a plain DataLoader or data of ours: it leaves no trace."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_distplus import ResumableDataModule, newest_valid
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import kept, kept_rows

NUM_SAMPLES = 40
KINDS = ("map 2", "stream 0", "stream 2", "stateful 0", "stateful 2", "ours 0", "ours 2")
EACH_COMMIT = [("ResilientDDP", "map 2"), ("ResilientDeepSpeed", "map 2"), ("ResilientModelParallel", "stateful 2")]
EACH_COMMIT += [("ResilientFSDP", "ours 0"), ("ResilientModelParallel", "ours 2")]
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


class Stream(IterableDataset):
    """The same samples, read from front to back: each rank and worker has its share, and each pass its order."""

    def __init__(self, *, is_augmented: bool) -> None:
        self.images = Images(is_augmented=is_augmented)
        self.done = 0
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = list(range(dist.get_rank() * num_workers + worker, NUM_SAMPLES, dist.get_world_size() * num_workers))
        random.Random(self.passes).shuffle(own)
        while self.done < len(own):
            self.done += 1
            yield self.images[own[self.done - 1]]
        self.done = 0
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.passes = state["done"], state["passes"]


def loader_of(kind: str, *, is_augmented: bool) -> Any:
    """What a user's script has: ``kind`` is the data, and how many workers read them."""
    data, _, workers = kind.partition(" ")
    options: dict[str, Any] = {"batch_size": 2, "num_workers": int(workers)}
    if data == "ours":
        return ResumableDataModule(Images(is_augmented=is_augmented), seed=5, **options)
    if data == "map":
        return DataLoader(Images(is_augmented=is_augmented), shuffle=True, **options)
    if data == "stream":
        return DataLoader(Stream(is_augmented=is_augmented), **options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stream(is_augmented=is_augmented), **options)


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


def train(name: str, kind: str, folder: str, is_augmented: bool, loaders: dict[str, str]) -> dict[str, Any]:
    """What a user's script does; ours is the strategy alone."""
    pl.seed_everything(7, workers=True)
    ours = {"timeout": "40s", **loaders} if name.startswith("Resilient") else {}
    loader = loader_of(kind, is_augmented=is_augmented)
    checkpoints = Path(folder) / "checkpoints"
    saver = ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=3, save_top_k=2, monitor="step", mode="max")
    found = newest_valid(checkpoints) if ours else None
    arguments = {
        "max_steps": STEPS,
        "use_distributed_sampler": True,
        "callbacks": [Diary(folder), saver, FaultCallback()],
    }
    trainer = jobs.fit(name, 2, folder, model := Net(), loader, ckpt_path=found, **arguments, **ours)
    return {"weights": weights_digest(model), "step": trainer.global_step, "resumed_from": found and found.name}


def run(
    name: str,
    folder: Path,
    *,
    kind: str = "map 2",
    is_augmented: bool = True,
    faults: FaultPlan | None = None,
    **loaders: str,
) -> SpawnResult:
    folder.mkdir(exist_ok=True)
    return spawn(train, 2, args=(name, kind, str(folder), is_augmented, loaders), faults=faults, deadline="60s")


def diary_of(folder: Path, rank: int) -> dict[int, Any]:
    """What counted in each step: a step that was run again replaces the one that was lost."""
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return {line.pop("step"): line for line in map(json.loads, lines)}


@pytest.mark.deadline(180)
@pytest.mark.parametrize(("name", "kind"), kept_rows(list(product(jobs.STRATEGIES, KINDS)), EACH_COMMIT))
def test_run_killed_inside_an_epoch_repeats_and_misses_nothing(name: str, kind: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(name, whole, kind=kind).check()
    killed = run(name, broken, kind=kind, faults=FaultPlan().kill(rank=1, step=8, where="after_backward"))
    assert killed.faults_fired == 1
    assert killed.exit_codes[1] == -signal.SIGKILL
    assert killed.exit_codes[0] not in (0, None)
    resumed = run(name, broken, kind=kind).check()
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
