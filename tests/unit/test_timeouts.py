from __future__ import annotations

import contextlib
import dataclasses
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_distplus.timeouts import Phase, Timeouts, group_timeout, parse_duration, resolve_timeouts

ACCEPTED = [
    ("90s", 90),
    ("30m", 1800),
    ("30 m", 1800),
    ("30 min", 1800),
    ("30 Minutes", 1800),
    ("1 hour 30 minutes", 5400),
    ("2hrs", 7200),
    ("1 day", 86400),
    ("45 seconds", 45),
    ("2h", 7200),
    ("1d", 86400),
    ("500ms", 0.5),
    ("1h30m", 5400),
    ("1.5h", 5400),
    (" 2H ", 7200),
    ("0:30:00", 1800),
    ("1:00:00", 3600),
    ("0:00:02.5", 2.5),
    ("1 day, 0:00:01", 86401),
    ("2 days, 1:00:00", 176400),
    ("600", 600),
    ("1e3", 1000),
    (600, 600),
    (0.25, 0.25),
    (timedelta(minutes=3), 180),
]
REFUSED = [
    "30 mi", "30 minutess", "30m and", "", "soon", "30q", "m", "-5s", "0s", "1:00", "1:60:00", "1:00:61", "nan", "inf",
    "${timeout}", "auto", -1,
    0, 0.0, float("nan"), float("inf"), True, False, None, [30], b"30m", timedelta(0), timedelta(seconds=-1), 1e-9,
    10**400, 1e300, "9999999999d", "999999999999 days, 0:00:00", "9" * 400 + "s",
]  # fmt: skip


def test_a_duration_is_read_in_every_form() -> None:
    for value, seconds in ACCEPTED:
        assert parse_duration(value) == timedelta(seconds=seconds), value


def test_anything_else_is_refused_with_the_field_and_the_accepted_forms() -> None:
    message = r'^x is .*Accepted: "90s", "30m", "30 minutes", "2h", "1d", "1h30m", "0:30:00", a number'
    for value in REFUSED:
        with pytest.raises(ValueError, match=message):
            print(value, parse_duration(value, field="x"))


@given(st.text(max_size=12))
def test_no_text_ends_in_another_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_duration(text) > timedelta(0)


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=10_000)))
def test_a_timedelta_and_its_text_are_the_same_duration(value: timedelta) -> None:
    assert parse_duration(str(value)) == parse_duration(value) == value


def test_defaults_are_those_of_the_contract() -> None:
    minutes = {phase.value: Timeouts().deadline(phase).total_seconds() / 60 for phase in Phase}
    assert minutes == {
        "rendezvous": 10, "setup": 30, "data": 120, "resume": 60, "step": 10, "validation": 30, "checkpoint": 60,
        "teardown": 5,
    }  # fmt: skip
    assert Timeouts().report_after == timedelta(seconds=30)


def test_every_field_takes_every_form_and_is_a_timedelta_inside() -> None:
    timeouts = Timeouts(step="2m", checkpoint=90, rendezvous="0:05:00", data=timedelta(hours=1), report_after=None)
    assert timeouts.deadline(Phase.STEP) == timedelta(minutes=2)
    assert timeouts.deadline(Phase.CHECKPOINT) == timedelta(seconds=90)
    assert timeouts.deadline(Phase.RENDEZVOUS) == timedelta(minutes=5)
    assert timeouts.report_after is None
    assert Timeouts(report_after="5s").report_after == timedelta(seconds=5)


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"Timeouts\.step is '5q', which is no duration"):
        Timeouts(step="5q")
    with pytest.raises(ValueError, match=r"Timeouts\.setup is None"):
        Timeouts(setup=None)
    with pytest.raises(TypeError, match="stepp"):
        Timeouts(stepp="5s")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Timeouts().step = 5


def test_one_long_value_sets_the_step_and_what_cannot_be_shorter() -> None:
    timeouts = resolve_timeouts("3h")
    hours = {phase.value: timeouts.deadline(phase).total_seconds() / 3600 for phase in Phase}
    assert hours == {
        "rendezvous": 1 / 6, "setup": 3, "data": 3, "resume": 3, "step": 3, "validation": 3, "checkpoint": 3,
        "teardown": 1 / 12,
    }  # fmt: skip


@pytest.mark.parametrize("value", ["90s", 90, 90.0, "0:01:30", timedelta(seconds=90)])
def test_one_short_value_sets_the_step_alone(value: object) -> None:
    assert resolve_timeouts(value) == Timeouts(step=90)


def test_a_mapping_is_the_same_as_timeouts() -> None:
    assert resolve_timeouts({"step": "2m", "checkpoint": 90}) == Timeouts(step="2m", checkpoint="90s")
    assert resolve_timeouts({}) == Timeouts()


def test_a_misspelt_phase_is_refused_with_the_phases() -> None:
    with pytest.raises(ValueError, match=r"no phase 'stepp'\. Phases: rendezvous, setup, data, .*, report_after"):
        resolve_timeouts({"stepp": "2m"})


def test_none_stays_none_and_timeouts_stay_themselves() -> None:
    assert resolve_timeouts(None) is None
    timeouts = Timeouts(step=5)
    assert resolve_timeouts(timeouts) is timeouts


@pytest.mark.parametrize("value", ["30q", [30], True, "-1s"])
def test_a_wrong_timeout_is_refused_with_every_accepted_form(value: object) -> None:
    with pytest.raises(ValueError, match=r"^timeout is .*Accepted: .* Also accepted: Timeouts\(step=.*, or None"):
        resolve_timeouts(value)


def test_a_group_waits_longer_than_the_deadline() -> None:
    assert group_timeout(timedelta(seconds=30)) == timedelta(seconds=40)
    assert group_timeout(timedelta(minutes=10)) == timedelta(minutes=11)
    assert group_timeout(timedelta(minutes=10), "report") == timedelta(hours=24)
    assert group_timeout(timedelta(days=3), "report") == timedelta(days=3)
