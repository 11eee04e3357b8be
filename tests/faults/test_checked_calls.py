"""Rows H6 and H8, calls through Lightning: ranks in different calls raise together, with both sides and both lines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer

from lightning_distplus.errors import DivergenceError, ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs

FAULT_BATCH = 2
SOON_S = 2.0  # from the moment at which the second rank is elsewhere to the error on every rank
DEADLINE_S = 3.0


def labels(module: Any, rank: int) -> None:
    module.all_gather((torch.zeros(2, 32),) if rank == 0 else (torch.zeros(2, 32), torch.zeros(2)))


def missing_key(module: Any, rank: int) -> None:
    module.all_gather({"loss": torch.tensor(1.0), **({"accuracy": torch.tensor(1.0)} if rank == 0 else {})})


def order_of_keys(module: Any, rank: int) -> None:
    module.all_gather(dict.fromkeys(["a", "b"] if rank == 0 else ["b", "a"], torch.tensor(1.0)))


def shape(module: Any, rank: int) -> None:
    module.all_gather(torch.zeros(4 + rank, 3))


def dtype(module: Any, rank: int) -> None:
    module.all_gather(torch.zeros(4, dtype=torch.float32 if rank == 0 else torch.int32))


def empty(module: Any, rank: int) -> None:
    module.all_gather([torch.zeros(2)] if rank == 0 else [])


def shape_of_a_reduction(module: Any, rank: int) -> None:
    module.trainer.strategy.reduce(torch.ones(2 + rank))


def operator(module: Any, rank: int) -> None:
    module.trainer.strategy.reduce(torch.ones(2), reduce_op="sum" if rank == 0 else "mean")


def decision(module: Any, rank: int) -> None:
    module.trainer.strategy.reduce_boolean_decision(True, all=rank == 0)


def source(module: Any, rank: int) -> None:
    module.trainer.strategy.broadcast("text", src=rank)


def barriers(module: Any, rank: int) -> None:
    module.trainer.strategy.barrier("before" if rank == 0 else "after")


def order(module: Any, rank: int) -> None:
    first, second = (module.trainer.strategy.barrier, lambda: module.all_gather(torch.ones(1)))[:: 1 - 2 * rank]
    first()
    second()


def logged(module: Any, rank: int) -> None:
    module.log("a" if rank == 0 else "b", 1.0, sync_dist=True)


def logged_for_the_epoch(module: Any, rank: int) -> None:
    module.log("a" if rank == 0 else "b", 1.0, on_step=False, on_epoch=True, sync_dist=True)


def lonely_barrier(module: Any, rank: int) -> None:
    _ = rank or module.trainer.strategy.barrier("mine")


def lonely_save(module: Any, rank: int) -> None:
    _ = rank or module.trainer.save_checkpoint(Path(module.trainer.default_root_dir) / "mine.ckpt")


def lonely_log_dir(module: Any, rank: int) -> None:
    _ = rank or module.trainer.log_dir


@dataclass(frozen=True)
class Expected:
    """What both ranks' errors say; the line is that of the fault, unless the call is Lightning's own."""

    field: str
    sides: tuple[str, str]
    ranks: tuple[int, ...] = (0, 1)
    at_own_line: tuple[bool, bool] = (True, True)


AT_THE_GATE = "at the step gate of batch 3"
FAULTS: dict[Callable[[Any, int], None], Expected] = {
    labels: Expected("structure", ("all_gather of (float32[2, 32])", "all_gather of (float32[2, 32], float32[2])")),
    missing_key: Expected("structure", ("{'loss': float32[], 'accuracy': float32[]}", "{'loss': float32[]}")),
    order_of_keys: Expected("structure", ("{'a': float32[], 'b': float32[]}", "{'b': float32[], 'a': float32[]}")),
    shape: Expected("structure", ("float32[4, 3]", "float32[5, 3]")),
    dtype: Expected("structure", ("float32[4]", "int32[4]")),
    empty: Expected("structure", ("[float32[2]]", "no tensors")),
    shape_of_a_reduction: Expected("structure", ("reduce of float32[2] [mean]", "reduce of float32[3] [mean]")),
    operator: Expected("arguments", ("reduce of float32[2] [sum]", "reduce of float32[2] [mean]")),
    decision: Expected("arguments", ("reduce_boolean_decision [all]", "reduce_boolean_decision [any]")),
    source: Expected("arguments", ("broadcast [from rank 0]", "broadcast [from rank 1]")),
    barriers: Expected("collective", ("barrier 'before'", "barrier 'after'")),
    logged: Expected("collective", ("log 'on_train_batch_end.a'", "log 'on_train_batch_end.b'")),
    logged_for_the_epoch: Expected(
        "collective", ("log 'on_train_batch_end.a'", "log 'on_train_batch_end.b'"), at_own_line=(False, False)
    ),
    lonely_barrier: Expected("collective", ("barrier 'mine'", AT_THE_GATE), (0,), (True, False)),
    lonely_save: Expected("collective", ("barrier 'Trainer.save_checkpoint'", AT_THE_GATE), (0,), (True, False)),
    lonely_log_dir: Expected("collective", ("broadcast [from rank 0]", AT_THE_GATE), (0,), (True, False)),
}
BY_NAME = {fault.__name__: fault for fault in (*FAULTS, order)}


class Disagreeing(jobs.Model):
    """The ranks come to the fault in one hook of one batch; the moment is kept."""

    def __init__(self, fault: Callable[[Any, int], None], hook: str = "on_train_batch_end") -> None:
        super().__init__()
        self.fault = fault
        self.hook = hook
        self.reached_at = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._strike("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._strike("on_train_batch_end", batch_idx)

    def _strike(self, hook: str, batch_idx: int) -> None:
        if (hook, batch_idx) == (self.hook, FAULT_BATCH):
            self.reached_at = time.time()
            self.fault(self, self.global_rank)


def trainer_of(strategy: str, world_size: int, folder: str, timeout: Any = "60s") -> Any:
    arguments = {"stage": 2} if "DeepSpeed" in strategy else {}
    made = jobs.strategy(strategy, timeout=timeout, **arguments)
    return jobs.trainer(made, world_size, folder, max_epochs=1, limit_train_batches=6)


def disagree(fault: str, strategy: str, world_size: int, folder: str) -> dict[str, Any]:
    model = Disagreeing(BY_NAME[fault])
    try:
        trainer_of(strategy, world_size, folder).fit(model, jobs.loader())
    except DivergenceError as error:
        told = {"text": str(error), "ranks": error.ranks, "field": error.field, "values": error.values}
        return {**told, "reached_at": model.reached_at, "raised_at": time.time()}
    return {}


def errors_of(fault: str, strategy: str, world_size: int, folder: Path) -> dict[int, dict[str, Any]]:
    """Every rank's error; all came soon after the last rank had come to the fault."""
    run = spawn(disagree, world_size, args=(fault, strategy, world_size, str(folder)), deadline="50s")
    errors = run.check().results
    assert all(errors.values()), run.logs
    second = max(error["reached_at"] for error in errors.values())
    assert max(error["raised_at"] for error in errors.values()) - second < SOON_S
    return errors


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_both_ranks_show_both_calls_and_both_lines(fault: Callable[[Any, int], None], tmp_path: Path) -> None:
    expected = FAULTS[fault]
    line = f"{__file__}:{fault.__code__.co_firstlineno + 1}"
    for error in errors_of(fault.__name__, "ResilientDDP", 2, tmp_path).values():
        assert (error["field"], tuple(error["ranks"])) == (expected.field, expected.ranks)
        for rank in range(2):
            side = error["values"][rank]
            assert f"rank {rank} {side}" in error["text"]
            assert expected.sides[rank] in side
            assert side.endswith(f" at {line}") == expected.at_own_line[rank]


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("ResilientFSDP", lonely_save), ("ResilientModelParallel", labels), ("ResilientDeepSpeed", lonely_barrier)],
)
def test_the_other_strategies_check_their_calls_too(
    strategy: str, fault: Callable[[Any, int], None], tmp_path: Path
) -> None:
    expected = FAULTS[fault]
    for error in errors_of(fault.__name__, strategy, 2, tmp_path).values():
        assert (error["field"], tuple(error["ranks"])) == (expected.field, expected.ranks)
        assert all(side in error["text"] for side in expected.sides)


def test_the_majority_names_the_rank_that_is_elsewhere(tmp_path: Path) -> None:
    for error in errors_of("labels", "ResilientDDP", 3, tmp_path).values():
        assert error["ranks"] == [0]
        assert "rank 0 in all_gather of (float32[2, 32]) at" in error["text"]
        assert "ranks 1-2 in all_gather of (float32[2, 32], float32[2]) at" in error["text"]
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("divergence", [0], [1, 2])
    assert (verdict["field"], verdict["operation"]) == ("structure", "all_gather of (float32[2, 32])")
    assert verdict["location"] == f"{__file__}:{labels.__code__.co_firstlineno + 1}"
    assert verdict["values"] == {str(rank): text for rank, text in error["values"].items()}
    assert "gather(tree)" in verdict["remedy"]


def test_calls_in_another_order_are_found_at_the_first_of_them(tmp_path: Path) -> None:
    for error in errors_of("order", "ResilientDDP", 2, tmp_path).values():
        assert error["field"] == "collective"
        assert "in barrier at" in error["values"][0]
        assert "in all_gather of float32[1] at" in error["values"][1]


# -- alone and early: no contradiction yet, so the watchdog's verdict comes after the deadline -------------------------


def save_alone_and_early(strategy: str, world_size: int, folder: str) -> None:
    trainer = trainer_of(strategy, world_size, folder, {"step": DEADLINE_S, "setup": "60s"})
    model = Disagreeing(lonely_save, hook="training_step")  # behind the gate of the batch
    trainer.fit(model, jobs.loader())


@pytest.mark.parametrize(
    ("strategy", "world_size", "others"),
    [
        ("ResilientDDP", 3, "ranks 1-2 in backward batch 2"),
        pytest.param("ResilientDDP", 2, "rank 1 in backward batch 2", marks=pytest.mark.soak),
        ("ResilientFSDP", 2, "rank 1 in backward batch 2"),
    ],
)
def test_a_save_on_rank_0_alone_is_named_after_the_deadline_when_the_others_stand_in_the_engine(
    strategy: str, world_size: int, others: str, tmp_path: Path
) -> None:
    run = spawn(save_alone_and_early, world_size, args=(strategy, world_size, str(tmp_path)), deadline="50s")
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    line = f"{__file__}:{lonely_save.__code__.co_firstlineno + 1}"
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [0])
    assert verdict["location"] == line
    assert verdict["operation"] == "barrier 'Trainer.save_checkpoint'"
    assert re.search(r"in \"barrier 'Trainer.save_checkpoint'\", call \d+ of the run, for", run.logs[0])
    assert f"rank 0 in barrier 'Trainer.save_checkpoint' at {line}; {others}" in verdict["cause"]
    assert set(run.exit_codes.values()) == {int(ExitCode.HANG)}
    assert DEADLINE_S <= verdict["elapsed_s"] < DEADLINE_S + 2


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
        met = strategy._points.meet
        strategy._points.meet = lambda point: (counted.append(str(point)), met(point))

    strategy.setup = setup
    trainer.fit(jobs.Model(), jobs.loader(), jobs.loader(16))
    trainer.validate(jobs.Model(), jobs.loader(16), verbose=False)
    assert any("own" in point for point in counted) is False
    return len(counted)


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_healthy_run_with_everything_that_synchronises_is_not_ended(name: str, tmp_path: Path) -> None:
    counted = spawn(healthy, 2, args=(name, str(tmp_path)), deadline="55s").check().results
    assert counted[0] == counted[1] > 50


# -- twins: the same faults under Lightning's own strategy -------------------------------------------------------------


def disagree_in_stock(fault: str, folder: str) -> dict[str, Any]:
    trainer = trainer_of("DDPStrategy", 2, folder, timedelta(seconds=DEADLINE_S))
    model = Disagreeing(BY_NAME[fault])
    try:
        trainer.fit(model, jobs.loader())
    except RuntimeError as error:
        return {"text": str(error), "seconds": time.time() - model.reached_at}
    return {"metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}


def in_stock(fault: str, folder: Path) -> SpawnResult:
    return spawn(disagree_in_stock, 2, args=(fault, str(folder)), deadline="40s")


def test_stock_averages_different_keys_and_says_nothing(tmp_path: Path) -> None:
    assert in_stock("logged", tmp_path).check().results == {0: {"metrics": {"a": 1.0}}, 1: {"metrics": {"b": 1.0}}}


def test_stock_takes_different_dtypes_and_says_nothing(tmp_path: Path) -> None:
    assert in_stock("dtype", tmp_path).check().results == {0: {"metrics": {}}, 1: {"metrics": {}}}


@pytest.mark.parametrize("fault", ["lonely_barrier", "labels"])
def test_stock_waits_for_the_time_out_and_names_no_rank(fault: str, tmp_path: Path) -> None:
    for error in in_stock(fault, tmp_path).check().results.values():
        assert error["seconds"] >= DEADLINE_S
        assert re.search("Timed out|timeout|Connection closed by peer", error["text"])
        assert not re.search(r"rank \d", error["text"])
