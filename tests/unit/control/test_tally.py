"""The tally: who says the same is counted, who says something else is noticed, and keys are used again."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from lightning_distplus.control import ControlPlane
from lightning_distplus.control.tally import Tally
from lightning_distplus.world import World

SAME, OTHER = b"\xff" * 16, b"\x00" * 16


def tallies(size: int) -> list[Tally]:
    store = HashStore()
    return [Tally(ControlPlane(store, World(rank=rank, size=size)), "t") for rank in range(size)]


@pytest.mark.parametrize("digest", [SAME, OTHER])
def test_those_that_have_come_are_counted_at_every_number(digest: bytes) -> None:
    ranks = tallies(3)
    for number in range(1, 8):
        for come, tally in enumerate(ranks, start=1):
            tally.enter(number, digest)
            assert tally.look() == come
        assert [tally.look() for tally in ranks] == [3, 3, 3]
        for tally in ranks:
            tally.passed(number)


def test_a_rank_may_be_one_number_ahead_of_one_that_has_not_looked_yet() -> None:
    owner, late = tallies(2)
    owner.enter(1, SAME)
    for number in range(1, 8):
        late.enter(number, SAME)
        assert [owner.look(), owner.look()] == [1, 2]
        owner.passed(number)
        owner.enter(number + 1, SAME)
        assert [late.look(), late.look()] == [2, 2]
        late.passed(number)


def test_another_digest_is_noticed_on_both_sides_and_by_many_ranks() -> None:
    ranks = tallies(1000)
    for tally in ranks[:-1]:
        tally.enter(1, SAME)
    assert ranks[0].look() == 1
    assert ranks[0].look() == 999
    ranks[-1].enter(1, OTHER)
    assert [ranks[-1].look(), ranks[0].look()] == [None, None]
