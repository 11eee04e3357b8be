"""A loss or a gradient norm of one rank that stands out is reported with its rank, step and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus import RankDivergenceMonitor, ResumableDataModule
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs

STRATEGIES = {
    "ResilientDDP": ("ResilientDDP", {}),
    "stock": ("DDPStrategy", {}),
    "fsdp": ("ResilientFSDP", {}),
    "fsdp2": ("ResilientModelParallel", {}),
    "zero2": ("ResilientDeepSpeed", {"stage": 2}),
}
WRONG_STEP, ODD_STEP, STEPS = 40, 44, 47


class Miscalculates(Callback):
    """Once, rank 1 computes gradients that are a thousand times too large."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if trainer.global_rank == 1 and trainer.global_step == WRONG_STEP:
            loss.register_hook(lambda gradient: gradient * 1e3)


class Samples(torch.utils.data.Dataset):
    """Numbers, and one sample of rank 1 that is far out."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.randn(jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        return sample * 1e4 if index == 8 * ODD_STEP + 6 else sample


def train(kind: str, folder: str, **options: Any) -> dict[str, float]:
    name, arguments = STRATEGIES[kind]
    monitor = RankDivergenceMonitor(**options)
    trainer = jobs.trainer(
        jobs.strategy(name, **arguments), 2, folder, max_steps=STEPS, callbacks=[Miscalculates(), monitor]
    )
    trainer.fit(jobs.Model(), datamodule=ResumableDataModule(Samples(), batch_size=4, shuffle=False))
    return {"steps": trainer.global_step, **monitor.metrics()}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_rank_that_stands_out_is_reported_with_step_and_samples_and_the_run_goes_on(
    kind: str, tmp_path: Path
) -> None:
    result = spawn(train, 2, args=(kind, str(tmp_path)), deadline="50s").check()
    for found in result.results.values():
        assert (found["steps"], found["distplus/spikes"], found["distplus/divergences"]) == (STEPS, 3.0, 0.0)
    events = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "spike"]
    assert {event["rank"] for event in events} == {0, 1}
    events = [event for event in events if event["rank"] == 0]
    told = [(event["field"], event["global_step"], event["ranks"]) for event in events]
    assert told == [("gradient_norm", WRONG_STEP, [1]), ("loss", ODD_STEP, [1]), ("gradient_norm", ODD_STEP, [1])]
    assert [8 * ODD_STEP + 4 + number for number in range(4)] == events[1]["samples"]
    assert all(event["z"] >= 6 and event["values"][1] > 10 * event["values"][0] for event in events)
    for log in result.logs.values():
        assert f"The ranks differ in gradient norm in step {WRONG_STEP}, where that of rank 1 stands out (z = " in log
        assert f"samples [{8 * ODD_STEP + 4}, " in log


def test_a_spike_ends_all_ranks_where_that_is_wanted(tmp_path: Path) -> None:
    result = spawn(train_and_raise, 2, args=(str(tmp_path),), deadline="50s")
    assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}
    for log in result.logs.values():
        assert f"in step {WRONG_STEP}, where that of rank 1 stands out" in log, log[-3000:]


def train_and_raise(folder: str) -> None:
    train("ResilientDDP", folder, on_spike="raise")


# -- replay ------------------------------------------------------------------------------------------------------------


class Impure(jobs.Model):
    """Its loss depends on how often it was called."""

    calls = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        Impure.calls += 1
        return super().training_step(batch, batch_idx) * Impure.calls


class Gathers(jobs.Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.all_gather(batch)
        return super().training_step(batch, batch_idx)


class Normalised(jobs.Model):
    """With everything that a replay has to put back: dropout, running statistics, a counter that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(jobs.NUM_FEATURES)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        loss = super().training_step(batch, batch_idx) * (1 + torch.sin(self.steps) / 2)
        self.log("loss", loss)
        return loss + self.norm(batch).pow(2).mean() / 100


MODULES = {"pure": Normalised, "impure": Impure, "gathers": Gathers}


def train_and_replay(kind: str, module: str, replays: bool, folder: str) -> dict[str, Any]:
    monitor = RankDivergenceMonitor(replay_suspects=replays)
    trainer = jobs.trainer(
        jobs.strategy(STRATEGIES[kind][0]), 2, folder, max_steps=STEPS, callbacks=[Miscalculates(), monitor]
    )
    model = MODULES[module]()
    trainer.fit(model, datamodule=ResumableDataModule(Samples(), batch_size=4, shuffle=False))
    state = model.state_dict()
    return {"losses": model.losses, "weights": {name: value.tolist() for name, value in state.items()}}


@pytest.mark.parametrize("kind", ["ResilientDDP", "stock"])
def test_a_replay_tells_a_device_that_miscalculates_from_samples_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    result = spawn(train_and_replay, 2, args=(kind, "pure", True, str(tmp_path)), deadline="50s").check()
    events = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "spike" and event["rank"] == 0]
    told = {(event["field"], event["global_step"]): event["replayed"] for event in events}
    assert "both times: this device miscalculated the first time" in told["gradient_norm", WRONG_STEP]
    assert "gave the same numbers: its samples" in told["gradient_norm", ODD_STEP]
    alone = spawn(train_and_replay, 2, args=(kind, "pure", False, str(tmp_path / "alone")), deadline="50s").check()
    assert result.results == alone.results


@pytest.mark.parametrize(
    ("module", "reason"),
    [("impure", "it is no function of its inputs"), ("gathers", "training_step issues collectives")],
)
def test_a_step_that_cannot_be_repeated_is_not_replayed(module: str, reason: str, tmp_path: Path) -> None:
    result = spawn(train_and_replay, 2, args=("ResilientDDP", module, True, str(tmp_path)), deadline="50s").check()
    for log in result.logs.values():
        assert log.count("no step is replayed: ") == 1
        assert reason in log
    events = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "spike"]
    assert events
    assert {event["replayed"] for event in events} == {None}


def replay_on_fsdp(folder: str) -> str:
    trainer = jobs.trainer(
        jobs.strategy("ResilientFSDP"), 2, folder, callbacks=[RankDivergenceMonitor(replay_suspects=True)]
    )
    with pytest.raises(ValueError, match="a rank alone cannot compute a sharded step") as caught:
        trainer.fit(jobs.Model(), jobs.loader())
    return str(caught.value)


def test_a_sharded_strategy_refuses_to_replay(tmp_path: Path) -> None:
    assert len(set(spawn(replay_on_fsdp, 2, args=(str(tmp_path),)).check().results.values())) == 1
