"""The benchmarks of the strategies, in a form that is too short to measure anything."""

from __future__ import annotations

import pytest

from benchmarks import one_line_cost
from benchmarks.strategy_cost import ARMS, Blocks, figures_of, measure
from tests.pairs import kept

STRATEGIES = ["ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "ResilientDeepSpeed"]


def test_every_arm_is_timed_in_every_alternation_on_both_ranks() -> None:
    check("ResilientDDP", measure("ResilientDDP", alternations=3, work_s=0.001))


@pytest.mark.parametrize("name", kept(STRATEGIES, ["ResilientDDP"]))
def test_everything_that_one_line_brings_is_timed_against_nothing_of_it(name: str) -> None:
    check(name, measure(name, 3, work_s=0.001, toggle=one_line_cost.Toggle, brings_callbacks=True))


def check(name: str, ranks: dict[int, Blocks]) -> None:
    assert sorted(ranks) == [0, 1]
    for arms in ranks.values():
        assert sorted(arms) == sorted(ARMS)
        for quantities in arms.values():
            assert {name: len(values) for name, values in quantities.items()} == {
                "wall_us": 3,
                "cpu_us": 3,
                "gate_us": 3,
            }
            assert min(quantities["wall_us"]) > 1000, "a step holds its work"
            assert all(gate < wall for gate, wall in zip(quantities["gate_us"], quantities["wall_us"], strict=True)), (
                "a call of the gate is a part of its step"
            )
    names = [figure.name for figure in figures_of(name, ranks)]
    assert len(names) == len(set(names)) == 5
