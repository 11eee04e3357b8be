"""The pace: rate and remaining time where they are known, and silence where they are not."""

from __future__ import annotations

from lightning_distplus.watchdog.pace import Pace, Progress


def batches(done: int, total: int | None = 100) -> Progress:
    return Progress(unit="batches", whole="the epoch", done=done, total=total)


def test_rate_and_remaining_time_come_from_what_was_done_meanwhile() -> None:
    pace = Pace()
    pace.note(batches(2), now=0.0)
    assert pace.describe() == "2 of 100 batches of the epoch"
    pace.note(batches(3), now=2.0)
    assert pace.describe() == "3 of 100 batches of the epoch, 0.5 batches/s, 0:03:14 left"


def test_what_is_not_known_is_not_told() -> None:
    pace = Pace()
    assert pace.describe() == ""
    for second in range(3):
        pace.note(batches(second, total=None), now=float(second))
    assert pace.describe() == "2 batches of the epoch, 1 batches/s"
    pace.note(None, now=4.0)
    assert pace.describe() == ""


def test_a_new_epoch_or_stage_starts_the_count_anew_and_old_times_are_forgotten() -> None:
    pace = Pace()
    for second in range(100):
        pace.note(batches(second), now=float(second))
    pace.note(batches(0), now=100.0)
    assert pace.per_s == 0
    for second in range(1, 400):
        pace.note(batches(second // 10), now=100.0 + second)
    assert abs(pace.per_s - 0.1) < 0.01
    assert pace.describe() == "39 of 100 batches of the epoch, 0.097 batches/s, 0:10:29 left"
