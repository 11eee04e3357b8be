"""Processes of this host: alive, stopped or gone, how long they ran, who has started them, how busy the host is.

Also here, because it must be there before torch is imported: the signals of the launcher.

Reads /proc itself: psutil 7 knows neither the signal that has ended a process, nor the signals that it catches, nor its
tracer, nor the process table that a number belongs to. Its public time of a start moves with the wall clock, so that it
names no process to another one. What it could replace here is some ten lines, and a look takes 28 instead of 19 us.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import operator
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

from lightning_distplus import env

# -- life of a process -------------------------------------------------------------------------------------------------

_STATE, _PARENT, _START_TIME, _EXIT_CODE = 0, 1, 19, 49  # fields of /proc/<pid>/stat, counted after the name
_PR_SET_PDEATHSIG = 1
_SEEN_LATELY_S = 0.25
_STOPPED_S = 1.5  # the longest pause between two looks of a wait is half a second
_ANY_PORT = 9  # discard; where nothing listens, a host that is there refuses


class ProcessState(str, Enum):
    """What the system says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """There is no /proc to ask."""


class _RunningTime:
    """Leaves out what goes by between two looks that are too far apart for a process that runs.

    Nothing tells a process that it was stopped (Ctrl-Z, a scheduler's suspension, a frozen virtual machine). But every
    loop that waits looks at this clock, some ten times a second in the thread of a watchdog: a gap is time in which no
    thread of this process ran. Where a call that holds the global lock makes such a gap, this process could not wait
    either, and its peers, whose clocks go on, see its silence.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen_at = monotonic()
        self._stopped_s = 0.0

    def read(self) -> float:
        """``time.monotonic()``, without the time in which this process was stopped; what waits looks once a second.

        A difference of two values is how long this process ran meanwhile. It takes 0.2 microseconds.
        """
        stopped_s = self._stopped_s
        now = monotonic()
        # The second condition: another thread may have noticed a stop between the two lines above.
        if now - self._seen_at < _SEEN_LATELY_S and stopped_s == self._stopped_s:
            return now - stopped_s
        with self._lock:
            now = monotonic()
            gap_s = now - self._seen_at
            self._seen_at = now
            if gap_s > _STOPPED_S:
                self._stopped_s += gap_s
            return now - self._stopped_s


running_time = _RunningTime().read


def until(is_so: Callable[[], bool], seconds: float, *, every_s: float = 0.02) -> bool:
    """Asks until the answer is yes, for so long at most; returns the last answer."""
    end = running_time() + seconds
    while not (answer := is_so()) and running_time() < end:
        time.sleep(every_s)
    return answer


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; tells it from a later one with the same number."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else None


def age_of_process() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    started = start_time(os.getpid())
    if started is None:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"), 0.0)


def process_state(pid: int, started: int | None) -> ProcessState:
    """The state of a process of this host that has ``started`` then, as it told it itself; None where it could not."""
    if started is None or not Path("/proc/self/stat").exists():
        return ProcessState.UNKNOWN
    fields = _stat(pid)
    if fields is None or fields[_STATE] in "ZX" or int(fields[_START_TIME]) != started:
        return ProcessState.GONE
    return ProcessState.STOPPED if fields[_STATE] in "Tt" else ProcessState.RUNNING


def signal_of(pid: int, started: int | None) -> str:
    """The signal that has ended a process, as long as its parent has not asked; "" where nobody knows any more."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] != "Z" or int(fields[_START_TIME]) != started:
        return ""
    with suppress(ValueError):
        return signal.Signals(int(fields[_EXIT_CODE]) & 0x7F).name
    return ""


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """Names this host's present boot, and its process table; two containers with one host name differ."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """The processes that a process has started, in order of their numbers."""
    numbers = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [number for number in numbers if (fields := _stat(number)) and int(fields[_PARENT]) == pid]


def forks(pid: int) -> list[int]:
    """The children of a process that were forked from it and run the same program, as data workers do."""
    command = _command(pid)
    return [child for child in children(pid) if command and _command(child) == command]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def open_memory(pid: int, name: str, flags: int = os.O_RDONLY) -> int | None:
    """A descriptor of the memory (``os.memfd_create``) of a process of this host whose name begins so.

    None where it has none, or may not be looked at.
    """
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if str(path.readlink()).startswith(f"/memfd:{name}"):
                    return os.open(path, flags)
    return None


def end_with_parent() -> None:
    """From now on, this process is killed when the thread that started it is gone, however that ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_workers() -> None:
    """Ends the data workers of this process, which ends itself.

    Torch's handler of SIGCHLD goes first: it would raise in the middle of the exit, and print that above the verdict.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def catches_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where it cannot be asked."""
    mask = _status(pid, "SigCgt")
    return mask is not None and bool(int(mask, 16) >> (number - 1) & 1)


def is_traced(pid: int) -> bool:
    """Whether a debugger (or strace) is attached to a process."""
    return _status(pid, "TracerPid") not in (None, "0")


def _status(pid: int, name: str) -> str | None:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return None


def address_towards(host: str) -> str:
    """The address of this host on the way to another one; empty where there is no way. Sends nothing."""
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    return ""


def host_answers(address: str, deadline_s: float) -> bool:
    """Whether a packet comes back from a host: a connection, or its refusal.

    False also where a firewall drops what it does not know, and says nothing.
    """
    try:
        socket.create_connection((address, _ANY_PORT), timeout=deadline_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


# -- who has started this rank -----------------------------------------------------------------------------------------


def launcher_has_ended() -> bool:
    """Whether ``distplus launch`` has started this rank and is gone, and with it the store that it served."""
    path = env.DISTPLUS_IN_HAND.get()
    return path is not None and not Path(path).parents[1].exists()


def introduce_starter() -> None:
    """Says in the environment which process starts the other ranks; their job is known by it."""
    env.DISTPLUS_STARTER.set(f"{os.getpid()}:{start_time(os.getpid()) or 0}")


def starter_has_ended(job: str) -> bool:
    """Whether a job is known by the process that has started this rank, and is to serve the store, and that is gone.

    Whom torchrun or Slurm has started may have found the variable in its environment: its job has another name.
    """
    if not job or job != env.DISTPLUS_STARTER.get():
        return False
    pid, _, started = job.partition(":")
    return process_state(int(pid), int(started) or None) is ProcessState.GONE


# -- the signals of the launcher ---------------------------------------------------------------------------------------


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stop(BaseException):
    """The launcher was asked to stop while no rank was there to be told."""


class Signals:
    """Takes the signals of the launcher, from its first moment to its last.

    A rank that is just being started when a signal comes hears of it as soon as it is there. A SIGHUP, the end of the
    terminal, reaches the ranks as a SIGTERM; where it is ignored (``nohup``) it stays so.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        """The name of the last signal."""
        self._number: signal.Signals | None = None
        self._told: set[int] = set()
        self._is_interruptible = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def has_reached_ranks(self) -> bool:
        """Whether a rank was there to be told."""
        return bool(self._told)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal ends the block, in which no rank is there; so does one that came before.

        Raises:
            Stop: There was one.
        """
        self._is_interruptible = True
        try:
            if self.asked is not None:
                raise Stop
            yield
        finally:
            self._is_interruptible = False

    def ranks_begin(self) -> None:
        """From here on ranks are being started: a signal is for them."""
        self._is_interruptible = False

    def pass_on(self) -> None:
        """Tells the ranks that have come since the signal. Called again and again, from any thread."""
        if self._number is not None:
            self._tell(set(_ranks()) - self._told)

    def stop_ranks(self) -> None:
        """Sends a SIGTERM to the ranks of this host."""
        for pid in _ranks():
            _send(pid, signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self._number = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        self._tell(set(_ranks()))
        if self._is_interruptible:
            raise Stop

    def _tell(self, ranks: set[int]) -> None:
        assert self._number is not None
        self._told |= ranks
        for pid in ranks:
            _send(pid, self._number)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _ranks() -> list[int]:
    """Processes that this one has started as leaders of sessions of their own, which is how the agent starts ranks."""
    found = []
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):  # it has just ended
            if os.getsid(pid) == pid:
                found.append(pid)
    return found


# -- a person beside it ------------------------------------------------------------------------------------------------

_DEBUGGERS = ("debugpy", "pydevd")


def is_attended() -> bool:
    """Whether this process has a terminal to read from, or a debugger is loaded or configured."""
    if env.PYTHONBREAKPOINT.get() not in (None, "0") or any(name in sys.modules for name in _DEBUGGERS):
        return True
    try:
        return os.isatty(0)
    except OSError:  # standard input is closed
        return False


# -- load of the host --------------------------------------------------------------------------------------------------

_GPU_QUERY = "index,utilization.gpu,memory.used,memory.total"
_GPU_DEADLINE_S = 0.5
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """What the system says of this host and this process. None: it does not tell."""

    load_1m: float | None = None
    """Processes that ran or wanted to run, averaged over a minute."""
    num_cores: int | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    shm_used_bytes: int | None = None
    """Of /dev/shm, where data workers leave their batches."""
    shm_bytes: int | None = None
    disk_wait_percent: float | None = None
    """Share of the last 10 s in which some task waited for a disk (pressure stall information)."""
    num_files: int | None = None
    """Open file descriptors of this process."""
    max_files: int | None = None
    gpus: list[dict[str, float]] = field(default_factory=list)
    """Per GPU: index, used_percent, memory_used_bytes, memory_bytes."""

    @classmethod
    def now(cls) -> HostLoad:
        """Asks the system; a few milliseconds, half a second at most where there are GPUs. Never raises."""
        found: dict[str, Any] = {}
        for ask in (_processors, _memory, _shared_memory, _disks, _files, _gpus):
            with suppress(OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError):
                found.update(ask())
        return cls(**found)

    def describe(self) -> str:
        """One line, for example ``load 7.1 on 2 cores, memory 61 of 64 GiB, ...``."""
        parts = []
        if self.load_1m is not None:
            parts.append(f"load {self.load_1m:.1f} on {self.num_cores} cores")
        if self.memory_bytes:
            parts.append(f"memory {_share(self.memory_used_bytes, self.memory_bytes)}")
        if self.shm_bytes:
            parts.append(f"shared memory {_share(self.shm_used_bytes, self.shm_bytes)}")
        if self.disk_wait_percent is not None:
            parts.append(f"disk wait {self.disk_wait_percent:.0f} %")
        if self.num_files is not None:
            parts.append(f"{self.num_files} of {self.max_files} files open")
        for gpu in self.gpus:
            memory = _share(gpu["memory_used_bytes"], gpu["memory_bytes"])
            parts.append(f"GPU {gpu['index']:.0f} {gpu['used_percent']:.0f} % busy, {memory}")
        return ", ".join(parts)


def _share(used: float | None, total: float) -> str:
    return f"{(used or 0) / _GIB:.1f} of {total / _GIB:.1f} GiB"


def _processors() -> dict[str, Any]:
    return {"load_1m": os.getloadavg()[0], "num_cores": os.cpu_count()}


def _memory() -> dict[str, Any]:
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(text.split()[0]) * 1024 for name, text in lines}
    return {"memory_bytes": sizes["MemTotal"], "memory_used_bytes": sizes["MemTotal"] - sizes["MemAvailable"]}


def _shared_memory() -> dict[str, Any]:
    found = os.statvfs("/dev/shm")  # noqa: S108  # asked about, not written to
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return {"shm_bytes": found.f_blocks * found.f_frsize, "shm_used_bytes": used}


def _disks() -> dict[str, Any]:
    some = Path("/proc/pressure/io").read_text().splitlines()[0]  # some avg10=0.16 avg60=...
    return {"disk_wait_percent": float(some.split()[1].partition("=")[2])}


def _files() -> dict[str, Any]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"num_files": len(os.listdir("/proc/self/fd")), "max_files": limit}  # noqa: PTH208  # a count


def _gpus() -> dict[str, Any]:
    """Asks nvidia-smi: a call to the driver from here could block behind the training thread's own."""
    if not Path("/proc/driver/nvidia").exists():
        return {}
    command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_DEADLINE_S, check=True)
    names = ("index", "used_percent", "memory_used_bytes", "memory_bytes")
    units = (1, 1, _MIB, _MIB)
    lines = [[float(text) for text in line.split(",")] for line in ended.stdout.splitlines()]
    return {"gpus": [dict(zip(names, map(operator.mul, line, units), strict=True)) for line in lines]}
