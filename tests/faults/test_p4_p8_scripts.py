"""Rows P4 and P8: a user's script in an empty folder, killed by SIGKILL, goes on from what it had saved."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import newest_valid
from lightning_distplus.events import read_events
from lightning_distplus.testing import FaultPlan, SpawnResult, spawn
from tests.distributed.launch_jobs import planted
from tests.processes import LAUNCH, start

STEPS = 8
SCRIPT = '''
import json, os, sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_distplus import ResilientDDP
from lightning_distplus.testing import FaultCallback


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(Callback):
    """Which run this is, at which step it begins and ends, and where it saves."""

    def on_train_start(self, trainer, module):
        self.begins = trainer.global_step

    def on_train_end(self, trainer, module):
        saver = trainer.checkpoint_callback
        told = {"begins": self.begins, "ends": trainer.global_step, "folder": str(saver.dirpath), "argv": sys.argv[1:]}
        Path(f"run-{trainer.max_steps}-{trainer.global_rank}.json").write_text(json.dumps(told))


def fit(max_steps, ckpt_path, faults):
    seed_everything(1)
    trainer = Trainer(
        strategy=ResilientDDP(), accelerator="cpu", devices=2, max_steps=max_steps, log_every_n_steps=1,
        callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, filename="{step}"), Notes(), *faults],
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(torch.ones(64, 4), batch_size=2), ckpt_path=ckpt_path)


if __name__ == "__main__":
    two, auto = "--two" in sys.argv, "--auto" in sys.argv
    if two:
        fit(4, None, [])
    fit(8, "auto" if auto else None, [FaultCallback()])
'''


def launch(folder: Path, *words: str, plan: FaultPlan, code: int = 0) -> str:
    """What ``distplus launch`` has shown of the script, which each of the faults has struck."""
    (folder / "train.py").write_text(SCRIPT)
    launcher = start(*LAUNCH, "--nproc", "2", *words, cwd=folder, env=planted(plan, folder))
    shown, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == code, shown
    assert (folder / "faults").read_text().count("\n") == len(plan.faults)
    return shown


def run_script(folder: str, *words: str) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", *words]
    runpy.run_path("train.py", run_name="__main__")


def without_a_launcher(folder: Path, *words: str) -> SpawnResult:
    """Runs the script on two ranks that nobody restarts."""
    (folder / "train.py").write_text(SCRIPT)
    return spawn(run_script, 2, args=(str(folder), *words), deadline="60s")


def told(folder: Path, max_steps: int = STEPS) -> list[dict[str, Any]]:
    return [json.loads((folder / f"run-{max_steps}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.deadline(240)
def test_a_killed_script_goes_on_from_its_own_checkpoint_and_says_so(tmp_path: Path) -> None:
    """Killed before its first checkpoint it begins anew, beside what an earlier job has left in the folder."""
    without_a_launcher(tmp_path, "--two").check()
    shutil.rmtree(tmp_path / "distplus")
    left = set(tmp_path.glob("lightning_logs/*/checkpoints"))
    plan = FaultPlan().kill(1, step=1, where="before_backward").kill(1, step=5, where="before_backward")
    log = launch(tmp_path, "--max-restarts", "10", "train.py", "--lr", "1e-3", plan=plan)
    (folder,) = {path.parent for path in tmp_path.glob("lightning_logs/*/checkpoints/step=4.ckpt")} - left
    for one in told(tmp_path):
        assert (one["begins"], one["ends"], one["argv"]) == (4, STEPS, ["--lr", "1e-3"])
        assert one["folder"] == str(folder)
    assert "rank 1, killed by SIGKILL, at step 1: restarting from the beginning (1 steps, " in log
    restart = r"rank 1, killed by SIGKILL, at step 5: restarting from step=4\.ckpt \(1 steps, \d+ s of work lost\), "
    (line,) = re.findall(f"{restart}attempt 3 of 11$", log, re.MULTILINE)
    assert line
    assert log.count("fit names no checkpoint, and goes on from") == 1
    assert "starts anew: this job has no checkpoint yet" in log
    assert "[0] attempt 3: fit names no checkpoint, and goes on from" in log
    loaded = [event["attempt"] for event in read_events(tmp_path / "distplus") if event["kind"] == "loaded"]
    assert set(loaded) == {2}


@pytest.mark.deadline(240)
def test_the_second_fit_of_a_script_goes_on_from_what_second_fits_have_saved(tmp_path: Path) -> None:
    plan = FaultPlan().kill(0, step=7, where="before_backward")
    launch(tmp_path, "train.py", "--two", plan=plan)
    assert [(one["begins"], one["ends"]) for one in told(tmp_path)] == [(6, STEPS)] * 2
    loaded = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "loaded" and event["rank"] == 0]
    assert [(event["attempt"], event["global_step"]) for event in loaded] == [(1, 4), (1, 6)]  # the first fit is done


@pytest.mark.deadline(240)
def test_auto_in_a_script_is_auto_on_the_command_line(tmp_path: Path) -> None:
    plan = FaultPlan().kill(1, step=5, where="before_backward")
    log = launch(tmp_path, "--max-restarts", "0", "train.py", "--auto", plan=plan, code=137)
    assert "no restart is left of the 0 allowed" in log
    assert "names no checkpoint" not in log
    checkpoints = tmp_path / "checkpoints"
    assert newest_valid(checkpoints) == checkpoints / "step=4.ckpt"
    without_a_launcher(tmp_path, "--auto").check()
    assert [(one["begins"], one["folder"]) for one in told(tmp_path)] == [(4, str(checkpoints))] * 2
    for path in checkpoints.glob("*.ckpt"):
        path.write_bytes(b"torn")
    refused = without_a_launcher(tmp_path, "--auto")
    assert refused.exit_codes == {0: 1, 1: 1}
    assert "none of them committed and sound" in refused.logs[0]
    assert f"distplus verify {checkpoints}" in refused.logs[0]
