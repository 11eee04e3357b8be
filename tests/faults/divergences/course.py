"""Rows D3 to D7 and D14: batches, decisions, metrics and samples."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tests.distributed import jobs
from tests.faults.divergences.registry import (
    DDP,
    FSDP,
    FSDP2,
    Run,
    diverges,
    own_loader,
)

# -- D3: numbers of batches --------------------------------------------------------------------------------------------


def _batches(run: Run, usual: int, odd: int) -> None:
    run.data = {"train_dataloaders": own_loader(run.rank, 4 * (odd if run.is_guilty else usual))}


@diverges("D3", "number of training batches", number=1)
def batches_are_fewer(run: Run) -> None:
    _batches(run, 6, 4)


@diverges("D3", "number of training batches", number=2)
def batches_are_more(run: Run) -> None:
    _batches(run, 4, 6)


class _Stream(IterableDataset):
    def __init__(self, rank: int, num_batches: int) -> None:
        self.rank = rank
        self.num_batches = num_batches

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        return (torch.randn(4, jobs.NUM_FEATURES, generator=generator) for _ in range(self.num_batches))


@diverges("D3", "last_batch", says="nothing was averaged", on=DDP + FSDP + FSDP2)
def stream_ends_early(run: Run) -> None:
    num_batches = run.step + (1 if run.is_guilty else 4)
    run.data = {"train_dataloaders": DataLoader(_Stream(run.rank, num_batches), batch_size=None)}
    run.strike(lambda trainer, module: None)


@diverges("D3", "number of validation batches", number=4)
def validation_batches_are_fewer(run: Run) -> None:
    run.validate(4 if run.is_guilty else 8)


# -- D4 to D6: decisions and metrics -----------------------------------------------------------------------------------


@diverges("D4", "", number=26, blame="agreed")
def should_stop_is_set(run: Run) -> None:
    run.strike(lambda trainer, module: setattr(trainer, "should_stop", True))


@diverges("D4", "", blame="agreed", is_before=False)
def clock_of_saves_runs_ahead(run: Run) -> None:
    """Lightning asks rank 0 whether it is time."""
    saver = pl.callbacks.ModelCheckpoint(train_time_interval=timedelta(seconds=60))
    run.callbacks.append(saver)
    run.trainer["enable_checkpointing"] = True
    run.strike(lambda trainer, module: setattr(saver, "_last_time_checked", saver._last_time_checked - 100))


@diverges("D4", "moment", says="a save", on=("DDPStrategy",))  # of ours it is a checked call, row H6
def checkpoint_is_saved_alone(run: Run) -> None:
    run.strike(lambda trainer, module: trainer.save_checkpoint(f"{trainer.default_root_dir}/alone.ckpt"))


@diverges("D4", "max_steps", number=28)
def max_steps_differs(run: Run) -> None:
    run.trainer["max_steps"] = 4 if run.is_guilty else 9


@diverges("D4", "limit_val_batches", number=31)
def validation_is_disabled(run: Run) -> None:
    run.validate()
    run.trainer["limit_val_batches"] = 0.0 if run.is_guilty else 1.0


class _Logs(jobs.Model):
    def __init__(self, run: Run, *, is_synced: bool = True, is_lonely: bool = False) -> None:
        super().__init__()
        self.run = run
        self.is_synced = is_synced
        self.is_lonely = is_lonely

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        value = torch.tensor(2.0 if self.run.is_guilty else 1.0)
        self.log("first", value, sync_dist=self.is_synced)
        if self.is_lonely and self.run.is_guilty:
            self.log("odd", torch.tensor(3.0), sync_dist=True)
        self.log("last", torch.tensor(2.0), sync_dist=True)


@diverges("D5", "monitored metric 'first'", says="self.log('first', ..., sync_dist=True)")
def monitored_metric_differs(run: Run) -> None:
    run.validate()
    run.module = _Logs(run, is_synced=False)
    run.callbacks.append(pl.callbacks.EarlyStopping("first"))


@diverges("D6", "logged metric 'odd'", says="absent", number=5)
def metric_is_logged_alone(run: Run) -> None:
    run.validate()
    run.module = _Logs(run, is_lonely=True)


# -- D7 and D14: samples -----------------------------------------------------------------------------------------------


def _sharded(run: Run, shard: int) -> DistributedSampler:
    data = torch.randn(16 * run.size, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(data, num_replicas=run.size, rank=shard)
    run.data = {"train_dataloaders": DataLoader(data, batch_size=4, sampler=sampler)}
    return sampler


@diverges("D7", "shard", says="before the first step", number=11, blame="pair")
def shard_is_anothers(run: Run) -> None:
    _sharded(run, (run.rank + run.is_guilty) % run.size)


@diverges("D7", "epoch of sampler 0", says="before step 4", number=29)
def sampler_stays_in_its_epoch(run: Run) -> None:
    sampler = _sharded(run, run.rank)
    if run.is_guilty:
        sampler.set_epoch = lambda epoch: None


def _skip_a_batch(trainer: Any, module: Any) -> None:
    next(trainer.fit_loop._data_fetcher)
    trainer.fit_loop.epoch_loop.batch_progress.increment_by(1)


@diverges("D7", "micro_batch", blame="guilty")
def batch_is_passed_over(run: Run) -> None:
    run.strike(_skip_a_batch)


@diverges("D14", "duplicate_batches", blame="pair")
def batches_are_anothers(run: Run) -> None:
    run.data = {"train_dataloaders": own_loader((run.rank + run.is_guilty) % run.size)}


@diverges("D14", "tensor_parallel_batch", number=41, on=FSDP2)
def batches_of_tensor_parallel_peers_differ(run: Run) -> None:
    run.strategy = {"data_parallel_size": 1, "tensor_parallel_size": run.size}
    run.data = {"train_dataloaders": own_loader(8 if run.is_guilty else 7)}
