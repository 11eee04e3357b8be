"""The schedule of global batches: what Megatron-LM's formula says, and sums that a plain count agrees with."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_distplus.data.batch_schedule import BatchSchedule, Window

stages = st.dictionaries(st.integers(1, 60), st.integers(1, 12), max_size=4).flatmap(
    lambda later: st.integers(1, 12).map(lambda first: ((0, first), *sorted(later.items())))
)


@given(stages=stages, skipped=st.integers(0, 10), num_samples=st.integers(0, 120))
def test_sums_are_those_of_a_plain_count(stages: tuple[tuple[int, int], ...], skipped: int, num_samples: int) -> None:
    schedule = BatchSchedule(stages)
    first = 0
    for _ in range(skipped):
        first += schedule.size_at(first)
    here, num_steps = first, 0
    while here + schedule.size_at(here) <= first + num_samples:
        here += schedule.size_at(here)
        num_steps += 1
    assert schedule.whole_steps(first, num_samples) == (num_steps, here - first)
    assert schedule.samples_of(first, num_steps) == here - first


def test_ramp_is_megatrons() -> None:
    start, increment, samples, size = 32, 16, 1000, 112
    schedule = BatchSchedule.ramp(start, increment, samples, size)
    per_increment = samples / ((size - start) / increment)  # megatron/core/num_microbatches_calculator.py
    for consumed in range(1500):
        expected = size if consumed > samples else start + int(consumed / per_increment) * increment
        assert schedule.size_at(consumed) == expected, consumed
    assert BatchSchedule.ramp(64, 8, 0, 64).stages == ((0, 64),)
    assert (
        str(schedule) == "32 from sample 0 on, 48 from sample 200 on, 64 from sample 400 on, 80 from sample 600 on, "
        "... 112 in the end"
    )


def test_what_is_left_is_the_same_for_schedules_that_differ_in_the_past_alone() -> None:
    one, other = BatchSchedule(((0, 4), (20, 8), (40, 12))), BatchSchedule(((0, 2), (10, 6), (24, 8), (40, 12)))
    assert one.rest(3) != other.rest(3)
    assert one.rest(24) == other.rest(24) != ""
    assert one.rest(40) == "", "as if there had been no schedule"


@pytest.mark.parametrize(
    ("stages", "words"),
    [((), "begin at samples"), (((5, 4),), "first begins at 0"), (((0, 4), (0, 8)), "after the one before"),
     (((0, 4), (8, 0)), "at least 1")],
)  # fmt: skip
def test_stages_that_do_not_ascend_are_refused(stages: tuple[tuple[int, int], ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BatchSchedule(stages)
    with pytest.raises(ValueError, match="64 - 30 is no multiple of 16"):
        BatchSchedule.ramp(30, 16, 100, 64)
    with pytest.raises(ValueError, match="increment of at least 1"):
        BatchSchedule.ramp(32, 0, 100, 64)


def test_window_counts_from_the_beginning_of_its_stage() -> None:
    window = Window(3, first_batch=4)
    assert [number % window == 0 for number in (4, 5, 6, 7, 8, 9, 10)] == [True, False, False, True, False, False, True]
    assert window == 3
    assert 7 / window == 7 / 3
    copy = pickle.loads(pickle.dumps(window))
    assert (copy, copy.first_batch, 10 % copy) == (3, 4, 0)
