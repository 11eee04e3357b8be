"""The README is true: its blocks run, its tree is the tree, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=55, check=False)


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(README.splitlines()) <= 250


def test_the_python_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    ended = run([sys.executable, "-W", "ignore", "-c", "\n".join(blocks("python"))], tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if line])
def test_every_shell_line_runs(line: str, tmp_path: Path) -> None:
    words = shlex.split(line.replace("/tmp/distplus-readme", str(tmp_path)), comments=True)
    if words[0] == "make":
        # The suite does not start itself; that the target is there and parses is what can be said here.
        ended = run(["make", "--dry-run", *words[1:]], ROOT)
    else:
        assert words[0] == "distplus"
        ended = run([sys.executable, "-W", "ignore", "-m", "lightning_distplus.cli", *words[1:]], ROOT)
    assert ended.returncode == 0, ended.stderr


def test_every_place_in_the_tree_exists_and_none_is_left_out() -> None:
    (tree,) = re.findall(r"```text\n(lightning_distplus/\n.*?)```", ARCHITECTURE, flags=re.DOTALL)
    package, rest = tree.split("lightning_distplus/\n")[1].split("\nexamples/")
    named = {word.rstrip("/") for line in package.splitlines() for word in re.split(r"\s{2,}", line.strip())[0].split()}
    there = {path.name for path in (ROOT / "lightning_distplus").iterdir()}
    unnamed = {"__init__.py", "__pycache__", "py.typed"}
    assert named == {name for name in there - unnamed if not name.startswith(".")}
    for line in ("examples/" + rest).splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README + ARCHITECTURE))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()
