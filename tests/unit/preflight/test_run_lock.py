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


def held_elsewhere(lock: RunLock) -> Path:
    lock.path.parent.mkdir(exist_ok=True)
    lock.path.write_text(json.dumps(asdict(Holder(host="node7", boot="of another host", pid=1))))
    return lock.path


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
