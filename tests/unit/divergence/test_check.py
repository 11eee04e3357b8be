"""How rare the monitor's looks become, so that they take no more than their share of a step."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_distplus import RankDivergenceMonitor
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence import settings
from lightning_distplus.divergence.check import Budget, Check, GateMonitor
from lightning_distplus.divergence.replicas import ReplicaCheck, Windows
from lightning_distplus.divergence.settings import BatchCheck, StartCheck
from lightning_distplus.preflight.agreement import compare

FIGURES = {"step": 0.020, "state": 0.001, "batch": 0.0001, "everything": 0.001}


def test_nothing_waits_before_all_ranks_have_measured() -> None:
    budget = Budget(0.005)
    budget.agree([FIGURES, {}])
    assert [budget.exceeds(look) for look in ("state", "batch", "everything")] == [1, 1, 1]


def test_a_look_takes_at_most_its_part_of_the_share() -> None:
    budget = Budget(0.005)  # 100 us of a step: 50 for windows, 25 for the batch, 25 for full comparisons
    budget.agree([FIGURES, FIGURES])
    assert (budget.exceeds("state"), budget.exceeds("batch"), budget.exceeds("everything")) == (20, 4, 40)
    assert (budget.exceeds("state", 16), budget.exceeds("everything", 50)) == (2, 1)


def test_place_and_structure_are_said_in_each_step_and_samples_as_often_as_the_budget_allows() -> None:
    check: Any = BatchCheck(1)
    budget = Budget(0.005)
    budget.agree([FIGURES, FIGURES])
    check.run = SimpleNamespace(budget=budget, trainer=None, sample_ids=lambda: None)
    check._loaders, check._mine, check._compares_structure, check._reads_every = [], 0, True, 1
    said = [check.say(torch.ones(2), step) for step in range(8)]
    assert all(one["data_fingerprint"] and one["batch_structure"] for one in said)
    assert ["batch_content" in one for one in said] == [True, False, False, False] * 2


def test_a_batch_has_its_structure_and_content_in_whatever_order_a_rank_has_filled_it() -> None:
    batch = {"tokens": torch.ones(2), "names": ["a"], 3: {"b": torch.zeros(1), "a": 1}}
    turned = {3: {"a": 1, "b": torch.zeros(1)}, "names": ["a"], "tokens": torch.ones(2)}
    assert repr(settings._structure(batch, True)) == repr(settings._structure(turned, True))
    assert settings._content(batch) == settings._content(turned)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_window_on_a_device_is_said_a_step_later_so_that_nothing_waits_for_it(is_on_device: bool) -> None:
    check: Any = ReplicaCheck()
    trainer, tensor = SimpleNamespace(global_step=0), torch.zeros(2)
    check.run = SimpleNamespace(budget=Budget(None), trainer=trainer, gate=None)
    check._windows, check._due_at, check._is_on_device = Windows([tensor], 1), 100, is_on_device
    said, agreed_at = [], []
    for step in range(4):
        trainer.global_step = step
        said.append(check.say(None, step).get("state_fingerprint"))
        check.hear([GateRecord(global_step=step, micro_batch=0, epoch=0)] * 2)
        agreed_at.append(check._agreed_at[0])
        tensor += step == 1
    assert said == ([None, said[1], said[1], said[3]] if is_on_device else [said[0], said[0], said[2], said[2]])
    assert len({one for one in said if one}) == 2
    assert agreed_at == ([0, 0, 1, 2] if is_on_device else [0, 1, 2, 3])


def test_the_largest_cost_and_the_shortest_step_count() -> None:
    budget = Budget(0.005)
    budget.agree([{**FIGURES, "state": 0.002}, {**FIGURES, "step": 0.010}])
    assert budget.exceeds("state") == 80


def test_without_a_share_nothing_waits() -> None:
    budget = Budget(None)
    budget.agree([FIGURES])
    assert budget.exceeds("state") == 1


def test_what_a_rank_shows_are_medians_of_many_steps() -> None:
    budget = Budget(0.005)
    for _ in range(20):
        budget.begin_step()
    assert budget.figures() == {}
    budget.begin_step()
    began = time.thread_time()
    sum(range(10_000))
    budget.took("state", began, scale=16)
    found = budget.figures()
    assert sorted(found) == ["state", "step"]
    assert 0 < found["step"] < found["state"]


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.5])
def test_a_share_that_is_none_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match=r"budget is .* above 0 and at most 1, or None"):
        RankDivergenceMonitor(budget=budget)


def test_training_without_the_callbacks_starts_no_comparison() -> None:
    started: list[str] = []
    monitor: Any = GateMonitor([Noting(started)])
    trainer = SimpleNamespace(callbacks=[], loggers=[])
    monitor._run = SimpleNamespace(trainer=trainer, is_attached=True, is_stock=False)
    for trainer.callbacks in ([], [monitor]):  # a LearningRateFinder takes them away
        monitor._start(lambda: started.append("the strategy"))
    assert started == ["the strategy", "the strategy", "the check"]


def test_a_strategy_has_its_own_methods_back_at_the_end() -> None:
    monitor: Any = GateMonitor()
    strategy = SimpleNamespace(setup=monitor._set_up, on_train_start=monitor._start, kept=1)
    monitor._run = SimpleNamespace(is_attached=False, close=lambda: None)
    monitor.teardown(SimpleNamespace(strategy=strategy), None, "fit")
    assert vars(strategy) == {"kept": 1}


@pytest.mark.parametrize("is_stock", [True, False])
def test_on_a_stock_strategy_errors_at_the_start_are_raised_and_the_rest_is_noted(
    is_stock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[dict[str, Any]] = [
        {"trainer.max_steps": 3 + rank, "initial_weights": str(rank), "hyperparameters.lr": rank} for rank in range(2)
    ]
    monkeypatch.setattr(settings, "disagreements", lambda *_: list(compare(statements, ["rank 0", "rank 1"])))
    monkeypatch.setattr(settings, "state_before_training", lambda trainer: {})
    told: list[tuple[str, dict[int, Any]]] = []
    check: Any = StartCheck()
    check.run = SimpleNamespace(plane=None, patience=None, trainer=None, rank=0, is_stock=is_stock)
    check.run.tell = lambda error: told.append((error.field, error.values))
    check.run.note = lambda kind, field, ranks, values: told.append((f"{kind} {field}", values))
    check.start()
    wanted = [
        ("max_steps", {0: 3, 1: 4}),
        ("difference initial_weights", {0: "0", 1: "1"}),
        ("difference hyperparameters.lr", {0: 0, 1: 1}),
    ]
    assert told == wanted * is_stock


class Noting(Check):
    def __init__(self, started: list[str]) -> None:
        self.started = started

    def start(self) -> None:
        self.started.append("the check")


def test_a_trainer_that_never_logs_is_no_division_by_zero() -> None:
    monitor: Any = GateMonitor()
    monitor._run = object()
    trainer: Any = SimpleNamespace(log_every_n_steps=0, loggers=[None], global_step=1)
    monitor.on_train_batch_end(trainer, None, None, None, 0)
