"""Row H13: a job that is stopped for longer than its deadlines, by Ctrl-Z or a scheduler, goes on when continued."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_distplus.control import Address, Point, Points, connect, part
from lightning_distplus.testing import SpawnResult, spawn
from lightning_distplus.world import World
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side

pytestmark = pytest.mark.deadline(400)  # the first test waits for both runs

DEADLINE_S = 1.0
PATIENCE_S = DEADLINE_S + 10.0  # of every wait of the control plane
EVEN_S = 3 * DEADLINE_S


def pause_all(plane: Any, seconds: float, is_rank: int) -> None:
    """Called by all ranks: half a second later, all of them are stopped, and continued in turn."""
    pids = " ".join(str(one["pid"]) for one in plane.gather_json("pids", {"pid": os.getpid()}, timedelta(seconds=30)))
    if plane.world.rank == is_rank:
        command = f"sleep 0.5; kill -STOP {pids}; sleep {seconds}; for pid in {pids}; do kill -CONT $pid; done"
        subprocess.Popen(["sh", "-c", command], start_new_session=True)


def work(seconds: float) -> None:
    """In small parts, so that what is left when all are stopped is left when they go on."""
    for _ in range(round(100 * seconds)):
        time.sleep(0.01)


def pause_even(trainer: Any, *_: Any) -> None:
    """All ranks are in their step when all are stopped: only the watchdog counts time."""
    pause_all(trainer.strategy.plane, EVEN_S, is_rank=0)
    work(0.7)


def pause_uneven(trainer: Any, *_: Any) -> None:
    """Rank 1 needs a second more than rank 0, which waits at the gate when all are stopped."""
    pause_all(trainer.strategy.plane, PATIENCE_S + 1.5, is_rank=1)
    work(trainer.global_rank)


def train(folder: str) -> tuple[int, float]:
    strategy = jobs.strategy("ResilientDDP", timeout={"step": DEADLINE_S, "setup": "60s"})
    start = time.monotonic()
    pauses = [jobs.At("on_train_batch_start", pause, step=at) for pause, at in ((pause_even, 2), (pause_uneven, 4))]
    trainer = jobs.fit(strategy, 2, folder, max_steps=8, callbacks=pauses)
    return trainer.global_step, time.monotonic() - start


def wait_in_turn(rank: int) -> list[float]:
    """Each kind of wait, with a second of patience, in which all are stopped for three."""
    world = World(rank=rank, size=2, local_rank=rank)
    address = Address(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))
    plane = connect(world, address, timedelta(seconds=60))
    points = Points(plane, waits=SimpleNamespace(patience=timedelta(seconds=1.5)))
    points.begin()
    waits = {
        "barrier": lambda: plane.barrier("late", timedelta(seconds=1.5)),
        "gather": lambda: plane.gather("late", b"", timedelta(seconds=1.5)),
        "point": lambda: points.meet(Point(operation="late")),
    }
    took = []
    for wait in waits.values():
        pause_all(plane, 3.0, is_rank=1)
        start = time.monotonic()
        work(rank)
        wait()
        took.append(time.monotonic() - start)
    points.end()
    part(plane, timedelta(seconds=10), has_failed=False)
    return took


def pause_a_job(folder: Path) -> tuple[SpawnResult, Path]:
    return spawn(train, 2, args=(str(folder),), deadline="100s"), folder


runs = side_by_side({"job": pause_a_job, "waits": lambda folder: spawn(wait_in_turn, 2, deadline="60s")})


def test_a_job_that_is_paused_in_its_steps_and_while_a_rank_waits_at_the_gate_goes_on(runs: Runs) -> None:
    run, folder = runs("job")
    assert {steps for steps, _ in run.check().results.values()} == {8}
    assert min(seconds for _, seconds in run.results.values()) > PATIENCE_S + 1.5 + EVEN_S
    assert not list(folder.glob("distplus/verdict-*"))


def test_no_wait_of_the_control_plane_counts_a_pause(runs: Runs) -> None:
    run = runs("waits").check()
    assert all(seconds > 3.0 for took in run.results.values() for seconds in took)
