"""Locks of torch's extension builds that a killed process has left behind; every later start would wait for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from lightning_distplus import env

__all__ = ["remove_abandoned_locks"]

log = logging.getLogger(__name__)

# On these no other host can hold a file.
_LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})


def remove_abandoned_locks() -> list[Path]:
    """Removes the locks that no process holds.

    torch guards a build by a file ``lock``, which the builder keeps open and removes at the end (torch 2.13,
    ``file_baton.py``). A builder that is killed removes nothing, and everybody after it waits without end. DeepSpeed
    takes such a lock at each start. A lock on a file system that other hosts may share is only reported.

    Returns:
        What was removed.
    """
    locks = [path.resolve() for path in _build_root().glob("**/lock")]
    if not locks:
        return []
    held = set(_open_files())
    removed = []
    for lock in locks:
        if lock in held:
            continue
        if _file_system_of(lock) not in _LOCAL_FILE_SYSTEMS:
            log.warning("%s may be left of a killed process; if no host builds extensions now, remove it", lock)
            continue
        lock.unlink(missing_ok=True)
        removed.append(lock)
        log.warning("removed %s: the process that held it is gone, and everybody would have waited for it", lock)
    return removed


def _build_root() -> Path:
    return Path(env.TORCH_EXTENSIONS_DIR.get() or get_default_build_root())


def _open_files() -> Iterator[Path]:
    """The files that processes of this user have open on this host."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            yield link.readlink()


def _file_system_of(path: Path) -> str:
    """The type of the file system on which a file lies; empty where this host does not tell."""
    longest, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount_point, found, *_ = line.split(" ")
            if path.is_relative_to(mount_point) and len(mount_point) >= len(longest):
                longest, kind = mount_point, found
    return kind
