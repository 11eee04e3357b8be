"""Row S2: two runs that write their checkpoints into one folder, and no variable that tells."""

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
from tests.processes import is_there, wait_until

BOUND_S = 10.0  # four seconds of watching, and whatever a busy machine adds


def fit(folder: Path, *callbacks: Callback) -> None:
    """One run of one process, as each of two nodes makes it where ``num_nodes`` was forgotten."""
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
    with env.changed(**variables):
        saves = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1)
        jobs.fit("ResilientDDP", 1, str(folder), callbacks=[saves, *callbacks], max_steps=1)


def run_twice(rank: int, folder: str, dies: bool = False) -> None:
    """Process 0 is the first run, which waits until the second one, process 1, has ended, or dies."""
    place = Path(folder)

    def wait_or_die(*_: Any) -> None:
        (place / "trains").touch()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until((place / "ended").exists)

    if rank == 0:
        fit(place, jobs.At("on_train_start", wait_or_die))
        return
    wait_until((place / "trains").exists)
    if dies:
        pid = json.loads((place / "checkpoints" / ".distplus" / "run.lock").read_text())["pid"]
        wait_until(lambda: not is_there(pid))
    begin = time.monotonic()
    try:
        fit(place)
    except PreflightError as error:
        (place / "refused").write_text(f"{time.monotonic() - begin}\n{error}")
        raise
    finally:
        (place / "ended").touch()


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
