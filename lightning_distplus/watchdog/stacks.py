"""Python stacks of this process: where in the user's code a thread stands, and whether it waits for other ranks."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = [
    "error_in",
    "fold_traceback",
    "format_stack",
    "frame_of",
    "is_debugged",
    "is_fetching_data",
    "is_library",
    "is_own",
    "is_waiting_for_peers",
    "place_of",
    "stack_of",
    "user_location",
]

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
# Where a frame of these stands, the code that called it is looked for; every other package may be the user's own.
_LIBRARIES = {
    "deepspeed", "fsspec", "functorch", "jsonargparse", "lightning", "lightning_distplus", "lightning_fabric",
    "lightning_utilities", "numpy", "pytorch_lightning", "torch", "torchdata", "torchmetrics", "tqdm",
}  # fmt: skip

# Innermost frames in these files: the thread waits for peers. (file ending, functions; none: any function)
_WAITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("torch/distributed/distributed_c10d.py", ()),
    ("torch/distributed/c10d_logger.py", ()),
    ("torch/distributed/_functional_collectives.py", ()),
    ("torch/autograd/graph.py", ("_engine_run_backward",)),
    ("torch/distributed/utils.py", ()),
)

_FRAME = re.compile(r'\s*File "(.+)", line \d+')
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
    """``file.py:line`` of the innermost frame that is no library's; see ``is_library``."""
    for frame in reversed(stack):
        if not is_library(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def is_own(filename: str) -> bool:
    """Whether a file is of this package."""
    return filename.startswith(_PACKAGE)


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file is nobody's own code: of this package, the standard library, torch, Lightning and their kin."""
    if is_own(filename) or filename.startswith("<"):
        return True
    parts = Path(filename).parts
    if (place := next((name for name in _INSTALLED if name in parts[:-1]), None)) is None:
        return filename.startswith(_STANDARD)
    return parts[parts.index(place) + 1].removesuffix(".py") in _LIBRARIES


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


def fold_traceback(text: str) -> str:
    """Leaves out the frames of libraries, save the innermost, and says how many there were; all else stays as it is.

    Args:
        text: A traceback as the interpreter prints it, chained errors included; or a stack.
    """
    shown: list[str] = []
    frames: list[tuple[str, list[str]]] = []
    for line in text.rstrip("\n").splitlines():
        frame = _FRAME.match(line)
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
            continue
        shown += [*_tell_hidden(hidden), *lines]
        hidden = []
    return [*shown, *_tell_hidden(hidden)]


def _library_of(file: str) -> str:
    if is_own(file):
        return "lightning_distplus"
    for part in ("site-packages/", "dist-packages/"):
        if part in file:
            return file.rpartition(part)[2].partition("/")[0].removesuffix(".py")
    return "Python"


def _tell_hidden(libraries: Sequence[str]) -> list[str]:
    if not libraries:
        return []
    names = list(dict.fromkeys(libraries))
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return [f"    ... {len(libraries)} frame{'s' if len(libraries) > 1 else ''} of {listed}"]
