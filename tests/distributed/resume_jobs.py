"""A small training run that writes down everything that happens in it, for the tests of exact resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import Dataset

from lightning_distplus.data import MegatronWriter, ResumableDataModule, TokenDataModule
from lightning_distplus.testing import weights_digest
from tests.distributed import jobs

# Ways to train that data of every kind have.
CASES: dict[str, dict[str, Any]] = {
    "three epochs": {"max_epochs": 3, "num_samples": 9},
    "limited by steps": {"max_epochs": 5, "max_steps": 18},
    "validation inside the epoch": {"max_epochs": 2, "val_check_interval": 3},
    "validation across epochs": {"max_epochs": 2, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "validation inside windows": {"max_epochs": 2, "val_check_interval": 1, "accumulate_grad_batches": 2},
    "loaders made anew in each epoch": {"max_epochs": 3, "num_samples": 9, "reload_dataloaders_every_n_epochs": 1},
    "sanity check": {"max_epochs": 2, "num_sanity_val_steps": 1},
}


class Augmented(Dataset):
    """Sample i is (i, the sum of a random number of each generator); it keeps which ones were read."""

    def __init__(self, num_samples: int = 17, text: str | None = None) -> None:
        self.num_samples = num_samples
        self.text = text
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, list):
            return torch.stack([self[one] for one in index])
        self.read.append(index)
        return torch.tensor([float(index), random.random() + np.random.rand() + torch.rand(()).item()])


class WithFingerprint(Augmented):
    def fingerprint(self) -> str:
        return self.text or ""


class Diary(pl.LightningModule):
    """Notes every event with the counters of the Trainer."""

    def __init__(self, *, plans_schedule: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
        self.plans_schedule = plans_schedule
        self.events: list[tuple[Any, ...]] = []

    def note(self, *event: Any) -> None:
        trainer, loop = self.trainer, self.trainer.fit_loop
        counters = (trainer.current_epoch, trainer.global_step, loop.total_batch_idx)
        self.events.append((*event, *counters, loop.epoch_loop._batches_that_stepped))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = batch[:, 0].int().tolist()
        if not self.trainer.datamodule.is_iterable:
            assert ids == self.trainer.datamodule.sample_ids(batch_idx)
        counted = self.trainer.fit_loop.epoch_loop.batch_idx
        self.note("train", batch_idx, counted, tuple(ids), tuple(batch[:, 1].tolist()))
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        progress = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress
        if not self.trainer.sanity_checking:
            ids = tuple(batch[:, 0].int().tolist())
            self.note("validate", batch_idx, ids, progress.total.ready, progress.current.ready)

    def on_train_epoch_start(self) -> None:
        self.note("epoch starts")

    def on_train_epoch_end(self) -> None:
        self.note("epoch ends")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if not self.plans_schedule:
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps / 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(Callback):
    """Saves at every occasion of one hook; notes how many events there were by then."""

    def __init__(self, hook: str, folder: Path) -> None:
        self.folder = folder
        self.saves: list[tuple[Path, int]] = []
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        path = self.folder / f"{len(self.saves)}.ckpt"
        trainer.save_checkpoint(path)
        self.saves.append((path, len(module.events)))


class FailsOnce(Callback):
    """Raises in the backward pass of one micro-batch and saves on the way out, as OnExceptionCheckpoint does."""

    def __init__(self, batch: int, folder: Path) -> None:
        self.batch = batch
        self.folder = folder

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise RuntimeError("planted")

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.folder / "error.ckpt")


def quiet_trainer(**arguments: Any) -> pl.Trainer:
    """`jobs.trainer` for one rank by default, as Lightning has it, but for the sanity check."""
    settings = {"use_distributed_sampler": True, "num_sanity_val_steps": 0, **arguments}
    places = (settings.pop("strategy", "auto"), settings.pop("devices", 1), settings.pop("default_root_dir", None))
    return jobs.trainer(*places, **settings)


def fit(
    data: pl.LightningDataModule,
    *,
    ckpt_path: str | Path | None = None,
    plans_schedule: bool = False,
    diary: type[Any] = Diary,
    **arguments: Any,
) -> Any:
    """Fits a model of a class that notes what it sees."""
    model = diary(plans_schedule=True) if plans_schedule else diary()
    quiet_trainer(**arguments).fit(model, data, ckpt_path=ckpt_path)
    return model


def counters(trainer: pl.Trainer) -> dict[str, Any]:
    """Where the Trainer's loops stand."""
    loop = trainer.fit_loop
    optimizer = loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    return {
        "epochs": loop.epoch_progress.state_dict(),
        "batches": loop.epoch_loop.batch_progress.state_dict(),
        "steps": optimizer.step.total.state_dict(),
        "zero_grads": optimizer.zero_grad.total.state_dict(),
        "validation": loop.epoch_loop.val_loop.batch_progress.total.state_dict(),
        "logged": loop.epoch_loop._batches_that_stepped,
        "consumed": getattr(trainer.datamodule, "consumed_samples", None),
    }


def final_counters(model: Diary) -> dict[str, Any]:
    """All counters, and the weights, after a fit."""
    return {**counters(model.trainer), "weights": weights_digest(model)}


def assert_every_save_resumes_exactly(
    make_data: Callable[[], Any], hook: str, folder: Path, every: int = 1, run: Any = None, **arguments: Any
) -> int:
    """Resumes from every save, or every n-th counted from the last one.

    The events must be the last ones of the undisturbed run, and none may be missing. ``run`` makes the data by itself.
    """
    run = run or (lambda make, **named: fit(make(), **named))
    saver = SaveAt(hook, folder)
    undisturbed = run(make_data, callbacks=[saver], **arguments)
    window = undisturbed.trainer.accumulate_grad_batches
    for path, num_before in saver.saves[::-every]:
        resumed = run(make_data, ckpt_path=path, **arguments)
        left = undisturbed.events[num_before:]
        if not resumed.events:  # Lightning leaves a finished run as it is, also what was due after its last step
            assert trained(left) == 0
            assert final_counters(resumed)["consumed"] == final_counters(undisturbed)["consumed"]
            continue
        # The hook of the module that follows the hook of the callback is not repeated.
        may_lack = hook in ("on_train_epoch_end", "on_train_epoch_start")
        assert len(resumed.events) >= len(left) - may_lack, path.name
        assert resumed.events == undisturbed.events[len(undisturbed.events) - len(resumed.events) :], path.name
        repeated = trained(resumed.events) - trained(left)
        assert 0 <= repeated < window + (hook == "on_before_optimizer_step"), path.name
        assert final_counters(resumed) == final_counters(undisturbed), path.name
    return len(saver.saves)


def case_resumes_exactly(
    data_of: Callable[[int], Any], case: dict[str, Any], hook: str, folder: Path, every: int = 1
) -> int:
    """The same for data of as many samples as the case has, 17 by default, and its arguments of the Trainer."""
    arguments = {"num_samples": 17, **case}
    num_samples = arguments.pop("num_samples")
    return assert_every_save_resumes_exactly(lambda: data_of(num_samples), hook, folder, every, **arguments)


def trained(events: list[Any]) -> int:
    """How many of them are micro-batches."""
    return sum(event[0] == "train" for event in events)


def ids_by_step(run: Diary) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for _, _, _, ids, _, _, step, *_ in (event for event in run.events if event[0] == "train"):
        steps.setdefault(step, []).extend(ids)
    return steps


def map_data(num_samples: int = 17, **arguments: Any) -> ResumableDataModule:
    settings = {"batch_size": 2, "val_batch_size": 3, "seed": 3, "val_dataset": Augmented(5), **arguments}
    return ResumableDataModule(Augmented(num_samples), **settings)


class SampleDiary(pl.LightningModule):
    """Notes the first number of each sample: per optimizer step, a list for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: torch.nn.Module | None = None
        self.steps: dict[int, list[list[int]]] = {}
        self.validated: list[int] = []
        self.events: list[Any] = []  # for SaveAt

    def configure_model(self) -> None:
        if self.layer is None:
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps.setdefault(self.trainer.global_step, []).append(ids_of(batch))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += ids_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Numbered(jobs.Model):
    """Notes in each batch its step and number, its samples and the loss; on any strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int, list[int], str]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch.repeat(1, jobs.NUM_FEATURES // 2) / 24, batch_idx)
        self.events.append((self.trainer.global_step, batch_idx, ids_of(batch), self.losses[-1]))
        return loss


def ids_of(batch: Any) -> list[int]:
    samples = batch["input_ids"] if isinstance(batch, dict) else batch
    return samples[:, 0].int().tolist()


def global_batches(results: dict[int, list[Any]], run: int = 0) -> dict[int, list[int]]:
    """The samples of each step over all ranks: micro-steps in order, in each of them the ranks in order."""
    ranks = [results[rank][run][0] for rank in sorted(results)]
    return {
        step: [sample for parts in zip(*(one[step] for one in ranks), strict=True) for part in parts for sample in part]
        for step in ranks[0]
    }


def token_data(**arguments: Any) -> TokenDataModule:
    return TokenDataModule(**{"seq_len": 4, "micro_batch_size": 2, "seed": 3, **arguments})


def write_tokens(prefix: Path, num_tokens: int, start: int = 0) -> str:
    """Token t of the file is start + t: a block tells where it comes from."""
    with MegatronWriter(prefix, np.int32) as writer:
        for first in range(0, num_tokens, 100):
            writer.add_document(np.arange(start + first, start + min(first + 100, num_tokens)))
    return str(prefix)
