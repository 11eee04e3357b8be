"""The last lines of the terminal, as a person reads them: the verdict comes last, and nobody else is blamed.

Rows H1 and H2.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_distplus.errors import ExitCode
from tests.pairs import kept

SCRIPT = """
import sys, threading, time
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset
from lightning_distplus import ResilientDDP

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.global_rank == 1:
            if sys.argv[1] != "raise":
                time.sleep(10**6)
            raise ValueError("a bad sample,\\n  of a long message")
        if batch_idx == 5 and sys.argv[1] == "redraw":
            threading.Thread(target=self.redraw, daemon=True).start()
        return self.layer(batch[0]).pow(2).mean()

    def redraw(self):
        while True:
            self.trainer.progress_bar_callback.train_progress_bar.refresh()
            time.sleep(1e-3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    data = TensorDataset(torch.arange(512.0).reshape(64, 8) if sys.argv[1] != "preflight" else torch.rand(64, 8))
    trainer = Trainer(
        strategy=ResilientDDP(timeout="4s"), accelerator="cpu", devices=2, max_epochs=1,
        logger=TensorBoardLogger(".", name="board"),
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=2))
"""
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node=2"],
}


def ending_of(launcher: str, fault: str, folder: Path) -> tuple[int, list[str]]:
    """The exit code, and the terminal from the end of the progress bar on, without torchrun's epilogue."""
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*LAUNCHERS[launcher], "train.py", fault],
        cwd=folder,
        env={**os.environ, "DISTPLUS_TRACEBACK": "", "DISTPLUS_ON_VERDICT": "cat > told.json"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    # The agent logs that a rank has failed while the others still end, and raises when all have.
    text = re.sub(r"E\d{4} \S+ \d+ torch/distributed/elastic.*\n", "", done.stdout)
    text = re.split(r'Traceback \(most recent call last\):\n  File ".*/torchrun"', text)[0]
    text = re.sub(r"(?m)^W\d{4} .*torch/distributed.*\n", "", text)
    assert "[rank0]" not in text
    assert len(text.splitlines()) < 80
    return done.returncode, text.rstrip().splitlines()


def verdict_at_the_end_of(lines: list[str]) -> list[str]:
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("RANK "))
    block = lines[begin:]
    assert len(block) <= 30
    assert block[-1].startswith("  file:  ")
    assert block[-2].startswith("  next:  ")
    return block


def told(folder: Path) -> tuple[str, list[int]]:
    """What the command of ``on_verdict`` has heard."""
    found = json.loads((folder / "told.json").read_text())
    return found["kind"], found["culprits"]


@pytest.mark.parametrize("launcher", kept([*LAUNCHERS], ["torchrun"]))
def test_a_hang_ends_with_its_verdict(launcher: str, tmp_path: Path) -> None:
    code, lines = ending_of(launcher, "hang", tmp_path)
    block = verdict_at_the_end_of(lines)
    assert re.fullmatch(r"RANK 1 HANGS \(host \S+, pid \d+\) in training_step, train.py:17", block[0])
    assert block[1] == "    time.sleep(10**6)"
    assert lines.count("rank 1 stopped, exit 170") == 1
    assert told(tmp_path) == ("hang", [1])
    assert not any("Traceback" in line for line in lines)
    assert code == (ExitCode.HANG if launcher == "python" else 1)


@pytest.mark.soak
def test_a_bar_that_is_redrawn_meanwhile_does_not_come_behind_the_verdict(tmp_path: Path) -> None:
    _, lines = ending_of("python", "redraw", tmp_path)
    verdict_at_the_end_of(lines)


@pytest.mark.parametrize("launcher", kept([*LAUNCHERS], ["python"]))
def test_an_exception_ends_with_its_verdict_and_is_shown_whole_once(launcher: str, tmp_path: Path) -> None:
    code, lines = ending_of(launcher, "raise", tmp_path)
    block = verdict_at_the_end_of(lines)
    assert re.fullmatch(r"RANK 1 FAILED \(host \S+, pid \d+\) in training_step, train.py:18", block[0])
    assert "no checkpoint has been committed yet" in " ".join(block)
    before = lines[: -len(block)]
    assert before.count("ValueError: a bad sample,") == before.count("  of a long message") == 1
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert any(re.match(r"    \.\.\. \d+ frames of .*lightning", line) for line in before)
    assert before.count("rank 0 stopped because of rank 1, exit 171") == 1
    assert told(tmp_path) == ("exception", [1])
    assert any(b"RANK 1 FAILED" in path.read_bytes() for path in (tmp_path / "board").rglob("events.out.*"))
    for rank in (0, 1):
        assert "Traceback" in (tmp_path / "distplus" / f"rank{rank:05d}.traceback").read_text()
    assert code == (ExitCode.PEER_LOST if launcher == "python" else 1)


def test_what_all_ranks_raise_alike_is_shown_once_and_without_frames(tmp_path: Path) -> None:
    code, lines = ending_of("python", "preflight", tmp_path)
    assert code == ExitCode.PREFLIGHT
    assert not any("Traceback" in line for line in lines)
    assert sum("content of the data set differs" in line for line in lines) == 1
    assert sum("PreflightError" in line for line in lines[-8:]) >= 1
    assert lines.count("rank 1 stopped with PreflightError, exit 173") <= 1


@pytest.mark.soak
def test_all_tracebacks_are_shown_to_who_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", "raise"], cwd=tmp_path, env={**os.environ, "DISTPLUS_TRACEBACK": "full"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stderr.count("Traceback (most recent call last):") >= 3
    assert done.stderr.rstrip().splitlines()[-1].startswith("  file:  ")


# -- a notebook, where Lightning forks the ranks -----------------------------------------------------------------------

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
