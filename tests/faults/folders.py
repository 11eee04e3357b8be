"""Folders in which something is wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["read_only"]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A file system that takes no file, also not from root; skips the test where mounting is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,ro", "none", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("the right to mount a file system is missing")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
