"""The README's first story, from an empty folder: `distplus init`, train, kill a process, train again (row P8)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from lightning_distplus.errors import ExitCode

DEADLINE_S = 60.0


def python(*arguments: str, cwd: Path, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )  # type: ignore[call-overload, no-any-return]


def second_process_of(pid: int) -> int:
    """The rank that Lightning's launcher has started, the newest process with the script in its command line."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(int(child) for child in children if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_a_script_that_is_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    assert python("-m", "lightning_distplus.cli", "init", cwd=tmp_path).wait(timeout=DEADLINE_S) == 0
    script = (tmp_path / "train.py").read_text()
    assert len(script.splitlines()) <= 42
    (tmp_path / "train.py").write_text(script.replace("max_steps=1000", "max_steps=100_000"))  # killed in the middle
    run = python("train.py", cwd=tmp_path, env={**os.environ, "DISTPLUS_TRACEBACK": ""})
    end = time.monotonic() + DEADLINE_S
    while not list((tmp_path / "checkpoints").glob("step=*.ckpt")) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(second_process_of(run.pid), signal.SIGKILL)
    printed = run.communicate(timeout=DEADLINE_S)[0].rstrip().splitlines()
    assert run.returncode == ExitCode.PEER_LOST, printed
    assert any(line.startswith("RANK 1 IS GONE") for line in printed[-20:])
    assert printed[-1].startswith("  file:  ")
    assert "goes on from" in printed[-2]
    newest = max(int(path.name[5:-5]) for path in (tmp_path / "checkpoints").glob("step=*.ckpt"))

    (tmp_path / "train.py").write_text(script.replace("max_steps=1000", f"max_steps={newest + 50}"))
    again = python("train.py", cwd=tmp_path)
    told = again.communicate(timeout=DEADLINE_S)[0]
    assert again.returncode == 0, told
    assert re.search(rf"Restored all states from the checkpoint at \S*/checkpoints/step={newest}\.ckpt", told), told
    assert (tmp_path / "checkpoints" / f"step={newest + 50}.ckpt").exists()
