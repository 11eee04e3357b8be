"""The files of a source: their digest, and the record by which a later run says which of them has changed.

A checkpoint holds one record for all sources, beside the position. It is read where fingerprints differ, and decides
nothing. In plain values, format version 1:

    {"version": 1, "sources": [{
        "facts": {"format": "npy", "dtype": "uint16", ...},    what else the fingerprint depends on
        "num_files": 2,
        "files": [[name, bytes, 16 hex digits], ...]           "" where only the size was looked at
    }]}

Of more than 1,024 files a row stands for several that follow one another, with the sum of their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

__all__ = ["INVENTORY_VERSION", "digest_file", "digest_files", "first_difference", "inventory", "rows_of_files"]

INVENTORY_VERSION = 1

_WHOLE_BELOW = 16 * 2**20  # bytes; files up to this size enter the fingerprint as a whole, larger ones by samples
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64
_MAX_ROWS = 1024  # of a source
_MAX_NAME = 64  # characters, from the end
_SEVERAL = " .. "

Row = list[Any]


def digest_files(digest: xxhash.xxh3_64, paths: Sequence[Path]) -> None:
    """All sizes; all content of a little data; of much data samples, from at most 64 files."""
    paths = list(dict.fromkeys(paths))
    sizes = [path.stat().st_size for path in paths]
    if _is_each_alone(sizes):
        for path in paths:
            digest_file(digest, path)
        return
    digest.update(np.array(sizes, dtype="<i8").tobytes())
    for number, count in _samples_of_files(len(paths)).items():
        _digest_samples(digest, paths[number], sizes[number], count)


def digest_file(digest: xxhash.xxh3_64, path: Path) -> None:
    """Size and content of one file (of a large one: 64 samples)."""
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    if size <= _WHOLE_BELOW:
        digest.update(path.read_bytes())
    else:
        _digest_samples(digest, path, size, _NUM_SAMPLES)


def rows_of_files(paths: Sequence[Path], *, each_alone: bool) -> list[Row]:
    """Name, size in bytes and digest of each file, over the bytes that its source's fingerprint covers.

    Args:
        paths: In the order of the fingerprint.
        each_alone: Whether that is ``digest_file`` of each, and not ``digest_files`` of all.
    """
    paths = list(dict.fromkeys(paths))
    sizes = [path.stat().st_size for path in paths]
    samples = {} if each_alone or _is_each_alone(sizes) else _samples_of_files(len(paths))
    rows = []
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        digest, is_read = xxhash.xxh3_64(), not samples or number in samples
        if not samples:
            digest_file(digest, path)
        elif is_read:
            _digest_samples(digest, path, size, samples[number])
        rows.append([path.name[-_MAX_NAME:], size, digest.hexdigest() if is_read else ""])
    return _grouped(rows)


def inventory(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of a checkpoint, from one of each source."""
    return {"version": INVENTORY_VERSION, "sources": [dict(source) for source in sources]}


def first_difference(record: Any, place: int, now: Mapping[str, Any]) -> str:
    """The first thing in which a source differs from that of a checkpoint, with both sides.

    Args:
        record: The checkpoint's, of any version, or None.
        place: Number of the source.
        now: This run's record of that source.

    Returns:
        One line; empty where the record is not there, is newer, or holds nothing that differs.
    """
    if not isinstance(record, Mapping) or record.get("version") != INVENTORY_VERSION:
        return ""
    before = record["sources"][place] if place < len(record["sources"]) else {}
    old, new = before.get("facts", {}), now["facts"]
    for name in [*new, *(name for name in old if name not in new)]:
        if before and old.get(name) != new.get(name):
            return f"{name}: {old.get(name)!r} in the checkpoint, {new.get(name)!r} in this run"
    return _first_file(before, now) if before else ""


def _first_file(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = before["files"], now["files"]
    text = ""
    if before["num_files"] != now["num_files"]:
        text = f"number of files: {before['num_files']} in the checkpoint, {now['num_files']} in this run"
        known, present = ({row[0] for row in rows if _SEVERAL not in row[0]} for rows in (old, new))
        if known & present:  # the files have kept their names, which say which is which
            lost = [f"; {name} ({size} bytes) is missing in this run" for name, size, _ in old if name not in present]
            found = [f"; {name} ({size} bytes) is not in the checkpoint" for name, size, _ in new if name not in known]
            return text + "".join([*lost, *found][:1])
    pairs = list(zip_longest(old, new, fillvalue=["no file", 0, ""]))
    places = [place for place, (was, here) in enumerate(pairs) if was[1:] != here[1:]]
    if not places:
        return text
    first = _difference(places[0], *pairs[places[0]])
    also = f" ({len(places)} of {len(pairs)} differ)" if len(places) > 1 else ""
    return f"{text}; {first}{also}" if text else first + also


def _difference(place: int, before: Row, now: Row) -> str:
    """How one file differs, or one row of several."""
    what = f"row {place + 1}, files" if _SEVERAL in now[0] else f"file {place + 1},"
    name = now[0] if before[0] == now[0] else f"{before[0]} in the checkpoint and {now[0]} in this run"
    if before[1] != now[1]:
        return f"{what} {name}: {before[1]} bytes in the checkpoint, {now[1]} in this run"
    return f"{what} {name}: content {before[2]} in the checkpoint, {now[2]} in this run, {now[1]} bytes each"


def _grouped(rows: list[Row]) -> list[Row]:
    """At most ``_MAX_ROWS`` rows."""
    if len(rows) <= _MAX_ROWS:
        return rows
    size = -(-len(rows) // _MAX_ROWS)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [_summary(group) for group in groups]


def _summary(group: list[Row]) -> Row:
    """One row for several."""
    digest = xxhash.xxh3_64(repr([row[1:] for row in group]).encode()).hexdigest()
    return [f"{group[0][0]}{_SEVERAL}{group[-1][0]}", sum(row[1] for row in group), digest]


def _is_each_alone(sizes: Sequence[int]) -> bool:
    """Whether ``digest_files`` reads each file as ``digest_file`` does."""
    return len(sizes) == 1 or sum(sizes) <= _WHOLE_BELOW


def _samples_of_files(num_files: int) -> dict[int, int]:
    """Of the files that are looked into, the number of samples."""
    chosen = np.linspace(0, num_files - 1, min(num_files, _NUM_SAMPLES)).astype(int).tolist()
    return dict.fromkeys(chosen, max(2, _NUM_SAMPLES // len(chosen)))


def _digest_samples(digest: xxhash.xxh3_64, path: Path, size: int, count: int) -> None:
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as stream:
        for sample in range(count):
            stream.seek(last * sample // (count - 1), os.SEEK_SET)
            digest.update(stream.read(_SAMPLE_BYTES))
