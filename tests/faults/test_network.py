"""Row H10: a host is cut off. Both sides say so at the deadline, also where the other side has the store."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.hosts import TwoHosts, run_on, two_hosts

DEADLINE_S = 4.0
CUT_STEP = 5


class Cuts(Callback):
    """Takes the link down from rank 0's side, once."""

    def __init__(self, command: list[str], record: str) -> None:
        self.command = command
        self.record = record

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == CUT_STEP and trainer.global_rank == 0:
            subprocess.run(self.command, check=True, timeout=10)
            Path(self.record).write_text(str(time.time()))


def train(rank: int, hosts: TwoHosts, folder: str) -> None:
    def fit() -> None:
        os.environ.update(
            NODE_RANK=str(rank), LOCAL_RANK="0", MASTER_ADDR=hosts.addresses[0], GLOO_SOCKET_IFNAME="eth0"
        )
        trainer = jobs.trainer(
            jobs.strategy("ResilientDDP", timeout={"step": DEADLINE_S, "setup": "60s"}),
            1,
            folder,
            num_nodes=2,
            plugins=[LightningEnvironment()],
            max_steps=20,
            callbacks=[Cuts(hosts.cut_command, f"{folder}/fired")],
        )
        try:
            trainer.fit(jobs.Model(), jobs.loader(200))
        finally:
            Path(f"{folder}/ended-{rank}").write_text(str(time.time()))

    run_on(hosts.names[rank], fit)


def verdict_of(folder: Path, host: str) -> dict[str, Any]:
    (path,) = (folder / "distplus").glob(f"verdict-*-{host}.json")
    return json.loads(path.read_text())


@pytest.mark.deadline(240)
def test_a_host_that_is_cut_off_is_named_on_both_sides(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        run = spawn(train, 2, args=(hosts, str(tmp_path)), deadline="60s")
        seconds = time.time() - float((tmp_path / "fired").read_text())
    for rank in range(2):  # rank 1 has lost the host of rank 0, which serves the store
        verdict = verdict_of(tmp_path, hosts.names[rank])
        other = hosts.names[1 - rank]
        assert (verdict["kind"], verdict["culprits"]) == ("peer_lost", [1 - rank]), verdict
        assert verdict["hosts"][str(1 - rank)] == other
        assert f"no packet comes back from host {other} to {hosts.names[rank]}" in run.logs[rank]
    assert run.exit_codes == {0: int(ExitCode.PEER_LOST), 1: int(ExitCode.PEER_LOST)}
    assert run.alive == {}
    assert DEADLINE_S <= seconds < DEADLINE_S + 6
