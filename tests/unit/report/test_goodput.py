from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_distplus.report.goodput import best_interval
from lightning_distplus.report.run import describe_job, describe_runs, read_ledgers
from tests.unit.report.ledgers import BEGAN, Job, a_job_that_hung_once


def goodput_of(job: Job, mtbf_s: float | None = None) -> dict:
    (told,) = describe_runs(read_ledgers(job.home), mtbf_s)
    parts = {part["name"]: part["seconds"] for part in told["goodput"]["parts"]}
    assert sum(parts.values()) == pytest.approx(told["goodput"]["wall_s"])
    return {**told["goodput"], **parts, "attempts": told["attempts"]}


def test_every_second_of_a_job_that_hung_belongs_to_one_part(tmp_path: Path) -> None:
    found = goodput_of(a_job_that_hung_once(tmp_path))
    assert found["wall_s"] == pytest.approx(200)
    assert found["setup"] == pytest.approx(20)
    assert found["redone"] == pytest.approx(10)  # of 60 steps, ten were not saved
    assert found["detection"] == pytest.approx(20)
    assert found["restart"] == pytest.approx(10)
    assert found["data_wait"] == pytest.approx(9 * 2.0)
    assert found["checkpoint"] == pytest.approx(9 * 0.5)
    assert found["training"] == pytest.approx(50 + 90 - 9 * 2.5)
    assert found["share"] == pytest.approx(found["training"] / 200)


def test_an_incident_says_how_long_it_took_to_see_and_to_mend_and_what_it_cost(tmp_path: Path) -> None:
    (incident,) = goodput_of(a_job_that_hung_once(tmp_path))["incidents"]
    assert (incident["kind"], incident["culprits"], incident["global_step"]) == ("hang", [1], 60)
    assert incident["detect_s"] == pytest.approx(20)
    assert incident["recover_s"] == pytest.approx(20)  # the restart, and its set-up
    assert (incident["steps_lost"], incident["seconds_lost"]) == (10, pytest.approx(10))


def test_what_a_rank_waited_for_a_dead_peer_in_its_last_window_is_detection(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.train(10, 0, 20)
    job.tell(50, "steps", global_step=22, steps=2, seconds=20.0)  # written by the rank that found out
    job.hang(50, silence_s=18, step=22)
    found = goodput_of(job)
    assert found["detection"] == pytest.approx(18)
    assert found["training"] == pytest.approx(22)


def test_an_attempt_lasts_until_it_is_known_that_it_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.train(10, 0, 20)
    job.hang(60, silence_s=25, step=20)  # nobody has written anything since
    told = describe_job(read_ledgers(job.home), now=BEGAN + 100)
    assert (told["last"], told["attempts"][0]["last"]) == (BEGAN + 60, BEGAN + 60)
    assert told["goodput"]["wall_s"] == pytest.approx(60)


def test_very_many_windows_become_fewer_and_the_seconds_stay(tmp_path: Path) -> None:
    job = Job(tmp_path, num_ranks=1)
    job.start(0)
    end = job.train(10, 0, 40_000, data_s=2.0, checkpoint_s=1.0)
    ledgers = read_ledgers(job.home)
    windows = ledgers.windows["a", 0][0]
    assert len(windows) < 1024
    assert sum(window.steps for window in windows) == windows[-1].step == 40_000
    assert (windows[-1].steps, windows[0].end - windows[0].seconds) == (10, BEGAN + 10)
    assert len(describe_job(ledgers, now=BEGAN + end)["loss"][0]["points"]) > 300
    found = goodput_of(job)
    assert [found[part] for part in ("data_wait", "checkpoint", "setup")] == pytest.approx([8000, 4000, 10])
    assert found["training"] == pytest.approx(28_000)


def test_a_hang_that_was_only_reported_is_no_incident(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.train(10, 0, 20)
    job.hang(50, silence_s=18, step=22)
    job.train(60, 20, 60)
    told = describe_job(read_ledgers(job.home), now=BEGAN + 105)
    assert told["state"] == "running"
    assert told["goodput"]["incidents"] == []
    assert len(told["verdicts"]) == 1


def test_between_two_jobs_of_one_line_of_checkpoints_is_the_queue(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    end = job.train(10, 0, 20)
    job.tell(end, "saved", path="/gone/preempt-step=20.ckpt", global_step=20)
    job.tell(end, "preempted", global_step=20, reason="SIGTERM")
    later = Job(tmp_path, run_id="b")
    later.start(1030)
    later.tell(1034, "loaded", path="/gone/preempt-step=20.ckpt", global_step=20)
    later.tell(later.train(1040, 20, 40), "end", failed=False)
    stranger = Job(tmp_path, run_id="c")
    stranger.start(5000)
    jobs = describe_runs(read_ledgers(job.home))
    assert [told["runs"] for told in jobs] == [["a", "b"], ["c"]]
    parts = {part["name"]: part["seconds"] for part in jobs[0]["goodput"]["parts"]}
    assert parts["queue"] == pytest.approx(1000)
    assert parts["redone"] == parts["detection"] == 0
    assert [one["end"] for one in jobs[0]["attempts"]] == ["preempted", "done"]
    assert jobs[0]["goodput"]["incidents"] == []


def test_a_requeued_job_of_the_same_name_was_in_the_queue_meanwhile(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.tell(job.train(10, 0, 20), "preempted", global_step=20, reason="SIGTERM")
    job.start(130, attempt=1)
    job.train(140, 20, 40, attempt=1)
    found = goodput_of(job)
    assert (found["queue"], found["restart"]) == (pytest.approx(100), 0)


def test_each_second_that_is_lost_is_lost_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.tell(job.train(10, 0, 20), "failed", ranks=[1], error="RuntimeError: x", exit_code=1, global_step=20)
    job.start(40, attempt=1)  # nothing was saved
    job.train(50, 0, 20, attempt=1)
    found = goodput_of(job)
    assert (found["redone"], found["training"]) == (pytest.approx(20), pytest.approx(20))


def test_advice_needs_three_failures_or_a_rate(tmp_path: Path) -> None:
    job = a_job_that_hung_once(tmp_path)
    assert goodput_of(job)["advice"] == ""
    told = goodput_of(job, mtbf_s=3600.0)["advice"]
    assert told.startswith("save every 60 s: a failure each 60 min (as given), and 0.5 s for a save")


def test_the_best_interval_is_youngs_where_saves_are_short_and_is_bounded_where_they_are_not() -> None:
    assert best_interval(1.0, 1e6) == pytest.approx(math.sqrt(2e6), rel=0.01)
    # Daly's terms of higher order, for 5 minutes a save and a failure each 6 hours.
    higher = 1 + 0.083333 / 3 + 0.0069444 / 9
    assert best_interval(300, 21600) == pytest.approx(math.sqrt(2 * 300 * 21600) * higher - 300)
    assert best_interval(100, 50) == 50


def test_without_a_step_all_is_set_up_and_a_rank_that_fails_there_is_an_incident(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.tell(30, "failed", ranks=[1], error="RuntimeError: no such file", exit_code=1, global_step=0)
    found = goodput_of(job)
    assert found["setup"] == pytest.approx(30)
    assert [one["kind"] for one in found["incidents"]] == ["failed"]
    assert found["attempts"][0]["why"] == "RuntimeError: no such file"
