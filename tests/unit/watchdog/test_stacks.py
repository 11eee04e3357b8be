"""Stacks of processes that cannot be asked in Python."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import _compat
from lightning_distplus.process import catches_signal, children, forks, host_answers, is_traced
from lightning_distplus.testing import faults, spawn
from lightning_distplus.watchdog.stacks import PrintsStacks, StackPrinter, _read_new, ask_for_stack, is_fetching_data


def test_a_forked_process_that_holds_the_lock_tells_its_stack_and_goes_on() -> None:
    printer = StackPrinter.arm()
    assert printer is not None
    pid = os.fork()
    if pid == 0:
        faults._hold_gil(20.0)
        os._exit(0)
    try:
        time.sleep(0.3)
        stack = ask_for_stack(pid, printer)
        assert (stack[-1].name, stack[-1].filename) == ("_hold_gil", faults.__file__)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        assert pid in children(os.getpid())
        assert pid in forks(os.getpid())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        printer.disarm()
    assert not catches_signal(os.getpid(), printer.number)


def call_and_return(depth: int) -> int:
    return 0 if depth == 0 else 1 + call_and_return(depth - 1)


def run_busy() -> None:
    while True:
        call_and_return(200)
        eval(compile("[x for x in range(3)]", "made anew", "eval"))


def asked_while_busy(questions: int) -> int:
    """A process whose three threads call and return all the time; how often it has answered."""
    printer = StackPrinter.arm()
    assert printer is not None
    pid = os.fork()
    if pid == 0:
        for _ in range(2):
            threading.Thread(target=run_busy, daemon=True).start()
        run_busy()
    try:
        time.sleep(0.1)
        answers = sum(bool(ask_for_stack(pid, printer)) for _ in range(questions))
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the question has ended the process"
        return answers
    finally:
        with suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_process_that_runs_survives_the_question() -> None:
    questions = 40
    assert spawn(asked_while_busy, 1, args=(questions,), deadline="120s").check().results == {0: questions}


def test_an_answer_that_stops_between_two_pieces_is_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("xb", buffering=0) as written, (tmp_path / "stacks").open("rb") as read:
        written.write(b"Stack (most recent call first):\n")
        late = threading.Timer(0.1, written.write, (b'  File "train.py", line 3 in fit\n',))
        late.start()
        assert _read_new(read).endswith("in fit\n")
        late.join()


def hold_lock_beside_the_main_thread(begun: str) -> None:
    printer = StackPrinter.arm()
    assert printer is not None
    Path(begun).write_text(json.dumps(vars(printer)))
    faults._hold_gil(3.0)


def asked_in_a_thread(folder: str) -> list[str]:
    begun = Path(folder) / "begun"
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=hold_lock_beside_the_main_thread, args=(str(begun),)).start()
        time.sleep(1000)
    try:
        while not begun.exists() or not begun.read_text():
            time.sleep(0.01)
        time.sleep(0.3)
        return [frame.name for frame in ask_for_stack(pid, StackPrinter(**json.loads(begun.read_text())))]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_thread_that_trains_beside_the_main_one_tells_its_own_stack(tmp_path: Path) -> None:
    frames = spawn(asked_in_a_thread, 1, args=(str(tmp_path),)).check().results[0]
    assert frames[-2:] == ["hold_lock_beside_the_main_thread", "_hold_gil"]


class Hangs(Dataset[int]):
    """Its worker says that it has begun, and never returns."""

    def __init__(self, begun: Any) -> None:
        self.begun = begun

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.begun.set()
        time.sleep(1000)
        return index


def begin(worker: int) -> None:
    """A function of the user's, with which every worker begins."""


def ask_a_spawned_worker(rank: int) -> tuple[bool, bool, list[tuple[str, str]]]:
    """Whether the loader has its own function back, whether it stays that of forked workers, and the stack."""
    printer = StackPrinter.arm()
    assert printer is not None
    context = multiprocessing.get_context("spawn")
    hangs = Hangs(context.Event())
    undo = _compat.prepare_workers(lambda loader: PrintsStacks.where_needed(loader, printer))
    loader = DataLoader(hangs, num_workers=1, multiprocessing_context=context, worker_init_fn=begin)
    forked = DataLoader(hangs, num_workers=1, multiprocessing_context="fork", worker_init_fn=begin)
    iterator = iter(loader)
    undo()
    assert hangs.begun.wait(100)
    stack = ask_for_stack(iterator._workers[0].pid, printer)
    assert is_fetching_data(stack)
    iterator._workers[0].kill()
    kept = loader.worker_init_fn is begin, PrintsStacks.where_needed(forked, printer) is begin
    return *kept, [(frame.name, frame.filename) for frame in stack]


def test_a_spawned_data_worker_tells_its_stack() -> None:
    has_its_own, is_left_alone, frames = spawn(ask_a_spawned_worker, 1, deadline="120s").check().results[0]
    assert has_its_own
    assert is_left_alone
    assert ("__getitem__", __file__) in frames


def test_a_process_that_does_not_catch_the_signal_is_not_ended_by_the_question() -> None:
    printer = StackPrinter.arm()
    assert printer is not None
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
        printer.disarm()


def test_a_question_that_comes_too_late_ends_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        printer = StackPrinter.arm()
        assert printer is not None
        printer.disarm()
        os.kill(os.getpid(), printer.number)  # by a peer that has looked before
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_two_printers_of_one_process_take_different_signals() -> None:
    found = [StackPrinter.arm() for _ in range(2)]
    numbers = {one.number for one in found if one is not None}
    for one in found:
        assert one is not None
        one.disarm()
    assert len(numbers) == 2


def test_a_host_that_refuses_answers_and_nobody_traces_this_process() -> None:
    assert host_answers("127.0.0.1", 1.0)
    assert not is_traced(os.getpid())


@pytest.mark.parametrize("pid", [2**22 + 1])
def test_a_process_that_is_not_there_catches_nothing(pid: int) -> None:
    assert not catches_signal(pid, 10)
    assert children(pid) == []
