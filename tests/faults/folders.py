"""Folders in which something is wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

__all__ = ["disk", "read_only"]


@contextmanager
def disk(folder: Path, *options: str) -> Iterator[Path]:
    """A file system of its own, by the options of a tmpfs; skips the test where mounting is not permitted."""
    folder.mkdir()
    words = ",".join(options)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", words, "none", str(folder)], check=False).returncode:
        pytest.skip("the right to mount a file system is missing (root, or CAP_SYS_ADMIN)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(folder: Path) -> AbstractContextManager[Path]:
    """One that takes no file, also not from root."""
    return disk(folder, "size=4k", "ro")
