"""A rank that is killed is named by those who wait for it, within two seconds and without a time-out (row H3)."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from lightning_distplus.errors import PeerLost
from lightning_distplus.testing import FaultCallback, FaultPlan, spawn
from tests.distributed import jobs


def train(folder: str) -> tuple[str, list[int], float]:
    trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=20, callbacks=[FaultCallback()])
    try:
        trainer.fit(jobs.Model(), jobs.loader())
    except PeerLost as error:
        return "lost", error.ranks, time.time()
    return "finished", [], 0.0


@pytest.mark.parametrize("mode", ["forkserver", "torchrun"])
def test_a_rank_killed_before_the_gate_is_named_by_the_one_who_waits_there(mode: str, tmp_path: Path) -> None:
    # Under torchrun the store outlives rank 0, so that nothing but its absence tells.
    faults = FaultPlan().kill(rank=1 if mode == "forkserver" else 0, step=4, where="batch_end")
    run = spawn(train, 2, args=(str(tmp_path),), faults=faults, mode=mode, deadline="50s")
    (fault,) = run.faults
    survivor = 1 - fault.fault.rank
    outcome, ranks, at = run.results[survivor]
    assert (outcome, ranks) == ("lost", [fault.fault.rank])
    assert at - fault.unix_s < 4.0
    if mode == "forkserver":
        assert run.exit_codes[fault.fault.rank] == -signal.SIGKILL
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("peer_lost", [fault.fault.rank])
    # Its last beat came in the first second of the run; who has passed the gate of a step with it knows more.
    assert (verdict["phase"], verdict["global_step"]) == ("step", 4)
    assert re.search(r"its process is gone, last seen in '.*, \d\.\d s before$", verdict["lines"][0])
