"""What a process finds around itself when it starts, as JSON; run as a script and as a module, warm and cold."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path


def square(number: int) -> int:
    """What spawned processes, such as data workers, find in a ``__main__`` of their own."""
    return number * number


def facts() -> dict[str, object]:
    spec = sys.modules["__main__"].__spec__
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": spec and spec.name,
        "is_main": sys.modules["__main__"].square is square,
        "folder": str(Path.cwd()),
        "variables": dict(os.environ),
        "descriptors": sorted(path.name for path in Path("/proc/self/fd").iterdir())[:-1],
        "threads": [threading.current_thread().name, len(list(Path("/proc/self/task").iterdir()))],
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "handlers": {number: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdin.isatty()],
        "input": sys.stdin.read(),
        "cores": sorted(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    atexit.register(print, "at the end")
    found = facts()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["squares"] = pool.map(square, range(4))
    print(json.dumps(found))
