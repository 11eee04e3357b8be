"""Ranks that do not have the same data, or do not stand at the same place in it, hear so before the first batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import ResilientDDP
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import spawn
from tests.distributed.resume_jobs import SampleDiary, SaveAt, fit, map_data, quiet_trainer


def fit_with_odd_rank(rank: int, stock: bool, odd: dict[str, Any], folder: str) -> tuple[str, int]:
    strategy: Any = "ddp" if stock else ResilientDDP(timeout="30s")
    trainer = quiet_trainer(strategy=strategy, devices=3, max_steps=2, default_root_dir=folder)
    model = SampleDiary()
    try:
        trainer.fit(model, map_data(**{"num_samples": 26, "seed": 3, **(odd if rank == 1 else {})}))
    except DatasetMismatch as error:
        return str(error), len(model.steps)
    return "finished", len(model.steps)


@pytest.mark.parametrize(
    ("stock", "odd", "line"),
    [
        (True, {"num_samples": 24}, "num_samples: 26 on ranks 0, 2; 24 on rank 1"),
        (False, {"seed": 4}, "seed: 3 on ranks 0, 2; 4 on rank 1"),
        (False, {}, ""),
    ],
)
def test_rank_with_other_data_is_named_on_all_ranks_before_the_first_batch(
    stock: bool, odd: dict[str, Any], line: str, tmp_path: Path
) -> None:
    run = spawn(fit_with_odd_rank, 3, args=(stock, odd, str(tmp_path)), deadline="40s")
    for rank in range(3):  # a rank that is slow to end is ended by its peers' failure: then its log has the line
        text, num_steps = run.results.get(rank, (run.logs[rank], 0))
        assert line in text
        assert num_steps == (0 if line else 2)
        assert (text == "finished") is not bool(line)


@pytest.mark.parametrize("limit", [{"max_steps": 4}, {"max_epochs": 1}])
def test_finished_training_says_so(limit: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = SaveAt("on_train_epoch_end" if "max_epochs" in limit else "on_train_batch_end", tmp_path)
    fit(map_data(17), callbacks=[saver], **{"max_epochs": 2, **limit})
    with caplog.at_level(logging.WARNING, "lightning_distplus"):
        again = fit(map_data(17), ckpt_path=saver.saves[-1][0], **{"max_epochs": 2, **limit})
    (name, value), num_samples = *limit.items(), 8 if "max_steps" in limit else 16
    assert not [event for event in again.events if event[0] == "train"]
    assert f"training is already finished: the checkpoint stands after step {num_samples // 2}" in caplog.text
    assert f"sample {num_samples}, and {name} is {value}; raise it to go on" in caplog.text


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            {"max_steps": 11},
            r"after step 12, epoch 1, sample 24, and this run ends before, with max_steps=11\. Raise max_s",
        ),
        (
            {"max_epochs": 1},
            r"after step 16, epoch 2, sample 32, and this run ends before, with max_epochs=1\. Raise max_e",
        ),
    ],
)
def test_checkpoint_past_the_end_of_the_run_is_refused(limit: dict[str, int], words: str, tmp_path: Path) -> None:
    saver = SaveAt("on_train_epoch_end" if "max_epochs" in limit else "on_train_batch_end", tmp_path)
    fit(map_data(17), callbacks=[saver], max_epochs=2)
    path = saver.saves[-1 if "max_epochs" in limit else 11][0]
    with pytest.raises(DatasetMismatch, match=f"training already finished: the checkpoint stands {words}"):
        fit(map_data(17), ckpt_path=path, **{"max_epochs": 2, **limit})
