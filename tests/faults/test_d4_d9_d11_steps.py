"""Rows D4, D9 and D11: decisions, failed batches and sums of gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus import RankDivergenceMonitor
from lightning_distplus.control import connected
from lightning_distplus.errors import DivergenceError
from lightning_distplus.testing import FaultCallback, FaultPlan, spawn
from tests.distributed import jobs
from tests.faults.divergences import own_loader

STEP = 3  # the fault strikes when so many steps are done


def fit(
    rank: int, name: str, folder: str, *callbacks: Callback, module: Any = None, data: Any = None, **named: Any
) -> pl.Trainer:
    """A short fit on two ranks with a monitor; ``data`` may be the arguments of a fit."""
    loaders = tuple(data.values()) if isinstance(data, dict) else own_loader(rank) if data is None else data
    monitor = named.pop("monitor", None) or RankDivergenceMonitor()
    settings = {"max_steps": 6, **({"timeout": "20s"} if name.startswith("Resilient") else {}), **named}
    return jobs.fit(name, 2, folder, module, loaders, callbacks=[*callbacks, monitor], **settings)


def caught(run: Callable[[], Any]) -> dict[str, Any]:
    """What a rank raised."""
    try:
        run()
    except DivergenceError as error:
        return {"field": error.field, "ranks": error.ranks, "values": error.values, "message": str(error)}
    return {"field": "nothing was raised"}


# -- D4: decisions ----------------------------------------------------------------------------------------------------


def train_and_validate(
    rank: int, name: str, folder: str, *callbacks: Callback, **options: Any
) -> tuple[int, list[int]]:
    """How many steps it made, and behind which of them there was a validation."""
    steps: list[int] = []
    count = jobs.At("on_validation_start", lambda trainer, *_: steps.append(trainer.global_step))
    data = {"train_dataloaders": own_loader(rank), "val_dataloaders": own_loader(rank, 8)}
    trainer = fit(rank, name, folder, *callbacks, count, data=data, num_sanity_val_steps=0, **options)
    return trainer.global_step, steps


def train_until_somebody_stops(rank: int, name: str, ranks: int, accumulate: int, folder: str) -> tuple[int, list[int]]:
    def stop(trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or rank >= 2 - ranks

    stops = jobs.At("on_train_batch_end", stop, step=STEP)
    return train_and_validate(rank, name, folder, stops, accumulate_grad_batches=accumulate, max_steps=20)


STOPS = [("ResilientDDP", 2, 1, STEP), ("ResilientFSDP", 1, 2, STEP + 1), ("DDPStrategy", 1, 1, STEP + 1)]


@pytest.mark.parametrize(("name", "ranks", "accumulate", "stops_at"), STOPS)
def test_all_ranks_stop_and_validate_at_the_same_step(
    name: str, ranks: int, accumulate: int, stops_at: int, tmp_path: Path
) -> None:
    run = spawn(train_until_somebody_stops, 2, args=(name, ranks, accumulate, str(tmp_path)), deadline="40s").check()
    assert run.results == {0: (stops_at, [stops_at]), 1: (stops_at, [stops_at])}


def train_with_validation_by_the_clock(rank: int, folder: str) -> list[int]:
    """Rank 1's clock of validations runs ahead of the others by a second."""

    def run_ahead(trainer: pl.Trainer, *_: Any) -> None:
        trainer._last_val_time -= 1.0

    skews = jobs.At("on_train_start", run_ahead, rank=1)
    slow = jobs.At("on_train_batch_end", lambda *_: time.sleep(0.05))
    options = {"val_check_interval": "00:00:00:01", "max_steps": 26}
    return train_and_validate(rank, "ResilientDDP", folder, skews, slow, **options)[1]


def test_validation_by_the_clock_comes_at_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    results = spawn(train_with_validation_by_the_clock, 2, args=(str(tmp_path),), deadline="40s").check().results
    assert results[0] == results[1]
    assert results[0][0] == 2
    assert len(results[0]) >= 2


# -- D11: gradients of different steps --------------------------------------------------------------------------------


def train_without_one_sum(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Nobody can go on with a warning: the others stand in the sum."""
    steps: list[int] = []  # those that the monitor lets through
    count = jobs.At("on_before_optimizer_step", lambda trainer, *_: steps.append(trainer.global_step))
    monitor = RankDivergenceMonitor(on_divergence="warn")
    found = caught(lambda: fit(rank, name, folder, FaultCallback(), count, monitor=monitor))
    return {**found, "steps": len(steps)}


@pytest.mark.parametrize("name", ["ResilientDDP", "DDPStrategy"])
def test_a_rank_that_leaves_out_a_sum_of_gradients_is_named_before_it_steps(name: str, tmp_path: Path) -> None:
    faults = FaultPlan().skip_collective(rank=1, step=STEP)
    run = spawn(train_without_one_sum, 2, args=(name, str(tmp_path)), faults=faults, deadline="30s")
    assert run.faults_fired == 1
    found = run.results[1]
    assert (found["field"], found["ranks"]) == ("gradient_sum", [1])
    assert "wrong: rank 1" in found["message"]
    assert found["steps"] == STEP
    assert run.alive == {}
    if name == "ResilientDDP":  # on a stock strategy the others see that the connection is closed
        assert run.results[0]["field"] == "gradient_sum"


# -- D9: a batch that fails on one rank -------------------------------------------------------------------------------


def train_with_failing_batches(
    rank: int, name: str, how: str, batches: tuple[int, ...], accumulate: int, folder: str
) -> dict[str, Any]:
    """Rank 1 has no loss in some steps: no memory, or a caught error and None."""
    weights: list[str] = []

    def fail(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        weights.append(module.net[0].weight.detach().sum().item().hex())
        if rank != 1 or batch_idx not in batches:
            return loss
        if how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (planted)")
        return None

    module = jobs.Model(change=fail)
    monitor = RankDivergenceMonitor(on_local_failure="skip_all", max_skips_in_a_row=2)
    found = caught(lambda: fit(rank, name, folder, module=module, monitor=monitor, accumulate_grad_batches=accumulate))
    return {**found, "weights": weights, "skipped": monitor.skips.total, "global_step": module.trainer.global_step}


@pytest.mark.parametrize(
    ("name", "how", "accumulate"),
    [("ResilientDDP", "memory", 1), ("ResilientDDP", "none", 2), ("DDPStrategy", "memory", 1)],
)
def test_all_ranks_leave_out_a_step_whose_batch_fails_on_one(
    name: str, how: str, accumulate: int, tmp_path: Path
) -> None:
    arguments = (name, how, (2, 5), accumulate, str(tmp_path))
    results = spawn(train_with_failing_batches, 2, args=arguments, deadline="40s").check().results
    assert results[0] == results[1]
    found = results[0]
    assert (found["field"], found["skipped"], found["global_step"]) == ("nothing was raised", 2, 6)
    first = found["weights"]
    steps = [first[index] for index in range(0, len(first), accumulate)]
    skipped = {2 // accumulate, 5 // accumulate}
    assert {index for index in range(5) if steps[index] == steps[index + 1]} == skipped - {5}


def test_too_many_steps_left_out_in_a_row_end_the_run(tmp_path: Path) -> None:
    arguments = ("ResilientDDP", "memory", (1, 2, 3), 1, str(tmp_path))
    for found in spawn(train_with_failing_batches, 2, args=arguments, deadline="40s").check().results.values():
        assert (found["field"], found["ranks"]) == ("training_step", [1])
        assert "max_skips_in_a_row is 2" in found["message"]
        assert len(found["message"].splitlines()) <= 15


def start_on_fsdp(rank: int, folder: str) -> str:
    try:
        fit(rank, "ResilientFSDP", folder, monitor=RankDivergenceMonitor(on_local_failure="skip_all"))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_sharded_strategy_refuses_to_leave_out_a_step_that_failed_locally(tmp_path: Path) -> None:
    for message in spawn(start_on_fsdp, 2, args=(str(tmp_path),), deadline="40s").check().results.values():
        assert "works with DDP, not with ResilientFSDP" in message


# -- no false alarm ---------------------------------------------------------------------------------------------------


def end_late(rank: int, folder: str) -> int:
    """Rank 1 still has a question when rank 0, whose process serves the store, has nothing left to do."""

    def ask(*_: Any) -> None:
        time.sleep(1.0)
        plane = connected()
        assert plane is not None
        plane.read("anything")

    asks = jobs.At("on_fit_end", ask, rank=1)
    named = {"data": own_loader(0), "use_distributed_sampler": True, "max_steps": 2}
    return fit(rank, "DDPStrategy", folder, asks, **named).global_step


def test_rank_0_of_a_stock_strategy_serves_the_store_to_the_last(tmp_path: Path) -> None:
    assert spawn(end_late, 2, args=(str(tmp_path),), deadline="40s").check().results == {0: 2, 1: 2}
