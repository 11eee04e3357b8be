"""Another number of ranks, micro-batch, accumulation and workers between the legs of one run: row R3."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_distplus import ResilientDDP
from lightning_distplus.testing import spawn
from tests.distributed.resume_jobs import (
    SampleDiary,
    fit,
    global_batches,
    map_data,
    token_data,
    write_tokens,
)

# (ranks, micro-batch, accumulation, workers, micro-batch of this leg after which the next leg's checkpoint is written)
LEGS = [(2, 4, 3, 0, 13), (4, 2, 3, 1, 25), (3, 4, 2, 0, 20), (2, 6, 2, 2, 0)]
GLOBAL_BATCH = 24
NUM_STEPS = 16
FIRST_STEPS = [4, 8, 10]  # 13, 25 and 20 micro-batches: whole windows only
CUTS = [f"24 (batch size {size} x {ranks} data-parallel ranks x accumulation {n})" for ranks, size, n, *_ in LEGS]


class SaveAfter(Callback):
    """Saves once, after a given number of micro-batches; then the run goes on."""

    def __init__(self, batch: int, path: str) -> None:
        self.batch = batch
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)


def leg(prefix: str, number: int, folder: str) -> list[Any]:
    """One leg on every rank, for each kind of data: the samples of each step, and the counters at the end."""
    logging.getLogger("lightning_distplus").setLevel(logging.INFO)
    logging.basicConfig(format="%(name)s %(message)s", force=True)
    world_size, micro_batch, accumulation, num_workers, save_after = LEGS[number]
    return [
        _fit(
            data,
            world_size=world_size,
            accumulation=accumulation,
            load=f"{folder}/{kind}{number}.ckpt" if number else None,
            saver=SaveAfter(save_after, f"{folder}/{kind}{number + 1}.ckpt"),
        )
        for kind, data in (
            ("map", map_data(200, batch_size=micro_batch, num_workers=num_workers)),
            ("tokens", token_data(sources=prefix, micro_batch_size=micro_batch, num_workers=num_workers)),
        )
    ]


def _fit(data: Any, *, world_size: int, accumulation: int, load: str | None, saver: SaveAfter) -> Any:
    settings = {"devices": world_size, "default_root_dir": Path(saver.path).parent, "callbacks": [saver]}
    settings |= {"strategy": ResilientDDP(timeout="60s"), "accumulate_grad_batches": accumulation}
    run = fit(data, diary=SampleDiary, ckpt_path=load, max_steps=NUM_STEPS, **settings)
    trainer = run.trainer
    counters = {"consumed": data.consumed_samples, "step": trainer.global_step, "epoch": trainer.current_epoch}
    return run.steps, counters, trainer.fit_loop.epoch_loop.batch_progress.total.state_dict()


@pytest.mark.deadline(120)
def test_run_goes_on_from_2_to_4_to_3_to_2_ranks_with_the_same_samples_in_each_step(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens", 801)
    runs = [
        spawn(leg, LEGS[number][0], args=(prefix, number, str(tmp_path)), deadline="60s").check()
        for number in range(len(LEGS))
    ]

    for kind in range(2):
        undisturbed = global_batches(runs[0].results, kind)
        sizes = {step: len(batch) for step, batch in undisturbed.items()}
        assert sizes == dict.fromkeys(range(NUM_STEPS), GLOBAL_BATCH)
        for first, run, (_, _, accumulation, _, _) in zip(FIRST_STEPS, runs[1:], LEGS[1:], strict=True):
            assert global_batches(run.results, kind) == {step: undisturbed[step] for step in range(first, NUM_STEPS)}
            for per_rank in run.results.values():
                assert per_rank[kind][1] == runs[0].results[0][kind][1]
                assert set(per_rank[kind][2].values()) == {NUM_STEPS * accumulation}
    for first, run, before, cut in zip(FIRST_STEPS, runs[1:], CUTS[:-1], CUTS[1:], strict=True):
        receipts = re.findall(r"resumed at sample .*", "".join(run.logs.values()))
        assert len(receipts) == 2, "one line for each run, from rank 0"
        for receipt in receipts:
            assert receipt.startswith(f"resumed at sample {first * GLOBAL_BATCH}, step {first}, epoch ")
            assert receipt.endswith(f"; global batch {cut}, before {before}")
        assert run.logs[0].count("they start afresh") == 2
