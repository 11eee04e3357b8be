"""A call through Lightning that only some ranks make: who stands in it, where the others are, and who is to blame."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_distplus.control.collective_check import sides
from lightning_distplus.watchdog.evidence import Evidence

__all__ = ["REMEDY", "lonely_call"]

REMEDY = (
    "call it on every rank or on none: code under `if rank == 0` must not synchronise, and trainer.save_checkpoint, "
    "trainer.log_dir, barriers and logging with sync_dist=True do"
)

_FRAMES = (
    "lightning_distplus/control/collective_check.py",
    "in meet",
)  # of a rank that has not been joined there by all


def lonely_call(evidence: Mapping[int, Evidence]) -> tuple[list[int], str] | None:
    """Finds ranks that wait in a call through Lightning while the others wait elsewhere.

    No rank enters the collective of such a call before all have come to it: the others are not in it. Fewer ranks are
    to blame than are not; in a tie, those in the call, because the others are where every step comes by.

    Returns:
        Who is to blame, and the cause in one line; None where all, or none, stand in such a call.
    """
    inside = sorted(rank for rank, one in evidence.items() if one.waits and all(text in one.stack for text in _FRAMES))
    outside = sorted(set(evidence) - set(inside))
    if not inside or not outside:
        return None
    places = {rank: f"in {one.operation}" for rank, one in evidence.items()}
    for rank in inside:
        places[rank] += f" at {evidence[rank].location}" if evidence[rank].location else ""
    return inside if len(inside) <= len(outside) else outside, sides(places)
