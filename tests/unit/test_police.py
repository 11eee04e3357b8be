"""The police of tests/conftest.py, tried on offenders in a pytest of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

OFFENDERS = {
    "variable": ("os.environ['LEFT_BEHIND'] = '1'", "environment variable LEFT_BEHIND: None before, '1' now"),
    "thread": ("threading.Thread(target=time.sleep, args=(4,), daemon=True, name='left').start()", "thread 'left'"),
    "child": ("subprocess.Popen(['sleep', '30'])", "sleep 30"),
    "grandchild": ("subprocess.Popen(['sh', '-c', 'sleep 31; true'])", "sleep 31"),
    "signal_handler": ("signal.signal(signal.SIGUSR1, lambda *_: None)", "handler of SIGUSR1"),
    "log_handler": ("logging.getLogger().addHandler(logging.NullHandler())", "of logger 'root'"),
    "socket": ("globals().update(kept=socket.create_server(('127.0.0.1', 0)))", "socket that listens on port"),
    "file": ("os.makedirs('left'), open('left/events.jsonl', 'w').close()", "left/events.jsonl"),
    "process_group": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "the default process group of torch.distributed",
    ),
}


def test_each_kind_of_leak_fails_the_test_that_leaks_and_no_other(tmp_path: Path) -> None:
    lines = ["import logging, os, signal, socket, subprocess, threading, time", "import torch.distributed as dist"]
    for name, (offence, _) in OFFENDERS.items():
        lines += [f"def test_{name}(): {offence}", f"def test_innocent_after_{name}(): pass"]

    output = _pytest(tmp_path, "\n".join(lines))

    for name, (_, expected) in OFFENDERS.items():
        assert f"ERROR test_offender.py::test_{name} - " in output, output
        assert expected in output
    assert f"{2 * len(OFFENDERS)} passed, {len(OFFENDERS)} errors" in output, output


def test_a_sleeping_test_and_its_fixture_fail_by_name_at_the_deadline(tmp_path: Path) -> None:
    output = _pytest(
        tmp_path,
        """
        import pytest, time

        @pytest.fixture
        def slow():
            time.sleep(20)

        @pytest.mark.deadline(0.3)
        def test_sleeper():
            time.sleep(20)

        @pytest.mark.deadline(0.3)
        def test_slow_fixture(slow): pass

        def test_innocent(): pass
        """,
    )

    assert "test_offender.py::test_sleeper exceeds its deadline of 0.3 s" in output
    assert "test_offender.py::test_slow_fixture exceeds its deadline of 0.3 s" in output
    assert "in test_sleeper" in output, "the stacks are shown"
    assert "1 failed, 1 passed, 1 error" in output


def test_a_test_that_holds_the_gil_ends_the_run_with_its_stack(tmp_path: Path) -> None:
    output = _pytest(
        tmp_path,
        """
        import ctypes, pytest

        @pytest.mark.deadline(0.3)
        def test_deaf():
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        """,
        backstop_s=0.5,
    )

    assert "Timeout (0:00:00" in output
    assert "in test_deaf" in output


def _pytest(folder: Path, source: str, backstop_s: float = 10.0) -> str:
    shutil.copy(CONFTEST, folder / "conftest.py")
    conftest = (folder / "conftest.py").read_text(encoding="utf-8")
    conftest = conftest.replace("GRACE_S = 2.0", "GRACE_S = 0.3").replace(
        "BACKSTOP_S = 10.0", f"BACKSTOP_S = {backstop_s}"
    )
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    (folder / "test_offender.py").write_text(textwrap.dedent(source), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), "-rA", str(folder)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=40, check=False)
    return ended.stdout + ended.stderr
