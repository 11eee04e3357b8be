"""The inside of what a spawn starts: a rank, which runs the call and leaves its result, and torchrun around ranks.

``python -m lightning_distplus.testing.rank JOB`` is one rank that torchrun or Lightning's launcher has started,
``python -m lightning_distplus.testing.rank torchrun OUTCOME [torchrun's arguments]`` is torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import inspect
import json
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_distplus import env as environment
from lightning_distplus.process import end_with_parent

__all__ = ["DUMP_SIGNAL", "TORCHRUN", "Job", "run_rank"]

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write the Python stacks of all its threads into its log; no launcher or scheduler uses it."""

TORCHRUN = "torchrun"
"""Asks this module for torchrun, in the place of a job's file."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of one spawn share."""

    call: bytes
    """The pickled ``(fn, args)``; unpickled in the rank, after its environment is set."""
    mode: str
    folder: str
    """Where results, exit notes and process ids are left."""
    log_folder: str
    variables: dict[str, str]
    """The environment of rank 0; a rank changes RANK and LOCAL_RANK in it."""
    preparation: dict[str, Any]
    """Module search path, working directory and main module, as ``multiprocessing.spawn`` gives them to a child."""

    def log(self, rank: int) -> Path:
        """Standard output and error of a rank."""
        return Path(self.log_folder) / f"rank{rank:05d}.log"

    def note(self, rank: int, kind: str) -> Path:
        """A small file that a rank leaves: ``"pid"``, ``"exit"`` or ``"result"``."""
        return Path(self.folder) / f"rank{rank:05d}.{kind}"


def run_rank(job: Job, rank: int) -> None:
    """Runs the call as this rank and ends the process with its exit code."""
    if job.mode in ("forkserver", "fresh"):
        os.setsid()  # a process group of its own, so that its data workers can be killed with it
        environment.restore({**job.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    if job.mode != "lightning" or rank == 0:
        end_with_parent()
    _redirect_output(job.log(rank))
    faulthandler.enable(file=2)
    faulthandler.register(DUMP_SIGNAL, file=2)
    for of_an_earlier_attempt in ("exit", "result"):
        job.note(rank, of_an_earlier_attempt).unlink(missing_ok=True)
    _leave(job.note(rank, "pid"), str(os.getpid()).encode())
    code = _call(job, rank)
    _leave(job.note(rank, "exit"), str(code).encode())
    sys.exit(code)


def main() -> None:
    """Runs the job whose file is the first argument, as the rank that the launcher's variables name.

    The process ends as one of the forkserver does, without the interpreter's finalization: in it, stock DDP on gloo has
    ended once with "terminate called without an active exception" (torch 2.13; not reproduced in 190 runs).
    """
    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    try:
        run_rank(job, environment.RANK.integer() or environment.LOCAL_RANK.integer() or 0)
    except SystemExit as stop:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(stop.code or 0))


def _call(job: Job, rank: int) -> int:
    """Calls the function, and reports what it raises as the interpreter would: through ``sys.excepthook``."""
    try:
        fn, args = _load(job)
        # The forkserver hands on its own start method; a data worker of the job starts as it would in a user's process.
        multiprocessing.set_start_method(None, force=True)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        value = fn(rank, *args) if _takes_rank(fn) else fn(*args)
        _leave(job.note(rank, "result"), pickle.dumps(value))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # the root of the process
        return 1
    return 0


def _load(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if job.mode in ("torchrun", "lightning"):
        main_module = sys.modules["__main__"]
        multiprocessing.spawn.prepare(job.preparation)
        call: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(job.call)
        sys.modules["__main__"] = main_module  # Lightning's launcher starts the other ranks from it
        return call
    return pickle.loads(job.call)  # type: ignore[no-any-return]


def _takes_rank(fn: Callable[..., Any]) -> bool:
    with contextlib.suppress(ValueError, TypeError):  # a builtin has no signature
        return next(iter(inspect.signature(fn).parameters), None) == "rank"
    return False


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)  # a rank has no terminal, also where the test runner has one
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _leave(path: Path, content: bytes) -> None:
    aside = path.with_suffix(f"{path.suffix}-aside")
    aside.write_bytes(content)
    aside.replace(path)


# -- torchrun ----------------------------------------------------------------------------------------------------------


def _run_torchrun(outcome: Path, arguments: list[str]) -> None:
    """Leaves ``{rank: exit code}`` of the ranks that failed in the last attempt; a signal is a negative code.

    torchrun's own exit code does not tell how each rank has ended.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # a rank sets its environment first
    from torch.distributed.run import parse_args, run

    failures: dict[int, int] = {}
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    outcome.write_text(json.dumps(failures), encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    if sys.argv[1] == TORCHRUN:
        _run_torchrun(Path(sys.argv[2]), sys.argv[3:])
    main()
