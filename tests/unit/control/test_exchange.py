"""The exchange: what ranks of one host show each other in memory, and who shares it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from lightning_distplus.control import ControlPlane, exchange
from lightning_distplus.control.exchange import Exchange, Roll, SharedRecords, share_memory

RECORD = b"\xff" * 16


def test_a_record_that_is_read_while_it_is_written_counts_as_not_there() -> None:
    memory = mmap.mmap(-1, SharedRecords.num_bytes(2))
    reader, writer = (SharedRecords(memory, 2) for _ in range(2))
    writer.write(1, 1, b"another one")
    writer.write(3, 1, RECORD)  # in the place of number 1
    assert reader.read(1, [0, 1]) == {}
    assert reader.read(3, [0, 1]) == {1: RECORD}
    whole = memory[:]
    place = len(whole) // 2 // exchange._PLACE_BYTES * exchange._PLACE_BYTES  # of the set of odd numbers
    place += exchange._PLACE_BYTES  # of rank 1
    for torn in range(place, place + exchange._PLACE_HEAD_BYTES + len(RECORD)):
        memory[torn] ^= 0xFF
        assert reader.read(3, [0, 1]) == {}
        memory[torn] = whole[torn]


def test_the_outcome_has_room_for_the_longest_records_of_all() -> None:
    records = SharedRecords(mmap.mmap(-1, SharedRecords.num_bytes(70)), 70)
    longest = bytes(exchange._PLACE_BYTES - exchange._PLACE_HEAD_BYTES)
    outcome = exchange._packed(dict.fromkeys(range(70), longest))
    for number in (1, 2):
        records.write(number, records.outcome, outcome)
    for number in (1, 2):
        for rank in range(70):
            records.write(number, rank, longest)
        assert records.read(number, [records.outcome]) == {records.outcome: outcome}
    assert exchange._unpacked(outcome) == dict.fromkeys(range(70), longest)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_last_one_wakes_those_who_wait(
    num_nodes: int, monkeypatch: pytest.MonkeyPatch, make_ranks: Any, later: timedelta
) -> None:
    """Nobody would come to an end here who slept through the ring once."""
    for name in ("_LINGER_S", "_ALONE_S", "_LATE_S"):
        monkeypatch.setattr(exchange, name, 600.0)
    ranks = make_ranks(4, num_nodes=num_nodes)
    exchanges = [Exchange(plane, "all") for plane in ranks.planes]
    ranks.run(lambda plane: exchanges[plane.world.rank].open(later))
    for plane in ranks.planes:
        monkeypatch.setattr(plane, "poll", _patient(plane))

    def meet_often(one: Exchange) -> None:
        for number in range(200):
            one.post(b"%d" % number)
            assert one.collect(timedelta(hours=1), what="a test") == [b"%d" % number] * 4

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(meet_often, exchanges))


def _patient(plane: ControlPlane) -> Callable[..., None]:
    """Looks only when it is rung."""

    def poll(is_complete: Callable[[], bool], *_: Any, pause: Exchange, **__: Any) -> None:
        while not is_complete():
            pause.rest(600.0)

    return poll


def test_an_entry_that_is_shown_again_at_a_later_number_does_not_count(make_ranks: Any) -> None:
    (plane,) = make_ranks(1, secret="of the job").planes
    roll = Roll(plane, "all")
    roll.post(1, {0: b"old"})
    plane.send_unsigned("all/1", (plane.read_unsigned("all/1") or b"") * 2)  # the key of 1 and of 4
    assert roll.read(1) == {0: b"old"}
    assert roll.read(4) == {}
    roll.post(4, {0: b"new"})
    assert roll.read(4) == {0: b"new"}


def test_memory_is_shared_by_the_ranks_of_a_host_and_who_cannot_map_it_is_a_host_alone(
    make_ranks: Any, later: timedelta
) -> None:
    def share(plane: ControlPlane) -> tuple[list[int], bytes]:
        if plane.world.rank == 2:
            plane = _Elsewhere(plane._store, plane.world)
        firsts, memory = share_memory(plane, "some", later)
        memory[plane.world.rank] = 1
        plane.barrier("all have written", later)
        return firsts, memory[:5]

    found = make_ranks(5, num_nodes=2).run(share)
    assert [firsts for firsts, _ in found] == [[0, 0, 2, 3, 3]] * 5
    assert [memory for _, memory in found] == [
        b"\1\1\0\0\0", b"\1\1\0\0\0", b"\0\0\1\0\0", b"\0\0\0\1\1", b"\0\0\0\1\1"
    ]  # fmt: skip


class _Elsewhere(ControlPlane):
    """A rank in another container: what the others offer is not to be found there."""

    def gather_json(self, *arguments: Any) -> list[dict[str, Any]]:
        offers = super().gather_json(*arguments)
        return [
            {**offer, "memory": f"{offer['memory']}-elsewhere"} if offer.get("memory") else offer for offer in offers
        ]
