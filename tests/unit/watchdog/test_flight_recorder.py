"""torch's record of collectives, and the sends and receives that it does not see."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_distplus.testing import spawn
from lightning_distplus.watchdog import flight_recorder
from lightning_distplus.watchdog.flight_recorder import Collective, Recording, cycles, match, p2p_call, waits_for_work

__all__ = []

STEP = ("all_reduce", "broadcast")


def recording(*ops: str | Collective, done: int | None = None, size: int = 2) -> Recording:
    """A rank that has called these in one group; the last call is not done unless ``done`` says so."""
    finished = len(ops) - 1 if done is None else done
    calls = [
        op if isinstance(op, Collective) else call(op, seq=number, is_done=number <= finished)
        for number, op in enumerate(ops, 1)
    ]
    return Recording(calls=calls, groups={"0": list(range(size))})


def call(op: str, **changes: Any) -> Collective:
    return Collective(**{"group": "0", "seq": 1, "op": op, "inputs": [[4]], "dtypes": ["Float"], **changes})


def matched(*recordings: Recording) -> Any:
    return match(dict(enumerate(recordings)))


def test_ranks_that_do_the_same_agree_also_when_one_is_behind() -> None:
    assert matched(recording(*STEP * 3), recording(*STEP * 3)) is None
    assert matched(recording(*STEP, done=2), recording(*STEP * 2, done=4)) is None
    assert match({0: Recording(), 1: Recording()}) is None


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (call("all_reduce", seq=7, inputs=[[8]]), "shape"),
        (call("all_reduce", seq=7, dtypes=["Double"]), "dtype"),
        (call("barrier", seq=7, inputs=[], dtypes=[]), "order"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_that_differs_is_found_and_the_side_that_left_the_sequence_blamed(
    odd: Collective, kind: str, size: int
) -> None:
    usual = recording(*STEP * 3, "all_reduce", size=size)
    found = matched(*[usual] * (size - 1), recording(*STEP * 3, odd, size=size))
    assert (found.kind, found.seq, found.culprits, found.is_decided) == (kind, 7, [size - 1], True)
    assert found.describe().startswith(f"collective #7 on group 0 differs in {kind}: rank {size - 1}: {odd.op} #7")


def test_a_call_of_one_rank_only_is_blamed_on_it_where_it_is_new_and_else_on_the_one_that_left_it_out() -> None:
    usual = recording(*STEP * 3, done=6)
    assert matched(usual, recording(*STEP * 3, "barrier")).culprits == [1]
    assert matched(usual, recording(*STEP * 3, "all_reduce")).culprits == [0]


def test_two_ranks_without_a_history_are_both_named_and_nothing_is_claimed() -> None:
    found = matched(recording("all_reduce"), recording("broadcast"))
    assert (found.culprits, found.is_decided) == ([0, 1], False)


def test_sizes_that_may_differ_between_ranks_are_not_a_mismatch() -> None:
    uneven: Sequence[Recording] = [
        recording(call("all_to_all", inputs=[[rank + 1]], outputs=[[3 - rank]])) for rank in range(2)
    ]
    root = recording(call("gather", outputs=[[4], [4]]))
    assert matched(*uneven) is None
    assert matched(root, recording(call("gather"))) is None


def test_a_recording_survives_its_way_through_json_and_keeps_what_is_unfinished() -> None:
    long = recording(*STEP * 50)
    kept = long.last(3)
    assert [one.seq for one in kept.calls] == [98, 99, 100]
    assert Recording.from_plain(kept.to_plain()) == kept
    assert [one.seq for one in recording(*STEP * 3, done=0).last(1).calls] == [1, 2, 3, 4, 5, 6]


def test_a_send_of_nccl_names_the_global_rank_at_its_other_end() -> None:
    entry = {
        "process_group": ["7", "ring"],
        "profiling_name": "nccl:recv 0<-1",
        "p2p_seq_id": 3,
        "collective_seq_id": 9,
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "retired": False,
        "state": "started",
    }
    (read,) = flight_recorder.read_entries([entry], {"7": [2, 5]})
    assert (read.op, read.peer, read.seq, read.is_done) == ("recv", 5, 3, False)
    assert read.describe() == "recv from rank 5 on group 7, [4] Float"


def record(rank: int) -> tuple[list[tuple[str, int, bool]], dict[str, list[int]], bool]:
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    assert flight_recorder.arm()
    assert dict(os.environ) == before
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    end = time.monotonic() + 10
    while (found := flight_recorder.dump()).unfinished and time.monotonic() < end:
        time.sleep(0.01)  # the recorder hears of the end a moment after the caller
    dist.barrier()
    dist.destroy_process_group()
    return [(one.op, one.seq, one.is_done) for one in found.calls], found.groups, flight_recorder.arm()


def test_real_gloo_ranks_are_recorded_without_a_variable_in_the_environment() -> None:
    for calls, groups, _ in spawn(record, 2).check().results.values():
        assert calls == [("all_reduce", 1, True), ("all_reduce", 2, True), ("all_reduce", 3, True)]
        assert list(groups.values()) == [[0, 1]]


def record_nothing(rank: int) -> tuple[bool, int]:
    import torch
    import torch.distributed as dist

    is_armed = flight_recorder.arm()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    count = len(flight_recorder.dump().calls)
    dist.destroy_process_group()
    return is_armed, count


def test_a_user_who_has_turned_the_recorder_off_is_left_alone() -> None:
    run = spawn(record_nothing, 2, env={"TORCH_FR_BUFFER_SIZE": 0}).check()
    assert set(run.results.values()) == {(False, 0)}


# -- sends and receives ------------------------------------------------------------------------------------------------


def test_cycles_are_found_each_once_from_its_lowest_rank_on() -> None:
    assert cycles({0: 1, 1: 2, 2: 0}) == [[0, 1, 2]]
    assert cycles({3: 1, 1: 3, 0: 2, 2: 0, 4: 0}) == [[0, 2], [1, 3]]
    assert cycles({0: 0}) == [[0]]


def test_a_chain_that_ends_in_a_rank_which_waits_for_nobody_is_no_cycle() -> None:
    assert cycles({0: 1, 1: 2, 3: 2}) == []
    assert cycles({}) == []


def test_a_thread_outside_torch_stands_in_no_send() -> None:
    import sys

    frame = sys._getframe()
    assert p2p_call(frame) is None
    assert p2p_call(None) is None
    assert not waits_for_work(frame)
