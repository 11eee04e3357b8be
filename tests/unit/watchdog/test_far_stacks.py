"""Stacks of processes that cannot be asked in Python."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from lightning_distplus.liveness import catches_signal, children, forks, host_answers, is_traced
from lightning_distplus.testing import deeds
from lightning_distplus.watchdog.far_stacks import StackPrinter, ask_for_stack


def test_a_forked_process_that_holds_the_lock_tells_its_stack_and_goes_on() -> None:
    armed = StackPrinter.arm()
    assert armed is not None
    printer, file = armed
    pid = os.fork()
    if pid == 0:
        deeds._hold_gil(20.0)
        os._exit(0)
    try:
        time.sleep(0.3)
        stack = ask_for_stack(pid, printer)
        assert (stack[-1].name, stack[-1].filename) == ("_hold_gil", deeds.__file__)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        assert pid in children(os.getpid())
        assert pid in forks(os.getpid())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        printer.disarm(file)
    assert not catches_signal(os.getpid(), printer.number)


def test_a_process_that_does_not_catch_the_signal_is_not_ended_by_the_question() -> None:
    armed = StackPrinter.arm()
    assert armed is not None
    printer, file = armed
    child = subprocess.Popen(["sleep", "20"])
    try:
        assert ask_for_stack(child.pid, printer) == []
        time.sleep(0.05)
        assert child.poll() is None
        assert child.pid in children(os.getpid())
        assert child.pid not in forks(os.getpid())
    finally:
        child.kill()
        child.wait()
        printer.disarm(file)


def test_two_printers_of_one_process_take_different_signals() -> None:
    found = [StackPrinter.arm() for _ in range(2)]
    numbers = {one[0].number for one in found if one is not None}
    for one in found:
        assert one is not None
        one[0].disarm(one[1])
    assert len(numbers) == 2


def test_a_host_that_refuses_answers_and_nobody_traces_this_process() -> None:
    assert host_answers("127.0.0.1", 1.0)
    assert not is_traced(os.getpid())


@pytest.mark.parametrize("pid", [2**22 + 1])
def test_a_process_that_is_not_there_catches_nothing(pid: int) -> None:
    assert not catches_signal(pid, 10)
    assert children(pid) == []
