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
from lightning_distplus.control.collective_check import Place, Whereabouts, disagreement, sides
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


def gate_of(points: Points, plane: ControlPlane, later: timedelta) -> StepGate:
    gate = StepGate(plane, points=points, name="run")
    gate.open(later)
    return gate


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


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_at_a_point_while_the_others_wait_at_the_gate_is_named_on_all(
    guilty: int, make_job: Any, later: timedelta
) -> None:
    def wander(points: Points, plane: ControlPlane) -> None:
        points.meet(GATHER)
        gate = gate_of(points, plane, later)
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
        gate = gate_of(points, plane, later)
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
        gate = gate_of(points, plane, later)
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
        points._gates -= 1
        gate.exchange(record(), later)
        return "passed"

    assert make_job(2)(be_signalled) == ["passed"] * 2


def test_a_rank_that_has_failed_takes_part_no_more_and_the_others_hear_of_it(make_job: Any, later: timedelta) -> None:
    def fail(points: Points, plane: ControlPlane) -> bool | None:
        if plane.world.rank == 0:
            assert points.are_due
            plane.report_failure(ValueError("mine"))
            return points.are_due
        points.meet(BARRIER)
        return None

    failed, heard = make_job(2)(fail)
    assert failed is False
    assert isinstance(heard, PeerFailed)
    assert "mine" in str(heard)


def at(rank: int, place: Place, *, points: int = 0, gates: int = 0, point: Point = BARRIER) -> Whereabouts:
    return Whereabouts(rank=rank, place=place, points=points, gates=gates, point=point)


@pytest.mark.parametrize(
    ("one", "other", "excluded"),
    [
        (at(0, Place.POINT, points=3, gates=5), at(1, Place.GATE, points=2, gates=6), True),
        (at(0, Place.POINT, points=3, gates=5), at(1, Place.GATE, points=2, gates=5), False),  # an old word of rank 1
        (at(0, Place.POINT, points=3, gates=5), at(1, Place.GATE, points=3, gates=6), False),  # it has passed point 3
        (at(0, Place.POINT, points=3), at(1, Place.POINT, points=2), False),  # rank 1 is on its way
        (at(0, Place.POINT, points=3), at(1, Place.POINT, points=3), False),
        (at(0, Place.GATE, gates=2), at(1, Place.GATE, gates=1), False),
        (at(0, Place.GATE, gates=2), at(1, Place.END, gates=1), True),
        (at(0, Place.GATE, gates=2), at(1, Place.END, gates=2), False),
        (at(0, Place.END), at(1, Place.END), False),
    ],
)
def test_two_places_exclude_each_other_only_where_neither_can_go_on(
    one: Whereabouts, other: Whereabouts, excluded: bool
) -> None:
    assert one.excludes(other) is other.excludes(one) is excluded


def test_whereabouts_travel_and_come_back() -> None:
    one = Whereabouts(rank=3, place=Place.POINT, points=7, gates=2, point=GATHER, location="a.py:1")
    assert Whereabouts.from_plain(json.loads(json.dumps(asdict(one)))) == one


def test_ranks_that_stand_together_are_told_together() -> None:
    texts = {0: "in a", **dict.fromkeys(range(1, 4), "at b"), 5: "at b"}
    assert sides(texts) == "rank 0 in a; ranks 1-3, 5 at b"
    assert sides({rank: f"in {rank}" for rank in range(10)}).endswith("rank 7 in 7; and 2 more groups of ranks")


def test_ranks_that_have_not_come_are_told_too() -> None:
    places = {0: at(0, Place.POINT, points=1), 2: at(2, Place.GATE, gates=1, point=Point(operation="the gate"))}
    error = disagreement(places, 5)
    assert error.ranks == [0]
    assert "rank 2 at the gate; ranks 1, 3-4 elsewhere (wrong: rank 0)" in str(error)


def test_of_long_structures_the_first_difference_is_shown() -> None:
    long = ", ".join(f"'key{number}': float32[{number}]" for number in range(500))
    points = [Point(operation="all_gather", structure=text) for text in (long, long.replace("key300'", "other'"))]
    error = disagreement({rank: at(rank, Place.POINT, points=1, point=points[rank]) for rank in range(2)}, 2)
    assert error.field == "structure"
    assert "'key300': float32[300]" in error.values[0]
    assert "'other': float32[300]" in error.values[1]
    assert len(str(error)) < 3000
