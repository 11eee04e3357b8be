"""Marks of the training thread, what it counts, and the bytes of its saves and loads."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from lightning_distplus.control import ControlPlane
from lightning_distplus.watchdog import progress
from lightning_distplus.watchdog.progress import Marks, Pace, Progress, Transfer
from lightning_distplus.watchdog.stacks import is_waiting_for_peers, stack_of
from lightning_distplus.world import World


def test_a_mark_tells_what_and_since_when() -> None:
    marks = Marks(phase=lambda: "step")
    marks.global_step = 3
    before = marks.read().number
    marks.set("backward")
    time.sleep(0.01)
    mark = marks.read()
    assert (mark.operation, mark.phase, mark.global_step, mark.number) == ("backward", "step", 3, before + 1)
    assert 0.01 <= mark.silence_s < 5


def test_when_a_part_has_ended_the_mark_is_again_that_of_the_whole() -> None:
    marks = Marks(phase=lambda: "step")
    seen = []
    outer = marks.enter("backward batch 4")
    marks.set("a hook")
    marks.back_to("after a hook")
    seen.append(marks.read().operation)
    marks.leave(outer)
    seen.append(marks.read().operation)
    marks.back_to("after the next hook")
    seen.append(marks.read().operation)
    assert seen == ["backward batch 4", "after backward batch 4", "after the next hook"]


def test_a_mark_costs_a_few_microseconds_at_most() -> None:
    marks = Marks(phase=lambda: "step")
    best_s = min(_seconds_for(marks, 2000) for _ in range(5)) / 2000
    assert best_s < 10e-6  # 0.3 us on the machine of the benchmarks; the bound is for a loaded one


def _seconds_for(marks: Marks, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        marks.set("backward")
    return time.perf_counter() - start


def test_a_thread_in_the_control_planes_wait_waits_for_peers() -> None:
    store = HashStore()
    planes = [ControlPlane(PrefixStore("job", store), World(rank=rank, size=2)) for rank in range(2)]
    waiter = threading.Thread(target=lambda: planes[0].barrier("alone", timedelta(seconds=10)))
    waiter.start()
    time.sleep(0.2)
    assert is_waiting_for_peers(stack_of(waiter.ident or 0))
    planes[1].barrier("alone", timedelta(seconds=10))
    waiter.join(10)
    assert not waiter.is_alive()


# -- what can be counted -----------------------------------------------------------------------------------------------


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


# -- bytes of a save or a load -----------------------------------------------------------------------------------------


def write(path: Path, megabytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(megabytes):
            file.write(bytes(1_000_000))


def read_half(path: Path) -> None:
    with path.open("rb") as file:
        file.read(path.stat().st_size // 2)
    raise OSError("half of it")


def test_the_bytes_of_a_save_are_counted_and_those_of_the_last_one_are_the_total(tmp_path: Path) -> None:
    moving = Transfer()
    assert moving.progress() is None
    with moving.of("save"):
        write(tmp_path / "first", 12)
        first = moving.progress()
    assert first is not None
    assert (first.unit, first.whole, first.total, first.is_motion) == ("MB", "the save", None, True)
    assert 12 <= first.done < 20
    assert moving.progress() is None
    with moving.of("save"):
        write(tmp_path / "second", 6)
        second = moving.progress()
    assert second is not None
    assert second.done < first.done <= (second.total or 0) < 20


def test_a_load_counts_what_is_read_and_one_that_fails_is_no_measure(tmp_path: Path) -> None:
    moving, file = Transfer(), tmp_path / "file"
    write(file, 8)
    with pytest.raises(OSError, match="half"), moving.of("load"):
        read_half(file)
    with moving.of("load"):
        assert len(file.read_bytes()) == 8_000_000
        found = moving.progress()
    assert found is not None
    assert (found.whole, found.total) == ("the load", None)
    assert found.done >= 8


def test_one_that_does_not_move_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moving = Transfer()
    with moving.of("save"):
        write(tmp_path / "file", 1)
        assert moving.progress() is not None
        monkeypatch.setattr(progress, "_STALLED_S", -1.0)
        assert moving.progress() is None
