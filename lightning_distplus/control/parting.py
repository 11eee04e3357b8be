"""The end of a run, as all ranks see it."""

from __future__ import annotations

import logging
from datetime import timedelta

from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.errors import DistplusError

__all__ = ["part"]

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
