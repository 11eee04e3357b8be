"""Rows H6 and H8, calls through Lightning: ranks in different calls raise together, with both sides and both lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_distplus.errors import DivergenceError
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import kept

FAULT_BATCH = 2
SOON_S = 2.0  # from the moment at which the second rank is elsewhere to the error on every rank


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
LIKE_OTHERS = (missing_key, shape, empty, shape_of_a_reduction, decision, logged, lonely_barrier)


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


@pytest.mark.parametrize(
    "fault",
    kept([*FAULTS], [fault for fault in FAULTS if fault not in LIKE_OTHERS]),
    ids=lambda fault: fault.__name__,
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
