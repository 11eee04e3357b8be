"""Row S10: rings in which every stage sends before it receives; the verdict draws the cycles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import spawn
from tests.distributed import jobs

DEADLINE_S = 3.0


class Rings(Callback):
    """Two rings, of the even and of the odd ranks."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            neighbour = (trainer.global_rank + 2) % 4
            dist.send(torch.ones(3, 5), neighbour)  # send
            dist.recv(torch.ones(3, 5), neighbour)


def train(folder: str) -> None:
    timeout = {"step": DEADLINE_S, "setup": "60s"}
    trainer = jobs.trainer(jobs.strategy("ResilientDDP", timeout=timeout), 4, folder, max_steps=10, callbacks=[Rings()])
    trainer.fit(jobs.Model(), jobs.loader(200))


def test_two_rings_that_send_before_they_receive_are_drawn_with_the_line_of_each_rank(tmp_path: Path) -> None:
    run = spawn(train, 4, args=(str(tmp_path),), deadline="50s")
    assert set(run.exit_codes.values()) == {int(ExitCode.HANG)}
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    lines = Path(__file__).read_text().splitlines()
    line = f"{__file__}:{next(number for number, text in enumerate(lines, 1) if text.endswith('# send'))}"
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("hang", [0, 1, 2, 3], [])
    assert verdict["cycles"] == [[0, 2], [1, 3]]
    assert set(verdict["locations"].values()) == {line}
    call = verdict["collectives"]["0"]
    assert (call["op"], call["peer"], call["inputs"], call["dtypes"]) == ("send", 2, [[3, 5]], ["float32"])
    drawn = f"rank 1 (send at {line}) -> rank 3 (send at {line}) -> rank 1"
    assert drawn in verdict["findings"]
    assert drawn in run.logs[0]
    assert "batch_isend_irecv" in verdict["remedy"]
