"""From pip install of the wheel to the first resumed run, by the README, word for word.

The environment is fresh and has torch; pip's cache is warm. The kill comes when the first checkpoint is there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.figures import Figure

__all__ = ["Shell", "follow", "lines_of", "run", "typed_in"]

_ROOT = Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_TARGET_S = 180.0
_DEADLINE_S = 600.0
_KEPT = ("HOME", "LANG", "PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_FIND_LINKS", "TMPDIR", "SSL_CERT_FILE")


def run(quick: bool) -> list[Figure]:
    """Builds the wheel, makes an environment with torch, and follows the README in an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.EnvBuilder(with_pip=True, symlinks=True).create(folder / "venv")
        shell = Shell(folder / "work", folder / "venv" / "bin")
        _build(shell.folder)
        shell.run(f"pip install --quiet torch=={version('torch').partition('+')[0]}")
        install, _ = lines_of(_README)
        times = {install: _timed(shell, install), **dict(follow(shell))}
    figures = [Figure(name=line, value=seconds, unit="s") for line, seconds in times.items()]
    return [*figures, Figure(name="all of it", value=sum(times.values()), unit="s", target=_TARGET_S)]


class Shell:
    """Runs lines as a terminal in an empty folder would, whose only environment is a fresh one.

    Args:
        folder: Where the lines are run.
        programs: ``bin`` of the environment.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        path = f"{programs}:/usr/bin:/bin"
        self.variables = {**{name: os.environ[name] for name in _KEPT if name in os.environ}, "PATH": path}

    def start(self, line: str) -> subprocess.Popen[str]:
        """Starts a line, in a session of its own."""
        return subprocess.Popen(
            line,
            shell=True,
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, line: str) -> str:
        """Runs a line to its end, and returns what it prints.

        Raises:
            RuntimeError: It fails; with what it has printed.
        """
        process = self.start(line)
        told = process.communicate(timeout=_DEADLINE_S)[0]
        if process.returncode:
            raise RuntimeError(f"$ {line}\n{told}")
        return told


def lines_of(readme: str) -> tuple[str, list[str]]:
    """What the README says to type: to install the wheel, and to train, kill and go on."""
    install, train = re.split(r"^## ", readme, flags=re.MULTILINE)[1:3]
    _torch, _checkout, wheel = typed_in(install)
    return wheel, typed_in(train)


def typed_in(section: str) -> list[str]:
    """The lines behind a ``$``, without their comments."""
    return [line.partition("  #")[0].strip() for line in re.findall(r"^\$ (.*)$", section, flags=re.MULTILINE)]


def follow(shell: Shell) -> Iterator[tuple[str, float]]:
    """Trains, kills and goes on, and tells how long each took.

    Raises:
        RuntimeError: A line does not do what the README says.
    """
    init, train, kill, again = lines_of(_README)[1]
    yield init, _timed(shell, init)

    began = time.monotonic()
    first = shell.start(train)
    while not list(shell.folder.glob("checkpoints/*.ckpt")):
        if first.poll() is not None or time.monotonic() - began > _DEADLINE_S:
            raise RuntimeError(f"$ {train}\n{first.communicate(timeout=_DEADLINE_S)[0]}")
        time.sleep(0.05)
    shell.run(f"{kill} -s {first.pid}")  # of this session alone: other scripts of that name may run on this host
    told = first.communicate(timeout=_DEADLINE_S)[0]
    if first.returncode != 171 or "RANK 1 IS GONE" not in told:
        raise RuntimeError(f"$ {train}\n{told}\nended with {first.returncode}")
    yield f"{train}, {kill}", time.monotonic() - began

    began = time.monotonic()
    told = shell.run(again)
    if not re.search(r"resumed at sample (\d+), step (\d+),", told):
        raise RuntimeError(f"$ {again}\n{told}")
    yield f"{again}, again", time.monotonic() - began


def _timed(shell: Shell, line: str) -> float:
    began = time.monotonic()
    shell.run(line)
    return time.monotonic() - began


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
