"""What stands out from a window, and what must not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lightning_distplus.divergence.spikes import Window

STEPS = 2000

Draw = Callable[[np.random.Generator, int], np.ndarray]


def drifting(rng: np.random.Generator, ranks: int) -> np.ndarray:
    """A loss that falls from 10 to 0.1, jumps back in the middle, and spikes on all ranks now and then."""
    level = np.geomspace(10, 0.1, STEPS)
    level[STEPS // 2 :] *= 30
    level[::100] *= 50
    return level[:, None] * rng.lognormal(0, 0.1, (STEPS, ranks))


def rare(rng: np.random.Generator, ranks: int) -> np.ndarray:
    """One batch in twenty is of another kind."""
    return rng.lognormal(0, 0.2, (STEPS, ranks)) * np.where(rng.random((STEPS, ranks)) < 0.05, 20, 1)


HARMLESS: dict[str, Draw] = {
    "normal": lambda rng, ranks: rng.normal(3, 0.1, (STEPS, ranks)),
    "around zero": lambda rng, ranks: rng.normal(0, 1, (STEPS, ranks)),
    "squares of one number": lambda rng, ranks: rng.chisquare(1, (STEPS, ranks)),
    "long tail": lambda rng, ranks: rng.lognormal(0, 1, (STEPS, ranks)),
    "longer tail": lambda rng, ranks: rng.pareto(2, (STEPS, ranks)),
    "constant": lambda rng, ranks: np.full((STEPS, ranks), 2.5),
    "one rank is always larger": lambda rng, ranks: rng.lognormal(0, 0.1, (STEPS, ranks)) * np.arange(1, ranks + 1),
    "drifting": drifting,
    "rare": rare,
}


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_training_does_anyway_does_not_stand_out(kind: str, ranks: int) -> None:
    values = HARMLESS[kind](np.random.default_rng(5), ranks)
    window = Window()
    assert [found for step in values for found in window.judge(step.tolist())] == []


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize(("kind", "factor"), [("normal", 5.0), ("around zero", 300.0), ("long tail", 3000.0)])
def test_a_value_of_one_rank_stands_out_with_its_rank_and_not_twice(kind: str, factor: float, ranks: int) -> None:
    values = HARMLESS[kind](np.random.default_rng(6), ranks)
    values[500, 1] = np.median(abs(values)) * factor
    values[510, 1] = values[500, 1]
    window = Window()
    found = [(number, one) for number, step in enumerate(values) for one in window.judge(step.tolist())]
    assert [(number, one.rank, one.value) for number, one in found] == [(500, 1, values[500, 1])]
    assert found[0][1].z >= 6
    assert found[0][1].usual == pytest.approx(np.median(values[436:500, 1]))


def test_how_much_larger_it_has_to_be_is_a_choice() -> None:
    for least_ratio, num_found in ((3.0, 1), (10.0, 0)):
        window = Window(least_ratio)
        assert not any(window.judge([1.0 + number % 7 / 10, 1.0]) for number in range(64))
        assert len(window.judge([8.0, 1.0])) == num_found


def test_what_is_not_finite_is_left_to_others_and_forgotten() -> None:
    window = Window()
    for value in [*[1.0, 1.1] * 20, float("nan"), float("inf"), -float("inf")]:
        assert window.judge([value, 1.0]) == []
    assert [one.rank for one in window.judge([1.0, 9.0])] == [1]


def test_nothing_is_judged_before_the_window_holds_enough() -> None:
    window = Window()
    assert [window.judge([1.0, 1.0 + number % 3 / 10]) for number in range(31)] == [[]] * 31
    assert window.judge([1.0, 100.0]) == []


def test_a_single_rank_is_judged_by_its_own_past() -> None:
    window = Window()
    assert not any(window.judge([1.0 + number % 7 / 10]) for number in range(64))
    (found,) = window.judge([500.0])
    assert (found.rank, found.value) == (0, 500.0)
