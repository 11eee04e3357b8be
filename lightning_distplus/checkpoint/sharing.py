"""Verification that the ranks share: each reads a part of a checkpoint's bytes, and all hear what each has found."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_distplus.checkpoint.catalog import FileFinding, check_file, reference, verify
from lightning_distplus.checkpoint.digests import BLOCK_BYTES, digest_block
from lightning_distplus.checkpoint.layout import MANIFEST, meta_folder
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest

__all__ = ["findings_in_share", "place_of"]

_NUM_READERS = 2  # of a rank: a disk or a network gives one of them less than it has

_Part = tuple[FileEntry, int | None]  # a file, or one block of a large one


def place_of(path: Path) -> list[Any] | None:
    """Which checkpoint lies at a path, and in which folder: the digest of its manifest, and that file's inode and time.

    Ranks that share the folder say the same; those of nodes with folders of their own differ. None: there is no
    committed checkpoint whose files have the right sizes.
    """
    try:
        known = reference(path)
        if known is None or not verify(path, "size").ok:
            return None
        file = (meta_folder(path.resolve()) / MANIFEST).stat()
    except OSError:
        return None
    return [known["manifest_xxh3_128"], file.st_ino, file.st_mtime_ns]


def findings_in_share(path: Path, manifest: Manifest, *, rank: int, num_ranks: int) -> list[FileFinding]:
    """What is wrong with the bytes that this rank reads; the sizes of the files have been compared before.

    Args:
        path: The checkpoint.
        manifest: Its manifest, the same on all ranks.
        rank: This rank.
        num_ranks: How many share the reading.
    """

    def check(part: _Part) -> FileFinding | None:
        entry, block = part
        file = path / entry.path if path.is_dir() else path
        return check_file(file, entry, "full") if block is None else _check_block(file, entry, block)

    with ThreadPoolExecutor(_NUM_READERS, "distplus-reader") as readers:
        found = readers.map(check, _shares(manifest, num_ranks)[rank])
        return [finding for finding in found if finding is not None]


def _shares(manifest: Manifest, num_ranks: int) -> list[list[_Part]]:
    """For each rank what it reads: about as many bytes each, one run after the other.

    Files are in the order of the numbers in their names, so that the run of a rank is more or less the shard that it
    loads then, which its host has in memory by that time.
    """
    parts: list[_Part] = []
    for entry in sorted(manifest.files, key=_by_numbers):
        parts += [(entry, number) for number in range(len(entry.blocks_64_mib))] or [(entry, None)]
    shares: list[list[_Part]] = [[] for _ in range(num_ranks)]
    total_bytes, before_bytes = max(1, sum(map(_size_bytes, parts))), 0
    for part in parts:
        middle = 2 * before_bytes + _size_bytes(part)
        shares[min(middle * num_ranks // (2 * total_bytes), num_ranks - 1)].append(part)
        before_bytes += _size_bytes(part)
    return shares


def _by_numbers(entry: FileEntry) -> list[str | int]:
    return [int(word) if word.isdigit() else word for word in re.split("([0-9]+)", entry.path)]


def _size_bytes(part: _Part) -> int:
    entry, block = part
    return entry.size_bytes if block is None else min(BLOCK_BYTES, entry.size_bytes - block * BLOCK_BYTES)


def _check_block(file: Path, entry: FileEntry, number: int) -> FileFinding | None:
    expected = entry.blocks_64_mib[number]
    try:
        digest = digest_block(file, number)
    except OSError as error:
        return FileFinding(str(file), f"{entry.size_bytes} readable bytes", f"{type(error).__name__} ({error})")
    if digest == expected:
        return None
    where = f"in bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + _size_bytes((entry, number))}"
    return FileFinding(str(file), f"XXH3 digest {expected} {where}", digest)
