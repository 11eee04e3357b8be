"""The end of a run, as all ranks see it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta

from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.errors import DistplusError, PeerLost, PeerMissing

__all__ = ["end_together", "part"]

log = logging.getLogger(__name__)


def part(plane: ControlPlane, deadline: timedelta, *, has_failed: bool) -> None:
    """Takes leave of the peers, so that nobody asks a store that is gone; never raises what a peer does.

    Args:
        plane: The control plane.
        deadline: How long to wait for the peers.
        has_failed: Whether this rank ends with an error: then nobody is waited for.
    """
    if has_failed:
        plane.stop_listening()
        return
    try:
        plane.farewell(deadline)
    except DistplusError as error:
        log.warning("rank %d ends alone: %s", plane.world.rank, error)


def end_together(plane: ControlPlane, deadline: timedelta, *, have_ended: Callable[[Collection[int]], bool]) -> None:
    """Ends the run of this rank when it has ended on all: one that fails in its last hooks fails the others too.

    Args:
        plane: The control plane.
        deadline: How long to wait for ranks that still work.
        have_ended: Whether all of some ranks are known to have ended their run: they may leave before this one.

    Raises:
        PeerFailed, PeerLost: A peer raised, or was killed, before its run had ended.
    """
    try:
        plane.await_ends(deadline)
    except PeerMissing as error:
        log.warning("rank %d ends alone: %s", plane.world.rank, error)
        plane.stop_listening()
    except PeerLost as error:
        if not have_ended(error.ranks):
            raise
        plane.stop_listening()
    else:
        part(plane, deadline, has_failed=False)
