"""Small training jobs that the distributed tests run in real processes."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_distplus
from lightning_distplus.preflight.host import HOST_CHECKS

STRATEGIES = ("ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "ResilientDeepSpeed")
NUM_FEATURES = 8
OF_TRAINER = inspect.signature(pl.Trainer).parameters.keys()


class Model(pl.LightningModule):
    """Two layers with dropout; its loss is a pure function of weights, batch and random state.

    Args:
        seed: Of its weights.
        change: Gets the model, the loss and the number of the batch, and gives what its ``training_step`` returns.
    """

    def __init__(self, seed: int = 0, change: Callable[[Any, torch.Tensor, int], Any] | None = None) -> None:
        super().__init__()
        self.seed, self._change = seed, change
        self.net: nn.Module | None = None
        self.losses: list[str] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(self.seed)
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=mesh["data_parallel"])
        torch.manual_seed(100 + self.trainer.global_rank)
        self.grow()

    def grow(self) -> None:
        """Makes what a subclass has beside the two layers."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.losses.append(loss.item().hex())
        return loss if self._change is None else self._change(self, loss, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class At(Callback):
    """Does something in one hook: on one rank or on all of them, at one step or at each.

    Args:
        hook: Its name.
        deed: Gets what the hook gets: the Trainer, the module, and whatever follows.
        rank: Where.
        step: How many steps are done then.
    """

    def __init__(
        self, hook: str, deed: Callable[..., Any], *, rank: int | None = None, step: int | None = None
    ) -> None:
        self.deed, self.rank, self.step = deed, rank, step
        setattr(self, hook, self._do)

    def _do(self, trainer: pl.Trainer, *arguments: Any, **named: Any) -> Any:
        if self.rank in (None, trainer.global_rank) and self.step in (None, trainer.global_step):
            return self.deed(trainer, *arguments, **named)
        return None


class BadSample(Dataset[torch.Tensor]):
    """One rank's data worker never returns from one sample, or raises there; the moment and its pid are kept."""

    def __init__(self, rank: int, number: int, record: str, *, raises: bool = False) -> None:
        self.rank, self.number, self.record, self.raises = rank, number, record, raises

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.number and os.environ["RANK"] == str(self.rank):
            Path(self.record).write_text(f"{time.time()} {os.getpid()}")
            if self.raises:
                raise ValueError("the planted sample")  # raised
            time.sleep(1000)  # the sample
        return torch.ones(NUM_FEATURES)


def loader(num_samples: int = 64, batch_size: int = 4) -> DataLoader:
    """The same samples on every rank, in the same order."""
    samples = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(7))
    return DataLoader(samples, batch_size=batch_size, generator=torch.Generator().manual_seed(8))


def strategy(name: str, **arguments: Any) -> Any:
    """A strategy by class name: one of ours, or one of Lightning's; "zero1" to "zero3" are DeepSpeed's stages.

    Ours come without a monitor unless a test asks for one: `loader` gives all ranks the same samples, and faults are
    planted that the monitor would name before the part that a test is about.
    """
    if name.startswith("zero"):
        name, arguments = "ResilientDeepSpeed", {"stage": int(name[-1]), **arguments}
    home = lightning_distplus if name.startswith("Resilient") else pl.strategies
    if home is lightning_distplus:
        arguments = {"monitor": False, **arguments}
    return getattr(home, name)(**arguments)


def trainer(which: Any, world_size: int, folder: Any, **arguments: Any) -> pl.Trainer:
    """A Trainer on the CPU that writes nothing by itself, except for checkpoints where a callback saves them.

    Args:
        which: A strategy, or the name of one, whose arguments then stand among those of the Trainer.
        world_size: Of this host.
        folder: Its root.
        **arguments: Of the Trainer, and of a strategy that is named.
    """
    if isinstance(which, str) and not which.startswith(("resilient_", "auto", "ddp")):  # which the Trainer knows
        which = strategy(which, **{name: arguments.pop(name) for name in arguments.keys() - OF_TRAINER})
    quiet = {
        "logger": False,
        "enable_checkpointing": any(isinstance(one, Checkpoint) for one in arguments.get("callbacks") or ()),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    place = {"accelerator": "cpu", "devices": world_size, "default_root_dir": folder}
    return pl.Trainer(strategy=which, **{**quiet, **place, **arguments})


def fit(
    which: Any,
    world_size: int,
    folder: Any,
    model: pl.LightningModule | None = None,
    data: Any = None,
    ckpt_path: Any = None,
    **arguments: Any,
) -> pl.Trainer:
    """Makes a `trainer` and fits a model, of this module by default, to a loader, several of them, or a data module."""
    made = trainer(which, world_size, folder, **arguments)
    loaders = data if isinstance(data, tuple) else (loader() if data is None else data,)
    made.fit(Model() if model is None else model, *loaders, ckpt_path=ckpt_path)
    return made


def verdict_in(folder: Path, *expected: Any) -> dict[str, Any]:
    """The one verdict of a run in this folder: what is expected of its kind, its culprits and the ranks that waited."""
    (path,) = (folder / "distplus").glob("verdict-*.json")
    verdict: dict[str, Any] = json.loads(path.read_text())
    assert [verdict[name] for name in ("kind", "culprits", "waiting")[: len(expected)]] == [*expected], verdict
    return verdict


def line_of(file: str, comment: str) -> str:
    """The place of the line that ends in this comment, as verdicts write it."""
    lines = Path(file).read_text().splitlines()
    return f"{file}:{next(number for number, text in enumerate(lines, 1) if text.endswith(f'# {comment}'))}"


def findings_of_preflight(run: Any) -> list[str]:
    """What the checks told of a run, but for those of the host: a busy machine writes slowly."""
    lines = [line for log in run.logs.values() for line in log.splitlines() if "preflight (" in line]
    return [line for line in lines if not any(f"preflight ({name})" in line for name in HOST_CHECKS)]
