"""Named points: who differs is found at once, who is alone is found when the others wait elsewhere, nobody else is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_distplus.control import ControlPlane, GateRecord, Point, Points, StepGate
from lightning_distplus.control.collective_check import BACKWARDS, END, GATES, POINTS, Whereabouts, disagreement, sides
from lightning_distplus.errors import DivergenceError, PeerFailed, PeerMissing

BARRIER = Point(operation="barrier", name="x")
GATHER = Point(operation="all_gather", structure="float32[2]")
one_host_or_two = pytest.mark.parametrize("num_nodes", [1, 2])


@pytest.fixture
def make_job(make_ranks: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Runs a function of (points, plane) on every rank, each on a thread of its own."""
    all_points: list[Points] = []

    def make(
        size: int, patience_s: float = 15.0, num_nodes: int = 1
    ) -> Callable[[Callable[[Points, ControlPlane], Any]], list[Any]]:
        ranks = make_ranks(size, num_nodes=num_nodes)

        def call(function: Callable[[Points, ControlPlane], Any]) -> list[Any]:
            def on_rank(plane: ControlPlane) -> Any:
                plane.listen()
                patience = timedelta(seconds=patience_s)
                locate = lambda: f"user.py:{plane.world.rank}"  # noqa: E731
                points = Points(plane, waits=SimpleNamespace(patience=patience), locate=locate, name="run")
                points.begin()
                all_points.append(points)
                return function(points, plane)

            return ranks.run(on_rank)

        call.num_keys = ranks.num_keys
        return call

    yield make
    for points in all_points:
        points.end()


class Gate(StepGate):
    """A step gate at which those that wait at a point see who waits, as in a Trainer."""

    def __init__(self, points: Points, plane: ControlPlane, later: timedelta) -> None:
        super().__init__(plane, name="run")
        self.points = points
        self.open(later)

    def exchange(self, record: GateRecord, deadline: timedelta) -> list[GateRecord]:
        self.points.enter_gate(record)
        try:
            return super().exchange(record, deadline)
        finally:
            self.points.leave_gate()


def record(step: int = 0) -> GateRecord:
    return GateRecord(global_step=step, micro_batch=step, epoch=0)


@one_host_or_two
def test_equal_points_pass_however_many_there_are_and_leave_few_keys(
    num_nodes: int, make_job: Any, later: timedelta
) -> None:
    job = make_job(3, num_nodes=num_nodes)

    def pass_many(points: Points, plane: ControlPlane) -> str:
        for number in range(50):
            points.meet(Point(operation="barrier", name=str(number)))
        return "passed"

    assert job(pass_many) == ["passed"] * 3
    assert job.num_keys() < 12


@one_host_or_two
def test_another_point_at_the_same_number_is_an_error_on_all_ranks_with_both_sides(
    num_nodes: int, make_job: Any, later: timedelta
) -> None:
    def differ(points: Points, plane: ControlPlane) -> None:
        points.meet(BARRIER)
        points.meet(GATHER if plane.world.rank == 1 else BARRIER)

    errors = make_job(3, num_nodes=num_nodes)(differ)
    assert [type(error) for error in errors] == [DivergenceError] * 3
    for error in errors:
        assert (error.ranks, error.field) == ([1], "collective")
        assert "at call 2 of this run" in str(error)
        assert error.values == {
            0: "in barrier 'x' at user.py:0",
            1: "in all_gather of float32[2] at user.py:1",
            2: "in barrier 'x' at user.py:2",
        }


def test_the_points_of_groups_are_counted_apart_and_compared_by_their_ranks(make_job: Any, later: timedelta) -> None:
    """Ranks 0-1 and 2-3 go at their own pace, and differ in one group only."""

    def go(points: Points, plane: ControlPlane) -> None:
        rank = plane.world.rank
        group = (0, 1) if rank < 2 else (2, 3)
        for number in range(5 + rank // 2):
            points.meet(Point(operation="all_reduce", name=str(number)), group)
        points.meet(BARRIER)
        points.meet(GATHER if rank == 3 else BARRIER, group)

    job = make_job(4)
    errors = job(go)
    assert [type(error) for error in errors[2:]] == [DivergenceError] * 2
    for error in errors[2:]:
        assert (error.ranks, error.field) == ([2, 3], "collective")
        assert "at a call of ranks 2-3" in str(error)
        assert error.values == {2: "in barrier 'x' at user.py:2", 3: "in all_gather of float32[2] at user.py:3"}
    assert job.num_keys() < 20


def test_ranks_that_wait_for_each_other_in_different_groups_are_found(make_job: Any, later: timedelta) -> None:
    """Rank 0 waits in a group without rank 2, which is at the gate."""

    def cross(points: Points, plane: ControlPlane) -> None:
        gate = Gate(points, plane, later)
        if plane.world.rank < 2:
            points.meet(BARRIER, (0, 1) if plane.world.rank == 0 else (0, 1, 2))
        gate.exchange(record(), later)

    for error in make_job(3)(cross):
        assert (type(error), error.ranks) == (DivergenceError, [0, 1])
        assert error.values.keys() >= {0, 1}


def test_a_word_of_a_call_among_others_is_not_taken_for_where_a_rank_stands_now(make_job: Any) -> None:
    """Ranks 2-3 have said where they wait for each other; rank 2 comes late to the call in which rank 3 differs."""

    def differ(points: Points, plane: ControlPlane) -> None:
        if plane.world.rank >= 2:
            time.sleep(0.2 * (plane.world.rank - 2))
            points.meet(Point(operation="all_reduce"), (2, 3))
        time.sleep(0.4 * (plane.world.rank == 2))
        points.meet(GATHER if plane.world.rank == 3 else BARRIER)

    for error in make_job(4)(differ):
        assert (type(error), error.ranks) == (DivergenceError, [3])
        assert error.values[2] == "in barrier 'x' at user.py:2"


def test_a_rank_that_does_not_come_to_a_call_of_its_group_is_named_and_nobody_else(make_job: Any) -> None:
    def come_late(points: Points, plane: ControlPlane) -> None:
        if plane.world.rank == 1:
            points.meet(BARRIER, (1, 3))

    _, alone, _, _ = make_job(4, patience_s=1.2)(come_late)
    assert (type(alone), alone.ranks) == (PeerMissing, [3])


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_at_a_point_while_the_others_wait_at_the_gate_is_named_on_all(
    guilty: int, make_job: Any, later: timedelta
) -> None:
    def wander(points: Points, plane: ControlPlane) -> None:
        points.meet(GATHER)
        gate = Gate(points, plane, later)
        gate.exchange(record(), later)
        started.append(time.monotonic())
        if plane.world.rank == guilty:
            points.meet(BARRIER)
        gate.exchange(record(1), later)

    started: list[float] = []
    for error in make_job(2)(wander):
        assert isinstance(error, DivergenceError)
        assert error.ranks == [guilty]
        assert f"rank {guilty} in barrier 'x' at user.py:{guilty}" in str(error)
        assert "at the step gate of batch 1" in str(error)
    assert time.monotonic() - max(started) < 2.0


def test_a_run_that_has_ended_on_one_rank_is_seen_by_those_who_wait(make_job: Any, later: timedelta) -> None:
    def end_early(points: Points, plane: ControlPlane) -> None:
        if plane.world.rank == 0:
            points.end()
            return
        points.meet(BARRIER)

    ended, waited = make_job(2)(end_early)
    assert ended is None
    assert isinstance(waited, DivergenceError)
    assert "rank 0 has ended its run; rank 1 has not: in barrier 'x' at user.py:1" in str(waited)


def test_alone_and_early_is_a_missing_peer_only_after_the_deadline(make_job: Any) -> None:
    def come_late(points: Points, plane: ControlPlane) -> None:
        if plane.world.rank == 0:
            points.meet(BARRIER)

    alone, _ = make_job(2, patience_s=1.2)(come_late)
    assert isinstance(alone, PeerMissing)
    assert alone.ranks == [1]
    assert "barrier 'x'" in str(alone)


def test_a_rank_that_comes_late_to_points_and_gates_raises_no_alarm(make_job: Any, later: timedelta) -> None:
    def be_slow(points: Points, plane: ControlPlane) -> str:
        gate = Gate(points, plane, later)
        for step in range(2):
            if plane.world.rank == step:
                time.sleep(1.0)
            points.meet(BARRIER)
            if plane.world.rank == 1 - step:
                time.sleep(1.0)
            gate.exchange(record(step), later)
        return "passed"

    assert make_job(2)(be_slow) == ["passed"] * 2


def test_a_contradiction_that_dissolves_within_a_moment_raises_no_alarm(make_job: Any, later: timedelta) -> None:
    """A signal handler puts rank 0 into a call from between two steps, and rank 1 from within the gate, later."""

    def be_signalled(points: Points, plane: ControlPlane) -> str:
        gate = Gate(points, plane, later)
        if plane.world.rank == 0:
            points.meet(BARRIER)
            gate.exchange(record(), later)
            return "passed"
        points.enter_gate(record())
        since = time.monotonic()
        while time.monotonic() - since < 0.3:
            points.while_waiting(time.monotonic() - since)
            time.sleep(0.01)
        points.leave_gate()
        points.meet(BARRIER)
        points._begun[GATES] -= 1
        gate.exchange(record(), later)
        return "passed"

    assert make_job(2)(be_signalled) == ["passed"] * 2


def test_a_rank_that_has_failed_takes_part_no_more_and_the_others_hear_of_it(make_job: Any, later: timedelta) -> None:
    def fail(points: Points, plane: ControlPlane) -> bool | None:
        if plane.world.rank == 0:
            assert points.are_due
            with points.covering():
                assert not points.are_due, "what a compared call takes inside is not compared"
            assert points.are_due
            plane.report_failure(ValueError("mine"))
            return points.are_due
        points.meet(BARRIER)
        return None

    failed, heard = make_job(2)(fail)
    assert failed is False
    assert isinstance(heard, PeerFailed)
    assert "mine" in str(heard)


GROUP = "1-2"


def at(rank: int, sequence: str, *, point: Point = BARRIER, ranks: tuple[int, ...] = (), **begun: int) -> Whereabouts:
    begun = {POINTS: 0, GATES: 0, **begun}
    return Whereabouts(rank=rank, sequence=sequence, begun={sequence: 1, **begun}, point=point, ranks=ranks)


def test_of_a_call_of_a_group_its_ranks_decide_and_not_those_at_the_gate() -> None:
    gates = {rank: at(rank, GATES, gates=1, point=Point(operation="the gate")) for rank in range(2, 7)}
    calls = {rank: at(rank, "0-1-2", ranks=(0, 1, 2)) for rank in range(2)}
    assert disagreement({**calls, **gates}, range(7)).ranks == [2]


def in_group(rank: int, number: int, **begun: int) -> Whereabouts:
    return at(rank, GROUP, ranks=(1, 2), **{GROUP: number, **begun})


@pytest.mark.parametrize(
    ("one", "other", "excluded"),
    [
        (at(0, POINTS, points=3, gates=5), at(1, GATES, points=2, gates=6), True),
        (at(0, POINTS, points=3, gates=5), at(1, GATES, points=2, gates=5), False),  # an old word of rank 1
        (at(0, POINTS, points=3, gates=5), at(1, GATES, points=3, gates=6), False),  # it has passed point 3
        (at(0, POINTS, points=3), at(1, POINTS, points=2), False),  # rank 1 is on its way
        (at(0, POINTS, points=3), at(1, POINTS, points=3), False),
        (at(0, GATES, gates=2), at(1, GATES, gates=1), False),
        (at(0, GATES, gates=2), at(1, END, gates=1), True),
        (at(0, GATES, gates=2), at(1, END, gates=2), False),
        (at(0, END), at(1, END), False),
        (at(0, POINTS, points=3), in_group(1, 2, points=2), False),  # it waits for rank 2, not for rank 0
        (at(2, POINTS, points=3), in_group(1, 2, points=2), True),
        (at(2, POINTS, points=3, **{GROUP: 2}), in_group(1, 2, points=2), False),  # rank 2 has been there
        (in_group(1, 2, gates=1), at(2, GATES, gates=2, **{GROUP: 1}), True),
        (in_group(1, 2), at(2, BACKWARDS, backwards=1), True),
    ],
)
def test_two_places_exclude_each_other_only_where_neither_can_go_on(
    one: Whereabouts, other: Whereabouts, excluded: bool
) -> None:
    assert one.excludes(other) is other.excludes(one) is excluded


def test_whereabouts_travel_and_come_back() -> None:
    begun = {POINTS: 7, GATES: 2}
    one = Whereabouts(rank=3, sequence="1-3", begun=begun, point=GATHER, ranks=(1, 3), location="a.py:1")
    assert Whereabouts.from_plain(json.loads(json.dumps(asdict(one)))) == one


def test_ranks_that_stand_together_are_told_together() -> None:
    texts = {0: "in a", **dict.fromkeys(range(1, 4), "at b"), 5: "at b"}
    assert sides(texts) == "rank 0 in a; ranks 1-3, 5 at b"
    assert sides({rank: f"in {rank}" for rank in range(10)}).endswith("rank 7 in 7; and 2 more groups of ranks")


def test_ranks_that_have_not_come_are_told_too() -> None:
    places = {0: at(0, POINTS, points=1), 2: at(2, GATES, gates=1, point=Point(operation="the gate"))}
    error = disagreement(places, range(5))
    assert error.ranks == [0]
    assert "rank 2 at the gate; ranks 1, 3-4 elsewhere (wrong: rank 0)" in str(error)


def test_of_long_structures_the_first_difference_is_shown() -> None:
    long = ", ".join(f"'key{number}': float32[{number}]" for number in range(500))
    points = [Point(operation="all_gather", structure=text) for text in (long, long.replace("key300'", "other'"))]
    error = disagreement({rank: at(rank, POINTS, points=1, point=points[rank]) for rank in range(2)}, range(2))
    assert error.field == "structure"
    assert "'key300': float32[300]" in error.values[0]
    assert "'other': float32[300]" in error.values[1]
    assert len(str(error)) < 3000
