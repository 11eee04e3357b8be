"""Ranks as real processes: started, watched, and what came of them.

``python -m lightning_distplus.testing.spawning JOB`` is one rank that torchrun or Lightning's launcher has started;
with ``torchrun OUTCOME [torchrun's arguments]`` it is torchrun. This module loads no torch: a rank sets its environment
before that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import inspect
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lightning_distplus
from lightning_distplus import env as environment
from lightning_distplus.errors import require_choice
from lightning_distplus.process import ProcessState, end_with_parent, process_state, start_time
from lightning_distplus.testing.faults import FaultPlan, FiredFault
from lightning_distplus.timeouts import Duration, parse_duration

Mode = Literal["forkserver", "fresh", "torchrun", "lightning"]
_PRELOAD_S = 120.0
_HELD_PORTS = 32
_forkserver_of: int | None = None  # the process that has its forkserver ready
_held: deque[int] = deque()  # descriptors of sockets
_preloaded = ["torch", "torch.distributed", "lightning.pytorch"]
_OTHER_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PMI_", "OMPI_", "PYTEST_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


Started: TypeAlias = "BaseProcess | subprocess.Popen[bytes]"
"""A process that was started here: a rank, or the launcher of all ranks."""


def _code(process: Started) -> int | None:
    """Its exit code, a signal as a negative number; None while it lives. Also reaps it."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def preload(*modules: str) -> None:
    """Adds modules that the forkserver imports once for all ranks. Call it before the first ``spawn``.

    A rank starts from the forkserver with everything imported that it holds: torch and Lightning always, and what is
    named here. A module that starts threads or opens connections when it is imported must not be preloaded.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


def prepare(mode: Mode) -> None:
    """Waits until the forkserver has imported what it preloads, so that no job's deadline pays for that.

    Raises:
        RuntimeError: It is not ready within two minutes.
    """
    global _forkserver_of
    if mode != "forkserver" or _forkserver_of == os.getpid():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_preloaded))
    with environment.changed(OMP_NUM_THREADS=1):  # torch reads it when it is imported
        multiprocessing.forkserver.ensure_running()
    first = context.Process(target=os.getpid)
    first.start()  # the server imports before it serves, and this waits until it serves
    first.join(_PRELOAD_S)
    if first.exitcode != 0:
        first.kill()
        raise RuntimeError(
            f"The forkserver is not ready after {_PRELOAD_S:g} s: it imports {', '.join(_preloaded)}. "
            'One of them may fail or wait when it is imported; mode="fresh" does without the server.'
        )
    _forkserver_of = os.getpid()


def start(job: Job, world_size: int, max_restarts: int) -> list[Started]:
    """Starts the job: one process per rank, or the one launcher."""
    match job.mode:
        case "forkserver" | "fresh":
            forked, fresh = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
            rank_process: Callable[..., BaseProcess] = forked.Process if job.mode == "forkserver" else fresh.Process
            ranks = [rank_process(target=run_rank, args=(job, rank), name=f"rank {rank}") for rank in range(world_size)]
            for process in ranks:
                process.start()
            return list(ranks)
        case "lightning":
            return [_launch(job, [])]
        case _:
            arguments = [
                TORCHRUN,
                str(Path(job.folder) / "outcome.json"),
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0",
                "--local-addr=127.0.0.1",
                f"--nproc-per-node={world_size}",
                f"--max-restarts={max_restarts}",
                "--monitor-interval=0.1",
            ]
            return [_launch(job, [*arguments, "-m", run_rank.__module__])]


def rank_variables(mode: Mode, world_size: int, changes: Mapping[str, str | int | None]) -> dict[str, str]:
    """The environment of the ranks: the caller's, without that of any launcher around it, and then the changes.

    ``forkserver`` and ``fresh`` also get what a launcher would set, so that a Trainer with ``devices=world_size``
    joins these processes and starts none of its own.
    """
    variables = {
        name: value
        for name, value in environment.snapshot().items()
        if not name.startswith(_OTHER_LAUNCHERS) and name not in _OF_A_RANK
    }
    variables["OMP_NUM_THREADS"] = "1"
    variables.setdefault(environment.DISTPLUS_TRACEBACK.name, "full")  # a log is of one rank, and tells all it can
    if mode in ("forkserver", "fresh"):
        variables.update(
            WORLD_SIZE=str(world_size), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    for name, value in changes.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = str(value)
    return variables


def free_port() -> int:
    """A free TCP port of the loopback interface, which the system gives to nobody else before some 30 further calls.

    A socket stays bound to it that does not listen; torch's store, which reuses addresses, may listen there.
    """
    if len(_held) == _HELD_PORTS:
        os.close(_held.popleft())
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        _held.append(holder.detach())
    return port


def _launch(job: Job, arguments: list[str]) -> Started:
    """Starts this module, with the file of the job as its last argument."""
    root = str(Path(lightning_distplus.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, [root, job.variables.get("PYTHONPATH")]))
    path = Path(job.folder) / "job"
    path.write_bytes(pickle.dumps(job))
    with job.launcher_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", run_rank.__module__, *arguments, str(path)],
            env={**job.variables, "PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


# -- spawn -------------------------------------------------------------------------------------------------------------

_TAIL_LINES = 30
_DUMP_S = 0.3
_KILL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class SpawnResult:
    """How a spawn ended."""

    exit_codes: dict[int, int | None]
    """Per rank; a signal is a negative number. None: ended by its launcher, which does not say how."""
    logs: dict[int, str]
    """Standard output and error per rank, of all attempts."""
    results: dict[int, Any]
    """What the function returned, for the ranks on which it returned."""
    faults: list[FiredFault] = field(default_factory=list)
    """The faults that fired, in order of time."""
    faults_planned: int = 0
    alive: dict[int, str] = field(default_factory=dict)
    """Ranks that were still there at the deadline: "running", "stopped" or "not started"."""
    launcher_log: str = ""
    """What torchrun, or Lightning's launcher, itself wrote."""
    elapsed_s: float
    deadline_s: float

    @property
    def faults_fired(self) -> int:
        """How many of the plan's faults fired."""
        return len(self.faults)

    def check(self) -> SpawnResult:
        """Returns itself if every rank ended with 0 in time and every planned fault fired.

        Raises:
            AssertionError: Names the ranks, with the end of their logs.
        """
        problems = []
        if self.alive:
            states = ", ".join(f"rank {rank} ({state})" for rank, state in self.alive.items())
            problems.append(f"After {self.deadline_s:g} s these ranks had not ended and were killed: {states}.")
        failed = {rank: code for rank, code in self.exit_codes.items() if code != 0 and rank not in self.alive}
        if failed:
            problems.append("Failed: " + ", ".join(f"rank {rank} (exit code {code})" for rank, code in failed.items()))
        if self.faults_fired != self.faults_planned:
            problems.append(f"{self.faults_fired} of {self.faults_planned} planned faults fired.")
        if not problems:
            return self
        tails = [_tail(f"rank {rank}", self.logs[rank]) for rank in sorted({*failed, *self.alive})]
        if self.launcher_log:
            tails.append(_tail("the launcher", self.launcher_log))
        raise AssertionError("\n".join([*problems, *tails]))


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    faults: FaultPlan | None = None,
    deadline: Duration = "60s",
    mode: Mode = "forkserver",
    max_restarts: int = 0,
    env: Mapping[str, str | int | None] | None = None,
    log_dir: str | Path | None = None,
) -> SpawnResult:
    """Runs a function in real processes, one per rank, and waits for all of them.

    A Lightning Trainer inside, with ``devices=world_size``, joins the processes as its ranks.

    Args:
        fn: An importable function. If its first parameter is called ``rank``, it gets the rank.
        world_size: The number of ranks.
        args: Further arguments, picklable.
        faults: Faults for ``FaultCallback()`` or ``FaultPlan.from_environment().fire(...)`` in the ranks. Give it a
            record of its own (``plan.recorded_in(path)``) to carry what has fired into another spawn.
        deadline: The longest run, not counting the first start of the forkserver. Then the ranks write their stacks
            into their logs and are killed.
        mode: ``"forkserver"`` forks ranks that have torch and Lightning imported; ``"fresh"`` starts new interpreters;
            ``"torchrun"`` runs torchrun, with ``max_restarts``; ``"lightning"`` starts one process whose Trainer starts
            the others. In the last two the launcher sets RANK and its kin.
        max_restarts: How often torchrun restarts the ranks.
        env: Variables to set in the ranks, or to remove with None.
        log_dir: Where to keep the logs; they are in the result anyway.

    Returns:
        Exit codes, logs, return values and fired faults; call ``.check()`` on it where all ranks must succeed.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a job has at least one rank.")
    require_choice("mode", mode, Mode)
    if max_restarts and mode != "torchrun":
        raise ValueError(f'max_restarts is {max_restarts}, but only mode="torchrun" restarts ranks; mode is {mode!r}.')
    deadline_s = parse_duration(deadline, field="deadline").total_seconds()
    try:
        call = pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{fn!r} with its arguments cannot be sent to another process: {error}. "
            "Give a function that stands at the top of a module, and picklable arguments."
        ) from error
    with tempfile.TemporaryDirectory(prefix="distplus-spawn-") as folder:
        plan = faults or FaultPlan()
        plan = plan if plan.record else plan.recorded_in(Path(folder) / "faults.jsonl")
        fired_before = len(plan.fired())
        log_folder = Path(folder if log_dir is None else log_dir).absolute()
        log_folder.mkdir(parents=True, exist_ok=True)
        preparation = multiprocessing.spawn.get_preparation_data("rank")
        for private in ("authkey", "sys_argv", "name"):  # a launcher starts further ranks from sys.argv
            preparation.pop(private, None)
        variables = rank_variables(mode, world_size, env or {}) | {environment.DISTPLUS_FAULTS.name: plan.to_json()}
        job = Job(call, mode, folder, log_folder, variables, preparation)
        prepare(mode)
        begin = time.monotonic()
        started, alive = _run(job, world_size, max_restarts, begin + deadline_s)
        results = {rank: job.note(rank, "result") for rank in range(world_size)}
        return SpawnResult(
            exit_codes=_exit_codes(job, started, world_size),
            logs={rank: _text(job.log(rank)) for rank in range(world_size)},
            results={rank: pickle.loads(path.read_bytes()) for rank, path in results.items() if path.exists()},
            faults=plan.fired()[fired_before:],
            faults_planned=len(plan.faults) - fired_before,
            alive=alive,
            launcher_log=_text(job.launcher_log),
            elapsed_s=time.monotonic() - begin,
            deadline_s=deadline_s,
        )


def _run(job: Job, world_size: int, max_restarts: int, until: float) -> tuple[list[Started], dict[int, str]]:
    """Starts the job and waits; whatever happens, also Ctrl-C, nothing of it is left."""
    started: list[Started] = []
    alive: dict[int, str] = {}
    try:
        started = start(job, world_size, max_restarts)
        pause_s = 0.002
        while any(_code(process) is None for process in started):
            if time.monotonic() > until:
                alive = _alive(job, world_size)
                for rank in (rank for rank, state in alive.items() if state == "running"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(_text(job.note(rank, "pid"))), DUMP_SIGNAL)
                time.sleep(_DUMP_S)
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.02)
    finally:
        _kill_all(job, started, world_size)
    return started, alive


def _alive(job: Job, world_size: int) -> dict[int, str]:
    """Which ranks have not ended, and in which state the system sees them."""
    states: dict[int, str] = {}
    for rank in range(world_size):
        if job.note(rank, "exit").exists():
            continue
        pid = _text(job.note(rank, "pid"))
        state = process_state(int(pid), start_time(int(pid))) if pid else None
        if state in (None, ProcessState.RUNNING, ProcessState.STOPPED):
            states[rank] = "not started" if state is None else state.value
    return states


def _kill_all(job: Job, started: Sequence[Started], world_size: int) -> None:
    """Kills the process groups, and then whatever still has a log of this job open, in whatever group it is."""
    logs = {str(job.launcher_log), *(str(job.log(rank)) for rank in range(world_size))}
    until = time.monotonic() + _KILL_S
    while True:
        for process in started:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # the group is gone, or the rank has not made it yet
                    os.killpg(process.pid, signal.SIGKILL)
        holders = _holders_of(logs)
        for pid in holders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not holders and all(_code(process) is not None for process in started):
            return
        if time.monotonic() > until:
            raise RuntimeError(f"Processes {holders} of this job do not end {_KILL_S:g} s after SIGKILL.")
        time.sleep(0.005)


def _holders_of(paths: set[str]) -> list[int]:
    """Processes, other than this one, that have one of the files open. Empty where there is no /proc."""
    holders = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            if any(str(link.readlink()) in paths for link in (process / "fd").iterdir()):
                holders.append(int(process.name))
    return holders


def _exit_codes(job: Job, started: Sequence[Started], world_size: int) -> dict[int, int | None]:
    if job.mode in ("forkserver", "fresh"):
        return {rank: _code(process) for rank, process in enumerate(started)}
    notes = {rank: _text(job.note(rank, "exit")) for rank in range(world_size)}
    codes = {rank: int(code) if code else None for rank, code in notes.items()}
    if job.mode == "lightning":
        return {**codes, 0: _code(started[0])}
    outcome = _text(Path(job.folder) / "outcome.json")
    failures = {int(rank): code for rank, code in json.loads(outcome or "{}").items()}
    return {**codes, **failures}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _tail(owner: str, log: str) -> str:
    lines = log.rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"--- end of the log of {owner}", *lines]) if lines else f"--- {owner} wrote nothing"


# -- the inside of what a spawn starts: a rank, which runs the call and leaves its result, and torchrun around ranks ---

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write the Python stacks of all its threads into its log; no launcher or scheduler uses it."""

TORCHRUN = "torchrun"
"""Stands in the place of a job's file."""


@dataclass(frozen=True)
class Job:
    """What all ranks of one spawn share."""

    call: bytes
    """The pickled ``(fn, args)``; unpickled in the rank, after its environment is set."""
    mode: str
    folder: str
    """Where results, exit notes and process ids are left."""
    log_folder: Path
    variables: dict[str, str]
    """The environment of rank 0; a rank changes RANK and LOCAL_RANK in it."""
    preparation: dict[str, Any]
    """Module search path, working directory and main module, as ``multiprocessing.spawn`` gives them to a child."""

    def log(self, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.log_folder / f"rank{rank:05d}.log"

    @property
    def launcher_log(self) -> Path:
        """The same of torchrun, or of Lightning's launcher."""
        return self.log_folder / "launcher.log"

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
