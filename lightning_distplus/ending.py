"""How a process ends with the exit code of the error that ended it."""

from __future__ import annotations

import gc
import io
import re
import signal
import sys
from contextlib import redirect_stderr, suppress
from types import TracebackType
from typing import Protocol

from lightning_distplus.errors import DistplusError

__all__ = ["ErrorDisplay", "install_exit_codes", "show_errors_with"]

_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # it stands before errors of other ranks as well
_displays: list[ErrorDisplay] = []


class ErrorDisplay(Protocol):
    """Shows uncaught errors on the terminal."""

    @property
    def is_full(self) -> bool:
        """Whether the hooks of others print as well."""

    def show(self, error: BaseException, printed: str) -> None:
        """Shows an error; ``printed`` is what the hooks of others have printed of it."""


def show_errors_with(display: ErrorDisplay) -> None:
    """From now on, uncaught errors are shown by this display, and by no earlier one."""
    _displays[:] = [display]


def install_exit_codes() -> None:
    """Chains ``sys.excepthook``, so that an uncaught error of ours ends the process with its code.

    Idempotent; called again after others have chained their own hook, it stands outermost again.
    """
    if not isinstance(sys.excepthook, _ExitCodes):
        sys.excepthook = _ExitCodes(sys.excepthook)


class _ExitCodes:
    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._show(kind, error, trace)
        # Not where a later hook calls this one: torch's collects what is printed, and writes it after this returns.
        # An error of a collective is only what the first cause did to this rank: the code is that of the cause.
        known = error if isinstance(error, DistplusError) else error.__cause__
        if sys.excepthook is not self:
            return
        _keep_the_exit_code()
        _spare_the_last_collections()
        if isinstance(known, DistplusError):
            # A SystemExit that leaves the hook becomes the exit status, and the interpreter still shuts down in order.
            raise SystemExit(int(known.exit_code))

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Calls the hooks of others, which may do more than print, and prints in their place."""
        display = next(iter(_displays), None) if sys.excepthook is self else None
        if display is None or display.is_full:
            self._previous(kind, error, trace)  # type: ignore[operator]
        printed = io.StringIO()
        if display is None:
            return
        if not display.is_full:
            with redirect_stderr(printed):
                self._previous(kind, error, trace)  # type: ignore[operator]
        try:
            display.show(error, _TORCHS_PREFIX.sub("", printed.getvalue()))
        except Exception:  # the error itself must be seen
            sys.stderr.write(printed.getvalue())


def _keep_the_exit_code() -> None:
    """From here on no SIGTERM ends this process.

    An agent sends one to the ranks that still end when the first has ended, and it would take the place of the code.
    """
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _spare_the_last_collections() -> None:
    """Sets what lives aside from the garbage collector, which otherwise takes a second at the end of the interpreter.

    The launcher waits for that second before it starts the ranks again. Files in reference cycles, which those
    collections would have closed, are flushed here.
    """
    for one in gc.get_objects():
        if issubclass(type(one), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with suppress(OSError, ValueError):
                one.flush()
    gc.freeze()
