"""The lock of a folder that a run of another host holds, or takes over: nobody can ask its process."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_distplus.preflight import host
from lightning_distplus.preflight.host import Holder, RunLock
from lightning_distplus.process import start_time


def held_by(lock: RunLock, holder: Holder) -> Path:
    lock.path.parent.mkdir(exist_ok=True)
    lock.path.write_text(json.dumps(asdict(holder)))
    return lock.path


def held_elsewhere(lock: RunLock) -> Path:
    return held_by(lock, Holder(host="node7", boot="of another host", pid=1))


def touch(path: Path, times: int) -> None:
    for number in range(1, times + 1):
        time.sleep(0.15)
        os.utime(path, (number, number))


@pytest.mark.parametrize(("times", "status"), [(0, "note"), (1, "note"), (2, "error")])
def test_a_lock_is_taken_over_unless_it_is_touched_twice(
    times: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_WATCH_S", 0.8)
    lock = RunLock(tmp_path)
    touching = threading.Thread(target=touch, args=(held_elsewhere(lock), times))
    touching.start()
    (finding,) = lock.take()
    touching.join()
    assert (finding.status.value, json.loads(lock.path.read_text())["host"] == "node7") == (status, status == "error")
    lock.release()
    assert lock.path.exists() is (status == "error")


@pytest.mark.parametrize(
    ("job", "attempt", "status"), [("a", 1, "note"), ("a", 0, "error"), ("b", 1, "error"), ("", 1, "error")]
)
def test_only_a_restart_of_the_same_job_takes_the_lock_of_a_process_that_is_alive(
    job: str, attempt: int, status: str, tmp_path: Path
) -> None:
    lock, parent = RunLock(tmp_path, job=job, attempt=attempt), os.getppid()
    held_by(lock, Holder(pid=parent, started=start_time(parent), job="a"))
    (finding,) = lock.take()
    lock.release()
    assert finding.status.value == status


def test_an_earlier_run_of_this_process_holds_up_no_later_one(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    held_by(lock, Holder())
    (finding,) = lock.take()
    lock.release()
    assert finding.status.value == "note"


def test_a_lock_that_was_made_while_a_dead_one_was_taken_away_stays(tmp_path: Path) -> None:
    lock, dead = RunLock(tmp_path), Holder()
    path = held_elsewhere(lock)
    assert not lock._remove(dead)
    assert json.loads(path.read_text())["host"] == "node7"
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_run_touches_its_lock_and_says_so_where_another_one_has_taken_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "_BEAT_S", 0.05)
    lock = RunLock(tmp_path)
    assert list(lock.take()) == []
    os.utime(lock.path, (1, 1))
    end = time.monotonic() + 10
    while lock.path.stat().st_mtime == 1 and time.monotonic() < end:
        time.sleep(0.02)
    assert lock.path.stat().st_mtime > 1
    assert json.loads(lock.path.read_text())["beat"] > 0, "a run of release 0.2.0 would take it over"
    held_elsewhere(lock)
    while "host node7" not in caplog.text and time.monotonic() < end:
        time.sleep(0.02)
    assert f"another run has taken the folder {tmp_path} over: host node7" in caplog.text
    lock.release()
    assert lock.path.exists()
