"""Python stacks: of threads of this process, and of processes whose Python cannot be asked."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from lightning_distplus.process import catches_signal, open_memory

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
# Where a frame of these stands, the code that called it is looked for; every other package may be the user's own.
_LIBRARIES = {
    "IPython", "deepspeed", "fsspec", "functorch", "ipykernel", "jsonargparse", "lightning", "lightning_distplus",
    "lightning_fabric", "lightning_utilities", "numpy", "pytorch_lightning", "torch", "torchdata", "torchmetrics",
    "tqdm",
}  # fmt: skip

# Files, and functions of theirs or "" for any: a thread waits for peers whose innermost frames are there,
_WAITS = (
    ("torch/distributed/distributed_c10d.py", ""),
    ("torch/distributed/c10d_logger.py", ""),
    ("torch/distributed/_functional_collectives.py", ""),
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/distributed/utils.py", ""),
)
# or that has one of these frames anywhere: what they call belongs to the wait.
_OWN_WAITS = (
    ("lightning_distplus/control/plane.py", "poll"),
    ("lightning_distplus/strategies/collectives.py", "cause_of"),
)
_NUM_INNERMOST = 3

_ANY_FRAME = re.compile(r'\s*File "(.+)", line \d+')
_DATA = ("torch/utils/data/dataloader.py", "torch/utils/data/_utils/fetch.py")


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of one thread; None when the thread has ended."""
    return sys._current_frames().get(thread_id)


def error_in(thread_id: int) -> BaseException | None:
    """The error that a thread handles at this moment, in ``except``, ``finally`` or what these call."""
    handled: Any = sys._current_exceptions().get(thread_id)
    error: BaseException | None = handled[1] if isinstance(handled, tuple) else handled  # 3.12 gives the error itself
    return error


def place_of(frame: FrameType | None) -> str | None:
    """What ``user_location`` tells, in a few microseconds: no source is read."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def stack_of(thread_id: int) -> list[traceback.FrameSummary]:
    """The stack of one thread, outermost frame first; empty when the thread has ended."""
    frame = frame_of(thread_id)
    return [] if frame is None else list(traceback.extract_stack(frame))


def line_of_the_caller() -> str | None:
    """``file.py:line`` in the user's code from which this thread has come here; takes about a millisecond."""
    return user_location(stack_of(threading.get_ident()))


def user_location(stack: Sequence[traceback.FrameSummary]) -> str | None:
    """``file.py:line`` of the innermost frame that is no library's; see ``is_library``."""
    own = (frame for frame in reversed(stack) if not is_library(frame.filename))
    return next((f"{frame.filename}:{frame.lineno}" for frame in own), None)


def is_own(filename: str) -> bool:
    """Whether a file is of this package."""
    return filename.startswith(_PACKAGE)


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file is nobody's own code: of this package, the standard library, torch, Lightning and their kin."""
    if filename.startswith("<ipython-input"):  # a cell
        return False
    if is_own(filename) or filename.startswith("<") or Path(filename).name == "distplus":  # the script that pip makes
        return True
    parts = Path(filename).parts
    if (place := next((name for name in _INSTALLED if name in parts[:-1]), None)) is None:
        return filename.startswith(_STANDARD)
    return parts[parts.index(place) + 1].removesuffix(".py") in _LIBRARIES


def is_waiting_for_peers(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the innermost frames belong to a collective, or to the control plane's own waiting."""
    return _stands_in(stack, _OWN_WAITS) or _stands_in(stack[-_NUM_INNERMOST:], _WAITS)


def _stands_in(stack: Sequence[traceback.FrameSummary], places: Sequence[tuple[str, str]]) -> bool:
    return any(one.filename.endswith(file) and name in ("", one.name) for one in stack for file, name in places)


def is_fetching_data(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the thread waits for data workers, or is such a worker and reads a sample."""
    return any(frame.filename.endswith(_DATA) for frame in stack)


def is_debugged(stack: str) -> bool:
    """Whether a stack, as text, stands in Python's debugger."""
    return any(name in stack for name in ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/"))


def fold_traceback(text: str) -> str:
    """Leaves out the frames of libraries, save the innermost, and says how many there were; all else stays as it is.

    Args:
        text: A traceback as the interpreter prints it, chained errors included; or a stack.
    """
    shown: list[str] = []
    frames: list[tuple[str, list[str]]] = []
    for line in text.rstrip("\n").splitlines():
        frame = _ANY_FRAME.match(line)
        if frame is not None:
            frames.append((frame[1], [line]))
        elif frames and line.startswith("    "):  # its source, or a marker below it
            frames[-1][1].append(line)
        else:
            shown += [*_fold(frames), line]
            frames = []
    return "\n".join([*shown, *_fold(frames)])


def _fold(frames: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The frames of one error, outermost first: each its file and its lines."""
    shown: list[str] = []
    hidden: list[str] = []
    for number, (file, lines) in enumerate(frames, 1):
        if is_own(file) or (is_library(file) and number < len(frames)):
            hidden.append(_library_of(file))
        else:
            shown += [*_tell_hidden(hidden), *lines]
            hidden = []
    return [*shown, *_tell_hidden(hidden)]


def _library_of(file: str) -> str:
    if is_own(file):
        return "lightning_distplus"
    parts = Path(file).parts
    place = next((parts.index(name) for name in _INSTALLED if name in parts), None)
    return "Python" if place is None else parts[place + 1].removesuffix(".py")


def _tell_hidden(libraries: Sequence[str]) -> list[str]:
    *others, last = dict.fromkeys(libraries) or [""]
    listed = f"{', '.join(others)} and {last}" if others else last
    return [f"    ... {len(libraries)} frame{'s' if len(libraries) > 1 else ''} of {listed}"] if libraries else []


# -- stacks of other processes -----------------------------------------------------------------------------------------

# One that holds the global lock cannot be asked, nor can a data worker. ``faulthandler`` prints the stack of a thread
# from a C signal handler, without the lock. It is registered on a real-time signal that nobody uses, and prints into an
# unnamed file, which the peers of this host read through /proc. A data worker that is forked from this process inherits
# both; one that is started anew gets its own, ``PrintsStacks``.
#
# Each thread prints its own stack only, so the signal goes to the thread that is asked for. Printing those of all
# threads ends a process that runs: a handler that walks the frames of another thread, while that thread calls and
# returns, reads memory that is gone (Python 3.11: 20 questions to a process with three busy threads sufficed; with its
# own stack only, 30,119 did no harm).


_ANSWER_S = 0.3
_POLL_S = 0.01
_FIRST_SIGNAL = 10  # above SIGRTMIN, below which threading libraries and schedulers take theirs
_BEGIN = "Stack (most recent call first):"
_MEMORY = "distplus-stacks"
_MEMORY_OF_RANK = "distplus-rank-stacks"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


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
    def arm(cls) -> StackPrinter | None:
        """Makes this process answer, and the calling thread the one that is asked for; None where no signal is free."""
        for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX):
            if not catches_signal(os.getpid(), number):
                descriptor = os.memfd_create(_MEMORY_OF_RANK)  # open as long as it is armed
                ignore_signal(number)  # what `disarm` goes back to
                faulthandler.register(number, file=descriptor, all_threads=False, chain=False)
                return cls(number=number, descriptor=descriptor, thread=threading.get_native_id())
        return None

    def rearm(self) -> None:
        """Puts the handler back in, which Lightning takes out at the end of a run with those of all signals."""
        faulthandler.unregister(self.number)
        faulthandler.register(self.number, file=self.descriptor, all_threads=False, chain=False)

    def disarm(self) -> None:
        """Takes the handler out again. A peer looks before it asks; who asks too late even so is ignored."""
        faulthandler.unregister(self.number)
        os.close(self.descriptor)


@dataclass(frozen=True, kw_only=True)
class PrintsStacks:
    """The ``worker_init_fn`` of data workers that inherit nothing: spawned ones, and those of a forkserver.

    Each prints into memory of its own, which goes with it, and is known by its name among the worker's open files.
    ``number`` is the signal of its rank, ``inner`` the user's own function.
    """

    number: int
    inner: Callable[[int], None] | None

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
    """The stack of the training thread of a rank of this host, or of a data worker of it; empty where none answers."""
    is_ours = signal.SIGRTMIN + _FIRST_SIGNAL <= printer.number < signal.SIGRTMAX  # whatever a peer has said
    if not is_ours or not catches_signal(pid, printer.number):  # the signal would end it
        return []
    with suppress(OSError):
        descriptor = open_memory(pid, _MEMORY)
        if descriptor is None:
            descriptor = os.open(f"/proc/{pid}/fd/{printer.descriptor}", os.O_RDONLY)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            is_rank = Path(f"/proc/{pid}/task/{printer.thread}").exists()  # a data worker trains in no thread
            _signal_thread(pid, printer.thread if is_rank else pid, printer.number)
            text = _read_new(file).rpartition(_BEGIN)[2]  # somebody else may have asked at the same time
        frames = [(file, int(line) if line.isdigit() else 0, name) for file, line, name in _FRAME.findall(text)]
        return [traceback.FrameSummary(*frame) for frame in reversed(frames)]
    return []


def ignore_signal(number: int) -> None:
    """``signal.signal(number, SIG_IGN)`` from any thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, int(signal.SIG_IGN))


def _signal_thread(pid: int, thread: int, number: int) -> None:
    """``signal.pthread_kill`` for a thread of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, thread, number) != 0:
        raise OSError(ctypes.get_errno(), f"Thread {thread} of process {pid} cannot be signalled")


def _read_new(file: BinaryIO) -> str:
    """What is written from here on, once a frame is there and it stops growing: it comes in many small pieces."""
    end, text = time.monotonic() + _ANSWER_S, b""
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        text += (new := file.read())
        if not new and _FRAME.search(text.decode(errors="replace")):
            break
    return text.decode(errors="replace")
