"""The tallies: who says the same is counted, who says something else is noticed, and what they use is used again."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_distplus.control import ControlPlane, exchange
from lightning_distplus.control.exchange import SharedTally, Tally
from lightning_distplus.world import World

SAME, OTHER = b"\xff" * 16, b"\x00" * 16
Make = Callable[[int], list[Any]]


def over_a_store(size: int) -> list[Tally]:
    store = HashStore()
    return [Tally(ControlPlane(store, World(rank=rank, size=size)), "t") for rank in range(size)]


def in_memory(size: int) -> list[SharedTally]:
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    return [SharedTally(memory, rank, size) for rank in range(size)]


both_kinds = pytest.mark.parametrize("make", [over_a_store, in_memory])


@both_kinds
@pytest.mark.parametrize("digest", [SAME, OTHER])
def test_those_that_have_come_are_counted_at_every_number(digest: bytes, make: Make) -> None:
    ranks = make(3)
    for number in range(1, 8):
        for come, tally in enumerate(ranks, start=1):
            tally.enter(number, digest)
            assert tally.look() == come
        assert [tally.look() for tally in ranks] == [3, 3, 3]
        for tally in ranks:
            tally.passed(number)


@both_kinds
def test_a_rank_may_be_one_number_ahead_of_one_that_has_not_looked_yet(make: Make) -> None:
    owner, late = make(2)
    owner.enter(1, SAME)
    for number in range(1, 8):
        late.enter(number, SAME)
        assert [owner.look(), owner.look()][-1] == 2
        owner.passed(number)
        owner.enter(number + 1, SAME)
        assert [late.look(), late.look()] == [2, 2]
        late.passed(number)


@pytest.mark.parametrize(("make", "size"), [(over_a_store, 1000), (in_memory, 20)])
def test_another_digest_is_noticed_on_both_sides_and_by_many_ranks(make: Make, size: int) -> None:
    ranks = make(size)
    for tally in ranks[:-1]:
        tally.enter(1, SAME)
    assert [ranks[0].look(), ranks[0].look()][-1] == size - 1
    ranks[-1].enter(1, OTHER)
    assert [ranks[-1].look(), ranks[0].look()] == [None, None]


def test_a_record_that_is_read_while_it_is_written_counts_as_not_there() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    reader, writer = (SharedTally(memory, rank, 2) for rank in range(2))
    writer.enter(1, OTHER)
    reader.enter(1, SAME)
    assert reader.look() is None
    writer.enter(3, SAME)  # in the place of number 1
    whole = memory[:]
    reader.enter(3, SAME)
    assert reader.look() == 2
    place = 3 * SharedTally.PLACE_BYTES  # of rank 1 in the set of odd numbers
    for torn in range(place, place + SharedTally.PLACE.size + len(SAME)):
        memory[torn] ^= 0xFF
        assert reader.look() == 1
        memory[torn] = whole[torn]


def test_the_last_one_wakes_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would come to an end here who slept through the ring once."""
    monkeypatch.setattr(exchange, "_LINGER_S", 600.0)
    ranks = in_memory(3)

    def meet_often(tally: SharedTally) -> None:
        for number in range(1, 201):
            tally.enter(number, SAME)
            assert tally.look() == 3

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(meet_often, ranks))


def test_memory_is_shared_where_all_ranks_can_map_it_and_by_none_where_one_cannot(
    make_ranks: Any, later: timedelta
) -> None:
    def share(plane: ControlPlane) -> tuple[bool, bool]:
        tally = SharedTally.share(plane, "all", later)
        if plane.world.rank == 2:
            plane = _Elsewhere(plane._store, plane.world)
        return tally is not None, SharedTally.share(plane, "some", later) is not None

    assert make_ranks(3).run(share) == [(True, False)] * 3


class _Elsewhere(ControlPlane):
    """A rank in another container: what the others offer is not to be found there."""

    def gather_json(self, *arguments: Any) -> list[dict[str, Any]]:
        offers = super().gather_json(*arguments)
        return [
            {**offer, "memory": f"{offer['memory']}-elsewhere"} if offer.get("memory") else offer for offer in offers
        ]
