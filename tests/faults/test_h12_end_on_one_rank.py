"""Row H12: a rank whose epoch or run ends in the middle is named within seconds, and so is the batch."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side
from tests.pairs import kept

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

STEP_S = 60.0
SOON_S = 5.0  # some two seconds on a machine that has nothing else to do
BATCH = 5


class Ending(jobs.Model):
    """Ends on some ranks in batch 5: before its forward, by -1 from a hook, or in order behind it."""

    def __init__(self, how: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.how, self.ranks = how, ranks

    def _ends(self, batch_idx: int) -> bool:
        return batch_idx == BATCH and self.trainer.global_rank in self.ranks

    def _note(self) -> None:
        Path(self.trainer.default_root_dir, "ended").write_text(str(time.time()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.how == "minus one" and self._ends(batch_idx):
            self._note()
            return -1
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "should_stop" and self._ends(batch_idx):
            self._note()
            self.trainer.should_stop = True

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.how == "step" and self._ends(batch_idx):
            self._note()
            raise StopIteration
        return super().training_step(batch, batch_idx)


def train(strategy: str, how: str, ranks: tuple[int, ...], max_epochs: int, folder: str) -> int:
    model = Ending(how, ranks)
    named = {"timeout": {"step": STEP_S, "setup": "60s"}, "max_epochs": max_epochs}
    return jobs.fit(strategy, 2, folder, model, **named).global_step


def ending(what: tuple[Any, ...], folder: Path) -> tuple[SpawnResult, Path]:
    return spawn(train, 2, args=(*what, str(folder)), deadline="120s"), folder


ALONE: dict[str, tuple[str, str, tuple[int, ...], int]] = {
    "rank 0 of DDP": ("ResilientDDP", "step", (0,), 1),
    "rank 1 of DDP, and epochs follow": ("ResilientDDP", "step", (1,), 2),
    "rank 1 of FSDP": ("ResilientFSDP", "step", (1,), 1),
    "rank 0 of FSDP2": ("ResilientModelParallel", "step", (0,), 1),
    "rank 1 of ZeRO": ("ResilientDeepSpeed", "step", (1,), 1),
    "-1 on rank 0": ("ResilientDDP", "minus one", (0,), 1),
    "should_stop on rank 1": ("ResilientDDP", "should_stop", (1,), 1),
}
OFTEN = [name for name in ALONE if name != "rank 1 of FSDP"]
ALL = ("ResilientDDP", "step", (0, 1), 2)
runs = side_by_side({name: partial(ending, what) for name, what in {**ALONE, "all": ALL}.items()}, [*OFTEN, "all"])


@pytest.mark.parametrize("name", kept([*ALONE], OFTEN))
def test_a_rank_that_ends_in_the_middle_is_named_with_its_batch(name: str, runs: Runs) -> None:
    result, folder = runs(name)
    _, _, (guilty,), max_epochs = ALONE[name]
    what = "run" if max_epochs == 1 else "epoch"
    for log in result.logs.values():
        assert f"rank {guilty} has ended its {what} after batch {BATCH}; rank {1 - guilty} has not:" in log
    assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}
    (written,) = (path.stat().st_mtime for path in (folder / "distplus").glob("verdict-*.json"))
    assert written - float((folder / "ended").read_text()) < SOON_S
    jobs.verdict_in(folder, "divergence", [guilty])


def test_ranks_that_all_end_an_epoch_in_the_same_batch_go_on(runs: Runs) -> None:
    result, _ = runs("all")
    assert result.check().results == {0: 2 * BATCH, 1: 2 * BATCH}
