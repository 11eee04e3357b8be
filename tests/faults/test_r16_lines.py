"""Row R16: a run goes back to an earlier step on purpose, and comes back by ``auto``: it goes on from where it was."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus.testing import spawn
from tests.distributed import jobs


def roll_back_and_requeue(rank: int, folder: str) -> list[tuple[int, int]]:
    """Trains to step 8, from step 4 to step 6, and then from what ``auto`` finds to step 7."""
    ended = []
    for max_steps, choice in ((8, None), (6, f"{folder}/step=4.ckpt"), (7, "auto")):
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        named = {"ckpt_path": choice, "max_steps": max_steps, "callbacks": [saver]}
        trainer = jobs.fit("ResilientFSDP", 2, folder, model := jobs.Model(), **named)
        ended.append((trainer.global_step - len(model.losses), trainer.global_step))
    return ended


def test_run_that_went_back_on_purpose_goes_on_from_there(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run = spawn(roll_back_and_requeue, 2, args=(str(folder),), deadline="60s").check()
    for rank, ended in run.results.items():
        assert ended == [(0, 8), (4, 6), (6, 7)]
        (warning,) = (line for line in run.logs[rank].splitlines() if "a line that was left" in line)
        assert "step=6-v1.ckpt (step 6)" in warning
        assert "step=8.ckpt (step 8)" in warning
