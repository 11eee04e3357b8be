"""Durable and tolerant file operations: listing, digests, fsync, atomic writes, removal."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

__all__ = [
    "bytes_digest",
    "digest_file",
    "discard",
    "list_files",
    "list_folders",
    "remove_tree",
    "second_name",
    "sync_folder",
    "write_file",
]

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
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


def bytes_digest(content: bytes) -> str:
    """XXH3 128-bit digest in hex."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)


def digest_file(path: Path, *, durable: bool = False) -> tuple[int, str]:
    """Size in bytes and digest of what can be read at ``path``.

    Args:
        path: The file.
        durable: Whether its content is also forced to the disk.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    size_bytes = 0
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(view[:num_bytes])
            size_bytes += num_bytes
        if durable:
            os.fsync(file.fileno())
    return size_bytes, digest.hexdigest()


def write_file(path: Path, content: bytes, *, durable: bool) -> None:
    """Writes a whole new file; it is not atomic, so the caller writes where nobody looks yet."""
    with path.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def sync_folder(folder: Path, *, durable: bool) -> None:
    """Forces the names in ``folder`` to the disk, where its file system can do that."""
    if not durable:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def second_name(source: Path, destination: Path, *, durable: bool) -> None:
    """Gives a file a second name: a hard link, or a copy where the file system has none."""
    try:
        destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copyfile(source, destination)
        if durable:
            digest_file(destination, durable=True)


def discard(path: Path) -> None:
    """Deletes one file or link; that it is gone already is fine."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Deletes a file or a folder as far as possible; says so when something stays."""
    if path.is_symlink() or path.is_file():
        try:
            discard(path)
        except OSError as error:
            logger.warning("%s cannot be deleted (%s). Delete it by hand.", path, error)
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s cannot be deleted completely. Delete it by hand.", path)


def _raise(error: OSError) -> None:
    raise error
