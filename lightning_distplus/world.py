"""Who this process is among the others; and who of them is wrong, by majority, by history, or undecided."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_distplus.errors import DivergenceError

__all__ = [
    "LAUNCHER",
    "DataParallel",
    "World",
    "disagreement",
    "first_difference",
    "is_equal",
    "name_ranks",
    "odd_ranks",
    "ranges",
]

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


# -- who is wrong ------------------------------------------------------------------------------------------------------

_SHOWN_VALUES = 6
_SHOWN_CHARACTERS = 200


def is_equal(values: Iterable[Any]) -> bool:
    """Whether all values are the same; NaN is the same as NaN."""
    first, *others = (repr(value) for value in values)
    return all(value == first for value in others)


def disagreement(
    field: str,
    values: Mapping[int, Any],
    *,
    where: str,
    remedy: str,
    expected: Any = None,
    wrong: Iterable[int] | None = None,
) -> DivergenceError:
    """The error for one field; every rank that knows the same values builds the same one.

    Args:
        field: What differs.
        values: The value on each rank.
        where: The moment, for example ``"before step 12"``.
        remedy: What to look for.
        expected: What the history or the static plan allows; it decides where there is no majority.
        wrong: Who is wrong, where the caller knows it.
    """
    ranks, why = _judge(values, expected) if wrong is None else (sorted(wrong), "")
    blame = f"wrong: {name_ranks(ranks)}{why}" if ranks != sorted(values) else f"undecided: {why or 'no majority'}"
    lines = [
        f"The ranks differ in {field} {where}; {blame}.",
        *_sides(values),
        f"  do: {remedy}",
    ]
    return DivergenceError("\n".join(lines), ranks=ranks, field=field, values=values)


def odd_ranks(values: Mapping[int, Any]) -> tuple[list[int], int | None]:
    """The ranks that differ from the majority, and its lowest rank; without a majority all ranks, and None."""
    keys = {rank: repr(value) for rank, value in values.items()}
    (common, count), *others = Counter(keys.values()).most_common()
    if others and others[0][1] == count:
        return sorted(keys), None
    return sorted(rank for rank in keys if keys[rank] != common), min(rank for rank in keys if keys[rank] == common)


def _judge(values: Mapping[int, Any], expected: Any) -> tuple[list[int], str]:
    """The wrong ranks, all of them when nothing decides, and the reason."""
    wrong, right = odd_ranks(values)
    if right is not None:
        return wrong, ""
    if expected is not None and (found := [rank for rank in wrong if repr(values[rank]) != repr(expected)]) != wrong:
        return found, f" (expected {expected!r} after what all ranks did before)"
    return wrong, "as many ranks say the one as the other"


def _sides(values: Mapping[int, Any]) -> list[str]:
    """One line for each value, the most common first."""
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(_short(value), []).append(rank)
    lines = [
        f"  {name_ranks(ranks)}: {text}"
        for text, ranks in sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    ]
    if len(lines) > _SHOWN_VALUES:
        return [*lines[:_SHOWN_VALUES], f"  and {len(lines) - _SHOWN_VALUES} other values"]
    return lines


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text.replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def first_difference(explained: Sequence[Mapping[str, Any]]) -> tuple[str, dict[int, Any]] | None:
    """The first name whose value differs between ranks, with its value on each; None where all agree.

    Args:
        explained: Names to values, one mapping per rank, in rank order.
    """
    names = dict.fromkeys(name for one in explained for name in one)
    for name in names:
        values = {rank: one.get(name, "absent") for rank, one in enumerate(explained)}
        if not is_equal(values.values()):
            return name, values
    return None
