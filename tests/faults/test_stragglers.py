"""A rank that is slow in every step is named, on any strategy, with the part of the step in which it is slow.

Row H5.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus import RankDivergenceMonitor, StragglerMonitor
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs

SLOW_S = 0.2
NUM_STEPS, STEPS = 4, 16
LITTLE_S, LITTLE_STEPS = 0.05, 52  # of which the first 50 have to do


class SlowStep(jobs.Model):
    """One rank takes longer before its backward."""

    def __init__(self, slow: int, slow_s: float = SLOW_S) -> None:
        super().__init__()
        self.slow, self.slow_s = slow, slow_s

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.slow_s if self.global_rank == self.slow else 0)
        return super().training_step(batch, batch_idx)


class SlowCallback(Callback):
    """One rank takes longer after the step."""

    def __init__(self, slow: int) -> None:
        self.slow = slow

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        time.sleep(SLOW_S if trainer.global_rank == self.slow else 0)


def train(name: str, slow: int, is_early: bool, folder: str, monitors: str) -> list[float]:
    callbacks: list[Callback] = [] if is_early else [SlowCallback(slow)]
    if "both" in monitors:
        callbacks.append(RankDivergenceMonitor(on_straggler="ignore"))
    if "twice" in monitors:
        callbacks.append(StragglerMonitor())
    callbacks.append(StragglerMonitor(num_steps=NUM_STEPS))
    trainer = jobs.trainer(name, 2, folder, max_steps=STEPS, callbacks=callbacks, use_distributed_sampler=True)
    trainer.fit(SlowStep(slow) if is_early else jobs.Model(), jobs.loader(num_samples=2 * 4 * STEPS))
    return [one.metrics().get("distplus/stragglers", 0.0) for one in callbacks if hasattr(one, "metrics")]


class SlowSamples(torch.utils.data.Dataset):
    """One rank takes longer to fetch a sample; a batch has four."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 2 * 4 * LITTLE_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LITTLE_S / 4 if self.is_slow else 0)
        return torch.full((jobs.NUM_FEATURES,), index / 100)


def train_a_little_slower(folder: str) -> None:
    """With what one line brings: 50 ms more in the data of rank 1."""
    strategy = jobs.strategy("ResilientDDP", monitor=True)
    trainer = jobs.trainer(strategy, 2, folder, max_steps=LITTLE_STEPS, use_distributed_sampler=True)
    samples = SlowSamples(is_slow=trainer.global_rank == 1)
    trainer.fit(jobs.Model(), torch.utils.data.DataLoader(samples, batch_size=4))


def train_all(folder: str) -> dict[str, list[float]]:
    """Each place and each kind of strategy once, in the same processes."""
    train_a_little_slower(f"{folder}/little")
    runs = {
        "before": ("ResilientDDP", 1, True, "alone"),
        "after": ("ResilientFSDP", 0, False, "alone"),
        "beside": ("ResilientDDP", 1, True, "both"),
        "on stock": ("DDPStrategy", 1, False, "twice"),  # the last one: its store stays with the process
    }
    return {
        of: train(name, slow, is_early, f"{folder}/{of}", monitors)
        for of, (name, slow, is_early, monitors) in runs.items()
    }


def test_a_rank_for_which_its_peers_wait_in_every_step_is_named_with_the_part_of_the_step(tmp_path: Path) -> None:
    run = spawn(train_all, 2, args=(str(tmp_path),), deadline="120s").check()
    named = {"before": [1.0], "after": [1.0], "on stock": [1.0, 1.0], "beside": [1.0, 1.0]}
    assert run.results == {0: named, 1: named}
    for of, rank, is_early in (("before", 1, True), ("after", 0, False), ("on stock", 1, False)):
        events = [event for event in read_events(tmp_path / of / "distplus") if event["kind"] == "straggler"]
        assert {event["rank"] for event in events} == {0, 1}
        for event in events:
            assert event["ranks"] == [rank]
            assert event["wait_s"] > SLOW_S / 2
            assert (event["lead_s"] > event["wait_s"] / 2) == is_early
    little = [event for event in read_events(tmp_path / "little" / "distplus") if event["kind"] == "straggler"]
    assert {event["rank"] for event in little} == {0, 1}
    for event in little:
        assert (event["ranks"], event["part"]) == ([1], "data")
        assert event["global_step"] <= 50
        assert event["host"]
    assert "rank 1 is slow in every step: its peers wait " in run.logs[0]
    part = r": forward (\d+.\dx|\d+ ms above) the median on rank 1 \(host .+\), since step \d"
    assert re.search("in training_step, before the backward" + part, run.logs[0])
    assert "the optimizer, callbacks, logging" in run.logs[0]
    assert "Look there, and at its host: load " in run.logs[1]
    assert "data fetch" not in run.logs[0]  # the quiet form, which tells the ledger and the report only
