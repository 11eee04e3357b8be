"""What one host must have: shared memory, open files, and a folder that takes checkpoints, fast enough."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status
from lightning_distplus.preflight.interfaces import own_name
from lightning_distplus.preflight.running import Check

__all__ = ["HOST_CHECKS", "write_speed"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself, nothing is written there
_MIN_SHARED_BYTES = 1 << 30
_MIN_OPEN_FILES = 4096
_MIN_FREE_BYTES = 10 << 30
_TRIAL_S = 2.0
_SLOW_MB_PER_S = 50


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Data workers hand their batches over in shared memory; a container gets 64 MiB unless told otherwise."""
    if not _SHARED_MEMORY.is_dir():
        return
    found = os.statvfs(_SHARED_MEMORY)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < _MIN_SHARED_BYTES:
        yield Finding(
            status=Status.WARNING,
            subject=f"Shared memory has {_mib(free_bytes)} MiB free; data workers die of a bus error when it is full.",
            detail=f"{_SHARED_MEMORY}: {_mib(free_bytes)} of {_mib(found.f_blocks * found.f_frsize)} MiB free",
            remedy="docker run --ipc=host (or --shm-size=16g); in Kubernetes an emptyDir with medium: Memory",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    """Sockets to peers, data files and workers' pipes are open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
        yield Finding(
            status=Status.WARNING,
            subject=f"This process may open {soft} files; large jobs and many data workers need more.",
            detail=f"ulimit -n: {soft}, hard limit {limit}",
            remedy=f"ulimit -n {min(65536, hard) if hard != resource.RLIM_INFINITY else 65536}, before the run starts",
        )


def disk(facts: Facts) -> Iterator[Finding]:
    """The folder must take a file, keep space for checkpoints, and be written in a bearable time."""
    folder = facts.folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    try:
        mb_per_s = write_speed(folder, min(facts.trial_bytes, free_bytes // 2))
    except OSError as error:
        yield Finding(
            status=Status.ERROR,
            subject=f"{facts.folder} cannot be written: {error.strerror}; no checkpoint could be saved.",
            detail=f"writing into {folder} on {facts.host}, {_mib(free_bytes)} MiB free",
            remedy="Make room or give write permission there, or set another default_root_dir",
        )
        return
    detail = f"{folder}: {free_bytes / 1e9:.1f} GB free, {mb_per_s:.0f} MB/s with fsync"
    if free_bytes < _MIN_FREE_BYTES:
        subject = "Little space is left for checkpoints."
        remedy = "A checkpoint of N parameters with Adam needs 12 N to 16 N bytes, and its successor as much again"
        yield Finding(status=Status.WARNING, subject=subject, detail=detail, remedy=remedy)
    elif mb_per_s < _SLOW_MB_PER_S:
        subject = "The folder of the run is slow: every rank waits while a checkpoint is written."
        yield Finding(
            status=Status.WARNING, subject=subject, detail=detail, remedy="Save to a faster disk, or save less often"
        )
    else:
        yield Finding(status=Status.NOTE, subject="The folder of the run takes checkpoints.", detail=detail)


def write_speed(folder: Path, size_bytes: int) -> float:
    """MB/s into a file that is gone afterwards; at most two seconds and one block."""
    block = os.urandom(1 << 20)
    written = 0
    begin = time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:
        while written < size_bytes and time.monotonic() - begin < _TRIAL_S:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return written / 1e6 / (time.monotonic() - begin)


def _mib(size_bytes: int) -> int:
    return size_bytes >> 20


HOST_CHECKS: Mapping[str, Check] = {
    "own_name": own_name,
    "shared_memory": shared_memory,
    "open_files": open_files,
    "disk": disk,
}
"""The checks of one host, by name."""
