"""The ``distplus`` command: parse, call, print, return. Importing this package loads no torch."""

import argparse
import sys
from datetime import timedelta
from pathlib import Path

from lightning_distplus.timeouts import parse_duration

__all__ = ["duration", "import_from_here"]


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
