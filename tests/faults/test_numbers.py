"""Rows D1, D2 and D10: wrong numbers on one rank are named, on all ranks, and do not reach the others' weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from lightning_distplus import RankDivergenceMonitor
from lightning_distplus.divergence.fingerprint import fingerprint_of_each
from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn
from tests.distributed import jobs

STRATEGIES = {
    "ResilientDDP": {},
    "ResilientFSDP": {},
    "ResilientModelParallel": {},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
}
STEP = 3


class State(Callback):
    """Writes down what this rank holds before and after each step. Listed last."""

    def __init__(self) -> None:
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before[trainer.global_step] = held(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after[trainer.global_step] = held(trainer)


def held(trainer: Any) -> list[int]:
    """Fingerprints of this rank's part of the weights and the optimizer's state."""
    tensors = [local(parameter) for parameter in trainer.strategy.model.parameters()]
    (optimizer,) = trainer.optimizers
    states = getattr(optimizer, "optimizer", optimizer).state
    tensors += [local(value) for state in states.values() for value in state.values() if torch.is_tensor(value)]
    return fingerprint_of_each(tensors).tolist()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; ZeRO-3 keeps it beside a parameter that is whole or empty, as it likes."""
    tensor = getattr(tensor, "ds_tensor", tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Poisoned(jobs.Model):
    """Its loss is what ``value`` says, on rank 1, in one step; ``keeps_gradient``: with sound gradients."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and self.trainer.global_step == STEP:
            return loss + torch.tensor(self.value)
        return loss


def train(
    name: str, folder: str, policy: Any, value: float | None = None, size: int = 2, **arguments: Any
) -> dict[str, Any]:
    strategy = jobs.strategy("ResilientDeepSpeed" if "zero" in name else name, **STRATEGIES.get(name, {}))
    state = State()
    options = {"max_steps": 6, **arguments.pop("trainer", {})}
    monitor = RankDivergenceMonitor(on_divergence=policy, **arguments)
    trainer = jobs.trainer(strategy, size, folder, callbacks=[FaultCallback(), monitor, state], **options)
    trainer.fit(jobs.Model() if value is None else Poisoned(value), jobs.loader(400))
    weights = [local(parameter) for parameter in trainer.strategy.model.parameters()]
    return {
        "steps": trainer.global_step,
        "finite": all(bool(weight.isfinite().all()) for weight in weights),
        "unchanged": {step for step in state.before if state.before[step] == state.after.get(step + 1)},
        "last": held(trainer),
        "skipped": monitor.skips.total,
    }


def verdict_in(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "distplus").glob("verdict-*.json")
    return json.loads(path.read_text())


def require_named(result: SpawnResult, folder: Path, field: str, rank: int = 1) -> dict[str, Any]:
    """All ranks end with the same error, and the verdict has it."""
    assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}, result.logs
    assert result.alive == {}
    verdict = verdict_in(folder)
    assert (verdict["kind"], verdict["culprits"], verdict["field"]) == ("divergence", [rank], field)
    return verdict


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_gradient_that_is_not_finite_ends_all_ranks_before_the_step(name: str, tmp_path: Path) -> None:
    faults = FaultPlan().nan(rank=1, step=STEP)
    result = spawn(train, 2, args=(name, str(tmp_path), "raise"), faults=faults, deadline="50s")
    assert result.faults_fired == 1
    verdict = require_named(result, tmp_path, "gradient")
    assert verdict["global_step"] == STEP
    assert "net." in verdict["parameter"]
    for log in result.logs.values():
        assert f"Rank 1 has a gradient that is not finite in step {STEP}" in log
        assert "no weight has changed" in log


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_skipped_step_changes_no_weight_and_no_optimizer_state_on_any_rank(name: str, tmp_path: Path) -> None:
    faults = FaultPlan().nan(rank=1, step=STEP)
    result = spawn(train, 2, args=(name, str(tmp_path), "skip"), faults=faults, deadline="50s").check()
    assert result.faults_fired == 1
    for found in result.results.values():
        assert found["finite"]
        assert found["unchanged"] == {STEP}
        assert (found["steps"], found["skipped"]) == (6, 1)
    if name == "ResilientDDP":
        assert result.results[0]["last"] == result.results[1]["last"]
