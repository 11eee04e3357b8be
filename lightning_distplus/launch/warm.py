"""Starts ranks warm: forks them from one process of this host, which has imported what they need.

The standard library's forkserver, with a Python function as the entry point of torchrun's agent, would be shorter. It
cannot keep how a rank ends (measured 2026-11-23, torch 2.13, Python 3.11, ``LaunchConfig(start_method="forkserver")``):

- A rank that ends by ``os._exit(0)``, or by a KeyboardInterrupt, makes the agent wait for ever: it counts values that
  the function returns, not exits.
- Where two ranks fail at once the agent tells one exit code only, and the culprit's may be the other one.
- Functions that a script has registered with ``atexit`` do not run, and standard input is ``/dev/null``.
- A rank cannot become another interpreter where a fork is not safe, as it does here: the exec returns no value either.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from lightning_distplus import env
from lightning_distplus.launch.stand_in import END, FORKED, HERE, PASSED_ON, peer_of, receive
from lightning_distplus.process import end_with_parent

__all__ = ["PRELOADED", "Server", "Warm", "main", "run"]

# -- side of the launcher ----------------------------------------------------------------------------------------------

PRELOADED = ("lightning_distplus.cli.training", "lightning_distplus.strategies.engines")
"""With torch, Lightning and what they import; DeepSpeed only where the user names it."""
_MAX_WAITING = 1024
_END_S = 1.0


class Warm:
    """The launcher's side: starts the process, and tells how a rank comes from it.

    It imports while the launcher does, and serves all attempts; one that was killed is replaced. It ends with this
    object; without it, when the launcher and the last rank are gone.

    Args:
        modules: What it imports beside ``PRELOADED``. They must not start threads or touch a GPU.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._begin()

    def _begin(self) -> None:
        self._name = f"distplus-warm-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener, _held_back():
            listener.bind(f"\0{self._name}")  # of this host's memory and no file, so that nothing has to be removed
            listener.listen(_MAX_WAITING)
            self._server = subprocess.Popen(
                [sys.executable, "-m", "lightning_distplus.launch.warm", str(listener.fileno()), *PRELOADED,
                 *self._modules],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
            )  # fmt: skip

    def command(self, command: Sequence[str]) -> list[str]:
        """What follows the interpreter in the place of ``command``, for a rank that runs the same."""
        if command[0].startswith("-") and command[0] != "-m":
            return list(command)  # an option of the interpreter: it takes another one
        if (self._server.poll() or 0) < 0:  # killed, for example for memory; one that ended by itself would end again
            self._close_input()
            self._begin()
        stand_in = Path(__file__).with_name("stand_in.py")
        return ["-I", "-S", str(stand_in), self._name, *command]

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_input()
        try:
            self._server.wait(_END_S)
        except subprocess.TimeoutExpired:  # it still imports; the agent has ended the ranks
            self._server.kill()
            self._server.wait()

    def _close_input(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """The server is to outlive its ranks, which may be saving; it lets them have these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- the process that forks --------------------------------------------------------------------------------------------

_LAUNCHER = 0  # standard input, of which the launcher holds the other end
_DEVICES = ("/dev/nvidia", "/dev/kfd")
_THREADS_END_S = 1.0
_ASKING_S = 5.0


def main(listener: int, modules: Sequence[str]) -> None:
    """Serves until the launcher and the last rank are gone. In a rank, it returns when the rank's command has ended."""
    first_path, variables = sys.path[0], env.snapshot()
    gc.disable()  # it finds nothing while modules are imported
    for module in modules:
        _import(module)
    gc.freeze()  # no collection in a rank writes to the memory that all of them share
    reason = why_not()
    if reason:
        _warn(f"{reason}; each rank starts as an interpreter of its own")
    set_by_modules = dict(env.snapshot().items() - variables.items())
    task = Server(socket.socket(fileno=listener), forks=not reason).serve()
    if task is None:
        os._exit(0)  # what modules have registered for the end is for the ranks
    env.restore({**task.variables, **set_by_modules})
    _forget_the_server()
    gc.enable()
    run(task.command, first_path)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a module does when it is imported
        _warn(f"cannot import {module} beforehand: {type(error).__name__}: {error}; each rank imports it by itself")


def _warn(text: str) -> None:
    sys.stderr.write(f"distplus launch: {text}\n")
    sys.stderr.flush()


def why_not() -> str:
    """Why no rank may be forked from this process; empty where nothing is in the way."""
    held = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    if devices := sorted(name for name in held if name.startswith(_DEVICES)):
        return f"a module that is imported beforehand has opened {devices[0]}, which a forked rank could not use"
    if pid := os.fork():  # OpenBLAS, which expects forks, ends its threads for each of them
        os.waitpid(pid, 0)
    else:
        os._exit(0)
    until = time.monotonic() + _THREADS_END_S
    while len(threads := list(Path("/proc/self/task").iterdir())) > 1:
        if time.monotonic() > until:
            return f"modules that are imported beforehand have started {len(threads) - 1} threads"
        time.sleep(0.01)
    return ""


@dataclass(frozen=True)
class Task:
    """What a rank is to run, as the agent has started the process that stands in for it."""

    command: Sequence[str]
    variables: Mapping[str, str]
    folder: Path
    """Of that process, as a name of /proc: it may have been deleted since."""
    cores: set[int]

    @classmethod
    def of(cls, pid: int, name: str) -> Task:
        """Reads it from /proc."""
        process = Path(f"/proc/{pid}")
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")[:-1]]
        lines = [os.fsdecode(line) for line in (process / "environ").read_bytes().split(b"\0")]
        variables = {name: value for name, found, value in (line.partition("=") for line in lines) if found}
        return cls(words[words.index(name) + 1 :], variables, process / "cwd", os.sched_getaffinity(pid))


@dataclass
class _Rank:
    link: socket.socket
    is_asked_to_end: bool = False


class Server:
    """Forks ranks, hands signals to them and tells how they end.

    Args:
        listener: Where those connect who stand in for ranks.
        forks: Whether ranks may be forked from this process.
    """

    def __init__(self, listener: socket.socket, *, forks: bool) -> None:
        self._listener = listener
        self._forks = forks
        self._name = os.fsdecode(listener.getsockname()[1:])
        self._ranks: dict[int, _Rank] = {}
        self._has_launcher = True
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> Task | None:
        """Returns in each rank, and here when nobody is left."""
        while self._has_launcher or self._ranks:
            links = {rank.link: pid for pid, rank in self._ranks.items()}
            launcher: list[int | socket.socket] = [_LAUNCHER, self._listener] if self._has_launcher else []
            ready = wait([self._woken, *links, *launcher])
            if self._woken in ready:
                self._woken.recv(4096)
                self._reap()
            for link, pid in links.items():
                if link in ready and pid in self._ranks:
                    self._pass_on(pid, receive(link, 4096))
            if _LAUNCHER in ready:
                self._has_launcher = False
            elif self._listener in ready and (task := self._fork()) is not None:
                return task
        return None

    def _fork(self) -> Task | None:
        link, _ = self._listener.accept()
        asked = self._asked(link)
        if asked is None:
            link.close()
            return None
        return self._start(link, *asked)

    def _asked(self, link: socket.socket) -> tuple[Task, list[int]] | None:
        """What shall be run on which streams; None: it cannot be forked here, or whoever has asked is gone."""
        link.settimeout(_ASKING_S)
        streams: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            pid, user = peer_of(link)
            if user == os.getuid():
                link.send(HERE)
                _, streams, _, _ = socket.recv_fds(link, len(FORKED), 3)
                task = Task.of(pid, self._name)
                if self._forks and len(streams) == 3 and _same_threads(task):
                    return task, streams
        _close_all(streams)
        return None

    def _start(self, link: socket.socket, task: Task, streams: Sequence[int]) -> Task | None:
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._close()
                link.close()
                _become(task, streams, server)
            except BaseException as error:  # a second server would be worse than no rank
                _warn(f"a rank cannot start: {type(error).__name__}: {error}")
                os._exit(1)
            return task
        self._ranks[pid] = _Rank(link)
        _close_all(streams)
        with contextlib.suppress(OSError):  # who has asked is gone, which the next look at the link finds
            link.send(FORKED)
        return None

    def _close(self) -> None:
        """What a rank must not hold: the others would seem to live as long as it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self._listener, self._woken, self._waker, *(rank.link for rank in self._ranks.values())):
            one.close()

    def _pass_on(self, pid: int, numbers: bytes) -> None:
        with contextlib.suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)
                self._ranks[pid].is_asked_to_end |= number == signal.SIGTERM
            if not numbers:  # the agent has killed the process that stands in for it
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._ranks and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            rank = self._ranks.pop(ended.si_pid, None)
            if rank is None:  # a module has started it when it was imported
                os.waitpid(ended.si_pid, 0)
                continue
            if rank.is_asked_to_end:  # and so are the processes that it leaves: the agent means its whole group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended.si_pid, signal.SIGTERM)
            _, status = os.waitpid(ended.si_pid, 0)
            with contextlib.suppress(OSError):
                rank.link.send(END.pack(os.waitstatus_to_exitcode(status)))
            rank.link.close()


def _close_all(streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)


def _same_threads(task: Task) -> bool:
    """Whether libraries would start as many threads as they have counted here: by a variable, or by the cores."""
    return env.OMP_NUM_THREADS.get() is not None or task.cores == os.sched_getaffinity(0)


def _become(task: Task, streams: Sequence[int], server: int) -> None:
    """Makes this fork the process that the agent has started: its session, streams, folder and cores."""
    os.setsid()
    end_with_parent()
    if os.getppid() != server:
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(task.folder)
    os.sched_setaffinity(0, task.cores)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def _forget_the_server() -> None:
    """What modules took from the variables, or from chance, when they were imported; ``random`` sees to itself."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "lightning_utilities.core.rank_zero" in sys.modules:
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = env.RANK.integer() or 0
    if "torchmetrics.utilities.prints" in sys.modules:
        sys.modules["torchmetrics.utilities.prints"].rank_zero_only.rank = env.LOCAL_RANK.integer() or 0


# -- a command in a fork -----------------------------------------------------------------------------------------------


def run(command: Sequence[str], first_path: str) -> None:
    """Runs a script, or ``-m`` and a module, as ``__main__``.

    Args:
        command: What follows the interpreter.
        first_path: The folder that this interpreter has put in front of ``sys.path``; another one takes its place.

    Raises:
        SystemExit: It has ended otherwise than by its last line.
    """
    sys.orig_argv = [sys.executable, *command]
    importlib.invalidate_caches()
    main = ModuleType("__main__")
    is_module = command[0] == "-m"
    sys.argv = list(command[1:] if is_module else command)
    _begin_path_with(str(Path.cwd()) if is_module else str(Path(command[0]).resolve().parent), first_path)
    sys.modules["__main__"] = main
    try:
        code = _load_module(main, command[1]) if is_module else _load_script(main, command[0])
        exec(code, vars(main))  # noqa: S102 - what an interpreter does
    except Exception as error:
        error.__traceback__ = _from_the_command_on(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _from_the_command_on(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        trace = trace.tb_next
    return trace


def _begin_path_with(folder: str, before: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        if before in sys.path:
            sys.path.remove(before)
        sys.path.insert(0, folder)


def _load_module(main: ModuleType, name: str) -> CodeType:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        why = f"({type(error).__name__}: {error})"
        raise SystemExit(f"{sys.executable}: Error while finding module specification for {name!r} {why}") from None
    code = _code(spec)
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    sys.argv[0] = str(spec.origin)
    vars(main).update(
        __spec__=spec, __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent
    )
    return code


def _code(spec: ModuleSpec | None) -> CodeType | None:
    load = getattr(spec and spec.loader, "get_code", None)
    return load(spec.name) if spec is not None and load is not None else None


def _load_script(main: ModuleType, path: str) -> CodeType:
    file = str(Path(path).absolute())
    loader = SourceFileLoader("__main__", file)
    try:
        source = loader.get_data(file)
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    vars(main).update(__file__=file, __cached__=None, __loader__=loader)
    return loader.source_to_code(source, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
