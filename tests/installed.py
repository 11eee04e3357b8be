"""The package as a user has it: a wheel, installed into an environment that knows nothing of this checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from lightning_distplus import env

__all__ = ["DEEPSPEED", "ROOT", "Environment", "build", "environment", "run"]

ROOT = Path(__file__).parents[1]
OURS = ("lightning_distplus", "_editable_impl_lightning_distplus")
DEEPSPEED = ("deepspeed",)


class Environment:
    """A virtual environment.

    Args:
        folder: Where it is made.
        with_pip: Whether it installs for itself; else it is given what is there.
    """

    def __init__(self, folder: Path, *, with_pip: bool = False) -> None:
        venv.EnvBuilder(symlinks=True, with_pip=with_pip).create(folder)
        self.bin = folder / "bin"
        self.packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)

    def link(self, *, without: tuple[str, ...]) -> None:
        """Gives it the packages of this process, except for some: nothing is downloaded, nothing copied."""
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name.partition("-")[0].removesuffix(".pth") not in without:
                (self.packages / entry.name).symlink_to(entry)

    def run(self, *command: str, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """A command from its ``bin``."""
        return run(str(self.bin / command[0]), *command[1:], cwd=cwd, timeout=timeout)


def run(*command: str, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Fails with what was printed, unless the command ends well."""
    variables = {name: value for name, value in env.snapshot().items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        command, cwd=cwd, env={**variables, "COLUMNS": "200"}, capture_output=True, text=True, timeout=timeout
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended


def build(folder: Path, kind: str) -> Path:
    """Builds the ``wheel`` or the ``sdist`` with what is installed here."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def environment(folder: Path, *, without: tuple[str, ...] = ()) -> Environment:
    """The wheel of this checkout, beside the packages of this process."""
    made = Environment(folder / "venv")
    made.link(without=(*OURS, *without))
    wheel = build(folder / "dist", "wheel")
    pip = [sys.executable, "-m", "pip", "--python", str(made.bin / "python"), "install"]
    run(*pip, "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel), cwd=folder)
    return made
