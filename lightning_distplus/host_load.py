"""How busy this host is at one moment: processors, memory, disks, file descriptors, GPUs; from /proc and nvidia-smi."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["HostLoad"]

_GPU_QUERY = "index,utilization.gpu,memory.used,memory.total"
_GPU_DEADLINE_S = 0.5
_GIB = 1 << 30


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

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> HostLoad:
        """Reads what ``to_plain`` wrote."""
        return cls(**values)

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
            memory = _share(int(gpu["memory_used_bytes"]), int(gpu["memory_bytes"]))
            parts.append(f"GPU {gpu['index']:.0f} {gpu['used_percent']:.0f} % busy, {memory}")
        return ", ".join(parts)


def _share(used: int | None, total: int) -> str:
    return f"{(used or 0) / _GIB:.1f} of {total / _GIB:.1f} GiB"


def _processors() -> dict[str, Any]:
    return {"load_1m": os.getloadavg()[0], "num_cores": os.cpu_count()}


def _memory() -> dict[str, Any]:
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(text.split()[0]) * 1024 for name, text in lines}
    return {"memory_bytes": sizes["MemTotal"], "memory_used_bytes": sizes["MemTotal"] - sizes["MemAvailable"]}


def _shared_memory() -> dict[str, Any]:
    found = os.statvfs("/dev/shm")  # noqa: S108  # asked about, not written to
    return {
        "shm_bytes": found.f_blocks * found.f_frsize,
        "shm_used_bytes": (found.f_blocks - found.f_bfree) * found.f_frsize,
    }


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
    gpus = []
    for line in ended.stdout.splitlines():
        index, used, memory_used, memory = (float(text) for text in line.split(","))
        mib = 1 << 20
        gpus.append(
            {"index": index, "used_percent": used, "memory_used_bytes": memory_used * mib, "memory_bytes": memory * mib}
        )
    return {"gpus": gpus}
