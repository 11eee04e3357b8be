"""How a process ends with the exit code of the error that ended it."""

from __future__ import annotations

import gc
import io
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
        if sys.excepthook is self and isinstance(known, DistplusError):
            # A SystemExit that leaves the hook becomes the exit status, and the interpreter still shuts down in order.
            _spare_the_last_collections()
            raise SystemExit(int(known.exit_code))


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
