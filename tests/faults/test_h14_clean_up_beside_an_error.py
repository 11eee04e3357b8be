"""Row H14: a rank whose peer has raised finishes its clean-up; one that is stuck there is ended."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

CLEAN_UP_S = 8.0
TEARDOWN_S = 60.0


class CleansUp(Callback):
    """Rank 1 raises between two steps; rank 0 hears of it at the gate, and takes its time, or waits there for ever."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == 1:
            raise RuntimeError("the planted error")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if trainer.global_rank == 0 and self.how == "stuck":
            Path(trainer.default_root_dir, "stuck").touch()
            dist.monitored_barrier(dist.new_group([0, 1], backend="gloo"))
        elif trainer.global_rank == 0:
            clean_up(trainer)


def raise_planted(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
    if (batch_idx, module.trainer.global_rank) == (3, 1):
        raise RuntimeError("the planted error")
    return loss


class Raising(jobs.Model):
    """Rank 1 raises; rank 0 cleans up in ``finally`` when its backward fails for that."""

    def backward(self, loss: torch.Tensor, *arguments: Any, **named: Any) -> None:
        has_failed = True
        try:
            super().backward(loss, *arguments, **named)
            has_failed = False
        finally:
            if has_failed:
                clean_up(self.trainer)


def clean_up(trainer: Any) -> None:
    time.sleep(CLEAN_UP_S)
    Path(trainer.default_root_dir, "cleaned up").touch()


def train(strategy: str, how: str, folder: str) -> None:
    named = {"timeout": {"step": "20s", "setup": "60s", "teardown": TEARDOWN_S}, "max_steps": 8}
    if how == "finally":
        jobs.fit(strategy, 2, folder, Raising(change=raise_planted), **named)
    else:
        jobs.fit(strategy, 2, folder, callbacks=[CleansUp(how)], **named)


def run(strategy: str, how: str, folder: Path) -> tuple[SpawnResult, Path]:
    return spawn(train, 2, args=(strategy, how, str(folder)), deadline="100s"), folder


STRATEGIES = {"on_exception": "ResilientDDP", "finally": "ResilientFSDP", "stuck": "ResilientDDP"}


ended = side_by_side({how: partial(run, strategy, how) for how, strategy in STRATEGIES.items()})


@pytest.mark.parametrize("how", ["on_exception", "finally"])
def test_a_rank_on_its_way_out_finishes_its_clean_up(how: str, ended: Runs) -> None:
    result, folder = ended(how)
    assert result.exit_codes == {0: int(ExitCode.PEER_LOST), 1: 1}, result.logs
    assert (folder / "cleaned up").exists(), result.logs[0]
    assert "the planted error" in result.logs[0]


def test_a_rank_that_is_stuck_on_its_way_out_is_ended_after_the_grace(ended: Runs) -> None:
    result, folder = ended("stuck")
    assert (folder / "stuck").exists(), result.logs
    assert result.exit_codes == {0: int(ExitCode.PEER_LOST), 1: 1}, result.logs
    assert result.elapsed_s < TEARDOWN_S
