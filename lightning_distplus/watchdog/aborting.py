"""The last words of a process that C++ ends: gloo does so, without a Python exception, when a message does not fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.witness import Witness

__all__ = ["ABORTED", "Abort"]

_PEERS_S = 0.3  # how long the peers get to write their verdict, after all evidence is there


class _Aborted(RuntimeError):
    """What the peers are told: this process ends now. They judge together."""

    has_verdict = True


ABORTED = _Aborted.__name__


class Abort:
    """Tells the peers, from the thread on which C++ gives up, what this rank was doing; then the process ends.

    The training thread stands in the collective and cannot say anything; after this nobody can.

    Args:
        plane: The control plane; the training thread, which else reports errors over it, is stuck.
        witness: Knows this process.
        on_told: Called once the peers know, to judge and to write the verdict.
    """

    def __init__(self, plane: ControlPlane, witness: Witness, on_told: Callable[[], None]) -> None:
        self._plane = plane
        self._witness = witness
        self._on_told = on_told
        self._restore: Callable[[], None] | None = None
        self._once = threading.Lock()

    def arm(self) -> None:
        """Stands before what C++ does at the end of a process."""
        self._restore = _compat.on_terminate(self._speak)

    def disarm(self) -> None:
        """Takes it out again."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _speak(self, exception: str) -> None:
        if not self._once.acquire(blocking=False):  # two threads may end the process at once
            time.sleep(2.0)
            return
        with suppress(Exception):  # whatever happens here, the process ends as it would have ended
            self._witness.ended_by = exception or "of an unknown type"
            self._plane.report_failure(_Aborted(_message(self._witness.own())))
            self._on_told()
            time.sleep(_PEERS_S)


def _message(own: Evidence) -> str:
    call = own.collective.describe() if own.collective else "no collective that is known"
    return (
        f"an exception in C++ ({own.was_ended_by}) ends this process, which stands in {call}, at {own.location}. In "
        "gloo it means that a peer's message does not fit: another shape, dtype or order of collectives. The verdict "
        "names the rank that differs."
    )
