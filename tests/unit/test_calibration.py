"""``timeout="auto"``: up at once, down step by step, never below the floor nor above the default."""

from __future__ import annotations

import pytest

from lightning_distplus.timeouts import MEASURED_GATES, Calibration, Phase, Timeouts


def step_s(calibration: Calibration, *seconds: float) -> float:
    calibration.settle([{"step": taken} for taken in seconds])
    return calibration.timeouts().step.total_seconds()


def test_the_slowest_rank_counts_and_a_run_that_becomes_slower_gets_its_deadline_at_once() -> None:
    calibration = Calibration()
    assert step_s(calibration, 1.0, 4.0) == 80
    assert calibration.reasons["step"] == "20 times the longest, 4.00 s on rank 1"
    assert step_s(calibration, 12.0, 4.0) == 240
    assert calibration.reasons["step"] == "20 times the longest, 12.00 s on rank 0"


def test_a_run_that_becomes_faster_gets_a_shorter_deadline_step_by_step() -> None:
    calibration = Calibration()
    step_s(calibration, 20.0)
    found = [step_s(calibration, 5.0) for _ in range(30)]
    assert found[0] == pytest.approx(20 * (20 - 0.2 * 15))
    assert "on the way down to the longest, 5.00 s on rank 0" in calibration.reasons["step"]
    assert found == sorted(found, reverse=True)
    assert 100 < found[-1] < 112


def test_the_floor_and_the_default_bound_every_deadline() -> None:
    assert step_s(Calibration(), 0.1) == 60
    assert step_s(Calibration(), 1000.0) == Timeouts().step.total_seconds()


def test_a_change_of_less_than_a_tenth_is_none_and_a_phase_that_is_absent_keeps_what_it_has() -> None:
    calibration = Calibration()
    assert calibration.settle([{"step": 5.0, "validation": 30.0}])
    assert not calibration.settle([{"step": 5.2}])
    assert calibration.deadlines_s == {"step": 100, "validation": 600}
    assert calibration.reasons["checkpoint"] == "the default: none in the first 50 steps"


def test_reviews_come_about_every_ten_seconds_and_at_once_where_a_rank_is_late() -> None:
    calibration = Calibration()
    dues = [calibration.is_due() for _ in range(MEASURED_GATES)]
    assert dues == [False] * (MEASURED_GATES - 1) + [True]
    calibration.settle([{"step": 0.1}])
    assert [calibration.is_due() for _ in range(100)].index(True) == 99
    assert calibration.is_due(somebody_is_late=True)


def test_a_rank_is_late_when_a_phase_has_taken_a_quarter_of_its_deadline() -> None:
    calibration = Calibration()
    calibration.note(Phase.STEP, 500.0)
    assert not calibration.is_late, "nothing has been agreed yet"
    assert calibration.take() == {"step": 500.0}
    step_s(calibration, 1.0)
    calibration.note(Phase.STEP, 14.0)
    assert not calibration.is_late
    calibration.note(Phase.STEP, 16.0)
    assert calibration.is_late
    assert calibration.take() == {"step": 16.0}
    assert (calibration.is_late, calibration.take()) == (False, {})


def test_a_run_that_resumes_goes_on_from_the_deadlines_of_the_checkpoint() -> None:
    calibration = Calibration()
    calibration.adopt({"step": 200.0})
    assert calibration.timeouts().step.total_seconds() == 200
    assert "from the checkpoint" in calibration.reasons["step"]
    assert step_s(calibration, 4.0) == pytest.approx(20 * (10 - 0.2 * 6))


def test_what_occurs_once_has_a_quarter_of_its_default_at_least_and_is_kept_until_it_occurs_again() -> None:
    calibration = Calibration()
    calibration.settle([{"setup": 2.0, "resume": 60.0}, {"setup": 3.0, "resume": 70.0}])
    assert calibration.deadlines_s == {"setup": 450, "resume": 1400}
    assert calibration.reasons["setup"] == "20 times the longest, 3.00 s on rank 1; that is the least"
    assert not calibration.settle([{}, {}])
    assert calibration.deadlines_s == {"setup": 450, "resume": 1400}


def test_a_checkpoint_of_three_phases_leaves_the_others_their_defaults_until_they_are_measured() -> None:
    calibration = Calibration()
    calibration.note(Phase.RESUME, 90.0)
    calibration.adopt({"step": 200.0, "validation": 100.0, "checkpoint": 90.0, "of_a_later_release": 7.0})
    assert set(calibration.deadlines_s) == {"step", "validation", "checkpoint"}
    assert calibration.timeouts().resume == Timeouts().resume
    calibration.settle([calibration.take()])
    assert calibration.timeouts().resume.total_seconds() == 1800
    assert calibration.timeouts().step.total_seconds() == 200


def test_each_phase_is_told_with_a_reason_also_where_it_keeps_its_default() -> None:
    calibration = Calibration()
    calibration.settle([{"step": 1.0}])
    told = calibration.to_event()
    assert set(told["reasons"]) == set(told["deadlines_s"]) == {phase.value for phase in Phase}
    assert told["reasons"]["resume"] == "the default: none in the first 50 steps"
    assert told["reasons"]["data"] == "the default: no checkpoint is read before it"
    assert told["deadlines_s"]["data"] == 7200
