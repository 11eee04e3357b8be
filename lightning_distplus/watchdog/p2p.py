"""Sends and receives: in which one a thread stands, and the cycles in which ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_distplus.flight_recorder import Collective

__all__ = ["cycles", "p2p_call", "waits_for_work"]

_HOME = "torch/distributed/distributed_c10d.py"
# The arguments that name the other end: by its global rank, by its rank within the group.
_PEER = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}


def p2p_call(frame: FrameType | None) -> Collective | None:
    """The blocking send or receive in which a thread stands, read from its frames: gloo does not record them.

    Args:
        frame: The innermost frame of the thread.
    """
    for one in _outwards(frame):
        name = one.f_code.co_name
        if name in _PEER and one.f_code.co_filename.endswith(_HOME):
            return _read(name, one.f_locals)
    return None


def waits_for_work(frame: FrameType | None) -> bool:
    """Whether the thread's innermost frame holds the handle of an asynchronous call that is not complete."""
    values = [] if frame is None else list(frame.f_locals.values())
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return any(isinstance(one, dist.Work) and not one.is_completed() for one in flat)


def cycles(waits_for: Mapping[int, int]) -> list[list[int]]:
    """The cycles of a graph in which each rank waits for at most one other, each from its lowest rank on."""
    found: list[list[int]] = []
    seen: set[int] = set()
    for start in sorted(waits_for):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for.get(rank)
        if rank in path:
            cycle = path[path.index(rank) :]
            first = cycle.index(min(cycle))
            found.append(cycle[first:] + cycle[:first])
    return found


def _read(op: str, known: Mapping[str, Any]) -> Collective | None:
    tensor, group = known.get("tensor"), known.get("group") or dist.group.WORLD
    if not isinstance(tensor, torch.Tensor) or group is None:
        return None
    peer, within = (known.get(name) for name in _PEER[op])
    if peer is None and within is not None:
        peer = dist.get_global_rank(group, within)
    if peer is None:  # a receive from anybody
        return None
    return Collective(
        group=str(group.group_name),
        seq=0,
        op=op,
        inputs=[list(tensor.shape)],
        dtypes=[str(tensor.dtype).removeprefix("torch.")],
        peer=peer,
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
