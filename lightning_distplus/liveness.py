"""Whether a process of this host is running, stopped or gone."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

__all__ = ["ProcessState", "boot_id", "process_state", "start_time"]

_STATE, _START_TIME = 0, 19  # fields of /proc/<pid>/stat, counted after the name


class ProcessState(str, Enum):
    """What the system says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """There is no /proc to ask."""


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
