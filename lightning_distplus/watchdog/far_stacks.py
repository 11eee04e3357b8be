"""Stacks of processes whose Python cannot be asked: one that holds the global lock, and data workers.

``faulthandler`` prints the stack of a thread from a C signal handler, without the lock. It is registered on a real-time
signal that nobody uses, and prints into an unnamed file, which the peers of this host read through /proc. A data worker
that is forked from this process inherits both; one that is started anew gets its own, ``PrintsStacks``.

Each thread prints its own stack only, so the signal goes to the thread that is asked for. Printing those of all
threads ends a process that runs: a handler that walks the frames of another thread, while that thread calls and
returns, reads memory that is gone (Python 3.11: 20 questions to a process with three busy threads sufficed; with its
own stack only, 30,119 did no harm).
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lightning_distplus.process import catches_signal

__all__ = ["PrintsStacks", "StackPrinter", "ask_for_stack"]

_ANSWER_S = 0.3
_POLL_S = 0.01
_FIRST_SIGNAL = 10  # above SIGRTMIN, below which threading libraries and schedulers take theirs
_BEGIN = "Stack (most recent call first):"
_MEMORY = "distplus-stacks"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, kw_only=True)
class StackPrinter:
    """Where and how one process prints its stacks when a peer asks."""

    number: int
    """The signal."""
    descriptor: int
    """The file, by its number in that process."""
    thread: int
    """The thread that trains, as ``threading.get_native_id`` names it."""

    @classmethod
    def arm(cls) -> tuple[StackPrinter, IO[bytes]] | None:
        """Makes this process answer, and the calling thread the one that is asked for.

        Returns:
            How to ask, and the file to close after ``disarm``; None where no signal is free.
        """
        for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX):
            if not catches_signal(os.getpid(), number):
                file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # open as long as it is armed
                _ignore(number)  # what `disarm` goes back to
                faulthandler.register(number, file=file, all_threads=False, chain=False)
                return cls(number=number, descriptor=file.fileno(), thread=threading.get_native_id()), file
        return None

    def rearm(self, file: IO[bytes]) -> None:
        """Puts the handler back in, which Lightning takes out at the end of a run with those of all signals."""
        faulthandler.unregister(self.number)
        faulthandler.register(self.number, file=file, all_threads=False, chain=False)

    def disarm(self, file: IO[bytes]) -> None:
        """Takes the handler out again. A peer looks before it asks; who asks too late even so is ignored."""
        faulthandler.unregister(self.number)
        file.close()

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PrintsStacks:
    """The ``worker_init_fn`` of data workers that inherit nothing: spawned ones, and those of a forkserver.

    Each prints into memory of its own, which goes with it, and is known by its name among the worker's open files.
    """

    number: int
    """The signal of its rank."""
    inner: Callable[[int], None] | None
    """The user's."""

    @classmethod
    def where_needed(cls, loader: Any, printer: StackPrinter) -> Callable[[int], None] | None:
        """What the workers of a ``DataLoader`` call when they start; the user's own where they are forked."""
        context = loader.multiprocessing_context or multiprocessing.get_context()
        own: Callable[[int], None] | None = loader.worker_init_fn
        return own if context.get_start_method() == "fork" else cls(number=printer.number, inner=own)

    def __call__(self, worker: int) -> None:
        """Arms the worker, then does what the user wants."""
        file = os.memfd_create(_MEMORY)  # open as long as the worker lives
        faulthandler.register(self.number, file=file, all_threads=False, chain=False)
        if self.inner is not None:
            self.inner(worker)


def ask_for_stack(pid: int, printer: StackPrinter) -> list[traceback.FrameSummary]:
    """The stack of the training thread of another process of this host, outermost frame first; empty: no answer.

    Args:
        pid: The process: a rank, or one of its data workers.
        printer: How that rank prints.
    """
    if not catches_signal(pid, printer.number):  # the signal would end it
        return []
    with suppress(OSError):
        path = _file_of(pid, printer)
        begin = path.stat().st_size
        is_rank = Path(f"/proc/{pid}/task/{printer.thread}").exists()  # a data worker trains in no thread
        _signal_thread(pid, printer.thread if is_rank else pid, printer.number)
        return _parse(_read_new(path, begin))
    return []


def _ignore(number: int) -> None:
    """``signal.signal(number, SIG_IGN)`` from any thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, int(signal.SIG_IGN))


def _signal_thread(pid: int, thread: int, number: int) -> None:
    """``signal.pthread_kill`` for a thread of another process.

    Raises:
        OSError: There is no such thread, or it is another user's.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, thread, number) != 0:
        raise OSError(ctypes.get_errno(), f"Thread {thread} of process {pid} cannot be signalled")


def _file_of(pid: int, printer: StackPrinter) -> Path:
    folder = Path(f"/proc/{pid}/fd")
    own = (path for path in folder.iterdir() if str(path.readlink()).startswith(f"/memfd:{_MEMORY}"))
    return next(own, folder / str(printer.descriptor))


def _read_new(path: Path, begin: int) -> str:
    """What is written from ``begin`` on, once it stops growing."""
    end, size = time.monotonic() + _ANSWER_S, begin
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        now = path.stat().st_size
        if now == size > begin:
            break
        size = now
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def _parse(text: str) -> list[traceback.FrameSummary]:
    """The frames of the last stack that was printed; somebody else may have asked at the same time."""
    found = [one for line in text.rpartition(_BEGIN)[2].splitlines() if (one := _FRAME.match(line))]
    return [traceback.FrameSummary(one[1], int(one[2]) if one[2].isdigit() else 0, one[3]) for one in reversed(found)]
