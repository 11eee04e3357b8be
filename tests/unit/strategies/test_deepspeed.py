"""A lock whose holder was killed is removed; one that somebody holds is not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_distplus.strategies import deepspeed
from lightning_distplus.strategies.deepspeed import naming_builds, remove_abandoned_locks

HOLD = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "some_extension"
    folder.mkdir()
    return folder / "lock"


def test_only_the_lock_of_a_process_that_is_gone_is_removed(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout.readline() == "held\n"
        assert remove_abandoned_locks() == []
        assert lock.exists()
        builder.kill()
        builder.wait(10)
        assert remove_abandoned_locks() == [lock]
    assert not lock.exists()
    assert f"removed {lock}" in caplog.text
    assert remove_abandoned_locks() == []


def test_a_lock_that_another_host_may_hold_is_reported_and_stays(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock.touch()
    monkeypatch.setattr(deepspeed, "_LOCAL_FILE_SYSTEMS", frozenset())
    assert remove_abandoned_locks() == []
    assert lock.exists()
    assert str(lock) in caplog.text


def test_no_folder_of_extensions_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "missing"))
    assert remove_abandoned_locks() == []


def test_a_long_build_is_named_while_it_lasts_and_only_then(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock.touch()
    with caplog.at_level("INFO"), naming_builds(True, 0.02):
        while "DeepSpeed compiles some_extension" not in caplog.text:
            time.sleep(0.01)
        lock.unlink()
    caplog.clear()
    with caplog.at_level("INFO"), naming_builds(True, 0.02):
        time.sleep(0.1)
    assert not caplog.text
