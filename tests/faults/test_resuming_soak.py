"""Rows R1 and R3, over and over: kill -9 of a random rank in a random step, then another cut of the same steps."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any, get_args

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus import ResilientDDP, newest_valid
from lightning_distplus.data import SampleAudit, Source
from lightning_distplus.data.audit import audit_folder
from lightning_distplus.testing import FaultCallback, FaultPlan, spawn
from lightning_distplus.testing.faults import Where
from tests.distributed.resume_jobs import SampleDiary, global_batches, quiet_trainer, token_data, write_tokens

NUM_SEEDS = 50
NUM_STEPS = 14
GLOBAL_BATCH = 12
CUTS = [(1, 2), (1, 6), (2, 3), (2, 1), (3, 2), (3, 1)]  # ranks, micro-batch
PLACES = [place for place in get_args(Where) if place != "validation"]


class Noted(SampleDiary):
    """Logs the step, so that the newest checkpoints are the best ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)


def train(prefixes: list[str], size: int, micro_batch: int, workers: int, folder: str) -> Any:
    checkpoints = Path(folder) / "checkpoints"
    trainer = quiet_trainer(
        strategy=ResilientDDP(timeout="60s"),
        devices=size,
        default_root_dir=folder,
        max_steps=NUM_STEPS,
        callbacks=[
            SampleAudit(),
            ModelCheckpoint(dirpath=checkpoints, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"),
            FaultCallback(),
        ],
    )
    model = Noted()
    sources = [Source(path=prefix, weight=weight) for prefix, weight in zip(prefixes, (3.0, 1.0), strict=True)]
    data = token_data(
        sources=sources, micro_batch_size=micro_batch, num_workers=workers, global_batch_size=GLOBAL_BATCH
    )
    found = newest_valid(checkpoints)
    trainer.fit(model, data, ckpt_path=str(found) if found else None)
    return [(model.steps, data.consumed_samples)]


@pytest.mark.soak
@pytest.mark.deadline(300)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_kills_at_random_steps_repeat_and_miss_nothing(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    prefixes = [write_tokens(tmp_path / "a", 1601), write_tokens(tmp_path / "b", 801, start=10_000)]
    folder, num_kills = tmp_path / "run", draw.randint(1, 3)
    folder.mkdir()
    for step in sorted(draw.sample(range(1, NUM_STEPS), num_kills)):
        size, micro_batch = draw.choice(CUTS)
        place, rank = draw.choice(PLACES), draw.randrange(size)
        options = (prefixes, size, micro_batch, draw.choice([0, 2]), str(folder))
        faults = FaultPlan().kill(rank=rank, step=step, where=place)
        killed = spawn(train, size, args=options, faults=faults, deadline="120s")
        assert killed.faults_fired == 1, (step, place)
        assert killed.exit_codes[rank] == -signal.SIGKILL
    size, micro_batch = draw.choice(CUTS)
    done = spawn(train, size, args=(prefixes, size, micro_batch, 0, str(folder)), deadline="120s").check()

    (tmp_path / "whole").mkdir()
    whole = spawn(train, 1, args=(prefixes, 1, 2, 0, str(tmp_path / "whole")), deadline="120s").check()
    expected = global_batches(whole.results)
    assert {step: expected[step] for step in global_batches(done.results)} == global_batches(done.results)
    report = audit_folder(folder / "distplus" / "audit")
    assert report.ok, report
    assert report.num_steps == NUM_STEPS
    assert report.num_samples == whole.results[0][0][1] == done.results[0][0][1]
