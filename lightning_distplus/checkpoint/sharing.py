"""Verification that the ranks share: each reads a part of a checkpoint's bytes, and all hear what each has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_distplus.checkpoint.catalog import FileFinding, check_file, reference, verify
from lightning_distplus.checkpoint.digests import BLOCK_BYTES, digest_block
from lightning_distplus.checkpoint.layout import MANIFEST, meta_folder
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest

__all__ = ["findings_in_share", "place_of"]

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
    findings = []
    for entry, block in _shares(manifest, num_ranks)[rank]:
        file = path / entry.path if path.is_dir() else path
        found = check_file(file, entry, "full") if block is None else _check_block(file, entry, block)
        if found is not None:
            findings.append(found)
    return findings


def _shares(manifest: Manifest, num_ranks: int) -> list[list[_Part]]:
    """For each rank what it reads: the largest parts first, each to the rank that has least."""
    parts: list[_Part] = []
    for entry in manifest.files:
        parts += [(entry, number) for number in range(len(entry.blocks_64_mib))] or [(entry, None)]
    shares: list[list[_Part]] = [[] for _ in range(num_ranks)]
    loads_bytes = [0] * num_ranks
    for part in sorted(parts, key=_size_bytes, reverse=True):
        rank = loads_bytes.index(min(loads_bytes))
        shares[rank].append(part)
        loads_bytes[rank] += _size_bytes(part)
    return shares


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
