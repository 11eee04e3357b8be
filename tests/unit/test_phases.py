from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_distplus import _compat
from lightning_distplus.run_access import Phases
from lightning_distplus.timeouts import Phase, Timeouts

TIMEOUTS = Timeouts(setup=300, step=100, validation=200, checkpoint=400, data=500)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


def in_force() -> list[float]:
    return [_compat.read_group_timeout(group).total_seconds() for group in _compat.process_groups()]


def test_a_deadline_grows_at_any_moment_and_shrinks_only_after_a_meeting(group: None) -> None:
    phases = Phases(TIMEOUTS)
    phases.apply()
    assert in_force() == [330]
    phases.enter_after_meeting(Phase.STEP)
    assert in_force() == [110]
    phases.enter(Phase.CHECKPOINT)
    assert in_force() == [440]
    phases.enter(Phase.STEP)
    assert (in_force(), phases.patience, phases.deadline) == ([440], timedelta(seconds=110), timedelta(seconds=100))
    phases.enter(Phase.VALIDATION)  # longer than a step, shorter than what is in force
    assert in_force() == [440]
    phases.enter(Phase.STEP)
    phases.enter_after_meeting(Phase.STEP)
    assert in_force() == [110]


def test_a_group_made_later_gets_the_deadline_in_force(group: None) -> None:
    phases = Phases(TIMEOUTS)
    phases.enter(Phase.DATA)
    phases.enter(Phase.STEP)
    with _compat.default_group_timeout(phases.group_timeout):
        made = dist.new_group([0])
    assert _compat.read_group_timeout(made) == timedelta(seconds=550)
    later = dist.new_group([0])
    assert _compat.read_group_timeout(later) == timedelta(minutes=30)
    phases.apply()
    assert in_force() == [550] * 3


def test_a_group_that_is_spared_keeps_its_own_time_out(group: None) -> None:
    phases = Phases(TIMEOUTS)
    phases.spare(dist.new_group([0], timeout=timedelta(seconds=33)))
    phases.apply()
    phases.enter(Phase.DATA)
    assert sorted(in_force()) == [33, 550]


def test_with_report_the_groups_and_the_control_plane_wait_for_a_day(group: None) -> None:
    phases = Phases(TIMEOUTS, "report")
    phases.apply()
    assert in_force() == [86400]
    assert phases.patience == timedelta(days=1)
    assert phases.patience_in(Phase.RENDEZVOUS) == timedelta(minutes=10)


def test_without_deadlines_torch_keeps_its_own_and_the_control_plane_waits_as_long(group: None) -> None:
    phases = Phases(None)
    phases.apply()
    phases.enter(Phase.CHECKPOINT)
    phases.enter_after_meeting(Phase.STEP)
    with _compat.default_group_timeout(phases.group_timeout):
        made = dist.new_group([0])
    assert in_force() == [77, 1800]
    assert _compat.read_group_timeout(made) == timedelta(minutes=30)
    assert phases.group_timeout is None
    assert phases.patience == timedelta(minutes=30)
    assert phases.patience_in(Phase.RENDEZVOUS) == timedelta(minutes=10)


def test_each_phase_that_ends_is_told_once_with_its_length() -> None:
    left: list[tuple[Phase, float]] = []
    phases = Phases(TIMEOUTS, on_left=lambda phase, seconds: left.append((phase, seconds)))
    phases.enter(Phase.SETUP)
    phases.enter(Phase.RESUME)
    phases.enter_after_meeting(Phase.SETUP)
    phases.enter_after_meeting(Phase.SETUP)
    phases.current = Phase.STEP
    assert [phase for phase, _ in left] == [Phase.SETUP, Phase.RESUME, Phase.SETUP]
    assert all(0 <= seconds < 60 for _, seconds in left)


def test_at_the_end_of_a_run_a_silence_may_be_as_long_as_a_step() -> None:
    longest = [Phases(Timeouts(step=step, teardown=300)).last_deadline for step in (100, 700)]
    assert longest == [timedelta(seconds=300), timedelta(seconds=700)]
