"""What one line brings raises no alarm in usual settings and beside callbacks; DDP has the weights of stock."""

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

from lightning_distplus import ResilientDDP, ResumableDataModule, _compat
from lightning_distplus.errors import DivergenceError
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
    """A backbone, normalised and with dropout, and a head; it notes on what it was trained."""

    def __init__(
        self,
        *,
        is_frozen: bool = False,
        is_compiled: bool = False,
        schedule: str = "",
        logs: bool = False,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.schedule, self.logs, self.lr = schedule, logs, 1e-2
        dropout = nn.Dropout(0.1 if norm is nn.LayerNorm else 0.0)
        self.backbone = nn.Sequential(nn.Linear(jobs.NUM_FEATURES, 16), norm(16), dropout, nn.ReLU())
        self.head = nn.Linear(16, 1)
        self.backbone.requires_grad_(not is_frozen)
        if is_compiled:
            self.backbone.compile(backend="aot_eager")
        self.trained_on: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained_on += batch[:, 0].int().tolist()
        loss = self.head(self.backbone(batch)).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        if self.logs:
            self.log("reduced", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.head(self.backbone(batch)).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=self.lr)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.schedule == "each step":
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if self.schedule == "each epoch" else []


class Sharded(Model):
    """What FSDP2 asks of a model."""

    is_sharded = False

    def configure_model(self) -> None:
        if not self.is_sharded:
            for part in (self.backbone, self.head):
                torch.distributed.fsdp.fully_shard(part, mesh=self.device_mesh["data_parallel"])
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


def save_midway(trainer: pl.Trainer, *_: Any) -> None:
    """In the second epoch, behind its second batch."""
    if trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_progress.current.ready == 2:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/midway.ckpt")


def stop(trainer: pl.Trainer, *_: Any) -> None:
    trainer.should_stop = True


class Setting:
    """What a user adds to the one line.

    Args:
        model: Arguments of the model.
        data: Arguments of the DataLoader; ``count`` and ``is_augmented`` of the samples.
        made: More callbacks; called in the process, with its folder.
        strategy: Arguments of ours.
        then: What follows the fit: another one, its resume from the second epoch, or an evaluation around it.
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


def resumed(make: Callable[[], list[callbacks.Callback]], **trainer: Any) -> Setting:
    """A callback of Lightning's that changes how a run trains or what it saves, in a run and its resume."""
    return Setting(
        model={"norm": nn.BatchNorm1d, "schedule": "each epoch"},
        made=lambda folder: [*make(), jobs.At("on_train_batch_end", save_midway)],
        strategy={"data": "as_is"},  # as stock resumes
        then="resume",
        log_every_n_steps=1,
        **trainer,
    )


def finder(kind: type[callbacks.LearningRateFinder] = callbacks.LearningRateFinder) -> list[callbacks.Callback]:
    return [kind(num_training_steps=4, min_lr=1e-4, max_lr=1e-2)]


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
    "one rank wants to stop": Setting(made=lambda folder: [jobs.At("on_train_batch_end", stop, rank=1, step=3)]),
    "bars and timers": Setting(
        enable_progress_bar=True, made=lambda folder: [callbacks.RichProgressBar(), callbacks.Timer("00:01:00:00")]
    ),
    "EMA": resumed(lambda: [callbacks.EMAWeightAveraging(decay=0.9)]),
    "SWA": resumed(lambda: [callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]),
    "scheduled accumulation": resumed(lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]),
    "pruning": resumed(lambda: [callbacks.ModelPruning("l1_unstructured", amount=0.5)]),
    "learning rate finder": resumed(finder),
    "learning rate finder between epochs": resumed(lambda: finder(FindingAgain)),
    "all that watch": resumed(watching, enable_progress_bar=True, enable_model_summary=True),
}
BY_THE_CLOCK = ("time limit", "one rank wants to stop")
"""How far they come is not the same twice; stock waits for ever in the second."""
SEEDED = ("workers and augmentation",)
"""Ours draws each sample's augmentation from its place in the data."""
REFUSED = (("accumulation and clipping", "FSDP"), ("clipping by value", "DeepSpeed"))
"""Lightning clips no norm under FSDP, and DeepSpeed nothing else."""
OF_WHOLE_WEIGHTS = ("EMA", "SWA", "pruning", "learning rate finder between epochs")
"""Lightning's callbacks that do not know shards."""
# A resumed epoch is not begun again, and Lightning's scheduler of accumulation sets its factor where one begins.
STEPS = {"scheduled accumulation": (6, 9), "learning rate finder": (8, 12), "all that watch": (8, 12)}
OF_DDP = ["evaluation around it", "SWA", "learning rate finder", "all that watch"]
OF_SHARDS = {"FSDP": ["frozen backbone", *STEPS], "ModelParallel": ["two fits", *STEPS]}
SHARDED = [
    (name, which)
    for name in ("FSDP", "ModelParallel", "DeepSpeed")
    for which in SETTINGS
    if (which, name) not in REFUSED and which not in (*OF_WHOLE_WEIGHTS, *OF_SHARDS.get(name, ()))
]


def fit(rank: int, kind: str, name: str, whiches: list[str], folder: str) -> dict[str, Any]:
    """The steps of each run, and of what follows, and its weights."""
    return {which: fit_one(kind, name, SETTINGS[which], f"{folder}/{which}") for which in whiches}


def fit_one(kind: str, name: str, setting: Setting, folder: str) -> tuple[int, int, str | None]:
    pl.seed_everything(3)
    ours = {"timeout": "60s", "monitor": True, **setting.strategy} if kind == "Resilient" else {}
    which = f"Resilient{name}" if kind == "Resilient" else f"{name}Strategy"
    arguments = {"max_epochs": 2, "logger": CSVLogger(folder), "use_distributed_sampler": True, **setting.trainer}
    make = Sharded if name == "ModelParallel" else Model
    options = {"batch_size": 4, **setting.data}
    samples = Samples(options.pop("count", 32), is_augmented=options.pop("is_augmented", False))
    data, validation = DataLoader(samples, **options), DataLoader(Samples(16), batch_size=4)
    model = make(**setting.model)
    trainer = jobs.trainer(which, 2, folder, callbacks=setting.made(folder), **ours, **arguments)
    if setting.then == "evaluate":
        trainer.validate(model, validation, verbose=False)
    trainer.fit(model, data, validation)
    first = trainer.global_step
    if setting.then == "fit":
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, data, validation)
    if setting.then == "evaluate":
        trainer.test(model, validation, verbose=False)
    if setting.then == "resume":
        arguments |= {"max_epochs": 3, "callbacks": setting.made(folder)[:-1]}
        trainer, model = jobs.trainer(which, 2, folder, **ours, **arguments), make(**setting.model)
        trainer.fit(model, data, validation, ckpt_path=f"{folder}/midway.ckpt")
    # Where the last forward pass was no validation, FSDP2's parameters are shards again: those of two ranks differ.
    return first, trainer.global_step, None if name in ("FSDP", "ModelParallel") else weights_digest(model)


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


def test_a_communication_hook_gives_the_weights_of_stock_where_that_runs_it(tmp_path: Path) -> None:
    ours, stock = (spawn(fit_with_a_hook, 2, args=(kind, str(tmp_path))).check().results for kind in ("ours", "stock"))
    assert ours == stock


@pytest.mark.parametrize(
    "whiches",
    kept([OF_DDP, *([which] for which in SETTINGS if which not in OF_DDP)], [OF_DDP]),
    ids=lambda whiches: whiches[0],
)
def test_weights_under_ddp_are_those_of_stock(whiches: list[str], tmp_path: Path) -> None:
    ours = spawn(fit, 2, args=("Resilient", "DDP", whiches, str(tmp_path / "ours")), deadline="100s").check().results
    assert not list(tmp_path.glob("**/verdict-*"))
    assert ours[0] == ours[1]
    if whiches[0] not in BY_THE_CLOCK + SEEDED:
        stock = spawn(fit, 2, args=("", "DDP", whiches, str(tmp_path / "stock")), deadline="100s").check()
        assert stock.results == ours


@pytest.mark.parametrize(
    ("name", "whiches"),
    [*OF_SHARDS.items(), *(pytest.param(name, [which], marks=pytest.mark.soak) for name, which in SHARDED)],
    ids=lambda one: one if isinstance(one, str) else one[0],
)
def test_nothing_is_alarmed_where_nothing_is_wrong(name: str, whiches: list[str], tmp_path: Path) -> None:
    found = spawn(fit, 2, args=("Resilient", name, whiches, str(tmp_path)), deadline="100s").check().results
    assert found[0] == found[1]
    assert not list(tmp_path.glob("**/verdict-*"))
    assert {which: steps for which, (*steps, _) in found[0].items() if which in STEPS} == {
        which: [*steps] for which, steps in STEPS.items() if which in whiches
    }


def fit_unfreezing(rank: int, folder: str) -> str:
    model, data = Model(norm=nn.BatchNorm1d), DataLoader(Samples(32), batch_size=4)
    arguments = {"max_epochs": 2, "callbacks": [Unfreezing()], "monitor": True, "use_distributed_sampler": True}
    run = jobs.trainer("ResilientDDP", 2, folder, **arguments)
    try:
        run.fit(model, data)
    except DivergenceError as error:
        return f"{run.global_step} {error}"
    return ""


def test_what_is_unfrozen_under_ddp_is_named_before_the_ranks_differ(tmp_path: Path) -> None:
    """Stock trains on, and its ranks differ in silence: DDP was built while the backbone was frozen."""
    for rank, found in spawn(fit_unfreezing, 2, args=(str(tmp_path),)).check().results.items():
        assert found.startswith("4 ")
        assert f"rank {rank}: DDP does not sum the gradients of what was frozen when it was built: backbone.0" in found


class Numbered(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((jobs.NUM_FEATURES,), float(index))


def fit_data(rank: int, folder: str) -> list[list[int]]:
    found = []
    for added in (finder(), []):
        data = ResumableDataModule(Numbered(), batch_size=4, seed=3)
        jobs.fit("ResilientDDP", 2, folder, model := Model(), data, max_epochs=1, callbacks=added)
        found.append(model.trained_on[-16:])
    return found


def test_the_learning_rate_finder_takes_no_sample_from_the_run(tmp_path: Path) -> None:
    results = spawn(fit_data, 2, args=(str(tmp_path),)).check().results
    assert all(found == without for found, without in results.values())
    assert sorted(results[0][1] + results[1][1]) == list(range(32))
