"""How a process ends with the exit code of the error that ended it."""

from __future__ import annotations

import gc
import io
import signal
import sys
from contextlib import suppress
from types import TracebackType

from lightning_distplus.errors import DistplusError

__all__ = ["install_exit_codes"]


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
        self._previous(kind, error, trace)  # type: ignore[operator]
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
