"""Messages between ranks: each call meets all ranks or names the missing ones, and leaves no key behind."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from lightning_distplus.control.plane import MAX_MESSAGE_BYTES
from lightning_distplus.control.secret import Secret
from lightning_distplus.errors import PeerMissing
from lightning_distplus.strategies.start import clock_offset


def test_a_barrier_opens_only_when_all_ranks_have_come(make_ranks, later) -> None:
    ranks = make_ranks(3)
    first = ranks.start(lambda plane: plane.barrier("x", later), ranks=[0, 1])
    time.sleep(0.05)
    assert not any(future.done() for future in first)

    ranks.run(lambda plane: plane.barrier("x", later), ranks=[2])

    assert [future.result(5) for future in first] == [None, None]


def test_a_barrier_names_the_missing_ranks_on_every_rank_that_waits(make_ranks, soon) -> None:
    ranks = make_ranks(4)
    ranks.planes[3].send("hello/3", b'{"host": "node7", "pid": 77}')
    begin = time.monotonic()

    errors = ranks.run(lambda plane: plane.barrier("x", soon), ranks=[0, 2])

    assert time.monotonic() - begin < soon.total_seconds() + 1
    assert [type(error) for error in errors] == [PeerMissing] * 2
    assert [error.ranks for error in errors] == [[1, 3]] * 2
    message = str(errors[1])
    assert "Rank 2 waited 0.2 s for the barrier 'x': 2 of 4 ranks did not come" in message
    assert "rank 1 (never seen, node 0), rank 3 (host node7, pid 77)" in message


def test_a_gather_names_the_missing_ranks(make_ranks, soon) -> None:
    errors = make_ranks(4).run(lambda plane: plane.gather("x", b"v", soon), ranks=[0, 1, 3])
    assert [error.ranks for error in errors] == [[2]] * 3


def test_a_rank_that_keeps_the_others_waiting_inside_a_call_is_named(make_ranks, soon) -> None:
    """Rank 1 has arrived and dies before it leaves: rank 0, which clears up, does not wait for ever."""
    ranks = make_ranks(2)
    ranks.planes[1]._leave = lambda *_, **__: None

    error, _ = ranks.run(lambda plane: plane.barrier("x", soon))

    assert isinstance(error, PeerMissing)
    assert error.ranks == [1]


def test_a_gather_returns_all_values_in_the_order_of_ranks(make_ranks, later) -> None:
    values = make_ranks(5).run(lambda plane: plane.gather("x", b"%d" % plane.world.rank, later))
    assert values == [[b"0", b"1", b"2", b"3", b"4"]] * 5


def test_a_gather_of_dictionaries_is_a_gather(make_ranks, later) -> None:
    values = make_ranks(2).run(lambda plane: plane.gather_json("x", {"rank": plane.world.rank}, later))
    assert values == [[{"rank": 0}, {"rank": 1}]] * 2


def test_calls_of_the_same_name_do_not_mix(make_ranks, later) -> None:
    def rounds(plane) -> list[list[bytes]]:
        return [plane.gather("x", b"%d/%d" % (plane.world.rank, number), later) for number in range(50)]

    expected = [[b"0/%d" % number, b"1/%d" % number, b"2/%d" % number] for number in range(50)]
    assert make_ranks(3).run(rounds) == [expected] * 3


def test_a_message_of_1_mib_passes_and_a_larger_one_is_refused_before_it_is_sent(make_ranks, later) -> None:
    ranks = make_ranks(2)
    (mine, _), _ = ranks.run(lambda plane: plane.gather("x", bytes(MAX_MESSAGE_BYTES), later))
    assert len(mine) == 1 << 20
    keys = ranks.num_keys()

    with pytest.raises(ValueError, match=r"'x' of rank 0 has 1048577 bytes; .* at most 1048576"):
        ranks.planes[0].gather("x", bytes(MAX_MESSAGE_BYTES + 1), later)

    assert ranks.num_keys() == keys


def test_above_64_ranks_rank_0_relays_the_values_in_pieces_that_the_store_takes(make_ranks, later) -> None:
    ranks = make_ranks(70)
    begin = time.monotonic()
    results = ranks.run(lambda plane: plane.gather("x", bytes([plane.world.rank]) * (100 << 10), later))

    assert time.monotonic() - begin < 5
    for values in results[:: len(results) - 1]:
        assert [(len(value), value[0]) for value in values] == [(100 << 10, rank) for rank in range(70)]
    assert ranks.num_keys() == 0


def test_a_relayed_gather_names_the_missing_rank_and_not_the_relay(make_ranks, soon) -> None:
    errors = make_ranks(66).run(lambda plane: plane.gather("x", b"v", soon), ranks=[0, 1, 2, *range(4, 66)])
    assert {tuple(error.ranks) for error in errors} == {(3,)}


def test_a_relay_that_does_not_pass_the_values_on_is_named(make_ranks, soon) -> None:
    ranks = make_ranks(66)
    ranks.planes[0].send("gather/x/1/0", b"v")
    errors = ranks.run(lambda plane: plane.gather("x", b"v", soon), ranks=range(1, 66))
    assert {tuple(error.ranks) for error in errors} == {(0,)}


def test_barriers_and_gathers_leave_no_key_behind(make_ranks, later) -> None:
    ranks = make_ranks(3)

    def calls(plane) -> None:
        for _ in range(100):
            plane.barrier("b", later)
            plane.gather("g", b"v", later)
        plane.farewell(later)

    assert ranks.run(calls) == [None] * 3
    assert ranks.num_keys() == 0


def test_attempts_never_hear_each_other(make_ranks, soon, later) -> None:
    old = make_ranks(2, prefix="distplus/job/0")
    old.run(lambda plane: plane.gather("x", b"old", later))
    assert isinstance(old.run(lambda plane: plane.gather("x", b"old", soon), ranks=[0])[0], PeerMissing)
    old.planes[1].report_failure(ValueError("of attempt 0"))
    new = make_ranks(2, prefix="distplus/job/1", store=old.store)
    for plane in new.planes:
        plane.listen()

    for _ in range(2):
        assert new.run(lambda plane: plane.gather("x", b"new", later)) == [[b"new", b"new"]] * 2
    assert [plane.first_error for plane in new.planes] == [None, None]


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.1])
def test_a_deadline_is_kept(seconds: float, make_ranks) -> None:
    begin = time.monotonic()
    (error,) = make_ranks(2).run(lambda plane: plane.barrier("x", timedelta(seconds=seconds)), ranks=[0])
    assert isinstance(error, PeerMissing)
    assert seconds <= time.monotonic() - begin < seconds + 0.5


def test_a_store_for_a_group_has_keys_of_its_own(make_ranks) -> None:
    (plane,) = make_ranks(1).planes
    plane.store_for("group").set("key", b"group")
    assert plane.read("key") is None
    assert plane.read_unsigned("group/key") == b"group"


def test_reading_a_key_that_is_not_there_neither_waits_nor_creates_it(make_ranks) -> None:
    ranks = make_ranks(1)
    assert ranks.planes[0].read("nothing") is None
    assert ranks.num_keys() == 0
    ranks.planes[0].send("empty", b"")
    assert ranks.planes[0].read("empty") == b""


def test_one_rank_alone_passes_everything(make_ranks, soon) -> None:
    ranks = make_ranks(1)
    (plane,) = ranks.planes
    plane.barrier("x", soon)
    assert plane.gather("x", b"v", soon) == [b"v"]
    plane.farewell(soon)


@pytest.mark.deadline(300)
def test_a_thousand_ranks_complete_a_barrier_by_few_calls_each(make_ranks) -> None:
    """Seconds stand in ``benchmarks/control_gate``: here is what they come from, which no load of a host moves."""
    ranks = make_ranks(1000, num_nodes=1000)  # a rank also looks after the processes of its host: here its own alone
    all_started = threading.Event()
    deadline = timedelta(seconds=120)

    def meet(plane) -> tuple[int, int, float]:
        asked, others, call = 0, 0, plane._call

        def count(what, method, *arguments):
            nonlocal asked, others
            is_question = what.startswith("reading 'barrier/x/1/")
            asked, others = (asked + 1, others) if is_question else (asked, others + 1)
            return call(what, method, *arguments)

        plane._call = count
        all_started.wait(deadline.total_seconds())
        begin = time.monotonic()
        plane.barrier("x", deadline)
        return asked, others, time.monotonic() - begin

    threading.stack_size(256 << 10)
    try:
        futures = ranks.start(meet)
    finally:
        threading.stack_size(0)
    all_started.set()

    asked, others, seconds = zip(*[future.result(200) for future in futures], strict=True)
    shortest_look_s = 0.2
    for rank, (questions, waited) in enumerate(zip(asked, seconds, strict=True)):
        assert questions <= 2 + waited / (1000 * (100e-6 if rank else 20e-6))
    looks = sum(seconds) / shortest_look_s  # who waits longer asks for the process that it looks after
    assert sum(others) <= 4 * 1000 + looks  # a rank comes, is counted, leaves, is counted; the last one clears up
    assert ranks.num_keys() == 0


@pytest.mark.parametrize("size", [2, 70])
def test_what_a_stranger_sets_in_a_gather_is_waited_past(size: int, make_ranks, later) -> None:
    ranks = make_ranks(size, secret="only we know")
    ranks.store.set("distplus/job/0/gather/x/1/1", Secret("another").seal("gather/x/1/1", b"forged"))
    early = ranks.start(lambda plane: plane.gather("x", b"true", later), ranks=[r for r in range(size) if r != 1])
    time.sleep(0.3)
    assert not any(future.done() for future in early)
    assert ranks.run(lambda plane: plane.gather("x", b"true", later), ranks=[1]) == [[b"true"] * size]
    assert [future.result(15) for future in early] == [[b"true"] * size] * (size - 1)
    assert ranks.planes[0].secret.num_ignored == 1


def test_a_barrier_opens_neither_for_a_stranger_nor_is_it_held_up_by_one(make_ranks, later) -> None:
    ranks = make_ranks(3, secret="only we know")
    key = "distplus/job/0/barrier/x/1"
    early = ranks.start(lambda plane: plane.barrier("x", later), ranks=[0, 1])
    ranks.store.set(f"{key}/outcome", b"1 equal")
    entry = b"\1\0\0\0" + b"\2\0\0\0\x08\0" + bytes(8)  # of rank 2 at number 1
    ranks.store.append(f"{key}/1", Secret("another").entries("barrier/x/1/1").entry(entry))
    time.sleep(0.3)
    assert not any(future.done() for future in early)
    ranks.store.set(f"{key}/1", b"written over")
    assert ranks.run(lambda plane: plane.barrier("x", later), ranks=[2]) == [None]
    assert [future.result(15) for future in early] == [None, None]


def test_the_clocks_of_hosts_are_compared_with_that_of_rank_0(make_ranks, later) -> None:
    ahead_s = {0: 0.0, 1: 3600.0, 2: -0.5}

    def measure(plane):
        return clock_offset(plane, later, lambda: time.time() + ahead_s[plane.world.rank])

    assert make_ranks(3, num_nodes=3).run(measure) == [pytest.approx(one, abs=0.1) for one in ahead_s.values()]
    assert make_ranks(3, num_nodes=1).run(measure) == [0.0] * 3
