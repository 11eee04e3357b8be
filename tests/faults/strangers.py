"""A script of a stranger, in which one line is ours: run as a shell runs it, and what the terminal then shows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.processes import start

__all__ = [
    "EXCEPTION", "HANG", "LINES", "NAN", "line_of", "run_script", "script_of", "terminal_of", "verdict_at_the_end_of",
]  # fmt: skip

# As Lightning's users write it: a shuffled DataLoader, augmentation, two workers. One line of it changes.
SCRIPT = """\
import os, signal, sys, threading, time
import lightning.pytorch as pl, torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, TensorDataset
import lightning_distplus

class Samples(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        sample = torch.full((4,), float(index))
        return sample + 0.1 * torch.randn(4)

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = None

    def configure_model(self):
        if self.layer is None:
            self.layer = torch.nn.Linear(4, 1)
            if self.device_mesh is not None:
                fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss, rank, step = self.layer(batch).pow(2).mean(), self.trainer.global_rank, self.trainer.global_step
        if step == 7:
            pass  # the fault
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = pl.Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=3)
trainer.fit(Model(), DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2))
print("the script goes on")
"""
LINES = {
    "ddp": "ResilientDDP({})",
    "fsdp": "ResilientFSDP({})",
    "fsdp2": "ResilientModelParallel({})",
    "zero2": "ResilientDeepSpeed(stage=2, {})",
}
NAN = "loss = loss * torch.nan if rank == 1 else loss"
HANG = "rank == 1 and time.sleep(10**6)"
EXCEPTION = "if rank == 1: raise ValueError('a bad sample,\\n  of a long message')"


def script_of(
    fault: str = "pass", arguments: str = "", name: str = "ddp", changes: Mapping[str, str] | None = None
) -> str:
    """The script with a strategy of ours, and a fault in its eighth step.

    Args:
        fault: One line.
        arguments: Of the strategy.
        name: Of the strategy, as in ``LINES``.
        changes: What else is written in the place of what.
    """
    script = SCRIPT.replace('"ddp"', "lightning_distplus." + LINES[name].format(arguments))
    for before, after in {**(changes or {}), "pass  # the fault": fault.replace("\n", "\\n")}.items():
        assert before in script
        script = script.replace(before, after)
    return script


def line_of(script: str, text: str) -> int:
    """The number of the line which holds that."""
    return script[: script.index(text.replace("\n", "\\n"))].count("\n") + 1


def run_script(
    folder: Path, script: str, *launcher: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a shell shows of ``python train.py``, which starts its second rank by itself.

    No rank outlives the test: the one that is killed at the test's deadline would leave those that it has started.
    """
    (folder / "train.py").write_text(script)
    variables = {one: value for one, value in os.environ.items() if one not in ("RANK", "WORLD_SIZE")}
    running = start(*launcher, "train.py", cwd=folder, env={**variables, "DISTPLUS_TRACEBACK": "", **(env or {})})
    with running:
        try:
            shown, _ = running.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return subprocess.CompletedProcess([], running.returncode, shown)


def terminal_of(shown: str) -> list[str]:
    """The lines of a terminal without torchrun's own."""
    # The agent logs that a rank has failed while the others still end, and raises when all have.
    text = re.sub(r"E\d{4} \S+ \d+ \S*torch/distributed/elastic.*\n", "", shown)
    text = re.split(r'Traceback \(most recent call last\):\n  File ".*/torchrun"', text)[0]
    text = re.sub(r"(?m)^W\d{4} .*torch/distributed.*\n", "", text)
    assert "[rank0]" not in text
    assert len(text.splitlines()) < 80
    return text.rstrip().splitlines()


def verdict_at_the_end_of(lines: list[str]) -> list[str]:
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("RANK "))
    block = lines[begin:]
    assert len(block) <= 30
    assert block[-1].startswith("  file:  "), block
    assert block[-2].startswith("  next:  ")
    return block
