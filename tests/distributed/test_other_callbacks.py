"""Lightning's own callbacks that change how a run trains or what it saves do beside ours what they do without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import Dataset

from lightning_distplus import PreemptionHandler, RankDivergenceMonitor, StragglerMonitor
from lightning_distplus.data import ResumableDataModule
from lightning_distplus.errors import DivergenceError
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import in_turn, kept


class Model(pl.LightningModule):
    """A backbone with batch norm, and a head; it notes on what it was trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = 1e-2
        self.backbone = nn.Sequential(nn.Linear(jobs.NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 1)
        self.trained_on: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained_on += batch[:, 0].int().tolist()
        loss = self.head(self.backbone(batch)).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.backbone(batch)).pow(2).mean(), sync_dist=True)

    def train_dataloader(self) -> Any:
        return jobs.loader(32)

    def val_dataloader(self) -> Any:
        return jobs.loader(16)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Sharded(Model):
    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not hasattr(self, "is_sharded"):
            for part in (self.backbone, self.head):
                torch.distributed.fsdp.fully_shard(part, mesh=mesh["data_parallel"])
            self.is_sharded = True


class Unfreezing(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class FindingAgain(callbacks.LearningRateFinder):
    """Between two epochs, as Lightning's documentation shows it."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class SavesMidway(callbacks.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_progress.current.ready == 2:
            trainer.save_checkpoint(self.path)


def watching() -> list[callbacks.Callback]:
    return [
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        callbacks.EarlyStopping("val_loss", patience=1, mode="max"),
        callbacks.LearningRateMonitor(),
        callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last="link"),
        callbacks.RichModelSummary(),
        callbacks.RichProgressBar(),
        callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2),
        callbacks.Timer(duration="00:01:00:00"),
    ]


CALLBACKS: dict[str, Callable[[], list[callbacks.Callback]]] = {
    "EMAWeightAveraging": lambda: [callbacks.EMAWeightAveraging(decay=0.9)],
    "StochasticWeightAveraging": lambda: [callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)],
    "GradientAccumulationScheduler": lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
    "ModelPruning": lambda: [callbacks.ModelPruning("l1_unstructured", amount=0.5)],
    "BaseFinetuning": lambda: [Unfreezing()],
    "LearningRateFinder": lambda: [callbacks.LearningRateFinder(num_training_steps=4, min_lr=1e-4, max_lr=1e-2)],
    "LearningRateFinder between epochs": lambda: [FindingAgain(num_training_steps=4, min_lr=1e-4, max_lr=1e-2)],
    "all that watch": watching,
}


def trainer(strategy: str, folder: str, which: str, epochs: int) -> pl.Trainer:
    ours = [RankDivergenceMonitor(), StragglerMonitor(), PreemptionHandler()] if strategy == "ResilientDDP" else []
    arguments = {"use_distributed_sampler": True, "enable_model_summary": True, "enable_progress_bar": True}
    if which != "all that watch":
        arguments["enable_progress_bar"] = False
    return jobs.trainer(
        jobs.strategy(strategy, **({"data": "as_is"} if strategy == "ResilientDDP" else {})),  # as stock resumes
        2,
        folder,
        max_epochs=epochs,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_checkpointing=which == "all that watch",
        callbacks=[*ours, *CALLBACKS[which]()],
        **arguments,
    )


def fit_and_resume(rank: int, strategy: str, which: str, folder: str) -> list[Any]:
    made = Sharded if "ModelParallel" in strategy else Model
    first, second = trainer(strategy, folder, which, 2), trainer(strategy, folder, which, 3)
    trained, resumed = made(), made()
    first.callbacks.append(SavesMidway(f"{folder}/midway.ckpt"))
    first.fit(trained)
    second.fit(resumed, ckpt_path=f"{folder}/midway.ckpt")
    digests = [] if "FSDP" in strategy else [weights_digest(trained), weights_digest(resumed)]
    return [first.global_step, second.global_step, *digests]


@pytest.mark.parametrize(
    "which",
    kept(
        [which for which in CALLBACKS if which != "BaseFinetuning"],
        ("StochasticWeightAveraging", "LearningRateFinder", "all that watch"),
    ),
)
def test_a_run_and_its_resume_are_those_of_stock_ddp(which: str, tmp_path: Path) -> None:
    found = {}
    for strategy in ("DDPStrategy", "ResilientDDP"):
        (tmp_path / strategy).mkdir()
        found[strategy] = spawn(fit_and_resume, 2, args=(strategy, which, str(tmp_path / strategy))).check().results
    assert found["ResilientDDP"] == found["DDPStrategy"]


def fit_unfreezing(rank: int, strategy: str, folder: str) -> str:
    model, run = Model(), trainer(strategy, folder, "BaseFinetuning", 2)
    try:
        run.fit(model)
    except DivergenceError as error:
        return f"{run.global_step} {error}"
    return weights_digest(model)


def test_what_is_unfrozen_under_ddp_is_named_before_the_ranks_differ(tmp_path: Path) -> None:
    stock = spawn(fit_unfreezing, 2, args=("DDPStrategy", str(tmp_path))).check().results
    assert stock[0] != stock[1]  # silently: DDP was built while the backbone was frozen
    for rank, found in spawn(fit_unfreezing, 2, args=("ResilientDDP", str(tmp_path))).check().results.items():
        assert found.startswith("4 ")
        assert f"rank {rank}: DDP does not sum the gradients of what was frozen when it was built: backbone.0" in found


# A resumed epoch is not begun again, and Lightning's scheduler of accumulation sets its factor where one begins.
STEPS = {"GradientAccumulationScheduler": [6, 9], "LearningRateFinder": [8, 12], "all that watch": [8, 12]}


@pytest.mark.parametrize(
    ("strategy", "which"), in_turn(["DDPStrategy", "ResilientFSDP", "ResilientModelParallel"], list(STEPS))
)
def test_shards_are_trained_and_resumed_for_as_many_steps(strategy: str, which: str, tmp_path: Path) -> None:
    run = spawn(fit_and_resume, 2, args=(strategy, which, str(tmp_path))).check()
    assert [found[:2] for found in run.results.values()] == [STEPS[which]] * 2


class Numbered(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((jobs.NUM_FEATURES,), float(index))


def fit_data(rank: int, which: str, folder: str) -> list[int]:
    model, data = Model(), ResumableDataModule(Numbered(), batch_size=4, seed=3)
    model.train_dataloader = model.val_dataloader = None
    run = jobs.trainer(
        jobs.strategy("ResilientDDP"), 2, folder, max_epochs=1, callbacks=CALLBACKS[which]() if which else []
    )
    run.fit(model, datamodule=data)
    return model.trained_on[-16:]


def test_the_learning_rate_finder_takes_no_sample_from_the_run(tmp_path: Path) -> None:
    found = [spawn(fit_data, 2, args=(which, str(tmp_path))).check().results for which in ("LearningRateFinder", "")]
    assert found[0] == found[1]
    assert sorted(found[1][0] + found[1][1]) == list(range(32))
