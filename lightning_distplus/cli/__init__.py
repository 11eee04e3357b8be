"""The ``distplus`` command: parse, call, print, return. Importing this package loads no torch.

A command prints its result to standard output and returns its exit code. What it cannot do it raises, as a
``DistplusError`` or an ``OSError`` of one sentence, which ``__main__`` prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_distplus.timeouts import parse_duration

if TYPE_CHECKING:  # the doctor works where rich is missing
    from rich.console import Console
    from rich.table import Table

__all__ = ["count", "duration", "import_from_here", "moment", "print_json", "stdout", "table"]

_WIDTH_OF_A_FILE = 400  # a name stands in one line there


def duration(text: str) -> timedelta:
    """Reads a duration of a command line; argparse prints what is wrong with it.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return parse_duration(text, field="the value")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def import_from_here() -> None:
    """Lets the console script, like ``python -m``, import what lies beside the caller."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def count(number: int, name: str) -> str:
    """For example ``1 rank`` and ``2 ranks``."""
    return f"{number} {name}{'s' * (number != 1)}"


def moment(at: float | None) -> str:
    """A unix time as UTC; empty where there is none."""
    return "" if at is None else f"{datetime.fromtimestamp(at, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"


def print_json(value: Any) -> None:
    """Prints what a machine reads."""
    print(json.dumps(value, indent=2, default=str))


def stdout() -> Console:
    """Standard output as rich sees it, in colours on a terminal unless NO_COLOR is set; a file is wide."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table without a frame, which a log can hold as well; the columns of ``numbers`` end at the right."""
    from rich.table import Table

    empty = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        empty.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return empty
