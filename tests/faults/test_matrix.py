"""The fault matrix on four ranks: for every kind of fault and every seed, exactly the guilty ranks are named.

Rows H1 to H3.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn
from tests.distributed import jobs

WORLD_SIZE = 4
DEADLINE_S = 4.0
SEEDS = range(20)
PLANNED = ("hang", "hang_gil", "stop", "kill", "raise_")
COLLECTIVES = ("order", "only", "count", "shape", "dtype")
CHECKED = ("lonely", "uneven", "arguments")
KINDS = (*PLANNED, *COLLECTIVES, *CHECKED, "worker", "cycle")


@dataclass(frozen=True)
class Case:
    """One fault, drawn from a seed."""

    kind: str
    rank: int
    step: int
    strategy: str
    where: Any

    @classmethod
    def draw(cls, kind: str, seed: int) -> Case:
        rng = random.Random(f"{kind}-{seed}")
        where = rng.choice(["batch_start", "before_backward", "after_backward", "batch_end"])
        strategy = rng.choice(["ResilientDDP", "ResilientFSDP", "ResilientModelParallel"])
        return cls(kind, rng.randrange(WORLD_SIZE), rng.randrange(3, 12), strategy, where)

    @property
    def plan(self) -> FaultPlan | None:
        if self.kind not in PLANNED:
            return None
        plan: FaultPlan = getattr(FaultPlan(), self.kind)(rank=self.rank, step=self.step, where=self.where)
        return plan

    @property
    def guilty(self) -> list[int]:
        return sorted({self.rank, (self.rank + 1) % WORLD_SIZE}) if self.kind == "cycle" else [self.rank]


class Raw(Callback):
    """Raw collectives after each batch; the case's rank differs in its step."""

    def __init__(self, case: Case, record: str) -> None:
        self.case = case
        self.record = record

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        kind = None
        if trainer.global_step == self.case.step:
            if trainer.global_rank == self.case.rank and self.case.kind not in PLANNED:
                Path(self.record).write_text(str(time.time()))
            kind = self.case.kind if trainer.global_rank == self.case.rank else None
            if self.case.kind == "cycle" and trainer.global_rank in self.case.guilty:
                self.exchange(trainer.global_rank)
        if kind == "lonely":
            trainer.strategy.barrier("of one rank")
        if self.case.kind == "arguments":
            trainer.strategy.reduce(torch.ones(3 if kind is None else 4))
        if kind == "order":
            dist.all_gather([torch.ones(8) for _ in range(WORLD_SIZE)], torch.ones(8))
        if kind == "only":
            dist.barrier()
        if kind != "count":
            size, dtype = (16 if kind == "shape" else 8), (torch.float64 if kind == "dtype" else torch.float32)
            dist.all_reduce(torch.ones(size, dtype=dtype))
        dist.all_reduce(torch.ones(2))

    def exchange(self, rank: int) -> None:
        (other,) = set(self.case.guilty) - {rank}
        dist.send(torch.ones(5), other)
        dist.recv(torch.ones(5), other)


class Samples(Dataset[torch.Tensor]):
    """One sample never comes, on the case's rank."""

    def __init__(self, case: Case, record: str) -> None:
        self.case = case
        self.record = record

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4 * self.case.step + 12 and os.environ["RANK"] == str(self.case.rank):
            Path(self.record).write_text(str(time.time()))
            time.sleep(1000)
        return torch.ones(jobs.NUM_FEATURES)


def train(case: Case, folder: str) -> None:
    record = f"{folder}/fired"
    data = DataLoader(Samples(case, record), batch_size=4, num_workers=1) if case.kind == "worker" else jobs.loader(200)
    if case.kind == "uneven" and os.environ["RANK"] == str(case.rank):
        Path(record).write_text(str(time.time()))
        data = jobs.loader(4 * case.step)
    raw = [] if case.kind == "worker" else [Raw(case, record)]
    named = {"timeout": {"step": DEADLINE_S, "setup": "60s"}, "max_steps": 40, "callbacks": [FaultCallback(), *raw]}
    jobs.fit(case.strategy, WORLD_SIZE, folder, data=data, **named)


def named_by(run: SpawnResult, folder: Path, case: Case) -> list[int]:
    """The ranks that the job names: by its verdict, or, where a rank raised or is gone, by what the others show."""
    verdicts = list((folder / "distplus").glob("verdict-*.json"))
    if verdicts:
        return sorted({rank for path in verdicts for rank in json.loads(path.read_text())["culprits"]})
    others = [log for rank, log in run.logs.items() if rank != case.rank]
    return sorted({rank for rank in range(WORLD_SIZE) if all(_blames(log, rank) for log in others)})


def _blames(log: str, rank: int) -> bool:
    named = (
        f"Rank {rank} (host", f"the process of rank {rank} (host", f"connection to rank {rank}",
        f"(wrong: rank {rank})", f"number of batches differs on rank {rank}.",
    )  # fmt: skip
    return any(text in log for text in named)


@pytest.mark.soak
@pytest.mark.deadline(100)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_the_guilty_ranks_are_named(kind: str, seed: int, tmp_path: Path) -> None:
    case = Case.draw(kind, seed)
    run = spawn(train, WORLD_SIZE, args=(case, str(tmp_path)), faults=case.plan, deadline="80s")
    ended = time.time()
    assert run.faults or (tmp_path / "fired").exists(), (case, run.logs)
    fired = run.faults[0].unix_s if run.faults else float((tmp_path / "fired").read_text())
    print(f"{case}: {ended - fired:.1f} s")
    assert run.alive == {}
    assert named_by(run, tmp_path, case) == case.guilty, (case, run.logs)
    assert ended - fired < DEADLINE_S + 8
