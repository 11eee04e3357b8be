"""Every rank's bytes on every rank, for what goes into a checkpoint: with a deadline, also on a stock strategy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, connect_over, connected
from lightning_distplus.control.plane import MAX_MESSAGE_BYTES
from lightning_distplus.phases import Phases
from lightning_distplus.timeouts import Phase, Timeouts
from lightning_distplus.world import World

__all__ = ["MAX_BYTES", "gather_bytes"]

MAX_BYTES = 256 * MAX_MESSAGE_BYTES


def gather_bytes(strategy: Any, name: str, value: bytes, *, phase: Phase = Phase.CHECKPOINT) -> list[bytes]:
    """Every rank's value, in rank order; all ranks call it at the same point of the run.

    Under a Resilient strategy the messages travel through its control plane with the deadline of the phase,
    otherwise through the store of torch's default process group with the same deadline. No collective is issued.

    Args:
        strategy: The Trainer's strategy.
        name: What is gathered, for messages.
        value: At most 256 MiB; what is larger than 1 MiB goes in several messages.
        phase: Its deadline holds, or on a stock strategy the default one of that phase.

    Raises:
        ValueError: The value is too large.
        PeerMissing, PeerFailed, PeerLost: A peer did not come; ``.ranks`` names it.
    """
    if len(value) > MAX_BYTES:
        raise ValueError(
            f"The {name} of this rank has {len(value)} bytes; at most {MAX_BYTES} are gathered from each rank. "
            "Let its state hold positions, not data."
        )
    plane, deadline = _plane(strategy, phase)
    if plane is None:
        return [value]
    sizes = [int(size) for size in plane.gather(f"{name}-size", str(len(value)).encode(), deadline)]
    values: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, max(sizes), MAX_MESSAGE_BYTES):
        for parts, part in zip(
            values, plane.gather(name, value[start : start + MAX_MESSAGE_BYTES], deadline), strict=True
        ):
            parts.append(part)
    return [b"".join(parts) for parts in values]


def _plane(strategy: Any, phase: Phase) -> tuple[ControlPlane | None, timedelta]:
    phases = getattr(strategy, "phases", None)
    if isinstance(phases, Phases) and (plane := connected()) is not None:
        return plane, phases.patience_in(phase)
    deadline = Timeouts().deadline(phase)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None, deadline
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return connect_over(world, _compat.default_store(), deadline), deadline
