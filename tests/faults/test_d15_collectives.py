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


def another_operation(tensor: torch.Tensor, rank: int, groups: Any) -> None:
    dist.all_reduce(tensor, dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def another_group(tensor: torch.Tensor, rank: int, groups: Any) -> None:
    """Three ranks: one pair waits in its group, rank 1 in that of all."""
    if rank != 2:
        dist.all_reduce(tensor, group=None if rank == 1 else groups[0])


FAULTS = {
    "operation": (another_operation, ("all_reduce of float32[4] [SUM]", "all_reduce of float32[4] [MAX]")),
    "group": (another_group, ("of ranks 0-1", "of ranks 0-2")),
}


def train(name: str, fault: str, size: int, folder: str) -> dict[str, Any]:
    """A metric of the user's, in a callback, is exchanged by hand; at one step in another way on rank 1."""
    value, groups, planted_at, original = torch.ones(4), [], [0.0], dist.all_reduce

    def exchange(trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEP and fault in FAULTS:
            planted_at[0] = time.time()
            FAULTS[fault][0](value, trainer.global_rank, groups)
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
        found = {"field": error.field, "ranks": error.ranks, "message": str(error), "values": error.values}
    return {
        **found,
        "seconds": time.time() - planted_at[0],
        "value": value.tolist(),
        "traced": monitor.metrics()["distplus/traced_collectives"],
        "is_restored": dist.all_reduce is original,
    }


@pytest.mark.parametrize("name", kept(["ResilientDDP", "DDPStrategy"], ["DDPStrategy"]))
def test_a_call_that_differs_is_named_on_all_ranks_before_it_is_made(name: str, tmp_path: Path) -> None:
    """Other roots, shapes and calls are planted in ``test_d1_to_d15_ways_to_differ``."""
    results = spawn(train, 2, args=(name, "operation", 2, str(tmp_path)), deadline="50s").check().results
    for found in results.values():
        assert (found["field"], found["ranks"]) == ("collective", [0, 1])
        assert all(part in found["values"][rank] for rank, part in enumerate(FAULTS["operation"][1]))
        assert "test_d15_collectives.py:" in found["values"][0]
        assert found["value"] == [1.0] * 4, "nothing was exchanged"
        assert found["seconds"] < SOON_S
        assert found["is_restored"]


def test_two_ranks_that_wait_in_different_groups_are_named(tmp_path: Path) -> None:
    results = spawn(train, 3, args=("ResilientDDP", "group", 3, str(tmp_path)), deadline="50s").check().results
    assert {found["field"] for found in results.values()} == {"collective"}
    (ranks,) = {tuple(found["ranks"]) for found in results.values()}
    assert ranks in ((0, 1), (0, 1, 2)), "rank 2 waits at the gate; whether the first to look asks it too is chance"
    for found in results.values():
        assert all(part in found["message"] for part in FAULTS["group"][1])


@pytest.mark.parametrize(
    "name", kept([*jobs.STRATEGIES[:3], "DDPStrategy"], ["ResilientFSDP", "ResilientModelParallel"])
)
def test_traced_calls_that_agree_give_no_alarm(name: str, tmp_path: Path) -> None:
    for found in spawn(train, 2, args=(name, "none", 2, str(tmp_path)), deadline="50s").check().results.values():
        assert found["field"] == "nothing was raised"
        assert found["traced"] >= 6
        assert found["is_restored"]
