"""Rows H1 and H2 in a notebook, where Lightning forks the ranks: a cell that fails ends with the verdict, once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_endings import verdict_at_the_end_of
from tests.pairs import kept

# What a kernel does with a cell. It stands for one: the cells and their output are those of IPython.
NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell(open("first.py").read())
print("THE CELL HAS ENDED", file=sys.stderr)
shell.run_cell("raise ValueError('of the second cell')")
"""
CELL = """
import time
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from lightning_distplus import ResilientDDP

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        if batch_idx == 3 and self.global_rank == 1:
            FAULT
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

trainer = Trainer(strategy=ResilientDDP(timeout="4s", start_method="fork"), accelerator="cpu", devices=2, max_epochs=1,
                  logger=False, enable_model_summary=False, enable_progress_bar=False)
trainer.fit(Net(), DataLoader(TensorDataset(torch.rand(64, 8, generator=torch.Generator().manual_seed(0))), 2))
"""
FAULTS = {
    "hang": ("time.sleep(10**6)", r"RANK 1 HANGS .* in training_step, .*:15"),
    "exception": ('raise ValueError("a bad sample")', r"RANK 1 FAILED .* in training_step, .*:15"),
    "divergence": ("loss = loss * torch.nan", "RANK 1 DIFFERS in loss"),
}


@pytest.mark.parametrize("fault", kept(list(FAULTS), ["exception"]))
def test_a_cell_that_fails_ends_with_its_verdict_once(fault: str, tmp_path: Path) -> None:
    code, headline = FAULTS[fault]
    (tmp_path / "first.py").write_text(CELL.replace("FAULT", code))
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )
    cell, _, second = done.stdout.partition("THE CELL HAS ENDED")
    block = verdict_at_the_end_of(cell.rstrip().splitlines())
    assert re.fullmatch(headline, block[0]), done.stdout
    assert "RANK" not in second
    assert "of the second cell" in second
