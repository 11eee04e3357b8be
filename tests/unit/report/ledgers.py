"""Ledgers of jobs that never ran, written as the ranks and the launcher write them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.verdict import judge

BEGAN = 1_000_000.0


class Job:
    """Writes the ledgers of a job in the order of its clock."""

    def __init__(self, folder: Path, num_ranks: int = 2, run_id: str = "a") -> None:
        self.home = folder / "distplus"
        self.home.mkdir(parents=True, exist_ok=True)
        self.num_ranks = num_ranks
        self.run_id = run_id
        self._seq = 0

    def tell(
        self, at: float, kind: str, *, attempt: int = 0, ranks: Iterable[int] | None = None, **fields: Any
    ) -> None:
        """One event of all ranks, or of some, so many seconds after the job began."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            event = {"time": BEGAN + at, "run_id": self.run_id, "rank": rank, "attempt": attempt, "seq": self._seq}
            with (self.home / f"events-rank{rank:05d}.jsonl").open("a") as file:
                file.write(json.dumps({**event, "kind": kind, **fields}) + "\n")
            self._seq += 1

    def start(self, at: float, *, attempt: int = 0, took: float = 2.0) -> None:
        """The processes begin, and have met after so many seconds."""
        self.tell(
            at + took, "start", attempt=attempt, began_at=BEGAN + at, world_size=self.num_ranks, host="node0",
            strategy="ResilientDDP", function="fit",
        )  # fmt: skip

    def train(
        self, at: float, first: int, last: int, step_s: float = 1.0, *, attempt: int = 0, **parts: float
    ) -> float:
        """Steps in windows of ten; returns when they are done."""
        for step in range(first + 10, last + 1, 10):
            at += 10 * step_s
            fields = {"global_step": step, "steps": 10, "seconds": 10 * step_s, "loss": 10 / step, **parts}
            self.tell(at, "steps", attempt=attempt, **fields)
        return at

    def hang(self, at: float, silence_s: float, step: int, phase: str = "step") -> None:
        """Rank 1 is found to hang."""
        ranks = [
            Evidence(
                rank=rank, host="node0", pid=7, state="running", answers=True, waits=rank == 0, operation="forward",
                phase=phase, global_step=step, silence_s=silence_s, stack="<script>alert(1)</script>",
            )
            for rank in range(2)
        ]  # fmt: skip
        path = judge(dict(enumerate(ranks)), f"hang-{at:.0f}", self.run_id).write(self.home, "node0")
        os.utime(path, (BEGAN + at, BEGAN + at))


def a_job_that_hung_once(folder: Path) -> Job:
    """200 s: 10 of set-up, 60 of steps, a hang of 20, a restart of 10, 10 of set-up, 10 steps anew, 80 further ones."""
    job = Job(folder)
    job.start(0)
    job.train(10, 0, 60)
    job.tell(60, "saved", path="/gone/step=50.ckpt", global_step=50, stall_s=0.5)
    job.hang(90, silence_s=20, step=60)
    job.tell(91, "restart", attempt=1, ranks=[-1], culprit=1, exit_code=170)
    job.start(100, attempt=1)
    job.tell(105, "loaded", attempt=1, path="/gone/step=50.ckpt", global_step=50)
    end = job.train(110, 50, 140, attempt=1, data_s=2.0, checkpoint_s=0.5)
    job.tell(end, "end", attempt=1, failed=False)
    return job
