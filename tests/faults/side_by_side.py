"""Runs of which each mostly waits for a deadline, two at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

__all__ = ["side_by_side"]

T = TypeVar("T")

AT_ONCE = 2


def side_by_side(calls: Mapping[str, Callable[[Path], T]], folder: Path) -> dict[str, Future[T]]:
    """Makes all calls, each with a folder of its own; all have ended when this returns.

    Each test then takes the result of its own call, or the error that its call has raised.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {}
        for name, call in calls.items():
            (folder / name).mkdir()
            futures[name] = pool.submit(call, folder / name)
    return futures
