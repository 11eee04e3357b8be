"""Row H8, raw calls: where collectives differ, the verdict names the call and the rank that left the others."""

from __future__ import annotations

import json
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.pairs import kept_rows

DEADLINE_S = 3.0
FAULT_STEP = 4


class RawCollectives(Callback):
    """Calls torch.distributed after each batch; in one step, one rank does something else."""

    def __init__(self, kind: str, guilty: int, record: str) -> None:
        self.kind = kind
        self.guilty = guilty
        self.record = record

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        differs = trainer.global_step == FAULT_STEP and trainer.global_rank == self.guilty
        if differs:
            Path(self.record).write_text(str(time.time()))
        values = torch.ones(8)
        if differs and self.kind == "order":
            dist.all_gather([torch.ones(8) for _ in range(trainer.world_size)], values)  # order
        if differs and self.kind == "only":
            dist.barrier()  # only
        if differs and self.kind == "handle":
            dist.barrier(async_op=True).wait()  # handle
        if differs and self.kind == "count":
            dist.broadcast(torch.ones(3), 0)  # count
            return
        if differs and self.kind == "shape":
            values = torch.ones(16)
        if differs and self.kind == "shorter":
            values = torch.ones(2)
        if differs and self.kind == "dtype":
            values = torch.ones(8, dtype=torch.float64)
        dist.all_reduce(values)  # the call
        dist.broadcast(torch.ones(3), 0)
        if trainer.world_size > 2 and self.kind == "count":
            dist.all_reduce(torch.ones(1))


def train(kind: str, guilty: int, world_size: int, folder: str) -> None:
    trainer = jobs.trainer(
        jobs.strategy("ResilientDDP", timeout={"step": DEADLINE_S, "setup": "60s"}),
        world_size,
        folder,
        max_steps=10,
        callbacks=[RawCollectives(kind, guilty, f"{folder}/fired")],
    )
    trainer.fit(jobs.Model(), jobs.loader(200))


def run(kind: str, guilty: int, world_size: int, folder: Path) -> tuple[SpawnResult, dict[str, Any], float]:
    result = spawn(train, world_size, args=(kind, guilty, world_size, str(folder)), deadline="50s")
    seconds = time.time() - float((folder / "fired").read_text())
    assert result.alive == {}
    (path,) = (folder / "distplus").glob("verdict-*.json")
    return result, json.loads(path.read_text()), seconds


def line_of(kind: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {kind}'))}"


LEAVES = [("order", 1, 2), ("only", 0, 2), ("handle", 0, 3), ("count", 1, 3)]
REFUSED = [("shape", 1, 2), ("shorter", 0, 2), ("dtype", 1, 3)]


@pytest.mark.parametrize(
    ("kind", "guilty", "world_size"), kept_rows(LEAVES, [one for one in LEAVES if one[0] != "only"])
)
def test_a_rank_that_leaves_the_common_sequence_is_named(
    kind: str, guilty: int, world_size: int, tmp_path: Path
) -> None:
    result, verdict, seconds = run(kind, guilty, world_size, tmp_path)
    assert (verdict["kind"], verdict["culprits"], verdict["is_decided"]) == ("hang", [guilty], True)
    assert (verdict["mismatch"]["kind"], verdict["mismatch"]["culprits"]) == ("order", [guilty])
    calls = verdict["collectives"]
    assert {call["seq"] for call in calls.values()} == {verdict["mismatch"]["seq"]}
    assert all(call["dtypes"] and call["group"] == "0" for call in calls.values() if call["op"] != "barrier")
    assert verdict["location"] == line_of(kind)
    assert len(verdict["stacks"]) == world_size
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert DEADLINE_S <= seconds < DEADLINE_S + 6
    (printed,) = [log for log in result.logs.values() if "RANK" in log]
    assert f"RANK {guilty} HANGS (host" in printed
    assert f"#{verdict['mismatch']['seq']} on group 0 differs" in printed


@pytest.mark.parametrize(
    ("kind", "guilty", "world_size"), kept_rows(REFUSED, [one for one in REFUSED if one[0] != "shape"])
)
def test_a_message_that_gloo_refuses_is_explained_before_the_process_is_gone(
    kind: str, guilty: int, world_size: int, tmp_path: Path
) -> None:
    result, verdict, seconds = run(kind, guilty, world_size, tmp_path)
    assert (verdict["kind"], verdict["culprits"], verdict["is_decided"]) == ("exception", [guilty], True)
    assert verdict["mismatch"]["kind"] == ("dtype" if kind == "dtype" else "shape")
    assert verdict["location"] == line_of("the call")
    assert -signal.SIGABRT in result.exit_codes.values()  # gloo's end of the process stays what it was
    assert set(result.exit_codes.values()) <= {-signal.SIGABRT, int(ExitCode.PEER_LOST)}
    assert seconds < 6
    for rank, code in result.exit_codes.items():
        assert code == -signal.SIGABRT or "does not fit" in result.logs[rank]


class OwnGroup(Callback):
    """A group of the user's own, whose time-out is shorter than the deadline; one rank does not come."""

    def __init__(self, record: str) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != FAULT_STEP:
            return
        group = dist.new_group(timeout=timedelta(seconds=1))
        if trainer.global_rank == 1:
            Path(self.record).write_text(str(time.time()))
            time.sleep(100)  # asleep
        dist.all_reduce(torch.ones(2), group=group)


def train_with_an_own_group(folder: str) -> None:
    strategy = jobs.strategy("ResilientDDP", timeout={"step": 60.0, "setup": "60s"})
    trainer = jobs.trainer(strategy, 3, folder, max_steps=10, callbacks=[OwnGroup(f"{folder}/fired")])
    trainer.fit(jobs.Model(), jobs.loader(200))


def test_a_collective_that_times_out_is_not_the_first_cause(tmp_path: Path) -> None:
    result = spawn(train_with_an_own_group, 3, args=(str(tmp_path),), deadline="50s")
    seconds = time.time() - float((tmp_path / "fired").read_text())
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("hang", [1], [0, 2]), verdict
    assert verdict["location"] == line_of("asleep")
    assert result.alive == {}
    assert result.exit_codes[1] == int(ExitCode.PEER_LOST)
    for rank in (0, 2):  # its own error, or that of the rank which timed out first
        assert result.exit_codes[rank] in (1, int(ExitCode.PEER_LOST))
        assert "imed out" in result.logs[rank]
    assert "This rank is the one that waited." in result.logs[1]
    assert seconds < 30  # far below the deadline
