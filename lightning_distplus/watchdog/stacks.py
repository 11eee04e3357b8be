"""Python stacks of this process: where in the user's code a thread stands, and whether it waits for other ranks."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

__all__ = [
    "format_stack",
    "frame_of",
    "is_debugged",
    "is_fetching_data",
    "is_waiting_for_peers",
    "place_of",
    "stack_of",
    "user_location",
]

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Innermost frames in these files: the thread waits for peers. (file ending, functions; none: any function)
_WAITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torch/distributed/distributed_c10d.py", ()),
    ("torch/distributed/c10d_logger.py", ()),
    ("torch/distributed/_functional_collectives.py", ()),
    ("torch/autograd/graph.py", ("_engine_run_backward",)),
    ("torch/distributed/utils.py", ()),
)

_DATA = ("torch/utils/data/dataloader.py", "torch/utils/data/_utils/fetch.py")


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of one thread; None when the thread has ended."""
    return sys._current_frames().get(thread_id)


def place_of(frame: FrameType | None) -> str | None:
    """What ``user_location`` tells, in a few microseconds: no source is read."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# Wherever they stand: what they call belongs to the wait.
_OWN_WAITS = (("lightning_distplus/control/line.py", "poll"), ("lightning_distplus/strategies/naming.py", "_cause"))


def stack_of(thread_id: int) -> list[traceback.FrameSummary]:
    """The stack of one thread, outermost frame first; empty when the thread has ended."""
    frame = frame_of(thread_id)
    return [] if frame is None else list(traceback.extract_stack(frame))


def format_stack(stack: Sequence[traceback.FrameSummary]) -> list[str]:
    """The stack as Python prints it."""
    return traceback.format_list(list(stack))


def user_location(stack: Sequence[traceback.FrameSummary]) -> str | None:
    """``file.py:line`` of the innermost frame outside the standard library, installed packages and this package."""
    for frame in reversed(stack):
        if not _is_library(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _is_library(filename: str) -> bool:
    return filename.startswith((*_LIBRARIES, _PACKAGE, "<"))


def is_waiting_for_peers(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the innermost frames belong to a collective, or to the control plane's own waiting."""
    if any(frame.filename.endswith(ending) and frame.name == name for frame in stack for ending, name in _OWN_WAITS):
        return True
    for frame in list(reversed(stack))[:3]:
        for ending, functions in _WAITS:
            if frame.filename.endswith(ending) and (not functions or frame.name in functions):
                return True
    return False


def is_fetching_data(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the thread waits for data workers, or is such a worker and reads a sample."""
    return any(frame.filename.endswith(_DATA) for frame in stack)


def is_debugged(stack: str) -> bool:
    """Whether a stack, as text, stands in Python's debugger."""
    return any(name in stack for name in ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/ipdb/"))
