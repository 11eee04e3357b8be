"""Rows H8 and S10, raw calls: where they differ, or wait in a ring, the verdict names the call and the guilty rank."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side
from tests.pairs import kept

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

DEADLINE_S = 3.0
FAULT_STEP = 4
Ended = tuple[SpawnResult, dict[str, Any], float]


class RawCalls(Callback):
    """Calls torch.distributed after each batch; in one step, one rank does something else, or all call in a ring."""

    def __init__(self, kind: str, guilty: int, folder: str, step: int = FAULT_STEP) -> None:
        self.kind, self.guilty, self.record, self.step = kind, guilty, Path(folder, "fired"), step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        is_due = trainer.global_step == self.step
        differs = is_due and trainer.global_rank == self.guilty
        if differs:
            self.record.write_text(str(time.time()))
        getattr(self, self.kind, self.common)(trainer, is_due, differs)

    def common(self, trainer: Any, is_due: bool, differs: bool) -> None:
        values = torch.ones(8)
        if differs and self.kind == "lonely":
            trainer.strategy.barrier("of one rank")
        if self.kind == "arguments":
            trainer.strategy.reduce(torch.ones(4 if differs else 3))
        if differs and self.kind == "order":
            dist.all_gather([torch.ones(8) for _ in range(trainer.world_size)], values)  # order
        if differs and self.kind == "only":
            dist.barrier()  # only
        if differs and self.kind == "handle":
            dist.barrier(async_op=True).wait()  # handle
        if differs and self.kind == "count":
            dist.broadcast(torch.ones(3), 0)  # count
            return
        if differs and self.kind in ("shape", "shorter"):
            values = torch.ones(16 if self.kind == "shape" else 2)
        if differs and self.kind == "dtype":
            values = torch.ones(8, dtype=torch.float64)
        dist.all_reduce(values)  # the call
        dist.broadcast(torch.ones(3), 0)
        if trainer.world_size > 2 and self.kind == "count":
            dist.all_reduce(torch.ones(1))

    def own_group(self, trainer: Any, is_due: bool, differs: bool) -> None:
        """A group of the user's own, whose time-out is shorter than the deadline; one rank does not come."""
        if is_due:
            group = dist.new_group(timeout=timedelta(seconds=1))
            if differs:
                time.sleep(100)  # late
            dist.all_reduce(torch.ones(2), group=group)

    def in_flight(self, trainer: Any, is_due: bool, differs: bool) -> None:
        """A collective that all ranks have in flight and one never comes to, as ``.item()`` waits for a kernel."""
        if differs:
            time.sleep(600)  # asleep
        work: Any = dist.all_reduce(torch.ones(8), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)

    def cycle(self, trainer: Any, is_due: bool, differs: bool) -> None:
        """Two ranks send to each other before they receive; the others wait for them at the gate."""
        pair = [self.guilty, (self.guilty + 1) % trainer.world_size]
        if is_due and trainer.global_rank in pair:
            (other,) = set(pair) - {trainer.global_rank}
            dist.send(torch.ones(5), other)
            dist.recv(torch.ones(5), other)

    def rings(self, trainer: Any, is_due: bool, differs: bool) -> None:
        """Two rings, of the even and of the odd ranks, in which every stage sends before it receives."""
        if is_due:
            neighbour = (trainer.global_rank + 2) % 4
            dist.send(torch.ones(3, 5), neighbour)  # send
            dist.recv(torch.ones(3, 5), neighbour)


def train(kind: str, guilty: int, world_size: int, folder: str) -> None:
    timeout = {"step": 60.0 if kind == "own_group" else DEADLINE_S, "setup": "60s"}
    named = {"timeout": timeout, "max_steps": 10, "callbacks": [RawCalls(kind, guilty, folder)]}
    jobs.fit("ResilientDDP", world_size, folder, data=jobs.loader(200), **named)


def run(kind: str, folder: Path) -> Ended:
    """The end of the processes, their verdict, and how long after the fault it came."""
    guilty, world_size = KINDS[kind]
    result = spawn(train, world_size, args=(kind, guilty, world_size, str(folder)), deadline="50s")
    seconds = time.time() - float((folder / "fired").read_text())
    assert result.alive == {}
    return result, jobs.verdict_in(folder), seconds


LEAVES = {"order": (1, 2), "only": (0, 2), "handle": (0, 3), "count": (1, 3)}
REFUSED = {"shape": (1, 2), "shorter": (0, 2), "dtype": (1, 3)}
KINDS = {**LEAVES, **REFUSED, "own_group": (1, 3), "in_flight": (1, 3), "rings": (0, 4)}
OFTEN = [kind for kind in KINDS if kind not in ("only", "shape")]


ended = side_by_side({kind: partial(run, kind) for kind in KINDS}, OFTEN)


@pytest.mark.parametrize("kind", kept([*LEAVES], [kind for kind in LEAVES if kind in OFTEN]))
def test_a_rank_that_leaves_the_common_sequence_is_named(kind: str, ended: Runs) -> None:
    result, verdict, seconds = ended(kind)
    guilty, world_size = KINDS[kind]
    assert (verdict["kind"], verdict["culprits"], verdict["is_decided"]) == ("hang", [guilty], True)
    assert (verdict["mismatch"]["kind"], verdict["mismatch"]["culprits"]) == ("order", [guilty])
    calls = verdict["collectives"]
    assert {call["seq"] for call in calls.values()} == {verdict["mismatch"]["seq"]}
    assert all(call["dtypes"] and call["group"] == "0" for call in calls.values() if call["op"] != "barrier")
    assert verdict["location"] == jobs.line_of(__file__, kind)
    assert len(verdict["stacks"]) == world_size
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert DEADLINE_S <= seconds < DEADLINE_S + 6
    (printed,) = [log for log in result.logs.values() if "RANK" in log]
    assert f"RANK {guilty} HANGS (host" in printed
    assert f"#{verdict['mismatch']['seq']} on group 0 differs" in printed


@pytest.mark.parametrize("kind", kept([*REFUSED], [kind for kind in REFUSED if kind in OFTEN]))
def test_a_message_that_gloo_refuses_is_explained_before_the_process_is_gone(kind: str, ended: Runs) -> None:
    result, verdict, seconds = ended(kind)
    assert (verdict["kind"], verdict["culprits"], verdict["is_decided"]) == ("exception", [KINDS[kind][0]], True)
    assert verdict["mismatch"]["kind"] == ("dtype" if kind == "dtype" else "shape")
    assert verdict["location"] == jobs.line_of(__file__, "the call")
    assert -signal.SIGABRT in result.exit_codes.values()  # gloo's end of the process stays what it was
    assert set(result.exit_codes.values()) <= {-signal.SIGABRT, int(ExitCode.PEER_LOST)}
    assert seconds < 6
    for rank, code in result.exit_codes.items():
        assert code == -signal.SIGABRT or "does not fit" in result.logs[rank]


def test_a_collective_that_times_out_is_not_the_first_cause(ended: Runs) -> None:
    result, verdict, seconds = ended("own_group")
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("hang", [1], [0, 2]), verdict
    assert verdict["location"] == jobs.line_of(__file__, "late")
    assert result.exit_codes[1] == int(ExitCode.PEER_LOST)
    for rank in (0, 2):  # its own error, or that of the rank which timed out first
        assert result.exit_codes[rank] in (1, int(ExitCode.PEER_LOST))
        assert "imed out" in result.logs[rank]
    assert "This rank is the one that waited." in result.logs[1]
    assert seconds < 30  # far below the deadline


def test_ranks_with_a_collective_in_flight_are_not_blamed_wherever_their_python_stands(ended: Runs) -> None:
    result, verdict, seconds = ended("in_flight")
    assert (verdict["culprits"], verdict["waiting"], verdict["is_decided"]) == ([1], [0, 2], True)
    assert verdict["location"] == jobs.line_of(__file__, "asleep")
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert seconds < DEADLINE_S + 15


def test_two_rings_that_send_before_they_receive_are_drawn_with_the_line_of_each_rank(ended: Runs) -> None:
    result, verdict, _ = ended("rings")
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    line = jobs.line_of(__file__, "send")
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("hang", [0, 1, 2, 3], [])
    assert verdict["cycles"] == [[0, 2], [1, 3]]
    assert set(verdict["locations"].values()) == {line}
    call = verdict["collectives"]["0"]
    assert (call["op"], call["peer"], call["inputs"], call["dtypes"]) == ("send", 2, [[3, 5]], ["float32"])
    drawn = f"rank 1 (send at {line}) -> rank 3 (send at {line}) -> rank 1"
    assert drawn in verdict["findings"]
    assert drawn in result.logs[0]
    assert "batch_isend_irecv" in verdict["remedy"]


# -- on four ranks: for every kind of fault and every seed, exactly the guilty ranks are named -------------------------

MATRIX_DEADLINE_S = 4.0
PLANNED = ("hang", "hang_gil", "stop", "kill", "raise_")
PLACES = ("batch_start", "before_backward", "after_backward", "batch_end")
DRAWN = (*PLANNED, "order", "only", "count", "shape", "dtype", "lonely", "uneven", "arguments", "worker", "cycle")
BLAMES = (
    "Rank {} (host", "the process of rank {} (host", "connection to rank {}", "(wrong: rank {})",
    "number of training batches differs on rank {}.",
)  # fmt: skip


def train_one_of_four(strategy: str, kind: str, guilty: int, step: int, folder: str) -> None:
    record, data = f"{folder}/fired", jobs.loader(200)
    if kind == "worker":
        data = DataLoader(jobs.BadSample(guilty, 4 * step + 12, record), batch_size=4, num_workers=1)
    if kind == "uneven" and os.environ["RANK"] == str(guilty):
        Path(record).write_text(str(time.time()))
        data = jobs.loader(4 * step)
    raw = [] if kind == "worker" else [RawCalls(kind, guilty, folder, step)]
    named = {"timeout": {"step": MATRIX_DEADLINE_S, "setup": "60s"}, "callbacks": [FaultCallback(), *raw]}
    jobs.fit(strategy, 4, folder, data=data, max_steps=40, **named)


def named_by(run: SpawnResult, folder: Path, guilty: int) -> list[int]:
    """The ranks that the job names: by its verdict, or, where a rank raised or is gone, by what the others show."""
    verdicts = [json.loads(path.read_text()) for path in (folder / "distplus").glob("verdict-*.json")]
    if verdicts:
        return sorted({rank for verdict in verdicts for rank in verdict["culprits"]})
    others = [log for rank, log in run.logs.items() if rank != guilty]
    return [rank for rank in range(4) if all(any(text.format(rank) in log for text in BLAMES) for log in others)]


@pytest.mark.soak
@pytest.mark.deadline(100)
@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_guilty_ranks_are_named(kind: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{kind}-{seed}")
    where: Any = rng.choice(PLACES)
    strategy, guilty, step = rng.choice(jobs.STRATEGIES[:3]), rng.randrange(4), rng.randrange(3, 12)
    plan = getattr(FaultPlan(), kind)(rank=guilty, step=step, where=where) if kind in PLANNED else None
    case = (strategy, kind, guilty, step, str(tmp_path))
    run = spawn(train_one_of_four, 4, args=case, faults=plan, deadline="80s")
    ended = time.time()
    fired = run.faults[0].unix_s if run.faults else float((tmp_path / "fired").read_text().split()[0])
    print(f"{case} {where}: {ended - fired:.1f} s")
    assert run.alive == {}
    assert named_by(run, tmp_path, guilty) == sorted({guilty, (guilty + 1) % 4} if kind == "cycle" else {guilty})
    assert ended - fired < MATRIX_DEADLINE_S + 8
