"""The step gate: all ranks see what each of them says, before they average anything."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from lightning_distplus.control import GateRecord, StepGate, Wish, exchange
from lightning_distplus.control.exchange import HEAD_BYTES, RECORD_BYTES
from lightning_distplus.errors import DivergenceError, PeerMissing
from lightning_distplus.process import until

FORMS = {"host": (1, 64, 8), "few hosts": (2, 64, 8), "hosts": (2, 64, 1), "counted": (2, 1, 1)}
between_hosts = pytest.mark.parametrize("num_nodes", [form for form in FORMS if form != "host"], indirect=True)
counted = pytest.mark.parametrize("num_nodes", ["counted"], indirect=True)


@pytest.fixture(params=FORMS)
def num_nodes(request, monkeypatch) -> int:
    """The number of hosts; up to so many ranks all get all records, up to so many hosts all read what all say."""
    number, direct_ranks, few_hosts = FORMS[request.param]
    monkeypatch.setattr(exchange, "DIRECT_RANKS", direct_ranks)
    monkeypatch.setattr(exchange, "_FEW_HOSTS", few_hosts)
    return number


def _record(step: int = 0, **changes) -> GateRecord:
    return GateRecord(**{"global_step": step, "micro_batch": step, "epoch": 0, **changes})


def _opened(ranks, later, **arguments) -> dict[int, StepGate]:
    gates = {plane.world.rank: StepGate(plane, name="run", **arguments) for plane in ranks.planes}
    ranks.run(lambda plane: gates[plane.world.rank].open(later))
    return gates


def _exchange(ranks, gates, records, deadline, only=None):
    return ranks.run(lambda plane: gates[plane.world.rank].exchange(records[plane.world.rank], deadline), ranks=only)


def test_every_rank_gets_all_records_in_the_order_of_ranks(make_ranks, later) -> None:
    ranks = make_ranks(3)
    gates = _opened(ranks, later)
    for step in range(20):
        records = [_record(step, consumed_samples=rank, learning_rate=0.1) for rank in range(3)]
        assert _exchange(ranks, gates, records, later) == [records] * 3


def test_one_rank_s_wish_is_seen_by_all(num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(3, num_nodes=num_nodes)
    records = [_record(), _record(wishes=Wish.STOP | Wish.PREEMPT), _record()]
    for seen in _exchange(ranks, _opened(ranks, later), records, later):
        assert [record.wishes for record in seen] == [Wish.NONE, Wish.STOP | Wish.PREEMPT, Wish.NONE]


@pytest.mark.parametrize("field", ["global_step", "micro_batch", "epoch"])
def test_records_that_differ_are_read_by_all_ranks(field: str, num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(3, num_nodes=num_nodes)
    records = [_record(), _record(**{field: 7}), _record()]
    assert _exchange(ranks, _opened(ranks, later), records, later) == [records] * 3


def test_a_rank_with_another_version_is_named(make_ranks, later) -> None:
    ranks = make_ranks(2)
    gates = _opened(ranks, later)
    foreign = b"\2 a longer record of a later version" + bytes(60)
    gates[1]._exchange.post(foreign)

    (error,) = _exchange(ranks, gates, [_record()], later, only=[0])

    assert isinstance(error, DivergenceError)
    assert (error.ranks, error.field) == ([1], "record_version")
    assert (
        f"Rank 1 runs another version of lightning_distplus: its step record has version 2 and {len(foreign)} bytes"
        in (str(error))
    )


@between_hosts
def test_a_rank_with_another_version_is_named_however_long_its_record_is(num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(4, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    for rank in (2, 3):
        gates[rank]._exchange._roll.post(1, {rank: bytes(8) + b"\2" + bytes(10_000)})
    errors = _exchange(ranks, gates, [_record()] * 4, timedelta(seconds=2), only=[0, 1])
    assert {(type(error), tuple(error.ranks)) for error in errors} == {(DivergenceError, (2,))}


def test_missing_ranks_are_named_and_the_gate_goes_on_after_the_time_out(num_nodes, make_ranks, soon, later) -> None:
    ranks = make_ranks(4, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    records = [_record()] * 4
    begin = time.monotonic()

    errors = _exchange(ranks, gates, records, soon, only=[0, 2])

    assert time.monotonic() - begin < soon.total_seconds() + 1
    assert [error.ranks for error in errors] == [[1, 3]] * 2
    assert "Rank 2 waited 0.2 s for step gate 1 of run: 2 of 4 ranks did not come" in str(errors[1])
    assert isinstance(errors[0], PeerMissing)
    late = ranks.start(lambda plane: gates[plane.world.rank].exchange(records[0], later), ranks=[1, 3])
    assert ranks.run(lambda plane: gates[plane.world.rank].collect(later), ranks=[0, 2]) == [records] * 2
    assert [future.result(5) for future in late] == [records] * 2
    for step in range(1, 8):
        assert _exchange(ranks, gates, [_record(step)] * 4, later) == [[_record(step)] * 4] * 4


def test_a_record_posted_early_does_not_pair_with_another_step(num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(2, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    for step in range(200):  # rank 1 posts as early as it may, rank 0 dawdles now and then

        def work(plane, step: int = step) -> list[GateRecord]:
            if plane.world.rank == 0 and step % 50 == 0:
                time.sleep(0.005)
            gates[plane.world.rank].post(_record(step))
            return gates[plane.world.rank].collect(later)

        assert ranks.run(work) == [[_record(step)] * 2] * 2


def test_free_running_ranks_pass_a_thousand_gates_with_a_bounded_number_of_keys(make_ranks, later) -> None:
    ranks = make_ranks(3)
    gates = _opened(ranks, later)

    def run(plane) -> int:
        return sum(
            len(gates[plane.world.rank].exchange(_record(step, consumed_samples=plane.world.rank), later))
            for step in range(1000)
        )

    assert ranks.run(run) == [3000] * 3
    assert ranks.num_keys() == 0


@counted
@pytest.mark.parametrize(("size", "num_hosts"), [(3, 3), (10, 2), (7, 2), (130, 3)])
def test_many_ranks_that_agree_read_no_records_and_keep_a_bounded_number_of_keys(
    size: int, num_hosts: int, num_nodes: int, make_ranks, later
) -> None:
    ranks = make_ranks(size, num_nodes=num_hosts)
    gates = _opened(ranks, later)

    def run(plane) -> set[bool]:
        rank = plane.world.rank
        found = set()
        for step in range(40):
            mine = _record(step, consumed_samples=rank, wishes=Wish.STOP if step == 30 and rank == 2 else Wish.NONE)
            seen = gates[rank].exchange(mine, later)
            if step == 30:  # the records differ in a wish: everybody reads those of all
                assert [record.consumed_samples for record in seen] == list(range(size))
                assert [record.wishes for record in seen].index(Wish.STOP) == 2
            else:
                assert seen == [mine] * size
            found.add(len(seen) == size)
        return found

    assert ranks.run(run) == [{True}] * size
    assert ranks.num_keys() <= 4  # three with entries, one with the outcome
    longest = max(len(ranks.planes[0].read_unsigned(f"gate/run/{number}") or b"") for number in range(3))
    assert longest < 2 * 200 * size  # of two gates at most


def test_one_of_many_ranks_that_differs_is_seen_by_all(make_ranks, later) -> None:
    ranks = make_ranks(70, num_nodes=10)
    records = [_record(5 if rank == 33 else 4) for rank in range(70)]
    assert _exchange(ranks, _opened(ranks, later), records, later) == [records] * 70


def test_a_missing_rank_of_many_is_named(make_ranks, soon, later) -> None:
    ranks = make_ranks(70, num_nodes=10)
    gates = _opened(ranks, later)
    errors = _exchange(ranks, gates, [_record()] * 70, soon, only=[rank for rank in range(70) if rank != 33])
    assert {(type(error), tuple(error.ranks)) for error in errors} == {(PeerMissing, (33,))}


@between_hosts
def test_a_first_rank_that_is_missing_makes_no_peer_nameless(num_nodes, make_ranks, soon, later) -> None:
    ranks = make_ranks(6, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    errors = _exchange(ranks, gates, [_record()] * 6, soon, only=[0, 1, 2, 4, 5])
    assert {(type(error), tuple(error.ranks)) for error in errors} == {(PeerMissing, (3,))}


@counted
def test_a_host_whose_first_rank_is_late_is_heard_of_soon(num_nodes, make_ranks, monkeypatch) -> None:
    monkeypatch.setattr(exchange, "_LATE_S", 600.0)
    ranks, long = make_ranks(6, num_nodes=num_nodes), timedelta(seconds=2400)
    gates = _opened(ranks, long)
    waiting = ranks.start(lambda plane: gates[plane.world.rank].exchange(_record(), long), ranks=[0, 1, 2, 4, 5])
    assert until(lambda: {*gates[0]._exchange._roll.read(1)} == {0, 1, 2, 4, 5}, 2.0)
    assert gates[3].exchange(_record(), long) == [_record()] * 6
    assert [future.result(5) for future in waiting] == [[_record()] * 6] * 5


@counted
def test_the_error_of_a_rank_that_has_passed_the_gate_ends_no_wait_in_it(
    num_nodes, make_ranks, later, monkeypatch
) -> None:
    monkeypatch.setattr(exchange, "_ASK_FLOOR_PER_HOST_S", 1.0)  # the other one hears of it before it asks
    ranks = make_ranks(2, num_nodes=2)
    gates = _opened(ranks, later)
    ranks.planes[1].listen()

    def pass_and_fail(plane) -> list[GateRecord]:
        seen = gates[plane.world.rank].exchange(_record(), later)
        if plane.world.rank == 0:
            plane.report_failure(ValueError("after the gate"), to=[1])
        return seen

    assert ranks.run(pass_and_fail) == [[_record()] * 2] * 2


@between_hosts
@pytest.mark.parametrize("stopped", [0, 3])
def test_nobody_waits_for_a_first_rank_that_has_come_and_stopped(stopped: int, num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(6, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    records = [_record()] * 6
    gates[stopped].post(records[stopped])
    others = sorted({*range(6)} - {stopped})
    assert _exchange(ranks, gates, records, timedelta(seconds=2), only=others) == [records] * 5
    assert gates[stopped].collect(later) == records
    assert _exchange(ranks, gates, [_record(1)] * 6, later) == [[_record(1)] * 6] * 6


def test_only_the_first_rank_of_a_host_asks_the_store_and_a_single_host_never(num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(6, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    calls = {plane.world.rank: _counted(plane) for plane in ranks.planes}
    for step in range(20):
        assert _exchange(ranks, gates, [_record(step)] * 6, later) == [[_record(step)] * 6] * 6
    assert {rank for rank, made in calls.items() if made} == ({0, 3} if num_nodes == 2 else set())


def _counted(plane) -> list[str]:
    """What this rank asks the store from now on."""
    made, call = [], plane._call
    plane._call = lambda what, *arguments: (made.append(what), call(what, *arguments))[1]
    return made


@between_hosts
@pytest.mark.parametrize("early", [0, 1])
def test_what_a_stranger_has_written_over_is_said_again(early: int, num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(2, num_nodes=num_nodes, secret="of the job")
    gates = _opened(ranks, later)
    records, soon = [_record()] * 2, timedelta(seconds=2)
    waiting = ranks.start(lambda plane: gates[early].exchange(records[0], soon), ranks=[early])
    time.sleep(0.1)
    for key in ("1", "outcome"):
        ranks.planes[0]._store.set(f"gate/run/{key}", b"1 of a stranger")
    assert gates[1 - early].exchange(records[1], soon) == records
    assert waiting[0].result(5) == records


@counted
def test_an_outcome_that_is_lost_is_found_in_what_all_have_said(num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(2, num_nodes=num_nodes, secret="of the job")
    gates = _opened(ranks, later)
    ranks.planes[0].send = lambda *_: None  # the outcome of rank 0 never arrives
    records = [_record(), _record(7)]
    assert _exchange(ranks, gates, records, timedelta(seconds=2)) == [records] * 2


def test_a_gate_goes_on_after_ctrl_c(num_nodes, make_ranks, later) -> None:
    ranks = make_ranks(2, num_nodes=num_nodes)
    gates = _opened(ranks, later)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gates[0].exchange(_record(), later)
    assert time.monotonic() - begin < 1
    timer.join()
    late = ranks.start(lambda plane: gates[1].exchange(_record(), later), ranks=[1])
    assert gates[0].collect(later) == [_record()] * 2
    assert late[0].result(5) == [_record()] * 2
    assert _exchange(ranks, gates, [_record(1)] * 2, later) == [[_record(1)] * 2] * 2


def test_a_record_with_every_field_at_its_largest_survives_the_wire_in_128_bytes() -> None:
    record = GateRecord(
        global_step=2**64 - 1, micro_batch=2**32 - 1, epoch=2**32 - 1, wishes=Wish(15), decisions=2**16 - 1,
        consumed_samples=2**64 - 1, data_fingerprint=2**64 - 1, batch_structure=2**64 - 1, collectives=2**64 - 1,
        state_fingerprint=2**64 - 1, learning_rate=4e-4, loss_scale=65536.0,
        lead_s=60000.0, wait_s=0.25,
    )  # fmt: skip
    packed = record.pack()
    assert HEAD_BYTES + RECORD_BYTES <= 128
    assert GateRecord.unpack(packed, rank=0) == record
    assert Wish(GateRecord.unpack(packed, rank=0).wishes) == Wish(15)
    assert len(packed) == len(_record().pack())
    assert _record().wishes == Wish.NONE
