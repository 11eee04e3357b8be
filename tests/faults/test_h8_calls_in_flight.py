"""Row H8, calls in flight: a rank whose Python shows no wait, and whose recorder does, waits for its peers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import spawn
from tests.distributed import jobs

DEADLINE_S = 3.0
FAULT_STEP = 4
GUILTY = 1


class WaitsAsForItsDevice(Callback):
    """Calls a collective that all ranks have in flight and one never comes to, as `.item()` waits for a kernel."""

    def __init__(self, record: str) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == FAULT_STEP and trainer.global_rank == GUILTY:
            Path(self.record).write_text(str(time.time()))
            time.sleep(600)  # asleep
        work: Any = dist.all_reduce(torch.ones(8), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)


def train(folder: str) -> None:
    trainer = jobs.trainer(
        jobs.strategy("ResilientDDP", timeout={"step": DEADLINE_S, "setup": "60s"}),
        3,
        folder,
        max_steps=10,
        callbacks=[WaitsAsForItsDevice(f"{folder}/fired")],
    )
    trainer.fit(jobs.Model(), jobs.loader(200))


def test_ranks_with_a_collective_in_flight_are_not_blamed_wherever_their_python_stands(tmp_path: Path) -> None:
    result = spawn(train, 3, args=(str(tmp_path),), deadline="50s")
    seconds = time.time() - float((tmp_path / "fired").read_text())
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("hang", [GUILTY], [0, 2])
    assert verdict["is_decided"]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# asleep"))
    assert verdict["location"] == f"{__file__}:{line}"
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert result.alive == {}
    assert seconds < DEADLINE_S + 15
