"""Who this process is among the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_SHOWN_PIECES = 16


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place in the job.

    Ranks are global process indices in ``range(size)``.
    """

    rank: int
    size: int
    local_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"World.size is {self.size}; a job has at least one process.")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"World.rank is {self.rank}; it lies in 0..{self.size - 1}, because World.size is {self.size}."
            )

    @classmethod
    def of(cls, owner: Any) -> World:
        """This process, as a Trainer or a strategy of Lightning's sees it."""
        return cls(
            rank=owner.global_rank,
            size=owner.world_size,
            local_rank=owner.local_rank,
            node_rank=owner.node_rank,
            num_nodes=owner.num_nodes,
        )

    @property
    def ranks(self) -> range:
        """All ranks of the job."""
        return range(self.size)

    @property
    def node_ranks(self) -> range:
        """The ranks of this node, where ranks are numbered node by node, as launchers do by default."""
        per_node = max(1, self.size // self.num_nodes)
        first = self.rank // per_node * per_node
        return range(first, min(first + per_node, self.size))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """This process's place on the data-parallel axis; tensor-parallel peers share it and so get identical batches."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"The data-parallel rank is {self.rank}; it lies in 0..{self.size - 1}.")


LAUNCHER = -1
"""Stands for the launcher where ranks are named: in the ledger, and among the culprits of a verdict."""


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2-5``, ``the launcher`` or ``nobody``."""
    ranks = sorted(ranks)
    if ranks == [LAUNCHER]:
        return "the launcher"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}" if ranks else "nobody"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that say the same, each group in the place of its lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return groups


def ranges(ranks: Iterable[int]) -> str:
    """Ranks in short: ``0-3, 7``; of more than 16 pieces the first."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ", ".join(texts[:_SHOWN_PIECES]) + (", ..." if len(texts) > _SHOWN_PIECES else "")
