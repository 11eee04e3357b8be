"""Starts ranks warm: forks them from one process of this host, which has imported what they need.

Three processes run this file. The launcher has a ``Warm``. The server, ``python -m``, imports the modules and forks the
ranks. For each rank torchrun's agent starts a process that stands in for it: it passes signals on, and ends as the rank
ends. It is run by its path, isolated, on the standard library alone, so that it is there within some 30 ms. Where no
rank can be forked, it becomes the interpreter that the agent takes it for.

torch's agent with a Python function and the standard library's forkserver cannot keep how a rank ends (torch 2.13): it
counts values that the function returns, so that a rank that calls ``os._exit(0)`` makes it wait for ever, and where two
ranks fail at once it tells one exit code. ``atexit`` does not run there, and standard input is ``/dev/null``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that are meant for a rank. The server, which is to outlive it, holds them back."""
_HERE = b"?"  # says who has imported the modules, and waits for the question
_FORKED = b"+"  # asks for a rank, and says that there is one; any other answer means that there is none
_END = struct.Struct("i")  # how a rank has ended, as subprocess writes it; a signal is a negative number
_PEER = struct.Struct("3i")


def _peer_of(link: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def _receive(link: socket.socket, size: int) -> bytes:
    """What has come from the other end; nothing where it has gone, also with words of ours unread."""
    try:
        return link.recv(size)
    except ConnectionResetError:
        return b""


# -- in the launcher ---------------------------------------------------------------------------------------------------

PRELOADED = ("lightning_distplus.cli.training", "lightning_distplus.strategies.engines")
"""With torch, Lightning and what they import; DeepSpeed only where the user names it."""
_MAX_WAITING = 1024
_END_S = 1.0


class Warm:
    """The launcher's side: starts the server, and tells how a rank comes from it.

    The server imports while the launcher does, and serves all attempts; one that was killed is replaced. It ends with
    this object; without it, when the launcher and the last rank are gone. Modules that it imports beside ``PRELOADED``
    must not start threads or touch a GPU.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._begin()

    def _begin(self) -> None:
        self._name = f"distplus-warm-{os.getpid()}-{os.urandom(8).hex()}"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # for the server, which inherits it
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"\0{self._name}")  # of this host's memory and no file, so that nothing is left of it
                listener.listen(_MAX_WAITING)
                fd = listener.fileno()
                words = ["-m", "lightning_distplus.launch.warm", "serve", str(fd), *PRELOADED, *self._modules]
                self._server = subprocess.Popen(
                    [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[fd]
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def command(self, command: Sequence[str]) -> list[str]:
        """What follows the interpreter in the place of ``command``, for a rank that runs the same."""
        if command[0].startswith("-") and command[0] != "-m":
            return list(command)  # an option of the interpreter: it takes another one
        if (self._server.poll() or 0) < 0:  # killed, for example for memory; one that ended by itself would end again
            self._close_input()
            self._begin()
        return ["-I", "-S", __file__, "stand-in", self._name, *command]

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


# -- the process that stands in for a rank -----------------------------------------------------------------------------

_IMPORTS_S = 600.0


def _stand_in(name: str, *command: str) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        if _ask(link, name):

            def pass_on(number: int, frame: FrameType | None) -> None:
                with contextlib.suppress(OSError):
                    link.send(bytes([number]))

            for number in PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, pass_on)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            _end_like(_receive(link, _END.size))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - as the agent has been told


def _ask(link: socket.socket, name: str) -> bool:
    """Asks for a rank with the standard streams of this process; the rank reads all else from /proc.

    From the question on, signals wait until it is known whom they are for.
    """
    link.settimeout(_IMPORTS_S)
    try:
        link.connect(f"\0{name}")
        if _peer_of(link)[1] != os.getuid() or link.recv(len(_HERE)) != _HERE:
            return False
        link.settimeout(None)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        socket.send_fds(link, [_FORKED], [0, 1, 2])
        return _receive(link, len(_FORKED)) == _FORKED
    except TimeoutError:
        _warn(
            f"what is imported beforehand has taken {_IMPORTS_S:g} s and goes on; this rank starts as an interpreter "
            "of its own"
        )
    except OSError:  # the server has ended: out of memory, or a module that crashed it
        pass
    return False


def _end_like(end: bytes) -> None:
    code = _END.unpack(end)[0] if end else -signal.SIGKILL  # the server was killed, and its ranks with it
    if code >= 0:
        os._exit(code)
    if code != -signal.SIGKILL:  # whose action is not to be chosen
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left a core file already, if any
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pause()


# -- the server --------------------------------------------------------------------------------------------------------

_LAUNCHER = 0  # standard input, of which the launcher holds the other end
_DEVICES = ("/dev/nvidia", "/dev/kfd")
_THREADS_END_S = 1.0
_ASKING_S = 5.0


def _serve(listener: str, *modules: str) -> None:
    """Serves until the launcher and the last rank are gone. In a rank, it returns when the rank's command has ended."""
    from lightning_distplus import env  # here: whoever stands in for a rank finds the standard library alone

    first_path, variables = sys.path[0], env.snapshot()
    gc.disable()  # it finds nothing while modules are imported
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module does when it is imported
            why = f"{type(error).__name__}: {error}"
            _warn(f"cannot import {module} beforehand: {why}; each rank imports it by itself")
    gc.freeze()  # no collection in a rank writes to the memory that all of them share
    if reason := why_not():
        _warn(f"{reason}; each rank starts as an interpreter of its own")
    set_by_modules = dict(env.snapshot().items() - variables.items())
    server = _Server(socket.socket(fileno=int(listener)), forks=not reason)
    asked = server.serve()
    if asked is None:
        os._exit(0)  # what modules have registered for the end is for the ranks
    try:
        command, variables = _become_rank(*asked, server)
    except BaseException as error:  # a second server would be worse than no rank
        _warn(f"a rank cannot start: {type(error).__name__}: {error}")
        os._exit(1)
    env.restore({**variables, **set_by_modules})
    _forget_the_server()
    gc.enable()
    _run(command, first_path)


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


class _Server:
    """Forks a rank for each connection, hands signals to it and tells how it ends."""

    def __init__(self, listener: socket.socket, *, forks: bool) -> None:
        self._listener = listener
        self._forks = forks
        self.name = os.fsdecode(listener.getsockname()[1:])
        self.pid = os.getpid()
        self._links: dict[int, socket.socket] = {}
        self._asked_to_end: set[int] = set()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> tuple[socket.socket, list[int]] | None:
        """Returns in each rank, with the link to who has asked for it, and its streams; here when nobody is left."""
        has_launcher = True
        while has_launcher or self._links:
            links = {link: pid for pid, link in self._links.items()}
            poll = select.poll()
            for one in (self._woken, *links, *([_LAUNCHER, self._listener] if has_launcher else ())):
                poll.register(one, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                self._reap()
            for link, pid in links.items():
                if link.fileno() in ready and pid in self._links:
                    self._pass_on(pid, _receive(link, 4096))
            if _LAUNCHER in ready:
                has_launcher = False
            elif self._listener.fileno() in ready and (asked := self._fork()) is not None:
                return asked
        return None

    def _fork(self) -> tuple[socket.socket, list[int]] | None:
        link, _ = self._listener.accept()
        link.settimeout(_ASKING_S)
        streams: list[int] = []
        with contextlib.suppress(OSError):
            if self._forks and _peer_of(link)[1] == os.getuid():
                link.send(_HERE)
                _, streams, _, _ = socket.recv_fds(link, len(_FORKED), 3)
        if len(streams) < 3:  # whoever has asked is gone
            link.close()
        else:
            sys.stderr.flush()
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (self._listener, self._woken, self._waker, *self._links.values()):
                    one.close()  # the others would seem to live as long as this rank
                return link, streams
            self._links[pid] = link
        for stream in streams:
            os.close(stream)
        return None

    def _pass_on(self, pid: int, numbers: bytes) -> None:
        with contextlib.suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)
                if number == signal.SIGTERM:
                    self._asked_to_end.add(pid)
            if not numbers:  # the agent has killed the process that stands in for it
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._links and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            pid = ended.si_pid
            if pid in self._asked_to_end:  # and so are the processes that it leaves: the agent means its whole group
                self._asked_to_end.remove(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGTERM)
            _, status = os.waitpid(pid, 0)
            if (link := self._links.pop(pid, None)) is not None:  # else a module has started it when it was imported
                with link, contextlib.suppress(OSError):
                    link.send(_END.pack(os.waitstatus_to_exitcode(status)))


# -- a rank ------------------------------------------------------------------------------------------------------------


def _become_rank(link: socket.socket, streams: list[int], server: _Server) -> tuple[list[str], dict[str, str]]:
    """Makes this fork the process that the agent has started: its session, streams, folder and cores.

    Returns:
        The command of that process, and its variables.
    """
    from lightning_distplus import env
    from lightning_distplus.process import end_with_parent

    asking, _ = _peer_of(link)
    process, cores = Path(f"/proc/{asking}"), os.sched_getaffinity(asking)
    if env.OMP_NUM_THREADS.get() is None and cores != os.sched_getaffinity(0):
        os._exit(0)  # libraries have counted the threads that they start by the cores of the server
    words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")[:-1]]
    lines = [os.fsdecode(line) for line in (process / "environ").read_bytes().split(b"\0")]
    os.setsid()
    end_with_parent()
    if os.getppid() != server.pid:
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(process / "cwd")
    os.sched_setaffinity(0, cores)
    link.send(_FORKED)
    link.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    variables = {name: value for name, found, value in (line.partition("=") for line in lines) if found}
    return words[words.index(server.name) + 1 :], variables


def _forget_the_server() -> None:
    """What modules took from the variables, or from chance, when they were imported; ``random`` sees to itself."""
    from lightning_distplus import env

    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "lightning_utilities.core.rank_zero" in sys.modules:
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = env.RANK.integer() or 0
    if "torchmetrics.utilities.prints" in sys.modules:
        sys.modules["torchmetrics.utilities.prints"].rank_zero_only.rank = env.LOCAL_RANK.integer() or 0


def _run(command: Sequence[str], first_path: str) -> None:
    """Runs a script, or ``-m`` and a module, as ``__main__``.

    Its folder takes the place of the one that this interpreter has put in front of ``sys.path``.

    Raises:
        SystemExit: It has ended otherwise than by its last line.
    """
    importlib.invalidate_caches()
    is_module = command[0] == "-m"
    sys.orig_argv = [sys.executable, *command]
    sys.argv = list(command[1:] if is_module else command)
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        if first_path in sys.path:
            sys.path.remove(first_path)
        sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(command[0]).resolve().parent))
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if is_module:
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]  # what an interpreter calls for -m
        else:
            exec(_load_script(main, command[0]), vars(main))  # noqa: S102 - what an interpreter does
    except Exception as error:
        error.__traceback__ = _from_the_command_on(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


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


def _from_the_command_on(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    {"stand-in": _stand_in, "serve": _serve}[sys.argv[1]](*sys.argv[2:])
