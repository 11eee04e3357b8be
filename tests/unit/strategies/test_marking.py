"""The marks around Lightning's actions, and the user's profiler within them."""

from __future__ import annotations

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_distplus.strategies.marking import MarkingProfiler
from lightning_distplus.watchdog import Marks


def test_an_action_is_marked_at_its_begin_and_end_also_within_itself() -> None:
    marks = Marks(phase=lambda: "step")
    profiler = MarkingProfiler(PassThroughProfiler(), marks)
    seen = []
    with profiler.profile("outer"):
        seen.append(marks.read())
        with profiler.profile("inner"), profiler.profile("outer"):
            seen.append(marks.read())
        seen.append(marks.read())
    assert [mark.operation for mark in seen] == ["outer", "outer", "after inner"]
    assert [mark.number for mark in seen] == [1, 3, 5]
    assert marks.read().operation == "after outer"


def test_the_users_profiler_measures_what_it_measures_without_the_marks() -> None:
    marks, users = Marks(phase=lambda: "step"), SimpleProfiler()
    profiler = MarkingProfiler(users, marks)
    for _ in range(2):
        with pytest.raises(KeyError), profiler.profile("an action that fails"):
            raise KeyError
    assert len(profiler.recorded_durations["an action that fails"]) == 2


def test_where_an_action_has_failed_is_kept_while_the_callbacks_hear_of_it() -> None:
    marks = Marks(phase=lambda: "step")
    profiler = MarkingProfiler(PassThroughProfiler(), marks)
    with pytest.raises(StopIteration), profiler.profile("train_dataloader_next"):
        raise StopIteration
    assert marks.read().operation == "after train_dataloader_next"  # the end of the data is no failure
    with pytest.raises(KeyError), profiler.profile("run_training_batch"), profiler.profile("a hook"):
        raise KeyError
    for callback in ("FirstWord", "ModelCheckpoint"):
        with profiler.profile(f"[Callback]{callback}.on_exception"):
            assert marks.read().operation == f"[Callback]{callback}.on_exception"
    assert marks.at_failure.operation == "a hook"
    marks.forget()
    assert marks.at_failure.operation == "after [Callback]ModelCheckpoint.on_exception"


def test_actions_with_a_number_in_their_name_are_not_kept_for_ever() -> None:
    profiler = MarkingProfiler(PassThroughProfiler(), Marks(phase=lambda: "step"))
    for number in range(3000):
        with profiler.profile(f"batch {number}"):
            pass
    assert len(profiler._actions) <= 1000
