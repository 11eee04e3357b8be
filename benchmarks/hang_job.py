"""One rank of the job of ``benchmarks.hangs``, below one of its launchers: ``hang_job.py ARM FAULT FOLDER SECONDS``.

It runs in the environment of the arm: only that of ``ours``, ``warm`` and ``cold`` holds this package.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

FAULT_STEP = 12
GUILTY = 1
_STEP_S = 0.1


class Model(pl.LightningModule):
    """One layer; a step takes a tenth of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Sleeps, and uses the layer."""
        time.sleep(_STEP_S)
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Journal(Callback):
    """Writes down when which rank did what; plants the fault in the first attempt."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder = folder
        self.fault = fault
        self.attempt = int(os.environ.get("DISTPLUS_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """A step is done; the guilty rank may stop here."""
        self._write("step", trainer)
        if self.attempt == 0 and trainer.global_rank == GUILTY and trainer.global_step == FAULT_STEP:
            self._write("fault", trainer)
            if self.fault == "hang":
                time.sleep(10_000)
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self.fault])

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """This rank has noticed."""
        self._write("error", trainer)

    def _write(self, what: str, trainer: pl.Trainer) -> None:
        line = f"{time.time()} {what} {trainer.global_rank} {self.attempt} {trainer.global_step}\n"
        with (self.folder / f"journal-{trainer.global_rank}").open("a") as file:
            file.write(line)


def main(arm: str, fault: str, folder: Path, deadline_s: float) -> None:
    """Trains 60 steps; a later attempt resumes from the newest checkpoint."""
    callbacks: list[Callback] = [
        Journal(folder, fault),
        ModelCheckpoint(dirpath=folder / "saved", filename="{step:04d}", every_n_train_steps=5, save_top_k=-1),
    ]
    strategy: Any = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=deadline_s))
    if arm in ("ours", "warm", "cold"):
        from lightning_distplus import ResilientDDP

        strategy = ResilientDDP(timeout={"step": deadline_s, "setup": "60s"}, monitor=False, preemption=False)
    if arm == "nvrx":
        from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback

        strategy = DDPStrategy(process_group_backend="gloo")
        callbacks.append(FaultToleranceCallback(autoresume=False, calculate_timeouts=False))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        max_steps=60,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = sorted((folder / "saved").glob("*.ckpt"))
    samples = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))  # the same on all ranks
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    trainer.fit(Model(), loader, ckpt_path=str(saved[-1]) if saved else None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
