"""The step gate: all ranks see what each of them says, before they average anything."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from lightning_distplus.control import GateRecord, StepGate, Wish
from lightning_distplus.control.exchange import HEAD_BYTES, RECORD_BYTES
from lightning_distplus.errors import DivergenceError, PeerMissing

DIRECT, COUNTED = {"direct_ranks": 64}, {"direct_ranks": 1}
both_forms = pytest.mark.parametrize("form", [DIRECT, COUNTED], ids=["direct", "counted"])


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


@both_forms
def test_one_rank_s_wish_is_seen_by_all(form, make_ranks, later) -> None:
    ranks = make_ranks(3)
    records = [_record(), _record(wishes=Wish.STOP | Wish.PREEMPT), _record()]
    for seen in _exchange(ranks, _opened(ranks, later, **form), records, later):
        assert [record.wishes for record in seen] == [Wish.NONE, Wish.STOP | Wish.PREEMPT, Wish.NONE]


@both_forms
@pytest.mark.parametrize("field", ["global_step", "micro_batch", "epoch"])
def test_records_that_differ_are_read_by_all_ranks(field: str, form, make_ranks, later) -> None:
    ranks = make_ranks(3)
    records = [_record(), _record(**{field: 7}), _record()]
    assert _exchange(ranks, _opened(ranks, later, **form), records, later) == [records] * 3


def test_a_rank_with_another_version_is_named(make_ranks, later) -> None:
    ranks = make_ranks(2)
    gates = _opened(ranks, later)
    foreign = b"\2 a longer record of a later version" + bytes(60)
    gates[1]._slots.post(1, foreign)

    (error,) = _exchange(ranks, gates, [_record()], later, only=[0])

    assert isinstance(error, DivergenceError)
    assert (error.ranks, error.field) == ([1], "record_version")
    assert (
        f"Rank 1 runs another version of lightning_distplus: its step record has version 2 and {len(foreign)} bytes"
        in (str(error))
    )


@both_forms
def test_missing_ranks_are_named_and_the_gate_goes_on_after_the_time_out(form, make_ranks, soon, later) -> None:
    ranks = make_ranks(4)
    gates = _opened(ranks, later, **form)
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


@both_forms
def test_a_record_posted_early_does_not_pair_with_another_step(form, make_ranks, later) -> None:
    ranks = make_ranks(2)
    gates = _opened(ranks, later, **form)
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
    assert ranks.num_keys() == 3


@pytest.mark.parametrize(("size", "num_nodes"), [(3, 3), (10, 2), (7, 2), (130, 1)])
def test_many_ranks_count_records_and_keep_a_bounded_number_of_keys(
    size: int, num_nodes: int, make_ranks, later
) -> None:
    ranks = make_ranks(size, num_nodes=num_nodes)
    gates = _opened(ranks, later, **COUNTED)

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
    num_groups = len(gates[0]._slots._slots)
    assert ranks.num_keys() <= 3 * num_groups + 2 + 1  # the slots, the two counters, and one digest


def test_one_of_many_ranks_that_differs_is_seen_by_all(make_ranks, later) -> None:
    ranks = make_ranks(70, num_nodes=10)
    records = [_record(5 if rank == 33 else 4) for rank in range(70)]
    assert _exchange(ranks, _opened(ranks, later), records, later) == [records] * 70


def test_a_missing_rank_of_many_is_named(make_ranks, soon, later) -> None:
    ranks = make_ranks(70, num_nodes=10)
    gates = _opened(ranks, later)
    errors = _exchange(ranks, gates, [_record()] * 70, soon, only=[rank for rank in range(70) if rank != 33])
    assert {(type(error), tuple(error.ranks)) for error in errors} == {(PeerMissing, (33,))}


@both_forms
def test_the_next_run_may_use_the_same_name(form, make_ranks, later) -> None:
    ranks = make_ranks(2)
    for _ in range(3):
        gates = _opened(ranks, later, **form)
        for step in range(4):
            assert _exchange(ranks, gates, [_record(step)] * 2, later) == [[_record(step)] * 2] * 2


@both_forms
def test_a_gate_goes_on_after_ctrl_c(form, make_ranks, later) -> None:
    ranks = make_ranks(2)
    gates = _opened(ranks, later, **form)
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
