"""Durable and tolerant file operations: listing, fsync, atomic writes, removal."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeAlias

__all__ = [
    "Sync",
    "discard",
    "forget",
    "list_files",
    "list_folders",
    "read_ahead",
    "remove_tree",
    "second_name",
    "sync_folder",
    "write_file",
]

logger = logging.getLogger(__name__)

Sync: TypeAlias = Callable[[int], None]
"""Forces what an open file or folder holds to the disk, given its descriptor: ``os.fsync``, or a seam of a test."""

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def list_files(payload: Path) -> dict[str, int]:
    """Sizes in bytes by posix path relative to the payload, sorted by path; a single file stands under its own name."""
    if payload.is_file():
        return {payload.name: payload.stat().st_size}
    paths = sorted(
        Path(folder, name).relative_to(payload).as_posix()
        for folder, _, names in os.walk(payload, onerror=_raise)
        for name in names
    )
    return {path: (payload / path).stat().st_size for path in paths}


def list_folders(payload: Path) -> list[Path]:
    """The payload's folders, itself included; none for a single file."""
    return [Path(folder) for folder, _, _ in os.walk(payload, onerror=_raise)] if payload.is_dir() else []


def write_file(path: Path, content: bytes, *, sync: Sync | None) -> None:
    """Writes a whole new file; it is not atomic, so the caller writes where nobody looks yet."""
    with path.open("wb") as file:
        file.write(content)
        if sync is not None:
            file.flush()
            sync(file.fileno())


def sync_folder(folder: Path, *, sync: Sync | None) -> None:
    """Forces the names in ``folder`` to the disk, where its file system can do that."""
    if sync is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def forget(file: Path) -> None:
    """Has the page cache let go of what is on the disk, where the system can do that, so that it is read from there."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ahead(file: IO[bytes]) -> None:
    """Has the system read more of a file at once, where it can do that: it is read from its begin to its end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


def second_name(source: Path, destination: Path, *, sync: Sync | None) -> None:
    """Gives a file a second name: a hard link, or a copy where the file system has none."""
    try:
        destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copyfile(source, destination)
        if sync is not None:
            with destination.open("rb") as copied:
                sync(copied.fileno())


def discard(path: Path) -> None:
    """Deletes one file or link; that it is gone already is fine."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Deletes a file or a folder as far as possible; says so when something stays. Never raises."""
    try:
        if path.is_symlink() or path.is_file():
            discard(path)
            return
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.warning("%s cannot be deleted completely. Delete it by hand.", path)
    except OSError as error:  # it cannot even be looked at
        logger.warning("%s cannot be deleted (%s). Delete it by hand.", path, error)


def _raise(error: OSError) -> None:
    raise error
