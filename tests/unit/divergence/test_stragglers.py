"""Who is late in every step, and who only now and then."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

from lightning_distplus import StragglerMonitor
from lightning_distplus.divergence.stragglers import Arrivals, Straggler

SIZE = 20


def judge(steps: list[tuple[list[float], list[float]]], step_s: float = 0.2) -> list[Straggler]:
    arrivals = Arrivals(0.2, SIZE)
    *before, last = [arrivals.add(leads, waits, step_s) for leads, waits in steps]
    assert set(map(str, before)) == {"None"}
    assert last is not None
    return last


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_that_is_late_in_every_step_is_named_with_its_part(num_ranks: int, is_early: bool) -> None:
    rng = random.Random(num_ranks)
    steps = []
    for _ in range(SIZE):
        leads = [rng.uniform(0.01, 0.03) for _ in range(num_ranks)]
        waits = [rng.uniform(0.10, 0.12) for _ in range(num_ranks)]
        if is_early:
            leads[1] += 0.1
        else:
            waits[1] = 0.0
        steps.append((leads, waits))
    (found,) = judge(steps)
    assert found.rank == 1
    assert found.wait_s == pytest.approx(0.1, abs=0.03)
    assert (found.lead_s > found.wait_s / 2) == is_early


def test_two_slow_ranks_of_a_host_are_both_named() -> None:
    found = judge([([0.01, 0.2, 0.2, 0.01, 0.01], [0.0] * 5)] * SIZE)
    assert [one.rank for one in found] == [1, 2]
    found = judge([([0.01, 0.2, 0.052, 0.01, 0.01], [0.0] * 5)] * SIZE)  # beside it 42 ms of 200, which is too little
    assert [one.rank for one in found] == [1]


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_busy_host_names_nobody(seed: int) -> None:
    rng = random.Random(seed)
    noise = lambda: [rng.expovariate(10) for _ in range(4)]  # noqa: E731
    assert judge([(noise(), noise()) for _ in range(SIZE)]) == []


def test_what_is_late_in_some_steps_or_by_little_names_nobody() -> None:
    some = [([0.01, 0.2 if step % 4 == 0 else 0.01], [0.0, 0.0]) for step in range(SIZE)]
    assert judge(some) == []
    assert judge([([0.01, 0.05], [0.0, 0.0])] * SIZE) == []  # 40 ms of 200
    assert judge([([0.1, 0.2], [0.0, 0.0])] * SIZE, step_s=1.0) == []  # a tenth of the step


def test_a_step_without_a_backward_is_left_out() -> None:
    assert Arrivals(0.2, 1).add([0.1, math.nan], [0.0, 0.0], 1.0) is None


def test_a_rank_that_becomes_slow_anywhere_in_a_window_is_named_within_50_steps() -> None:
    for begin in range(32):
        arrivals = Arrivals(0.2, 32)
        named = None
        for step in range(200):
            late_s = 0.05001 if step >= begin else 0.0
            if arrivals.add([0.01, 0.01 + late_s, 0.01], [late_s, 0.0, late_s], 0.1):
                named = step
                break
        assert named is not None
        assert named - begin < 50, begin


def test_the_part_of_the_step_that_is_longer_than_on_the_others_is_named() -> None:
    even, slow = (0.002, 0.05, 0.01), {"data": (0.065, 0.05, 0.01), "optimizer": (0.002, 0.05, 0.08)}
    for part, own in slow.items():
        arrivals = Arrivals(0.2, SIZE)
        found = [arrivals.add([0.05] * 3, [0.06, 0.0, 0.06], 0.2, [even, own, even]) for _ in range(SIZE)][-1]
        assert found is not None
        assert (found[0].rank, found[0].part) == (1, part)
    named: dict[str, Any] = {"rank": 1, "wait_s": 0.1, "lead_s": 0.0, "step_s": 0.2, "part": "data"}
    assert Straggler(**named, part_s=0.063, others_s=0.03).describe_part() == "data fetch 2.1x the median"
    assert Straggler(**named, part_s=0.05).describe_part() == "data fetch 50 ms above the median"
    arrivals = Arrivals(0.2, SIZE)
    found = [arrivals.add([0.05] * 2, [0.06, 0.0], 0.2, [even, even]) for _ in range(SIZE)][-1]
    assert found is not None
    assert (found[0].rank, found[0].part, found[0].describe_part()) == (1, "", "")  # a callback, or the logger


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_of_2_000_even_steps_nobody_is_named(num_ranks: int) -> None:
    rng = random.Random(num_ranks)
    arrivals = Arrivals(0.2, 32)
    for step in range(2000):
        # A step of 100 ms with noise of a tenth, and now and then a pause of one rank.
        times = [rng.gauss(0.1, 0.01) + (0.5 if rng.random() < 0.02 else 0.0) for _ in range(num_ranks)]
        leads = [max(took / 3, 0.0) for took in times]
        waits = [max(times) - took for took in times]
        assert not arrivals.add(leads, waits, max(times)), step


def test_64_ranks_cost_40_microseconds_a_step() -> None:
    arrivals = Arrivals(0.2, 32)
    records = [(0.01, 0.01, 0.001, 0.1, 0.01)] * 64
    began = time.thread_time()
    for _ in range(1600):
        leads, waits, *parts = zip(*records, strict=True)
        arrivals.add(leads, waits, 0.2, list(zip(*parts, strict=True)))
    assert (time.thread_time() - began) / 1600 < 40e-6


def test_arguments_that_name_nobody_or_everybody_are_refused() -> None:
    with pytest.raises(ValueError, match="share is 1"):
        StragglerMonitor(share=1)
    with pytest.raises(ValueError, match="num_steps is 0"):
        StragglerMonitor(num_steps=0)
