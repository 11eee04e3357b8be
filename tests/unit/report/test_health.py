from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_distplus.report.health import FIGURES, RunHealth
from lightning_distplus.report.run import describe_runs, read_ledgers
from tests.unit.report.ledgers import Job


@dataclass
class Arrived:
    lead_s: float
    wait_s: float


def a_health(monkeypatch: pytest.MonkeyPatch, steps: list[list[Arrived]], step_s: float = 0.2) -> RunHealth:
    health, now = RunHealth(), 0.0
    for number, arrived in enumerate(steps):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        health.pass_gate(number, arrived)
        now += step_s
    monkeypatch.undo()
    return health


def test_the_slowest_rank_and_its_excess_are_those_for_which_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    step = [Arrived(0.03, 0.05), Arrived(0.03, 0.05), Arrived(0.08, 0.0), Arrived(0.03, 0.05)]
    found = a_health(monkeypatch, [step] * 10).figures()
    assert found["slowest_rank"] == 2
    assert found["slowest_excess_s"] == pytest.approx(0.1)
    assert found["step_p50_s"] == pytest.approx(0.1)  # of which it waits for nobody
    assert found["step_p95_s"] == pytest.approx(0.185)
    assert found["global_step"] == 9


def test_nobody_is_slowest_where_the_ranks_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_health(monkeypatch, [[Arrived(0.03, 0.0)] * 2] * 3).figures()
    assert (found["slowest_rank"], found["slowest_excess_s"]) == (-1, 0.0)
    assert found["step_p50_s"] == found["step_p95_s"] == pytest.approx(0.2)


def test_goodput_and_restarts_go_over_the_attempts_before_this_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    began = time.time() - 1_000_000.0 - 100  # of the clock of the ledger, 100 s ago
    job.start(began)
    job.train(began + 2, 0, 30)
    job.start(began + 60, attempt=1)
    job.tell(began + 62, "loaded", attempt=1, path="/gone/step=30.ckpt", global_step=30)
    health = RunHealth()
    health.begin(job.home, 0, "a", 1, time.time())
    found = health.figures()
    assert found["restarts"] == 1
    assert found["goodput"] == pytest.approx(0.3, abs=0.05)  # 30 of 100 s
    health.take("steps", {"steps": 10, "seconds": 25.0, "data_s": 2.0, "checkpoint_s": 3.0})
    assert health.figures()["goodput"] == pytest.approx(0.5, abs=0.05)


def test_steps_that_are_done_again_do_not_count_twice_and_the_report_says_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path)
    began = time.time() - 1_000_000.0 - 100
    job.start(began)
    job.train(began + 2, 0, 30)
    job.start(began + 60, attempt=1)
    job.tell(began + 62, "loaded", attempt=1, path="/gone/step=10.ckpt", global_step=10)  # 20 steps are lost
    health = RunHealth()
    health.begin(job.home, 0, "a", 1, time.time())
    job.train(began + 65, 10, 40, attempt=1)
    health.take("steps", {"steps": 30, "seconds": 30.0})
    (told,) = describe_runs(read_ledgers(job.home))
    trained_s = told["goodput"]["share"] * told["goodput"]["wall_s"]
    assert trained_s == pytest.approx(40.0)
    assert health.figures()["goodput"] == pytest.approx(0.4, abs=0.02)


def test_without_a_ledger_only_this_attempt_counts(tmp_path: Path) -> None:
    health = RunHealth()
    health.begin(tmp_path / "nowhere", 0, "a", 2, time.time() - 10)
    found = health.figures()
    assert found["restarts"] == 2
    assert "goodput" not in found
    assert set(found) < set(FIGURES)


def test_the_bar_shows_the_age_of_a_commit_and_a_named_rank_as_long_as_it_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    health = a_health(monkeypatch, [[Arrived(0.03, 0.05), Arrived(0.08, 0.0)]] * 10)
    assert health.for_the_bar() == {}
    health.take("straggler", {"ranks": [1]})
    health.take("saved", {"stall_s": 0.5})
    assert health.for_the_bar() == {"ckpt": "0 s ago", "slow": "rank 1 +50 ms"}
    assert health.figures()["checkpoint_stall_s"] == 0.5
    for _ in range(70):
        health.pass_gate(11, [Arrived(0.03, 0.0)] * 2)
    assert "slow" not in health.for_the_bar()


def test_a_step_of_64_ranks_takes_40_microseconds_at_most() -> None:
    health, records = RunHealth(), [Arrived(0.01, 0.01)] * 64
    began = time.thread_time()
    for step in range(1000):
        health.pass_gate(step, records)
    assert (time.thread_time() - began) / 1000 < 40e-6
