"""A training run that is asked to stop at a named moment, and the run that continues it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import PreemptionHandler, ResumableDataModule, newest_valid
from lightning_distplus.testing import weights_digest
from tests.distributed import jobs
from tests.distributed.resume_jobs import counters

STEPS = 11  # 8 global batches in an epoch of 34 samples: the last steps lie in the second epoch
MOMENTS = ("sanity check", "data", "forward", "backward", "optimizer", "validation", "save")


class Numbered(Dataset):
    """Sample i is i and random noise; one of them can be told to send a signal while a rank waits for it."""

    on_read: Any = None

    def __len__(self) -> int:
        return 34

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.on_read is not None:
            self.on_read()
        return torch.cat([torch.tensor([float(index)]), torch.rand(jobs.NUM_FEATURES - 1)])


@dataclass
class Asks(Callback):
    """Sends signals to this process, once, at one moment of one step, which lasts 50 ms longer for it.

    Each one is noted in ``asked.jsonl`` below the run's folder: the moment, the rank and the Trainer's step.
    """

    moment: str = "forward"
    ranks: Sequence[int] = (0, 1)
    step: int = 4
    signals: Sequence[str] = ("SIGTERM",)
    to_launcher: bool = False
    delays_s: Mapping[int, float] = field(default_factory=dict)  # by rank, from the moment on
    has_asked: bool = field(default=False, init=False)

    def ask(self, trainer: Any, moment: str, step: int) -> None:
        if (moment, step) != (self.moment, self.step) or self.has_asked:
            return
        self.has_asked = True
        if trainer.global_rank not in self.ranks:
            return
        with Path(trainer.default_root_dir, "asked.jsonl").open("a") as file:
            file.write(json.dumps([moment, trainer.global_rank, trainer.global_step]) + "\n")
        pid = os.getppid() if self.to_launcher else os.getpid()
        delay_s = self.delays_s.get(trainer.global_rank, 0.0)
        threading.Thread(target=self.send, args=(pid, delay_s), daemon=True).start()
        time.sleep(0.05)  # the signals arrive here

    def send(self, pid: int, delay_s: float) -> None:
        time.sleep(delay_s)
        if self.moment == "group":
            os.killpg(os.getpgid(pid), signal.SIGTERM)
            return
        for name in self.signals:
            os.kill(pid, getattr(signal, name))
            time.sleep(0.02)  # two pending signals of one kind are one

    def on_sanity_check_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "sanity check", self.step)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "train start", trainer.global_step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.datamodule.dataset.on_read = lambda: self.ask(trainer, "data", trainer.global_step)

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        for moment in ("forward", "group"):
            self.ask(trainer, moment, trainer.global_step)
        if self.moment == "death of rank 1" and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL if trainer.global_rank == 1 else signal.SIGTERM)
        if self.moment == "notice" and trainer.global_step == self.step:
            Path(self.signals[0]).touch()
            time.sleep(1.5)  # the notice is seen, and the grace passes

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "backward", trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "optimizer", trainer.global_step)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.ask(trainer, "validation", self.step)

    def on_test_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "test", self.step)

    def on_predict_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "predict", self.step)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer, "save", self.step)


class StockData(LightningDataModule):
    """The same numbers of batches from loaders that keep no state."""

    dataset = Numbered()

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(16, jobs.NUM_FEATURES), batch_size=2)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, jobs.NUM_FEATURES), batch_size=2)


def linger(model: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
    """A step takes a while, so that a late signal finds the run still going."""
    time.sleep(getattr(model, "slow_s", 0.0))
    return loss


def make(name: str, folder: str, callbacks: Sequence[Callback], **arguments: Any) -> tuple[Any, Any, Any]:
    """Trainer, model and data of the run."""
    settings = {"stage": 2} if "DeepSpeed" in name else {}
    if name.startswith("Resilient"):
        settings["timeout"] = "60s"
        settings["preflight"] = {"loopback": "off"}  # one host may play two
    if arguments.pop("keeps_buckets", False):  # DDP lays them out anew after its first step, else
        settings["find_unused_parameters"] = True
    num_workers = arguments.pop("num_workers", 0)
    world_size = arguments.pop("world_size", 2)
    is_stock = arguments.pop("is_stock", False)
    defaults = {"max_steps": STEPS, "val_check_interval": 3, "num_sanity_val_steps": 1, "enable_checkpointing": True}
    saver = ModelCheckpoint(dirpath=Path(folder) / "checkpoints", every_n_train_steps=5, save_top_k=-1)
    trainer = jobs.trainer(
        name, world_size, folder, **settings, callbacks=[*callbacks, saver], **{**defaults, **arguments}
    )
    dataset = Numbered()
    data = ResumableDataModule(dataset, torch.ones(8, jobs.NUM_FEATURES), batch_size=2, num_workers=num_workers, seed=5)
    data.dataset = dataset
    return trainer, jobs.Model(change=linger), StockData() if is_stock else data


def train(name: str, folder: str, asks: Asks | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """One attempt: resumes from the newest valid checkpoint where there is one."""
    handler = PreemptionHandler(**arguments.pop("handler", {}))
    slow_s = arguments.pop("slow_s", 0.0)
    callbacks = [handler] if asks is None else [handler, asks]
    trainer, model, data = make(name, folder, callbacks, **arguments)
    model.slow_s = slow_s
    found = newest_valid(Path(folder) / "checkpoints")
    trainer.fit(model, datamodule=data, ckpt_path=str(found) if found else None)
    resumed_at = -1 if found is None else int(found.stem.rpartition("=")[2])
    return {
        "weights": weights_digest(model),
        "step": trainer.global_step,
        "resumed_at": resumed_at,
        "counters": counters(trainer),
    }


def evaluate(function: str, folder: str, asks: Asks) -> None:
    """``validate``, ``test`` or ``predict``, asked to stop in its first batch."""
    trainer, model, _ = make("ResilientDDP", folder, [PreemptionHandler(), asks])
    loaders = jobs.loader()
    getattr(trainer, function)(model, dataloaders=loaders)
