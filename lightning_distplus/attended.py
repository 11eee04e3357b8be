"""Whether somebody sits at this run: then a rank may stand in a debugger, or be paused, for as long as they like."""

from __future__ import annotations

import os
import sys

from lightning_distplus import env

__all__ = ["is_attended"]

_DEBUGGERS = ("debugpy", "pydevd")


def is_attended() -> bool:
    """Whether this process has a terminal to read from, or a debugger is loaded or configured."""
    if env.PYTHONBREAKPOINT.get() not in (None, "0") or any(name in sys.modules for name in _DEBUGGERS):
        return True
    try:
        return os.isatty(0)
    except OSError:  # standard input is closed
        return False
