"""How long a killed rank costs, against stock Lightning under torchrun, and what readiness to stop costs each step.

A rank of two is killed with SIGKILL; the clock runs from there until both ranks have finished a step again. Both arms
run the same script on the same two processes, in turn. ``python -m benchmarks restart`` runs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.figures import Figure, bootstrap_ci95, median
from benchmarks.jobs import NUM_FEATURES, Model
from lightning_distplus import PreemptionHandler, ResilientDDP, newest_valid
from lightning_distplus.batch_gate import BatchGate
from lightning_distplus.launch.agent import Hosts
from lightning_distplus.launch.policy import RestartPolicy
from lightning_distplus.launch.supervisor import Job, supervise
from lightning_distplus.testing import spawn

__all__ = ["run"]

_ROOT = Path(__file__).parents[1]
_ARMS = ("distplus launch", "torchrun, stock")
_KILLED_AT = 7  # the last save is that of step 5
_LAST_STEP = 10
_TARGET_US = 40
_CALLS = 20_000


def run(quick: bool) -> list[Figure]:
    """Kills 10 times with each arm (quick: once)."""
    taken_s: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    for _ in range(1 if quick else 10):
        for arm in _ARMS:
            taken_s[arm].append(restart_s(arm))
    figures = [
        Figure(
            name=f"SIGKILL until training, {arm}", value=median(values), unit="s",
            ci95=bootstrap_ci95(values) if len(values) > 1 else None,
            note=f"{len(values)} runs, {min(values):.1f} .. {max(values):.1f} s",
        )
        for arm, values in taken_s.items()
    ]  # fmt: skip
    ready_us = [cost for costs in spawn(readiness_us, 2, deadline="120s").check().results.values() for cost in costs]
    ready = Figure(
        name="readiness to stop, per step", value=median(ready_us), unit="us", ci95=bootstrap_ci95(ready_us),
        target=_TARGET_US,
    )  # fmt: skip
    return [*figures, ready]


def restart_s(arm: str) -> float:
    """Seconds from the kill until the slower rank has finished a step again."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.restart", "launch", folder]
        if arm == "torchrun, stock":
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "benchmarks.restart"]
            command += ["stock", folder]
        log = Path(folder) / "log"
        with log.open("w") as file:
            ended = subprocess.run(command, cwd=_ROOT, stdout=file, stderr=file, timeout=300, check=False)
        if ended.returncode:
            raise RuntimeError(f"{arm} ended with {ended.returncode}:\n{log.read_text()[-3000:]}")
        killed_at = float((Path(folder) / "killed").read_text())
        return max(float((Path(folder) / f"trained-{rank}").read_text()) for rank in (0, 1)) - killed_at


class Clock(Callback):
    """Kills rank 1 once; in the attempt after that it notes when a step is done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_again = (folder / "killed").exists()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        note = self.folder / f"trained-{trainer.global_rank}"
        if self.is_again and not note.exists():
            note.write_text(str(time.time()))
        if not self.is_again and trainer.global_step == _KILLED_AT and trainer.global_rank == 1:
            (self.folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def train(arm: str, folder: Path) -> None:
    """One attempt of one rank."""
    saves = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=5, save_last=arm == "stock")
    is_ours = arm == "ours"
    callbacks = [saves, Clock(folder), *([PreemptionHandler()] if is_ours else [])]
    trainer = _trainer(ResilientDDP() if is_ours else "ddp", folder, callbacks, max_steps=_LAST_STEP)
    resumed: Any = newest_valid(folder / "checkpoints") if is_ours else "last" if Clock(folder).is_again else None
    trainer.fit(Model(), _loader(), ckpt_path=resumed)


def _trainer(strategy: Any, folder: Path, callbacks: list[Callback], **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, default_root_dir=folder, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip


def _loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(128, NUM_FEATURES), batch_size=4)


def launch(folder: Path) -> int:
    """The arm of ``distplus launch``: its supervisor with this script in the place of ``distplus fit``."""
    command = ["-m", "benchmarks.restart", "ours", str(folder)]
    policy = RestartPolicy(max_restarts=1)
    return supervise(
        Job(command=lambda has_saved: command, hosts=Hosts(nproc=2), policy=policy, log_dir=folder / "logs")
    )


class _Calls(Callback):
    """Times what the handler adds to a step, many times over, in the middle of a run."""

    def __init__(self, handler: PreemptionHandler) -> None:
        self.handler = handler
        self.costs_us: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        gate: BatchGate = trainer.strategy.gate  # type: ignore[attr-defined]
        for _ in range(20):
            began_at = time.perf_counter()
            for _ in range(_CALLS // 20):
                self.handler.on_train_batch_start(trainer, module, batch, batch_idx)
                gate.wants_preemption()
            self.costs_us.append((time.perf_counter() - began_at) / (_CALLS // 20) * 1e6)


def readiness_us(rank: int) -> list[float]:
    """Microseconds of the handler's two calls per step; its wish rides in the gate, which is there without it."""
    handler = PreemptionHandler()
    calls = _Calls(handler)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(ResilientDDP(), Path(folder), [handler, calls], max_steps=2, enable_checkpointing=False)
        trainer.fit(Model(), _loader())
    return calls.costs_us


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(launch(Path(sys.argv[2])))
    train(sys.argv[1], Path(sys.argv[2]))
