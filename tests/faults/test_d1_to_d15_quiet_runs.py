"""Runs in which nothing is wrong, with everything that may rightly differ between ranks: the monitor says nothing.

Rows D1 to D15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_distplus import RankDivergenceMonitor, ResumableDataModule
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.distributed.test_settings import FindingAgain
from tests.faults.divergences import own_loader
from tests.faults.test_d4_d9_d11_steps import fit
from tests.pairs import kept

STEPS = 40
SOAK_STEPS = 2000

Alarms = dict[str, float]
"""What the monitor has counted, without zeros."""


def alarms(monitor: RankDivergenceMonitor) -> Alarms:
    """Delayed decisions are none."""
    return {name: value for name, value in monitor.metrics().items() if value and "delayed" not in name}


class Lively(jobs.Model):
    """Everything that may rightly differ between ranks, or change during a run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        self.frozen = torch.nn.Linear(1, 1).requires_grad_(False)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] if isinstance(batch, tuple) else batch  # padded batches bring their weights

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        if torch.rand(()) < self.trainer.global_rank / 2:  # the ranks draw unlike each other
            torch.rand(3)
        out = self.norm(self.net(batch["tokens"].mean(dim=1)))
        loss = self.frozen(out).pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "extra": out.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch["tokens"].mean(dim=1)).pow(2).mean(), sync_dist=True)
        if self.trainer.is_global_zero:
            self.log("of rank 0", 1.0, rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Sequences(torch.utils.data.Dataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3 + index % 5, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(index))


def pad(samples: list[torch.Tensor]) -> dict[str, Any]:
    lengths = [len(sample) for sample in samples]
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"tokens": tokens, "lengths": torch.tensor(lengths), "names": [f"sample of {n}" for n in lengths]}


def thaw(trainer: pl.Trainer, module: Any) -> None:
    module.frozen.weight.requires_grad_(False)
    for group in trainer.optimizers[0].param_groups:
        group["weight_decay"] = 0.01 * trainer.current_epoch


def live(rank: int, steps: int, folder: str, name: str, **options: Any) -> tuple[int, Alarms]:
    """Validation in mid-epoch with saves, warm-up, frozen layers, sequences of all lengths."""
    monitor = RankDivergenceMonitor(parameters_every_n_steps=10, state_at_rest=True)
    data = ResumableDataModule(
        Sequences(63), Sequences(10), batch_size=3, uneven=options.pop("uneven", "drop"), collate_fn=pad
    )
    saver = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)
    stopper = pl.callbacks.EarlyStopping("val_loss", patience=10**6)
    arguments = {"max_steps": steps, "max_epochs": -1, "val_check_interval": 0.5, "data": {"datamodule": data}}
    arguments |= {"check_val_every_n_epoch": max(3, steps // 200), "module": Lively(), "monitor": monitor, **options}
    trainer = fit(rank, name, folder, saver, stopper, jobs.At("on_train_epoch_start", thaw), **arguments)
    return trainer.global_step, alarms(monitor)


def live_twice(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    """The second half is a resumed run."""
    live(rank, steps // 2 + 3, folder, "ResilientDDP")
    monitor = RankDivergenceMonitor()
    data = ResumableDataModule(Sequences(63), Sequences(10), batch_size=3, collate_fn=pad)
    named = {"timeout": "20s", "max_steps": steps, "max_epochs": -1, "callbacks": [monitor]}
    trainer = jobs.fit("ResilientDDP", 2, folder, Lively(), data, ckpt_path=str(Path(folder) / "last.ckpt"), **named)
    return trainer.global_step, alarms(monitor)


class Manual(jobs.Model):
    """Two optimizers that take turns."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:2], lr=0.01), torch.optim.AdamW(parameters[2:], lr=0.02)], []


def drive_by_hand(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    monitor, data = RankDivergenceMonitor(), own_loader(rank, 4 * steps)
    trainer = fit(rank, "ResilientDDP", folder, module=Manual(), monitor=monitor, data=data, max_steps=steps)
    return trainer.global_step, alarms(monitor)


class Spread(torch.optim.Optimizer):
    """Each rank keeps the moments of its own parameters, and sends these to the others, as optimizers that shard do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            owner = number % 2
            if owner == dist.get_rank():
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                parameter.add_(moment.mul_(0.9).add_(parameter.grad), alpha=-0.01)
            dist.broadcast(parameter, owner)


class Codebook(jobs.Model):
    """Sparse gradients, a buffer that each rank moves by its own batch, and a spread optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.nn.Embedding(20, 1, sparse=True)
        self.register_buffer("average", torch.zeros(jobs.NUM_FEATURES))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.average.mul_(0.9).add_(batch.mean(dim=0), alpha=0.1)
        nearest = (batch.sum(dim=1).abs() * 3).long() % 20
        return super().training_step(batch, batch_idx) + self.codes(nearest).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Spread(self.parameters())


def look_up_codes(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    monitor, data = RankDivergenceMonitor(parameters_every_n_steps=10), own_loader(rank, 4 * steps)
    trainer = fit(rank, "ResilientDDP", folder, module=Codebook(), monitor=monitor, data=data, max_steps=steps)
    return trainer.global_step, alarms(monitor)


def find_a_rate(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    """Between two epochs, up to rates at which the loss is infinite on one rank before it is on the other."""
    module = jobs.Model()
    module.lr, module.configure_optimizers = 0.01, lambda: torch.optim.AdamW(module.parameters(), lr=module.lr)
    finder = FindingAgain(0.1, 1e30, num_training_steps=12, early_stop_threshold=None)
    monitor, data = RankDivergenceMonitor(state_at_rest=True), own_loader(rank, 64)
    trainer = fit(rank, "ResilientDDP", folder, finder, module=module, monitor=monitor, data=data, max_steps=steps)
    assert len(finder.optimal_lr.results["loss"]) == 12
    assert not math.isfinite(finder.optimal_lr.results["loss"][-1])
    assert not [event for event in read_events(f"{folder}/distplus") if event["kind"] == "not_finite"]
    return trainer.global_step, alarms(monitor)


def compress(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    """A communication hook of the user's that comes after the monitor's."""
    hook = jobs.At("on_train_start", lambda trainer, _: trainer.model.register_comm_hook(None, fp16_compress_hook))
    monitor, data = RankDivergenceMonitor(), own_loader(rank, 4 * steps)
    trainer = fit(rank, "ResilientDDP", folder, hook, monitor=monitor, data=data, max_steps=steps)
    return trainer.global_step, alarms(monitor)


def quiet_zero(rank: int, steps: int, folder: str, stage: int) -> tuple[int, Alarms]:
    monitor = RankDivergenceMonitor(parameters_every_n_steps=5, state_at_rest=True)
    data = {"train_dataloaders": own_loader(rank), "val_dataloaders": own_loader(rank, 8)}
    saver = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=max(10, steps // 20))
    options = {"accumulate_grad_batches": 2, "val_check_interval": 14, "max_steps": steps, "max_epochs": -1}
    trainer = fit(rank, f"zero{stage}", folder, saver, data=data, monitor=monitor, timeout="20s", **options)
    return trainer.global_step, alarms(monitor)


def equal_peers(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    """Tensor-parallel peers, which have the same batches."""
    monitor, peers = RankDivergenceMonitor(), {"data_parallel_size": 1, "tensor_parallel_size": 2}
    data = own_loader(7, 4 * steps)
    trainer = fit(rank, "ResilientModelParallel", folder, data=data, monitor=monitor, max_steps=steps, **peers)
    return trainer.global_step, alarms(monitor)


class Adapted(jobs.Model):
    """Low-rank adapters beside layers that are frozen."""

    def grow(self) -> None:
        self.net.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(jobs.NUM_FEATURES, 2, bias=False), torch.nn.Linear(2, 1, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) + self.up(self.down(batch))).pow(2).mean()


def scale_and_adapt(rank: int, steps: int, folder: str) -> tuple[int, Alarms]:
    """A loss scaler that overflows, first and after every tenth step that does not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=10)
    monitor = RankDivergenceMonitor(on_divergence="skip")
    options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "max_steps": steps, "max_epochs": -1}
    data = own_loader(rank, 4 * steps)
    trainer = fit(rank, "ResilientDDP", folder, module=Adapted(), monitor=monitor, data=data, **options)
    assert scaler.get_scale() != 2.0**30, "gradients have overflowed"
    return trainer.global_step, alarms(monitor)


RUNS: dict[str, tuple[Callable[..., tuple[int, Alarms]], dict[str, Any]]] = {
    "padded": (live, {"name": "ResilientDDP", "uneven": "pad"}),
    "bf16": (live, {"name": "ResilientDDP", "precision": "bf16-mixed"}),
    "fsdp": (live, {"name": "ResilientFSDP"}),
    "fsdp2": (live, {"name": "ResilientModelParallel", "val_check_interval": 1.0}),
    "resumed": (live_twice, {}),
    "manual": (drive_by_hand, {}),
    "zero2": (quiet_zero, {"stage": 2}),
    "tensor-parallel peers": (equal_peers, {}),
    "codebook": (look_up_codes, {}),
    "communication hook": (compress, {}),
    "learning rate finder": (find_a_rate, {}),
    "scaler and adapters": (scale_and_adapt, {}),
    "zero3": (quiet_zero, {"stage": 3}),
    # At last: its store stays with the process.
    "stock": (live, {"name": "DDPStrategy", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
}


def run_each(rank: int, runs: list[str], steps: int, folder: str) -> dict[str, tuple[int, Alarms]]:
    """One run after the other, in the same processes."""
    return {run: RUNS[run][0](rank, steps, f"{folder}/{run}", **RUNS[run][1]) for run in runs}


def require_silence(runs: list[str], steps: int, folder: Path, deadline: str) -> None:
    result = spawn(run_each, 2, args=(runs, steps, str(folder)), deadline=deadline).check()
    assert result.results == {rank: dict.fromkeys(runs, (steps, {})) for rank in range(2)}
    assert not list(folder.glob("*/distplus/verdict-*"))


EACH_COMMIT = [run for run in RUNS if run != "zero3"]


@pytest.mark.parametrize("runs", kept([EACH_COMMIT, ["zero3"]], [EACH_COMMIT]), ids=lambda runs: runs[-1])
def test_lively_runs_give_no_alarm(runs: list[str], tmp_path: Path) -> None:
    require_silence(runs, STEPS, tmp_path, "140s")


def pass_on(rank: int, folder: str) -> tuple[int, Alarms]:
    """Messages in a chain of ranks, of which the ends send or get one only."""

    def send(*_: Any) -> None:
        if rank > 0:
            dist.recv(torch.empty(2), rank - 1)
        if rank < 2:
            dist.send(torch.ones(2), rank + 1)

    monitor = RankDivergenceMonitor()
    chain = jobs.At("on_train_batch_start", send)
    jobs.fit("ResilientDDP", 3, folder, None, own_loader(rank), timeout="20s", max_steps=6, callbacks=[monitor, chain])
    return monitor.num_compared, alarms(monitor)


def test_messages_between_two_ranks_are_no_collectives(tmp_path: Path) -> None:
    run = spawn(pass_on, 3, args=(str(tmp_path),), deadline="40s").check()
    assert run.results == dict.fromkeys(range(3), (6, {}))


@pytest.mark.soak
@pytest.mark.deadline(900)
@pytest.mark.parametrize("run", RUNS)
def test_two_thousand_steps_give_no_alarm(run: str, tmp_path: Path) -> None:
    require_silence([run], SOAK_STEPS, tmp_path, "14m")
