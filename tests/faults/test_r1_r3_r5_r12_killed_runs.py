"""A run is killed inside an epoch, over a plain DataLoader or data of ours: it leaves no trace.

Rows R1, R3, R5 and R12.
"""

from __future__ import annotations

import json
import random
import signal
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import ResilientDDP, ResumableDataModule, newest_valid
from lightning_distplus.data import SampleAudit, Source
from lightning_distplus.data.audit import audit_folder
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn, weights_digest
from lightning_distplus.testing.faults import Where
from tests.distributed import jobs
from tests.distributed.iterable_jobs import Counting
from tests.distributed.resume_jobs import (
    SampleDiary,
    SaveAt,
    fit,
    global_batches,
    quiet_trainer,
    token_data,
    write_tokens,
)  # fmt: skip
from tests.pairs import kept, kept_rows

NUM_SAMPLES = 40
KINDS = tuple(f"{data} {n}" for data in ("map", "stream", "stateful", "ours", "our stream") for n in (0, 2))[1:]
EACH_COMMIT = [("ResilientDDP", "map 2"), ("ResilientDeepSpeed", "map 2"), ("ResilientModelParallel", "stateful 2")]
EACH_COMMIT += [
    ("ResilientFSDP", "our stream 0"),
    ("ResilientModelParallel", "ours 2"),
    ("ResilientDDP", "our stream 2"),
]
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


class Stream(Counting):
    """The same samples, read from front to back: each rank and worker has its share, and each pass its order."""

    def __init__(self, *, is_augmented: bool) -> None:
        super().__init__(NUM_SAMPLES)
        self.images = Images(is_augmented=is_augmented)

    def sample(self, number: int) -> torch.Tensor:
        return self.images[number]


def loader_of(kind: str, *, is_augmented: bool) -> Any:
    """What a user's script has: ``kind`` is the data, and how many workers read them."""
    data, _, workers = kind.rpartition(" ")
    options: dict[str, Any] = {"batch_size": 2, "num_workers": int(workers)}
    samples: Any = (Images if data in ("ours", "map") else Stream)(is_augmented=is_augmented)
    if data.startswith("our"):
        return ResumableDataModule(samples, seed=5, **options)
    if data != "stateful":
        return DataLoader(samples, shuffle=data == "map" or None, **options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(samples, **options)


class Net(jobs.Model):
    """Trains on what is behind the number of a sample."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch * torch.tensor([0.0] + [1.0] * (jobs.NUM_FEATURES - 1)), batch_idx)
        self.log("step", float(self.trainer.global_step))
        return loss


def note(trainer: Any, module: Any, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
    """Appends the samples of a batch to this rank's file."""
    line = {"step": trainer.global_step, "epoch": trainer.current_epoch, "loss": module.losses[-1]}
    with Path(trainer.default_root_dir, f"rank-{trainer.global_rank}.jsonl").open("a") as file:
        file.write(json.dumps({**line, "ids": batch[:, 0].int().tolist()}) + "\n")


def train(name: str, kind: str, folder: str, is_augmented: bool, loaders: dict[str, str]) -> dict[str, Any]:
    """What a user's script does; ours is the strategy alone."""
    pl.seed_everything(7, workers=True)
    ours = {"timeout": "40s", **loaders} if name.startswith("Resilient") else {}
    loader = loader_of(kind, is_augmented=is_augmented)
    checkpoints = Path(folder) / "checkpoints"
    saver = ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=3, save_top_k=2, monitor="step", mode="max")
    found = newest_valid(checkpoints) if ours else None
    callbacks = [jobs.At("on_train_batch_end", note), saver, FaultCallback()]
    arguments = {"max_steps": STEPS, "use_distributed_sampler": True, "callbacks": callbacks}
    trainer = jobs.fit(jobs.strategy(name, **ours), 2, folder, model := Net(), loader, ckpt_path=found, **arguments)
    return {"weights": weights_digest(model), "step": trainer.global_step, "resumed_from": found and found.name}


def run(
    name: str, folder: Path, kind: str = "map 2", *, is_augmented: bool = True, faults: Any = None, **loaders: str
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
    first = [line for rank in range(2) for line in diary_of(broken, rank).values() if not line["epoch"]]
    assert sorted(index for line in first for index in line["ids"]) == list(range(NUM_SAMPLES))


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


# -- on three and four ranks: a sum of three depends on how DDP cuts its buckets ---------------------------------------

BUCKET_STEPS = 4


class Layers(pl.LightningModule):
    """Registers its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = torch.nn.Linear(41, 1), torch.nn.Linear(1, 37), torch.nn.Linear(37, 41)
        self.events: list[Any] = []  # for SaveAt

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.middle(self.first(batch.float().view(-1, 1) / 7).tanh()).tanh()
        return self.last(hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def weights_by_save(world_size: int, folder: str, start: str | None, arguments: dict[str, Any]) -> list[str]:
    """Trains, then resumes from the save of each step; the digest of the weights at the end of each run."""
    window = 1 if "static_graph" in arguments else 2  # torch's static graphs cannot begin with a no_sync()
    batch_size = 24 // world_size // window

    def run(path: Path | str | None, *callbacks: Any) -> str:
        options = {"devices": world_size, "max_steps": BUCKET_STEPS, "accumulate_grad_batches": window}
        strategy = ResilientDDP(timeout="120s", **arguments)
        trainer = quiet_trainer(strategy=strategy, default_root_dir=folder, callbacks=list(callbacks), **options)
        data = ResumableDataModule(torch.arange(96), batch_size=batch_size, seed=1)
        trainer.fit(model := Layers(), data, ckpt_path=path)
        assert trainer.global_step == BUCKET_STEPS
        return weights_digest(model)

    saver = SaveAt("on_train_batch_end", Path(folder) / f"{world_size}")
    undisturbed = run(start, saver)
    return [undisturbed, *(run(path) for path, _ in saver.saves[window - 1 :: 2 * window])]


def require_equal_weights(world_size: int, folder: Path, start: str | None, arguments: dict[str, Any]) -> None:
    job = spawn(weights_by_save, world_size, args=(world_size, str(folder), start, arguments), deadline="240s")
    undisturbed, *resumed = job.check().results[0]
    assert resumed
    assert set(resumed) == {undisturbed}


@pytest.mark.deadline(400)
@pytest.mark.parametrize("arguments", [{}, pytest.param({"static_graph": True}, marks=pytest.mark.soak)], ids=str)
def test_a_resume_on_three_and_four_ranks_has_the_same_bits(arguments: dict[str, Any], tmp_path: Path) -> None:
    require_equal_weights(4, tmp_path, None, arguments)
    require_equal_weights(3, tmp_path, str(tmp_path / "4" / "1.ckpt"), arguments)


@pytest.mark.soak
@pytest.mark.deadline(400)
def test_buckets_that_are_laid_out_anew_are_the_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        require_equal_weights(3, tmp_path, None, {"rebuild_buckets": True})


# -- over and over: kill -9 of a random rank in a random step, then another cut of the same steps ----------------------

NUM_SEEDS = 50
GLOBAL_BATCH = 12
CUTS = [(1, 2), (1, 6), (2, 3), (2, 1), (3, 2), (3, 1)]  # ranks, micro-batch
PLACES = [place for place in get_args(Where) if place != "validation"]


class Noted(SampleDiary):
    """Logs the step, so that the newest checkpoints are the best ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)


def train_cut(prefixes: list[str], size: int, micro_batch: int, workers: int, folder: str) -> Any:
    checkpoints = Path(folder) / "checkpoints"
    options: dict[str, Any] = {"devices": size, "max_steps": STEPS}
    saver = ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    callbacks = [SampleAudit(), saver, FaultCallback()]
    options |= {"strategy": ResilientDDP(timeout="60s"), "default_root_dir": folder, "callbacks": callbacks}
    sources = [Source(path=prefix, weight=weight) for prefix, weight in zip(prefixes, (3.0, 1.0), strict=True)]
    cut = {"micro_batch_size": micro_batch, "num_workers": workers, "global_batch_size": GLOBAL_BATCH}
    data = token_data(sources=sources, **cut)
    done = fit(data, diary=Noted, ckpt_path=newest_valid(checkpoints), **options)
    return [(done.steps, data.consumed_samples)]


@pytest.mark.soak
@pytest.mark.deadline(300)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_kills_at_random_steps_repeat_and_miss_nothing(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    prefixes = [write_tokens(tmp_path / "a", 1601), write_tokens(tmp_path / "b", 801, start=10_000)]
    folder, num_kills = tmp_path / "run", draw.randint(1, 3)
    folder.mkdir()
    for step in sorted(draw.sample(range(1, STEPS), num_kills)):
        size, micro_batch = draw.choice(CUTS)
        place, rank = draw.choice(PLACES), draw.randrange(size)
        options = (prefixes, size, micro_batch, draw.choice([0, 2]), str(folder))
        faults = FaultPlan().kill(rank=rank, step=step, where=place)
        killed = spawn(train_cut, size, args=options, faults=faults, deadline="120s")
        assert killed.faults_fired == 1, (step, place)
        assert killed.exit_codes[rank] == -signal.SIGKILL
    size, micro_batch = draw.choice(CUTS)
    done = spawn(train_cut, size, args=(prefixes, size, micro_batch, 0, str(folder)), deadline="120s").check()

    (tmp_path / "whole").mkdir()
    whole = spawn(train_cut, 1, args=(prefixes, 1, 2, 0, str(tmp_path / "whole")), deadline="120s").check()
    expected = global_batches(whole.results)
    assert {step: expected[step] for step in global_batches(done.results)} == global_batches(done.results)
    report = audit_folder(folder / "distplus" / "audit")
    assert report.ok, report
    assert report.num_steps == STEPS
    assert report.num_samples == whole.results[0][0][1] == done.results[0][0][1]
