"""Which ranks are wrong: by majority, by history, or undecided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_distplus.errors import DivergenceError
from lightning_distplus.world import name_ranks, ranks_by_text

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
    is_decided = ranks != sorted(values) or len(ranks) == 1
    blame = f"wrong: {name_ranks(ranks)}{why}" if is_decided else f"undecided: {why or 'no majority'}"
    lines = [f"The ranks differ in {field} {where}; {blame}.", *_sides(values), f"  do: {remedy}"]
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
    groups = ranks_by_text({rank: _short(value) for rank, value in values.items()})
    lines = [f"  {name_ranks(ranks)}: {text}" for text, ranks in sorted(groups.items(), key=lambda one: -len(one[1]))]
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
