"""Two runs that write their checkpoints into one folder, and no variable that tells (row S2)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import env
from lightning_distplus.errors import ExitCode, PreflightError
from lightning_distplus.events import read_events
from lightning_distplus.preflight.check import Status
from lightning_distplus.preflight.host import RunLock
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.hosts import Hosts, run_on, several_hosts

BOUND_S = 10.0  # four seconds of watching, and whatever a busy machine adds


class Trains(Callback):
    """Says that the first run trains, and waits until the second one has ended; or dies there."""

    def __init__(self, folder: Path, dies: bool) -> None:
        self.folder, self.dies = folder, dies

    def on_train_start(self, *_: Any) -> None:
        (self.folder / "trains").touch()
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(self.folder / "ended")


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


def fit(folder: Path, *callbacks: Callback) -> None:
    """One run of one process, as each of two nodes makes it where ``num_nodes`` was forgotten."""
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
    with env.changed(**variables):
        saves = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1)
        arguments: dict[str, Any] = {"callbacks": [saves, *callbacks], "max_steps": 1}
        jobs.fit("ResilientDDP", 1, str(folder), **arguments)


def run_twice(rank: int, folder: str, dies: bool = False) -> None:
    """Process 0 is the first run, process 1 the second one."""
    place = Path(folder)
    if rank == 0:
        fit(place, Trains(place, dies))
        return
    wait_for(place / "trains")
    if dies:
        wait_until_gone(place / "checkpoints")
    begin = time.monotonic()
    try:
        fit(place)
    except PreflightError as error:
        (place / "refused").write_text(f"{time.monotonic() - begin}\n{error}")
        raise
    finally:
        (place / "ended").touch()


def wait_until_gone(folder: Path) -> None:
    pid = json.loads((folder / ".distplus" / "run.lock").read_text())["pid"]
    until = time.monotonic() + 30
    while "Z" not in (state := _state(pid)) and state:
        assert time.monotonic() < until
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def twice_on_two_hosts(rank: int, hosts: Hosts, folder: str) -> None:
    run_on(hosts.names[rank], lambda: run_twice(rank, folder))


def refused(folder: Path) -> str:
    seconds, text = (folder / "refused").read_text().split("\n", 1)
    assert float(seconds) < BOUND_S
    assert f"Another run writes its checkpoints into {folder}/checkpoints: host " in text
    assert "num_nodes" in text
    assert '"run_lock": "off"' in text
    return text


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    run = spawn(run_twice, 2, args=(str(tmp_path),), deadline="90s")
    assert run.exit_codes == {0: 0, 1: int(ExitCode.PREFLIGHT)}, run.logs
    assert "of this host is running" in refused(tmp_path)
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert not (tmp_path / "checkpoints" / ".distplus" / "run.lock").exists()


def test_a_run_of_another_host_is_known_by_the_touch_of_its_lock(tmp_path: Path) -> None:
    with several_hosts(2) as hosts:
        run = spawn(twice_on_two_hosts, 2, args=(hosts, str(tmp_path)), deadline="90s")
    assert run.exit_codes == {0: 0, 1: int(ExitCode.PREFLIGHT)}, run.logs
    text = refused(tmp_path)
    assert f"host {hosts.names[0]}, pid " in text
    assert "its lock was touched twice meanwhile" in text


def test_the_lock_of_a_killed_run_is_taken_over_with_a_note_in_the_ledger(tmp_path: Path) -> None:
    run = spawn(run_twice, 2, args=(str(tmp_path), True), deadline="90s")
    assert run.exit_codes == {0: -signal.SIGKILL, 1: 0}, run.logs
    assert [event for event in read_events(tmp_path / "distplus") if event["kind"] == "run_lock_taken_over"]
    assert not list((tmp_path / "checkpoints" / ".distplus").glob("run.lock*"))


def test_a_lock_that_cannot_be_taken_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.path.parent.mkdir()
    lock.path.symlink_to(tmp_path / "nowhere")
    (finding,) = lock.take()
    assert finding.status is Status.WARNING
    assert str(lock.path) in finding.detail
    lock.release()
    assert lock.path.is_symlink()
