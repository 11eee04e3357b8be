"""Rows R1 and R5: a rank is killed at any step, the job comes back, and nothing shows that it ever happened."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import Dataset

from lightning_distplus import ResumableDataModule, newest_valid
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import kept_rows

NUM_SAMPLES = 34
BATCH_SIZE = 2
STEPS = 14  # 8 full global batches in an epoch of 34 samples: the last steps lie in the second epoch


class Numbered(Dataset):
    """Sample i is i and random noise: what augmentation draws must be the same after a resume."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(jobs.NUM_FEATURES - 1)])


class Ids(Callback):
    """Appends the ids of every batch to this rank's file, with the step to which they belong."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        line = {"step": trainer.global_step, "epoch": trainer.current_epoch, "ids": batch[:, 0].int().tolist()}
        with (self.folder / f"ids-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(name: str, num_workers: int, folder: str, attempt_folder: str) -> dict[str, Any]:
    """One attempt: resumes from the newest valid checkpoint where there is one."""
    arguments = {"stage": 2} if "DeepSpeed" in name else {}
    checkpoints = Path(folder) / "checkpoints"
    trainer = jobs.trainer(
        jobs.strategy(name, timeout="40s", **arguments),
        2,
        folder,
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[
            Ids(attempt_folder),
            ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=3, save_top_k=2, monitor="step", mode="max"),
            FaultCallback(),
        ],
    )
    model = Logged()
    data = ResumableDataModule(Numbered(), batch_size=BATCH_SIZE, num_workers=num_workers, seed=5)
    found = newest_valid(checkpoints)
    trainer.fit(model, datamodule=data, ckpt_path=str(found) if found else None)
    return {"weights": weights_digest(model), "step": trainer.global_step, "resumed_from": found and found.name}


class Logged(jobs.Model):
    """Logs the step, so that the newest checkpoints are the best ones."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("step", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)


def ids_of(folder: Path, rank: int) -> dict[int, list[int]]:
    """Per step the samples that counted: a step that was run again replaces the one that was lost."""
    lines = (folder / f"ids-{rank}.jsonl").read_text().splitlines()
    return {line["step"]: line["ids"] for line in map(json.loads, lines)}


def run(name: str, num_workers: int, folder: Path, faults: FaultPlan | None = None) -> SpawnResult:
    folder.mkdir(exist_ok=True)
    return spawn(train, 2, args=(name, num_workers, str(folder), str(folder)), faults=faults, deadline="60s")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[SpawnResult, Path]]:
    """The run of a strategy that nobody disturbs, without workers, and its folder; made once."""

    @functools.cache
    def made(name: str) -> tuple[SpawnResult, Path]:
        folder = tmp_path_factory.mktemp(name) / "undisturbed"
        return run(name, 0, folder).check(), folder

    return made


@pytest.mark.deadline(120)
@pytest.mark.parametrize(  # the others in each commit by test_r12_plain_dataloader
    ("name", "num_workers"),
    kept_rows([*product(jobs.STRATEGIES, (0, 2))], [("ResilientFSDP", 0), ("ResilientModelParallel", 2)]),
)
def test_a_rank_killed_in_the_second_epoch_leaves_no_trace(
    name: str, num_workers: int, undisturbed: Callable[[str], tuple[SpawnResult, Path]], tmp_path: Path
) -> None:
    expected, untouched = undisturbed(name)
    broken = tmp_path / "broken"
    killed = run(name, num_workers, broken, FaultPlan().kill(rank=1, step=10, where="after_backward"))
    assert killed.faults_fired == 1
    assert killed.exit_codes[1] == -signal.SIGKILL
    assert killed.exit_codes[0] not in (0, None)
    resumed = run(name, num_workers, broken).check()

    for rank in range(2):
        assert resumed.results[rank]["resumed_from"] is not None
        assert resumed.results[rank]["step"] == STEPS
        assert resumed.results[rank]["weights"] == expected.results[rank]["weights"]
        assert ids_of(broken, rank) == ids_of(untouched, rank)
    first_epoch = [i for rank in range(2) for step, ids in ids_of(broken, rank).items() if step < 8 for i in ids]
    assert len(first_epoch) == len(set(first_epoch)) == 32
