"""Row H8: one rank logs with ``sync_dist=True`` in ``training_step``; the other does not, and waits in its backward."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_distplus.errors import DivergenceError
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import kept

FAULT_BATCH = 3
SLOW_S = 4.0
SOON_S = 2.0


class Slow(torch.autograd.Function):
    """Its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Logs(jobs.Model):
    """Rank 0 logs alone in one batch, or both log while one of them is slow beforehand and in its backward."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.both_there_at = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != FAULT_BATCH:
            return loss
        self.both_there_at = time.time()
        if self.alone:
            _ = self.global_rank or self.log("alone", loss.detach(), sync_dist=True)
            return loss
        time.sleep(SLOW_S * self.global_rank)
        self.log("both", loss.detach(), sync_dist=True)
        return Slow.apply(loss, SLOW_S * self.global_rank)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", 1.0, sync_dist=True)


def train(strategy: str, folder: str, alone: bool) -> dict[str, Any]:
    arguments = {"stage": 2} if "DeepSpeed" in strategy else {}
    model = Logs(alone=alone)
    made = jobs.strategy(strategy, timeout="120s", **arguments)
    trainer = jobs.trainer(made, 2, folder, max_epochs=1, limit_train_batches=6)
    try:
        trainer.fit(model, jobs.loader())
    except DivergenceError as error:
        told = {"text": str(error), "ranks": error.ranks, "field": error.field, "values": error.values}
        return {**told, "reached_at": model.both_there_at, "raised_at": time.time()}
    return {}


@pytest.mark.parametrize("strategy", kept(jobs.STRATEGIES, ["ResilientDDP", "ResilientDeepSpeed"]))
def test_both_sides_are_named_within_two_seconds(strategy: str, tmp_path: Path) -> None:
    errors = spawn(train, 2, args=(strategy, str(tmp_path), True), deadline="100s").check().results
    assert all(errors.values())
    since = max(error["reached_at"] for error in errors.values())
    assert errors[0]["raised_at"] - since < SOON_S
    for error in errors.values():  # rank 1 is inside C++, and hears of it when its peer is gone
        assert (error["field"], error["ranks"]) == ("collective", [0])
        assert "in log 'training_step.alone'" in error["values"][0]
        assert error["values"][1] == f"in backward batch {FAULT_BATCH}"
        assert f"{Path(__file__).name}:" in error["text"]


def test_a_rank_that_is_slow_on_the_way_or_in_its_backward_is_waited_for(tmp_path: Path) -> None:
    run = spawn(train, 2, args=("ResilientDDP", str(tmp_path), False), deadline="100s").check()
    assert run.results == {0: {}, 1: {}}
