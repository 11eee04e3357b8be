"""Whether all ranks stand at the same place of the same data: asked once, before the first batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_distplus.data.rank_states import gather_bytes
from lightning_distplus.errors import DatasetMismatch, PeerError
from lightning_distplus.timeouts import Phase
from lightning_distplus.world import name_ranks

__all__ = ["require_agreement"]

_MAX_FIELDS = 5  # in a message
_MAX_WIDTH = 200


def require_agreement(strategy: Any, place: Mapping[str, Any]) -> None:
    """Compares what defines data and position over all ranks; no collective is issued.

    Args:
        strategy: The Trainer's.
        place: Plain values; the same on all ranks, or training would go wrong in silence.

    Raises:
        DatasetMismatch: On all ranks, if it is not; the message has each value with its ranks.
        PeerMissing, PeerFailed, PeerLost: A peer did not come.
    """
    mine = json.dumps(place, sort_keys=True, default=repr).encode()
    everyone = gather_bytes(strategy, "place in the data", mine, phase=Phase.SETUP)
    if len(set(everyone)) > 1:
        with suppress(PeerError):  # all have read before the first one ends: each raises this error, and none its echo
            gather_bytes(strategy, "difference in the data", b"", phase=Phase.SETUP)
        lines = _differences([json.loads(one) for one in everyone])
        text = "\n".join(f"  {line}" for line in lines)
        raise DatasetMismatch(
            f"The ranks do not have the same data, or do not stand at the same place in it:\n{text}\n"
            "Give all ranks the same files, settings and checkpoint: a folder that is not shared, or one that is still "
            "being written, is the usual cause."
        )


def _differences(states: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for name in sorted(set().union(*states)):
        ranks: dict[str, list[int]] = {}
        for rank, state in enumerate(states):
            ranks.setdefault(repr(state.get(name))[:_MAX_WIDTH], []).append(rank)
        if len(ranks) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {name_ranks(where)}" for value, where in ranks.items()))
    return lines[:_MAX_FIELDS]
