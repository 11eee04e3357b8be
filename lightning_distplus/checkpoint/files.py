"""Durable and tolerant file operations: listing, digests, fsync, atomic writes, removal."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = [
    "BLOCK_BYTES",
    "FileDigest",
    "Sync",
    "bytes_digest",
    "digest_block",
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

Sync: TypeAlias = Callable[[int], None]
"""Forces what an open file or folder holds to the disk, given its descriptor: ``os.fsync``, or a seam of a test."""

BLOCK_BYTES = 64 << 20
"""Larger files have a digest of each such block as well, so that several ranks can share the reading."""

_CHUNK_BYTES = 256 << 10  # stays in the second cache from the read to the digest
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


@dataclass(frozen=True)
class FileDigest:
    """Size of a file, XXH3 128-bit digest of its content, and of its blocks where it has more than one."""

    size_bytes: int
    xxh3_128: str
    blocks: tuple[str, ...] = ()
    sha256: str = ""
    """The SHA-256 digest, where it was asked for."""


def digest_file(
    path: Path,
    *,
    sync: Sync | None = None,
    on_bytes: Callable[[int], object] | None = None,
    with_blocks: bool = False,
    with_sha256: bool = False,
) -> FileDigest:
    """The digest of what can be read at ``path``.

    Args:
        path: The file.
        sync: Forces its content to the disk as well; None: nobody does.
        on_bytes: Told how many bytes were read, after each part.
        with_blocks: Whether the blocks of a large file get digests of their own.
        with_sha256: Whether the content gets a SHA-256 digest as well.
    """
    import xxhash

    whole, block = xxhash.xxh3_128(), xxhash.xxh3_128()
    cryptographic = hashlib.sha256() if with_sha256 else None
    blocks: list[str] = []
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    size_bytes = block_bytes = 0
    with path.open("rb", buffering=0) as file:
        with_blocks = with_blocks and os.fstat(file.fileno()).st_size > BLOCK_BYTES
        while num_bytes := file.readinto(view[: min(_CHUNK_BYTES, BLOCK_BYTES - block_bytes)]):
            whole.update(view[:num_bytes])
            if cryptographic is not None:
                cryptographic.update(view[:num_bytes])
            size_bytes += num_bytes
            if with_blocks:
                block.update(view[:num_bytes])
                block_bytes += num_bytes
                if block_bytes == BLOCK_BYTES:
                    blocks.append(block.hexdigest())
                    block, block_bytes = xxhash.xxh3_128(), 0
            if on_bytes is not None:
                on_bytes(num_bytes)
        if sync is not None:
            sync(file.fileno())
    if block_bytes:
        blocks.append(block.hexdigest())
    sha256 = "" if cryptographic is None else cryptographic.hexdigest()
    return FileDigest(size_bytes, whole.hexdigest(), tuple(blocks), sha256)


def digest_block(path: Path, number: int) -> str:
    """The digest of one block of a file, as far as it can be read."""
    import xxhash

    digest = xxhash.xxh3_128()
    view = memoryview(bytearray(_CHUNK_BYTES))
    left_bytes = BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(number * BLOCK_BYTES)
        while num_bytes := file.readinto(view[: min(_CHUNK_BYTES, left_bytes)]):
            digest.update(view[:num_bytes])
            left_bytes -= num_bytes
    return digest.hexdigest()


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


def second_name(source: Path, destination: Path, *, sync: Sync | None) -> None:
    """Gives a file a second name: a hard link, or a copy where the file system has none."""
    try:
        destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copyfile(source, destination)
        if sync is not None:
            digest_file(destination, sync=sync)


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
