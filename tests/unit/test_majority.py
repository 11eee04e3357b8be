from __future__ import annotations

import pytest

from lightning_distplus.majority import disagreement, first_difference, odd_ranks


def test_of_two_against_two_nobody_is_wrong_unless_what_was_before_decides() -> None:
    values = {0: 5, 1: 6, 2: 5, 3: 6}
    undecided = disagreement("step", values, where="here", remedy="look")
    assert undecided.ranks == [0, 1, 2, 3]
    assert "undecided" in str(undecided)
    assert disagreement("step", values, where="here", remedy="look", expected=6).ranks == [0, 2]


def test_a_rank_that_alone_knows_that_it_is_wrong_is_named() -> None:
    assert "wrong: rank 1." in str(disagreement("sum", {1: "none"}, where="here", remedy="look", wrong=[1]))


def test_the_sides_are_shown_with_the_most_common_first() -> None:
    error = disagreement("step", {0: 5, 1: 6, 2: 6}, where="here", remedy="look")
    assert error.ranks == [0]
    assert str(error).index(": 6") < str(error).index(": 5")


def test_what_one_rank_lacks_differs_also_from_0() -> None:
    assert first_difference([{"a": 1, "b": 0}, {"a": 1}]) == ("b", {0: 0, 1: "absent"})


@pytest.mark.parametrize(
    ("values", "expected"),
    [("aab", ([2], 0)), ("abb", ([0], 1)), ("ab", ([0, 1], None)), ("aabb", ([0, 1, 2, 3], None)), ("aaa", ([], 0))],
)
def test_the_majority_decides(values: str, expected: tuple[list[int], int | None]) -> None:
    assert odd_ranks(dict(enumerate(values))) == expected
