"""The benchmark of the strategies, in a form that is too short to measure anything."""

from __future__ import annotations

from benchmarks.strategy_cost import ARMS, figures_of, measure


def test_every_arm_is_timed_in_every_alternation_on_both_ranks() -> None:
    ranks = measure("ResilientDDP", alternations=3, work_s=0.001)
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
    names = [figure.name for figure in figures_of("ResilientDDP", ranks)]
    assert len(names) == len(set(names)) == 5
