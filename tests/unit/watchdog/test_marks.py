"""Progress marks, and where a thread stands."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, PrefixStore

from lightning_distplus.control import ControlPlane
from lightning_distplus.watchdog.marks import Marks
from lightning_distplus.watchdog.stacks import is_waiting_for_peers, stack_of, user_location
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


def test_the_users_line_is_the_innermost_one_outside_libraries() -> None:
    entered, leave = threading.Event(), threading.Event()

    def works() -> None:
        entered.set()
        leave.wait(10)

    thread = threading.Thread(target=works)
    thread.start()
    entered.wait(10)
    stack = stack_of(thread.ident or 0)
    leave.set()
    thread.join()
    file, _, line = (user_location(stack) or "").rpartition(":")
    assert file == __file__
    assert "leave.wait(10)" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert not is_waiting_for_peers(stack)
    assert stack_of(thread.ident or 0) == []


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
