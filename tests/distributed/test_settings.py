"""What one line brings raises no alarm in usual settings of a Trainer; DDP has the weights of stock, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import ResilientDDP, _compat
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import kept


class Samples(Dataset[torch.Tensor]):
    """Sample ``i`` is the same everywhere; augmentation draws from the generator of its process."""

    def __init__(self, count: int, *, is_augmented: bool = False) -> None:
        self.count = count
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.randn(jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        return sample + 0.1 * torch.randn(jobs.NUM_FEATURES) if self.is_augmented else sample


class Model(pl.LightningModule):
    """A backbone, normalised and with dropout, and a head."""

    def __init__(
        self, *, is_frozen: bool = False, is_compiled: bool = False, schedule: str = "", logs: bool = False
    ) -> None:
        super().__init__()
        self.is_compiled = is_compiled
        self.is_frozen = is_frozen
        self.schedule = schedule
        self.logs = logs
        self.backbone: nn.Module | None = None

    def configure_model(self) -> None:
        if self.backbone is not None:
            return
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(jobs.NUM_FEATURES, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.ReLU())
        self.head = nn.Linear(16, 1)
        self.backbone.requires_grad_(not self.is_frozen)
        if self.is_compiled:
            self.backbone.compile(backend="aot_eager")
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None:
            for part in (self.backbone, self.head):
                torch.distributed.fsdp.fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.head(self.backbone(batch)).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        if self.logs:
            self.log("reduced", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.backbone(batch)).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.schedule == "each step":
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        return optimizer


class StopsAlone(callbacks.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= (trainer.global_rank, trainer.global_step) == (1, 3)


class Setting:
    """What a user adds to the one line.

    Args:
        model: Arguments of the model.
        data: Arguments of the DataLoader; ``count`` and ``is_augmented`` of the samples.
        made: More callbacks; called in the process, with its folder.
        strategy: Arguments of ours.
        then: What follows the fit: another one, or an evaluation around it.
        **trainer: Arguments of the Trainer.
    """

    def __init__(
        self,
        *,
        model: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        made: Callable[[str], list[callbacks.Callback]] = lambda folder: [],
        strategy: dict[str, Any] | None = None,
        then: str = "",
        **trainer: Any,
    ) -> None:
        self.model, self.data, self.strategy = model or {}, data or {}, strategy or {}
        self.made, self.then, self.trainer = made, then, trainer


def saver(folder: str, **arguments: Any) -> list[callbacks.Callback]:
    return [callbacks.ModelCheckpoint(f"{folder}/saved", **arguments)]


AUGMENTED = {"num_workers": 2, "is_augmented": True, "shuffle": True, "persistent_workers": True}
SETTINGS = {
    "accumulation and clipping": Setting(accumulate_grad_batches=3, gradient_clip_val=0.1),
    "clipping by value": Setting(gradient_clip_val=0.1, gradient_clip_algorithm="value"),
    "bf16": Setting(precision="bf16-mixed"),
    "validation within an epoch": Setting(val_check_interval=0.25, num_sanity_val_steps=2),
    "validation by batches": Setting(val_check_interval=3, check_val_every_n_epoch=None),
    "validation by the clock": Setting(val_check_interval="00:00:00:01", max_epochs=3),
    "limits": Setting(limit_train_batches=0.5, limit_val_batches=1),
    "overfitting": Setting(overfit_batches=1, max_epochs=6, data={"shuffle": True}),
    "fast_dev_run": Setting(fast_dev_run=3),
    "time limit": Setting(max_time="00:00:00:02", max_epochs=200),
    "anomaly detection": Setting(detect_anomaly=True),
    "loaders made anew": Setting(reload_dataloaders_every_n_epochs=1, data={"shuffle": True}),
    "profiler": Setting(profiler="simple"),
    "reduced logs": Setting(log_every_n_steps=1, model={"logs": True}),
    "early stopping": Setting(max_epochs=8, made=lambda folder: [callbacks.EarlyStopping("val_loss", 0.5, 0)]),
    "best checkpoints": Setting(made=lambda folder: saver(folder, monitor="val_loss", save_top_k=2, save_last=True)),
    "checkpoints by step": Setting(made=lambda folder: saver(folder, every_n_train_steps=3, save_top_k=-1)),
    "plateau": Setting(model={"schedule": "plateau"}),
    "rate by step": Setting(model={"schedule": "each step"}, made=lambda folder: [callbacks.LearningRateMonitor()]),
    "workers and augmentation": Setting(data=AUGMENTED),
    "augmentation as torch seeds it": Setting(data=AUGMENTED, strategy={"seed_samples": False}),
    "uneven data": Setting(data={"count": 37}),
    "less data than ranks": Setting(max_epochs=6, data={"count": 1}),
    "compiled": Setting(model={"is_compiled": True}),
    "frozen backbone": Setting(model={"is_frozen": True}),
    "no validation": Setting(limit_val_batches=0),
    "two fits": Setting(then="fit"),
    "evaluation around it": Setting(then="evaluate"),
    "one rank wants to stop": Setting(made=lambda folder: [StopsAlone()]),
    "bars and timers": Setting(
        enable_progress_bar=True, made=lambda folder: [callbacks.RichProgressBar(), callbacks.Timer("00:01:00:00")]
    ),
}
BY_THE_CLOCK = ("time limit", "one rank wants to stop")
"""How far they come is not the same twice; stock waits for ever in the second."""
SEEDED = ("workers and augmentation",)
"""Ours draws each sample's augmentation from its place in the data."""
REFUSED = (("accumulation and clipping", "FSDP"), ("clipping by value", "DeepSpeed"))
"""Lightning clips no norm under FSDP, and DeepSpeed nothing else."""
EACH_COMMIT = (("frozen backbone", "FSDP"), ("two fits", "ModelParallel"))
SHARDED = [(which, name) for which in SETTINGS for name in ("FSDP", "ModelParallel", "DeepSpeed")]


def fit(rank: int, kind: str, name: str, which: str, folder: str) -> tuple[int, str | None]:
    setting = SETTINGS[which]
    pl.seed_everything(3)
    ours = {"timeout": "60s", "monitor": True, **setting.strategy} if kind == "Resilient" else {}
    if name == "DeepSpeed":
        ours["stage"] = 2
    strategy = jobs.strategy(f"Resilient{name}" if kind == "Resilient" else f"{name}Strategy", **ours)
    arguments = {"max_epochs": 2, "logger": CSVLogger(folder), "use_distributed_sampler": True, **setting.trainer}
    if made := setting.made(folder):
        arguments |= {"callbacks": made, "enable_checkpointing": True}
    trainer = jobs.trainer(strategy, 2, folder, **arguments)
    options = {"batch_size": 4, **setting.data}
    samples = Samples(options.pop("count", 32), is_augmented=options.pop("is_augmented", False))
    data, validation = DataLoader(samples, **options), DataLoader(Samples(16), batch_size=4)
    model = Model(**setting.model)
    if setting.then == "evaluate":
        trainer.validate(model, validation, verbose=False)
    trainer.fit(model, data, validation)
    if setting.then == "fit":
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, data, validation)
    if setting.then == "evaluate":
        trainer.test(model, validation, verbose=False)
    # Where the last forward pass was no validation, FSDP2's parameters are shards again: those of two ranks differ.
    return trainer.global_step, None if name in ("FSDP", "ModelParallel") else weights_digest(model)


class HooksAnywhere(DDPStrategy):
    """Lightning registers a communication hook on CUDA only, and leaves it out on a CPU without a word."""

    def _register_ddp_hooks(self) -> None:
        _compat.register_ddp_comm_hook(self.model, None, self._ddp_comm_hook, None)


def fit_with_a_hook(kind: str, folder: str) -> str:
    strategy = ResilientDDP if kind == "ours" else HooksAnywhere
    pl.seed_everything(3)
    hooked = strategy(process_group_backend="gloo", ddp_comm_hook=fp16_compress_hook)
    trainer = jobs.trainer(hooked, 2, folder, max_epochs=2, use_distributed_sampler=True)
    trainer.fit(model := Model(), DataLoader(Samples(32), batch_size=4))
    return weights_digest(model)


@pytest.mark.soak
def test_a_communication_hook_gives_the_weights_of_stock_where_that_runs_it(tmp_path: Path) -> None:
    ours, stock = (spawn(fit_with_a_hook, 2, args=(kind, str(tmp_path))).check().results for kind in ("ours", "stock"))
    assert ours == stock


@pytest.mark.parametrize("which", kept(list(SETTINGS), ("evaluation around it",)))
def test_weights_under_ddp_are_those_of_stock(which: str, tmp_path: Path) -> None:
    ours = spawn(fit, 2, args=("Resilient", "DDP", which, str(tmp_path / "ours"))).check().results
    assert not list(tmp_path.glob("**/verdict-*"))
    assert ours[0] == ours[1]
    if which not in BY_THE_CLOCK + SEEDED:
        assert spawn(fit, 2, args=("", "DDP", which, str(tmp_path / "stock"))).check().results == ours


@pytest.mark.parametrize(
    ("which", "name"),
    [
        pytest.param(*pair, marks=() if pair in EACH_COMMIT else pytest.mark.soak)
        for pair in SHARDED
        if pair not in REFUSED
    ],
)
def test_nothing_is_alarmed_where_nothing_is_wrong(which: str, name: str, tmp_path: Path) -> None:
    found = spawn(fit, 2, args=("Resilient", name, which, str(tmp_path))).check().results
    assert found[0] == found[1]
    assert not list(tmp_path.glob("**/verdict-*"))
