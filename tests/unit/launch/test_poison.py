from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from lightning_distplus.launch.supervisor import History, Poison


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poison]:
    monkeypatch.setenv("DISTPLUS_IN_HAND", "")
    monkeypatch.setenv("DISTPLUS_QUARANTINE", "")
    made = Poison(2, same_step=2, sets_apart=True)
    made.in_hand.forget()
    yield made
    made.in_hand.close()


def end(poison: Poison, *, step: int, rank: int = 1, samples: list[int]) -> None:
    poison.note(rank, History(step=step, samples={rank: samples}))


def test_the_same_samples_in_the_same_hands_are_set_apart_once_for_each_step(poison: Poison) -> None:
    for _ in range(2):
        end(poison, step=4, samples=[7, 2])
    assert poison.set_apart() == [7, 2]
    for _ in range(2):
        end(poison, step=4, samples=[3])
    assert poison.set_apart() == []  # it is not the samples
    for _ in range(2):
        end(poison, step=9, samples=[5])
    assert poison.set_apart() == [5]
    assert json.loads(os.environ["DISTPLUS_QUARANTINE"]) == [7, 2, 5]


@pytest.mark.parametrize("other", [{"samples": [1]}, {"samples": [7], "rank": 0}, {"samples": [7], "step": 3}])
def test_attempts_that_ended_differently_are_no_evidence_against_samples(poison: Poison, other: dict[str, int]) -> None:
    end(poison, **{"step": 4, "samples": [7], **other})  # type: ignore[arg-type]
    end(poison, step=4, samples=[7])
    assert poison.set_apart() == []


def test_unknown_samples_are_not_set_apart(poison: Poison) -> None:
    for _ in range(2):
        end(poison, step=4, samples=[])
    assert poison.set_apart() == []
