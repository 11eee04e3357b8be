"""Runs of which each mostly waits for a deadline, two at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Runs", "made_side_by_side", "side_by_side"]

AT_ONCE = 2
Runs = Callable[[str], Any]
"""What the call of this name has given, or the error that it has raised."""
Calls = Mapping[str, Callable[[Path], Any]]


def made_side_by_side(calls: Calls, folders: pytest.TempPathFactory, often: Collection[str] | None = None) -> Runs:
    """Makes the named calls, all by default, each with a folder of its own; the others when they are wanted."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {name: pool.submit(calls[name], folders.mktemp("run")) for name in (often or calls)}
    return lambda name: futures[name].result() if name in futures else calls[name](folders.mktemp("run"))


def side_by_side(calls: Calls, often: Collection[str] | None = None) -> Any:
    """The same as a fixture of a module, for the name that it is given there."""

    @pytest.fixture(scope="module")
    def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
        return made_side_by_side(calls, tmp_path_factory, often)

    return runs
