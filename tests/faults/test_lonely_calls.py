"""Calls through Lightning that are no contradiction: alone and early, late, or under Lightning's own strategy.

Row H6.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.faults import test_checked_calls as checked
from tests.faults.side_by_side import side_by_side
from tests.faults.test_checked_calls import Disagreeing, lonely_save, trainer_of
from tests.pairs import kept

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

DEADLINE_S = 3.0

# -- alone and early: no contradiction yet, so the watchdog's verdict comes after the deadline -------------------------


def save_alone_and_early(strategy: str, world_size: int, folder: str) -> None:
    trainer = trainer_of(strategy, world_size, folder, {"step": DEADLINE_S, "setup": "60s"})
    model = Disagreeing(lonely_save, hook="training_step")  # behind the gate of the batch
    trainer.fit(model, jobs.loader())


def saved_alone(strategy: str, world_size: int, folder: Path) -> tuple[SpawnResult, Path]:
    return spawn(save_alone_and_early, world_size, args=(strategy, world_size, str(folder)), deadline="50s"), folder


@pytest.fixture(scope="module")
def slow_ones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Any]]:
    """The runs that wait for a deadline, or for a rank that is late."""
    calls: dict[str, Callable[[Path], Any]] = {
        **{f"alone-{name}": partial(saved_alone, name, size) for name, size in ALONE.items()},
        **{f"healthy-{name}": partial(run_healthy, name) for name in HEALTHY},
    }
    return side_by_side(calls, tmp_path_factory.mktemp("slow"))


ALONE = {"ResilientDDP": 3, "ResilientFSDP": 2}
HEALTHY = ("ResilientModelParallel", "ResilientDeepSpeed")


@pytest.mark.parametrize("strategy", ALONE)
def test_a_save_on_rank_0_alone_is_named_when_the_others_stand_in_the_engine(
    strategy: str, slow_ones: dict[str, Future[Any]]
) -> None:
    run, folder = slow_ones[f"alone-{strategy}"].result()
    others = "ranks 1-2 in backward batch 2" if ALONE[strategy] == 3 else "rank 1 in backward batch 2"
    (path,) = (folder / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    line = f"{checked.__file__}:{lonely_save.__code__.co_firstlineno + 1}"
    assert (verdict["kind"], verdict["culprits"]) == ("divergence", [0])  # they need not wait for the deadline
    assert verdict["location"] == line
    assert verdict["operation"] == "barrier 'Trainer.save_checkpoint'"
    assert f"rank 0 in barrier 'Trainer.save_checkpoint' at {line}; {others}" in verdict["cause"]
    assert set(run.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}


# -- no false alarm ----------------------------------------------------------------------------------------------------


class Uneven(Callback):
    """Rank 1 comes to calls, saves and gates much later than rank 0; and rank 0 does what only rank 0 may do."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("own", 1.0, sync_dist=True, rank_zero_only=True)
        module.log("everywhere", float(trainer.global_rank), sync_dist=True, on_step=True, on_epoch=True)
        if trainer.is_global_zero:
            trainer.strategy.reduce("not a tensor")
            trainer.strategy.remove_checkpoint(Path(trainer.default_root_dir) / "nothing.ckpt")
        is_late = trainer.current_epoch == 0
        if is_late and batch_idx == 1 and trainer.global_rank == 1:
            time.sleep(1.2)  # rank 0 waits for it at a save
        if is_late and batch_idx == 2 and trainer.global_rank == 0:
            time.sleep(1.2)  # rank 1 waits for it at the gate
        if batch_idx == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "both.ckpt")

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        held = {"name": "a" * trainer.global_rank, "score": 1, "values": [torch.ones(2), None]}
        assert module.all_gather(held)["values"][0].shape == (2, 2)
        assert trainer.strategy.broadcast("x" if trainer.global_rank == 0 else None) == "x"
        assert trainer.log_dir


def healthy(name: str, folder: str) -> int:
    arguments = {"stage": 2} if "DeepSpeed" in name else {}
    trainer = jobs.trainer(
        jobs.strategy(name, timeout="60s", **arguments),
        2,
        folder,
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=2,
        val_check_interval=2,
        enable_checkpointing=True,
        callbacks=[
            Uneven(),
            ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True),
            ModelCheckpoint(dirpath=f"{folder}/timed", train_time_interval=timedelta(seconds=0.1)),
            EarlyStopping("val_loss", patience=100),
            Timer(duration="00:01:00:00"),
        ],
    )
    counted = []
    strategy = trainer.strategy
    begin = strategy.setup

    def setup(fitted: Any) -> None:
        begin(fitted)
        met = strategy.collectives.points.meet
        strategy.collectives.points.meet = lambda point: (counted.append(str(point)), met(point))

    strategy.setup = setup
    trainer.fit(jobs.Model(), jobs.loader(), jobs.loader(16))
    trainer.validate(jobs.Model(), jobs.loader(16), verbose=False)
    assert any("own" in point for point in counted) is False
    return len(counted)


def run_healthy(name: str, folder: Path) -> SpawnResult:
    return spawn(healthy, 2, args=(name, str(folder)), deadline="100s")


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, HEALTHY))
def test_a_healthy_run_with_everything_that_synchronises_is_not_ended(
    name: str, slow_ones: dict[str, Future[Any]], tmp_path: Path
) -> None:
    run = slow_ones[f"healthy-{name}"].result() if name in HEALTHY else run_healthy(name, tmp_path)
    counted = run.check().results
    assert counted[0] == counted[1] > 50


# -- twins: the same faults under Lightning's own strategy -------------------------------------------------------------


def disagree_in_stock(fault: str, folder: str) -> dict[str, Any]:
    trainer = trainer_of("DDPStrategy", 2, folder, timedelta(seconds=DEADLINE_S))
    model = Disagreeing(checked.BY_NAME[fault])
    try:
        trainer.fit(model, jobs.loader())
    except RuntimeError as error:
        return {"text": str(error), "seconds": time.time() - model.reached_at}
    return {"metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}


def in_stock(fault: str, folder: Path) -> SpawnResult:
    return spawn(disagree_in_stock, 2, args=(fault, str(folder)), deadline="40s")


@pytest.mark.soak
def test_stock_averages_different_keys_and_says_nothing(tmp_path: Path) -> None:
    assert in_stock("logged", tmp_path).check().results == {0: {"metrics": {"a": 1.0}}, 1: {"metrics": {"b": 1.0}}}


@pytest.mark.soak
def test_stock_takes_different_dtypes_and_says_nothing(tmp_path: Path) -> None:
    assert in_stock("dtype", tmp_path).check().results == {0: {"metrics": {}}, 1: {"metrics": {}}}


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["lonely_barrier", "labels"])
def test_stock_waits_for_the_time_out_and_names_no_rank(fault: str, tmp_path: Path) -> None:
    for error in in_stock(fault, tmp_path).check().results.values():
        assert error["seconds"] >= DEADLINE_S
        assert re.search("Timed out|timeout|Connection closed by peer", error["text"])
        assert not re.search(r"rank \d", error["text"])
