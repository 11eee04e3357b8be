"""Row D15: calls of ``torch.distributed`` that do not belong together are named before any of them is made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_distplus import RankDivergenceMonitor
from lightning_distplus.errors import DivergenceError
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import kept

STEP = 2
SOON_S = 5.0


def another_group(trainer: Any, groups: list[Any]) -> None:
    """Three ranks: one pair waits in its group, rank 1 in that of all."""
    if trainer.global_rank != 2:
        dist.all_reduce(torch.ones(4), group=None if trainer.global_rank == 1 else groups[0])


def train(name: str, size: int, folder: str, differs: bool) -> dict[str, Any]:
    """A metric of the user's, in a callback, is exchanged by hand; at one step in another group on rank 1."""
    groups: list[Any] = []
    planted_at, original = [0.0], dist.all_reduce

    def exchange(trainer: Any, *_: Any) -> None:
        if differs and trainer.global_step == STEP:
            planted_at[0] = time.time()
            another_group(trainer, groups)
        else:
            dist.all_reduce(torch.ones(4), dist.ReduceOp.SUM)

    makes = jobs.At("on_train_start", lambda *_: groups.append(dist.new_group([0, 1])))
    monitor = RankDivergenceMonitor(trace_collectives=True)
    options = {"timeout": "20s"} if name.startswith("Resilient") else {}
    options |= {"callbacks": [monitor, makes, jobs.At("on_train_batch_end", exchange)], "max_steps": 6}
    found: dict[str, Any] = {"field": "nothing was raised"}
    try:
        jobs.fit(name, size, folder, data=jobs.loader(200), use_distributed_sampler=True, **options)
    except DivergenceError as error:
        found = {"field": error.field, "ranks": error.ranks, "message": str(error)}
    return {
        **found,
        "seconds": time.time() - planted_at[0],
        "traced": monitor.metrics()["distplus/traced_collectives"],
        "is_restored": dist.all_reduce is original,
    }


@pytest.mark.parametrize("name", kept(["ResilientDDP", "DDPStrategy"], ["ResilientDDP"]))
def test_two_ranks_that_wait_in_different_groups_are_named(name: str, tmp_path: Path) -> None:
    """Other operations, roots, shapes and calls are planted in ``test_d1_to_d15_ways_to_differ``."""
    results = spawn(train, 3, args=(name, 3, str(tmp_path), True), deadline="50s").check().results
    assert {found["field"] for found in results.values()} == {"collective"}
    assert {tuple(found["ranks"]) for found in results.values()} == {(0, 1)}, "rank 2 waits at the gate"
    for found in results.values():
        assert all(part in found["message"] for part in ("of ranks 0-1", "of ranks 0-2", "test_d15_collectives.py:"))
        assert found["is_restored"]
        assert found["seconds"] < SOON_S


@pytest.mark.parametrize(
    "name", kept([*jobs.STRATEGIES[:3], "DDPStrategy"], ["ResilientFSDP", "ResilientModelParallel"])
)
def test_traced_calls_that_agree_give_no_alarm(name: str, tmp_path: Path) -> None:
    for found in spawn(train, 2, args=(name, 2, str(tmp_path), False), deadline="50s").check().results.values():
        assert found["field"] == "nothing was raised"
        assert found["traced"] >= 6
        assert found["is_restored"]
