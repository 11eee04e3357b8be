"""Whether a process of this host is running, stopped or gone, for how long it ran, and whether another host answers."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
import threading
from contextlib import suppress
from enum import Enum
from pathlib import Path
from time import monotonic

__all__ = [
    "ProcessState",
    "address_towards",
    "boot_id",
    "catches_signal",
    "children",
    "end_with_parent",
    "forks",
    "host_answers",
    "is_traced",
    "process_state",
    "running_time",
    "signal_of",
    "start_time",
]

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


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; tells it from a later one with the same number."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else None


def process_state(pid: int, started: int | None) -> ProcessState:
    """The state of a process of this host.

    Args:
        pid: Its number.
        started: Its ``start_time``, as it told it itself; None where it could not.
    """
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
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def end_with_parent() -> None:
    """From now on, this process is killed when the thread that started it is gone, however that ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
