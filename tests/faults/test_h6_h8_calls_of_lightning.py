"""Rows H6 and H8, calls through Lightning: ranks in different calls raise together, with both sides and both lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer

from lightning_distplus.errors import DivergenceError, ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.divergences import own_loader
from tests.faults.side_by_side import Runs, side_by_side
from tests.pairs import kept

pytestmark = pytest.mark.deadline(400)  # one test waits for all that run side by side

FAULT_BATCH = 2
SOON_S = 2.0  # from the moment at which the second rank is elsewhere to the error on every rank


def labels(module: Any, rank: int) -> None:
    module.all_gather((torch.zeros(2, 32),) if rank == 0 else (torch.zeros(2, 32), torch.zeros(2)))


def order_of_keys(module: Any, rank: int) -> None:
    module.all_gather(dict.fromkeys(["a", "b"] if rank == 0 else ["b", "a"], torch.tensor(1.0)))


def dtype(module: Any, rank: int) -> None:
    module.all_gather(torch.zeros(4, dtype=torch.float32 if rank == 0 else torch.int32))


def operator(module: Any, rank: int) -> None:
    module.trainer.strategy.reduce(torch.ones(2), reduce_op="sum" if rank == 0 else "mean")


def source(module: Any, rank: int) -> None:
    module.trainer.strategy.broadcast("text", src=rank)


def barriers(module: Any, rank: int) -> None:
    module.trainer.strategy.barrier("before" if rank == 0 else "after")


def order(module: Any, rank: int) -> None:
    first, second = (module.trainer.strategy.barrier, lambda: module.all_gather(torch.ones(1)))[:: 1 - 2 * rank]
    first()
    second()


def logged_for_the_epoch(module: Any, rank: int) -> None:
    module.log("a" if rank == 0 else "b", 1.0, on_step=False, on_epoch=True, sync_dist=True)


def lonely_barrier(module: Any, rank: int) -> None:
    _ = rank or module.trainer.strategy.barrier("mine")


def lonely_save(module: Any, rank: int) -> None:
    _ = rank or module.trainer.save_checkpoint(Path(module.trainer.default_root_dir) / "mine.ckpt")


def lonely_log_dir(module: Any, rank: int) -> None:
    _ = rank or module.trainer.log_dir


def lonely_log(module: Any, rank: int) -> None:
    _ = rank or module.log("alone", torch.ones(()), sync_dist=True)


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
    order_of_keys: Expected("structure", ("{'a': float32[], 'b': float32[]}", "{'b': float32[], 'a': float32[]}")),
    dtype: Expected("structure", ("float32[4]", "int32[4]")),
    operator: Expected("arguments", ("reduce of float32[2] [sum]", "reduce of float32[2] [mean]")),
    source: Expected("arguments", ("broadcast [from rank 0]", "broadcast [from rank 1]")),
    barriers: Expected("collective", ("barrier 'before'", "barrier 'after'")),
    logged_for_the_epoch: Expected(
        "collective", ("log 'on_train_batch_end.a'", "log 'on_train_batch_end.b'"), at_own_line=(False, False)
    ),
    lonely_barrier: Expected("collective", ("barrier 'mine'", AT_THE_GATE), (0,), (True, False)),
    lonely_save: Expected("collective", ("barrier 'Trainer.save_checkpoint'", AT_THE_GATE), (0,), (True, False)),
    lonely_log_dir: Expected("collective", ("broadcast [from rank 0]", AT_THE_GATE), (0,), (True, False)),
}
BY_NAME = {fault.__name__: fault for fault in (*FAULTS, order, lonely_log)}


def fit(
    fault: str, strategy: str, world_size: int, folder: str, in_step: bool, timeout: Any, reached: list[float],
    monitor: bool = False,
) -> None:  # fmt: skip
    """The ranks come to the fault in one batch, in its step or behind it; the moment is kept."""

    def strike(module: Any, batch_idx: int) -> None:
        if batch_idx == FAULT_BATCH:
            reached.append(time.time())
            BY_NAME[fault](module, module.global_rank)

    def strike_in_step(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        strike(module, batch_idx)
        return loss

    behind = jobs.At("on_train_batch_end", lambda trainer, module, _, __, batch_idx: strike(module, batch_idx))
    model, callbacks = jobs.Model(change=strike_in_step if in_step else None), [] if in_step else [behind]
    options: dict[str, Any] = {"monitor": monitor, "max_epochs": 1, "limit_train_batches": 6}
    if monitor:  # which sees that ranks train on the same samples
        options["data"] = own_loader(int(os.environ["RANK"]))
    named = {"timeout": timeout, "callbacks": callbacks, **options}
    jobs.fit(strategy, world_size, folder, model, **named)


def disagree(fault: str, strategy: str, world_size: int, folder: str, in_step: bool) -> dict[str, Any]:
    reached: list[float] = []
    try:
        fit(fault, strategy, world_size, folder, in_step, "120s", reached)
    except DivergenceError as error:
        told = {"text": str(error), "ranks": error.ranks, "field": error.field, "values": error.values}
        return {**told, "reached_at": reached[0], "raised_at": time.time()}
    return {}


def errors_of(
    fault: str, strategy: str, world_size: int, folder: Path, *, in_step: bool = False
) -> dict[int, dict[str, Any]]:
    """Every rank's error, which came soon after the last rank had come to the fault."""
    run = spawn(disagree, world_size, args=(fault, strategy, world_size, str(folder), in_step), deadline="100s")
    errors = run.check().results
    assert all(errors.values()), run.logs
    second = max(error["reached_at"] for error in errors.values())
    soon = [errors[0]] if in_step else [*errors.values()]  # others are inside C++, and hear of it when rank 0 is gone
    assert max(error["raised_at"] for error in soon) - second < SOON_S
    return errors


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault is not lonely_barrier], ids=lambda one: one.__name__
)
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
    verdict = jobs.verdict_in(tmp_path, "divergence", [0], [1, 2])
    assert (verdict["field"], verdict["operation"]) == ("structure", "all_gather of (float32[2, 32])")
    assert verdict["location"] == f"{__file__}:{labels.__code__.co_firstlineno + 1}"
    assert verdict["values"] == {str(rank): text for rank, text in error["values"].items()}
    assert "gather(tree)" in verdict["remedy"]


def test_calls_in_another_order_are_found_at_the_first_of_them(tmp_path: Path) -> None:
    for error in errors_of("order", "ResilientDDP", 2, tmp_path).values():
        assert error["field"] == "collective"
        assert "in barrier at" in error["values"][0]
        assert "in all_gather of float32[1] at" in error["values"][1]


# -- row H8: one rank logs in ``training_step``; the other does not, and waits in its backward -----------------------


@pytest.mark.parametrize("strategy", kept(jobs.STRATEGIES, ["ResilientDDP", "ResilientDeepSpeed"]))
def test_both_sides_are_named_within_two_seconds(strategy: str, tmp_path: Path) -> None:
    for error in errors_of("lonely_log", strategy, 2, tmp_path, in_step=True).values():
        assert (error["field"], error["ranks"]) == ("collective", [0])
        assert "in log 'training_step.alone'" in error["values"][0]
        assert error["values"][1] == f"in backward batch {FAULT_BATCH}"
        assert f"{Path(__file__).name}:" in error["text"]


def log_slowly(folder: str) -> int:
    """Both ranks log; one is slow beforehand and in its backward."""

    def log(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        slow_s = 4.0 * module.global_rank if batch_idx == FAULT_BATCH else 0.0
        time.sleep(slow_s)
        module.log("both", loss.detach(), sync_dist=True)
        loss.register_hook(lambda _: time.sleep(slow_s))
        return loss

    logs = jobs.At("on_train_batch_end", lambda trainer, module, *_: module.log("end", 1.0, sync_dist=True))
    model, named = jobs.Model(change=log), {"timeout": "120s", "max_epochs": 1, "limit_train_batches": 6}
    return jobs.fit("ResilientDDP", 2, folder, model, callbacks=[logs], **named).global_step


def test_a_rank_that_is_slow_on_the_way_or_in_its_backward_is_waited_for(tmp_path: Path) -> None:
    assert spawn(log_slowly, 2, args=(str(tmp_path),), deadline="100s").check().results == {0: 6, 1: 6}


# -- alone and early: no contradiction yet, so the watchdog's verdict comes after the deadline -------------------------


def saved_alone(strategy: str, world_size: int, folder: Path) -> tuple[SpawnResult, Path]:
    """Behind the gate of the batch, with all that the one line brings."""
    timeout = {"step": 3.0, "setup": "60s"}
    arguments = ("lonely_save", strategy, world_size, str(folder), True, timeout, [], True)
    return spawn(fit, world_size, args=arguments, deadline="50s"), folder


ALONE = {"ResilientDDP": 3, "ResilientFSDP": 2}
HEALTHY = ("ResilientModelParallel", "ResilientDeepSpeed")


@pytest.mark.parametrize("strategy", ALONE)
def test_a_save_on_rank_0_alone_is_named_when_the_others_stand_in_the_engine(strategy: str, slow_ones: Runs) -> None:
    run, folder = slow_ones(f"alone-{strategy}")
    others = "ranks 1-2 in backward batch 2" if ALONE[strategy] == 3 else "rank 1 in backward batch 2"
    verdict = jobs.verdict_in(folder, "divergence", [0])  # they need not wait for the deadline
    line = f"{__file__}:{lonely_save.__code__.co_firstlineno + 1}"
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
    callbacks = [
        Uneven(),
        ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(dirpath=f"{folder}/timed", train_time_interval=timedelta(seconds=0.1)),
        EarlyStopping("val_loss", patience=100),
        Timer(duration="00:01:00:00"),
    ]
    options = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2, "val_check_interval": 2}
    trainer = jobs.trainer(name, 2, folder, timeout="60s", callbacks=callbacks, **options)
    counted, strategy = [], trainer.strategy
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


slow_ones = side_by_side(
    {
        **{f"alone-{name}": partial(saved_alone, name, size) for name, size in ALONE.items()},
        **{f"healthy-{name}": partial(run_healthy, name) for name in jobs.STRATEGIES},
    },
    [*(f"alone-{name}" for name in ALONE), *(f"healthy-{name}" for name in HEALTHY)],
)


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, HEALTHY))
def test_a_healthy_run_with_everything_that_synchronises_is_not_ended(name: str, slow_ones: Runs) -> None:
    run = slow_ones(f"healthy-{name}")
    counted = run.check().results
    assert counted[0] == counted[1] > 50
