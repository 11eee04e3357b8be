"""What of a product runs for each commit: every value of each side once; the whole product runs in the soak."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["in_turn", "kept", "kept_rows"]


def kept(values: Sequence[Any], each_commit: Collection[Any]) -> list[Any]:
    """The values for ``parametrize``: those of ``each_commit`` always, the others in the soak."""
    assert all(value in values for value in each_commit)
    return [value if value in each_commit else pytest.param(value, marks=pytest.mark.soak) for value in values]


def kept_rows(rows: Sequence[Sequence[Any]], each_commit: Collection[Any]) -> list[Any]:
    """The same where each value is a row, of one value for each of several names."""
    assert all(row in rows for row in each_commit)
    return [pytest.param(*row, marks=() if row in each_commit else pytest.mark.soak) for row in rows]


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """The pairs of a product: each value of both sides once in each commit, all pairs in the soak."""
    count = max(len(first), len(second))
    now = {(index % len(first), index % len(second)) for index in range(count)}
    return [
        pytest.param(first[one], second[other], marks=() if (one, other) in now else pytest.mark.soak)
        for one, other in product(range(len(first)), range(len(second)))
    ]
