"""Rows H4 and H10: who serves the store stops, dies or is cut off: the others say so, without a store."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.hosts import Hosts, run_on, several_hosts
from tests.faults.side_by_side import Runs, side_by_side
from tests.processes import LAUNCH, start, wait_until

pytestmark = pytest.mark.deadline(400)  # the first test waits for both runs

DEADLINE_S = 4.0
CUT_STEP = 5
SPOT = "the spot on which rank 0 moves"


class IsStopped(Callback):
    """Rank 0 moves on one spot until it is stopped, as soon as rank 1 has heard where it is."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1:
            board = trainer.strategy.watchdog.board
            threading.Thread(target=self.listen, args=(board,), daemon=True).start()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= CUT_STEP and trainer.global_rank == 0:
            self.move(trainer.strategy.marks)
        (self.folder / "begins_to_wait").write_text(str(time.time()))  # rank 1, since this is the only one that goes on

    def move(self, marks: Any) -> None:
        while True:
            marks.set(SPOT)
            time.sleep(0.02)

    def listen(self, board: Any) -> None:
        while not (seen := board.sightings.get(0)) or seen.mark.operation != SPOT:
            time.sleep(0.02)
        (self.folder / "heard").touch()


def stop_rank_0(folder: Path, is_over: threading.Event) -> None:
    """From outside, because the first process of a host takes no such signal from itself; kills it in the end."""
    while not (folder / "heard").exists():
        if is_over.wait(0.02):
            return
    pid = int((folder / "pid-0").read_text())
    os.kill(pid, signal.SIGSTOP)
    (folder / "fired").write_text(str(time.time()))
    while not list(folder.glob("distplus/verdict-*.json")) and not is_over.wait(0.02):
        pass
    os.kill(pid, signal.SIGKILL)


def train(rank: int, hosts: Hosts, folder: str, is_cut: bool = True) -> None:
    def cut(*_: Any) -> None:
        """Takes the link down, once."""
        subprocess.run(hosts.cut_command, check=True, timeout=10)
        Path(folder, "fired").write_text(str(time.time()))

    def fit() -> None:
        variables = {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": hosts.addresses[0]}
        os.environ.update(variables, GLOO_SOCKET_IFNAME="eth0")
        cuts = jobs.At("on_train_batch_start", cut, rank=0, step=CUT_STEP)
        callbacks = [cuts if is_cut else IsStopped(folder)]
        named = {"timeout": {"step": DEADLINE_S, "setup": "60s"}, "num_nodes": 2, "plugins": [LightningEnvironment()]}
        try:
            jobs.fit("ResilientDDP", 1, folder, data=jobs.loader(200), max_steps=20, callbacks=callbacks, **named)
        finally:
            Path(f"{folder}/ended-{rank}").write_text(str(time.time()))

    run_on(hosts.names[rank], fit, f"{folder}/pid-{rank}")


def verdict_of(folder: Path, host: str) -> dict[str, Any]:
    (path,) = (folder / "distplus").glob(f"verdict-*-{host}.json")
    return json.loads(path.read_text())


def cut(folder: Path) -> tuple[SpawnResult, Hosts, Path]:
    with several_hosts(2, "c") as hosts:
        run = spawn(train, 2, args=(hosts, str(folder)), deadline="60s")
        (folder / "ended").write_text(str(time.time()))
    return run, hosts, folder


def stopped(folder: Path) -> tuple[SpawnResult, Hosts, Path]:
    with several_hosts(2, "s") as hosts, ThreadPoolExecutor(1) as pool:
        is_over = threading.Event()
        stopping = pool.submit(stop_rank_0, folder, is_over)
        run = spawn(train, 2, args=(hosts, str(folder), False), deadline="60s")
        (folder / "ended").write_text(str(time.time()))
        is_over.set()
        stopping.result()
    return run, hosts, folder


ended = side_by_side({"cut": cut, "stopped": stopped})


def test_a_host_that_is_cut_off_is_named_on_both_sides(ended: Runs) -> None:
    run, hosts, folder = ended("cut")
    seconds = float((folder / "ended").read_text()) - float((folder / "fired").read_text())
    for rank in range(2):  # rank 1 has lost the host of rank 0, which serves the store
        verdict = verdict_of(folder, hosts.names[rank])
        other = hosts.names[1 - rank]
        assert (verdict["kind"], verdict["culprits"]) == ("peer_lost", [1 - rank]), verdict
        assert verdict["hosts"][str(1 - rank)] == other
        assert f"no packet comes back from host {other} to {hosts.names[rank]}" in run.logs[rank]
    assert run.exit_codes == {0: int(ExitCode.PEER_LOST), 1: int(ExitCode.PEER_LOST)}
    assert run.alive == {}
    assert DEADLINE_S <= seconds < DEADLINE_S + 6


def test_a_stopped_rank_that_serves_the_store_to_another_host_is_shown_at_its_last_place(ended: Runs) -> None:
    run, hosts, folder = ended("stopped")
    verdict = verdict_of(folder, hosts.names[1])
    assert (verdict["kind"], verdict["culprits"], verdict["waiting"]) == ("hang", [0], [1]), verdict
    lines, first = inspect.getsourcelines(IsStopped.move)
    assert verdict["location"] in [f"{__file__}:{first + number}" for number in range(len(lines))]
    assert verdict["operation"] == SPOT
    seconds = float((folder / "ended").read_text()) - float((folder / "fired").read_text())
    assert seconds < DEADLINE_S + 10
    waited = float((folder / "ended").read_text()) - float((folder / "begins_to_wait").read_text())
    assert waited >= DEADLINE_S
    assert f"last seen in {verdict['operation']!r} at {verdict['location']}" in verdict["lines"][0]
    assert run.exit_codes[1] == int(ExitCode.HANG)


# -- row H4: the launcher that serves the store is killed; no rank is blamed for it ------------------------------------


def main(folder: str) -> None:
    def kill_parent(*_: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        Path(folder, "fired").touch()

    def tell(trainer: Any, module: Any, error: BaseException) -> None:
        told = {"type": type(error).__name__, "ranks": getattr(error, "ranks", None), "text": str(error)}
        stage = Path(folder, f"stage-{trainer.global_rank}")
        stage.write_text(json.dumps(told))
        stage.rename(Path(folder, f"told-{trainer.global_rank}"))

    callbacks = [jobs.At("on_train_batch_start", kill_parent, rank=0, step=3), jobs.At("on_exception", tell)]
    jobs.fit("ResilientDDP", 2, folder, timeout="120s", max_steps=10_000, callbacks=callbacks)


def test_a_killed_launcher_is_named_and_no_rank_is_blamed(tmp_path: Path) -> None:
    options = ["--nproc", "2", "--max-restarts", "0", "--start", "cold", "--log-dir", tmp_path / "logs"]
    job, log = ["-m", "tests.faults.test_h4_h10_lost_hosts", tmp_path], tmp_path / "launcher.log"
    launcher = start(*LAUNCH, *options, *job, log=log)
    assert launcher.wait(timeout=120) == -signal.SIGKILL, log.read_text()
    home, files = tmp_path / "distplus", [tmp_path / f"told-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files) and list(home.glob("verdict-*.json")), within_s=20)
    assert (tmp_path / "fired").exists()
    for file in files:
        told = json.loads(file.read_text())
        assert (told["type"], told["ranks"]) == ("PeerLost", [-1]), told
        assert "launcher" in told["text"]
    verdict = jobs.verdict_in(tmp_path, "peer_lost", [-1])
    assert verdict["lines"][0].startswith("the launcher")


if __name__ == "__main__":
    main(*sys.argv[1:])
