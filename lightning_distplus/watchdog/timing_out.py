"""A collective that times out on one rank: that rank is the one that waited, so all ranks judge before it is blamed.

The groups that Lightning and the engines make wait longer than the watchdog; one that the user makes may have a shorter
time-out of its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import message_of
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.witness import Witness

__all__ = ["TIMED_OUT", "judge_time_out"]

_SIGNS = ("timed out", "timeout", "time-out")


class _TimedOut(RuntimeError):
    """What the peers are told. They judge together."""

    has_verdict = True


TIMED_OUT = _TimedOut.__name__


def judge_time_out(error: BaseException, plane: ControlPlane, witness: Witness, on_told: Callable[[], None]) -> bool:
    """Tells all ranks that a collective has timed out here, and judges with them.

    Args:
        error: What a collective has raised, for which no peer is known to be the cause.
        plane: The control plane.
        witness: Knows this process.
        on_told: Called once the peers know, to judge and to write the verdict.

    Returns:
        Whether it is a time-out.
    """
    if not any(sign in message_of(error).lower() for sign in _SIGNS):
        return False
    witness.timed_out_at = traceback.extract_tb(error.__traceback__)
    plane.report_failure(_TimedOut(_message(witness.own(), error)))
    on_told()
    return True


def _message(own: Evidence, error: BaseException) -> str:
    return (
        f"a collective has timed out at {own.location}: {str(error).splitlines()[0]}. This rank is the one that "
        "waited. The verdict names the ranks that did not come."
    )
