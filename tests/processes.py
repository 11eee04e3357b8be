"""Processes that a test starts as a shell does, and waits for. Imports nothing heavy: a rank may be such a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["LAUNCH", "ROOT", "is_there", "run_source", "start", "wait_until"]

ROOT = Path(__file__).parents[1]
LAUNCH = ["-m", "lightning_distplus.cli", "launch"]


def start(
    *command: str | Path,
    prefix: Sequence[str] = (),
    log: Path | int = subprocess.PIPE,
    cwd: Path = ROOT,
    env: Mapping[str, str] = os.environ,
) -> subprocess.Popen[str]:
    """Starts Python in a session of its own, with this checkout in its path.

    Args:
        *command: What follows the interpreter.
        prefix: What stands before it.
        log: The file for both of its streams; without one they come through one pipe.
        cwd: Its folder.
        env: Its variables, beside two that all of them have.
    """
    with log.open("w") if isinstance(log, Path) else contextlib.nullcontext(log) as out:
        return subprocess.Popen(
            [*prefix, sys.executable, *map(str, command)], cwd=cwd, text=True, start_new_session=True,
            env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip


def run_source(source: str) -> subprocess.CompletedProcess[str]:
    """What Python says to these lines."""
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def wait_until(is_so: Callable[[], Any], told: Callable[[], object] = str, within_s: float = 100.0) -> Any:
    """What the first true answer is; fails with what is told where none comes."""
    until = time.monotonic() + within_s
    while not (answer := is_so()):
        assert time.monotonic() < until, told()
        time.sleep(0.02)
    return answer


def is_there(pid: int) -> bool:
    """Whether a process runs; of one that has ended, and for which nobody has waited, the name only is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
