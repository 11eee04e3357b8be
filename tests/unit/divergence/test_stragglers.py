"""Who is late in every step, and who only now and then."""

from __future__ import annotations

import math
import random

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


def test_arguments_that_name_nobody_or_everybody_are_refused() -> None:
    with pytest.raises(ValueError, match="share is 1"):
        StragglerMonitor(share=1)
    with pytest.raises(ValueError, match="num_steps is 0"):
        StragglerMonitor(num_steps=0)
