"""The saved position in the data, its format, and whether it and the files fit the run that loads it.

Beside the position a checkpoint holds one record of the files of all sources. It decides nothing: where fingerprints
differ it tells in which file, and where they agree it tells of a large file, of which only samples are compared, that
somebody has written to it. In plain values, format version 2:

    {"version": 2, "sources": [{
        "facts": {"format": "npy", "dtype": "uint16", ...},    what else the fingerprint depends on
        "num_files": 2,
        "files": [[name, bytes, digest, modified], ...]        digest: 16 hex digits, "" where only the size is compared
    }]}                                                        modified: st_mtime_ns, 0 where all bytes are compared

Version 1 had no ``modified``. Of more than 1,024 files a row stands for several that follow one another, with the sum
of their bytes and the latest time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lightning_distplus.data.batches import Geometry
from lightning_distplus.data.order import ORDER_VERSION, READABLE_ORDER_VERSIONS
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

__all__ = [
    "STATE_VERSION",
    "Position",
    "change_of_cut",
    "differences",
    "digest_file",
    "digest_files",
    "first_difference",
    "inventory",
    "position_at",
    "read_state",
    "require_same_batch",
    "require_same_data",
    "rewritten",
    "rows_of_files",
    "state_of",
]

STATE_VERSION = 2
_READABLE = (1, STATE_VERSION)  # version 1 knew neither schedules of batches nor changed mixtures

_log = logging.getLogger(__name__)
# What the state records of ignored differences, so that it stays below 1 KB.
_MAX_IGNORED, _MAX_DIFFERENCES, _MAX_CHARACTERS = 2, 3, 40
_GONE = {"schedule": "a schedule of global batches", "parts": "several data sets side by side (their sizes)"}
"""What earlier versions saved, and this one cannot go on with."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place between two optimizer steps.

    Attributes:
        epoch: The Trainer's epoch.
        batches: Micro-batches of this epoch that are done.
        offset: Samples of this epoch that are done, over all ranks.
        consumed_samples: Samples of all epochs that are done, over all ranks.
        total_batches: Micro-batches of all epochs that are done.
        steps: Optimizer steps done.
        is_validated: Whether the validation that is due here, if any, has run.
        validation_batches: Validation batches that have run in this epoch.
        is_epoch_done: Whether iterable data ended here; with map-style data this follows from ``batches``.
    """

    epoch: int = 0
    batches: int = 0
    offset: int = 0
    consumed_samples: int = 0
    total_batches: int = 0
    steps: int = 0
    is_validated: bool = False
    validation_batches: int = 0
    is_epoch_done: bool = False


def state_of(
    position: Position, geometry: Geometry, identity: Mapping[str, Any], records: Mapping[str, Any]
) -> dict[str, Any]:
    """What is saved: less than 1 KB of plain values, equal on all ranks.

    Args:
        position: Where the run stands.
        geometry: Batch sizes of the run.
        identity: What must be equal for the same order.
        records: What has changed before; what is empty is left out.
    """
    return {
        "version": STATE_VERSION,
        "order_version": ORDER_VERSION,
        **identity,
        "global_batch": geometry.global_batch,
        "micro_step": geometry.micro_step,
        "ranks": geometry.ranks.size,
        "global_batch_changes": [],
        **{name: record for name, record in records.items() if record},
        **asdict(position),
    }


def position_at(sample: int, geometry: Geometry, *, num_batches: int | float, num_steps: int) -> Position:
    """The position at a sample of the global order, for a checkpoint that holds none.

    Args:
        sample: Samples that are done, over all ranks and epochs.
        geometry: Batch sizes of the run.
        num_batches: Micro-batches of an epoch.
        num_steps: Optimizer steps that are done.

    Raises:
        ValueError: No optimizer step begins there, or iterable data would have to be read up to there.
    """
    num_windows, rest = divmod(sample, geometry.global_batch)
    if rest or sample < 0:
        raise ValueError(
            f"start_sample={sample} is not where an optimizer step begins: the global batch is {geometry}. The step "
            f"before begins at sample {max(0, sample - rest)}."
        )
    if sample and num_batches == float("inf"):
        raise ValueError(f"start_sample={sample}: iterable training data begins at its beginning only, start_sample=0.")
    done = num_windows * geometry.accumulation
    epoch, batches = divmod(done, int(num_batches)) if sample else (0, 0)
    return Position(
        epoch=epoch,
        batches=batches,
        offset=batches * geometry.micro_step,
        consumed_samples=sample,
        total_batches=done,
        steps=num_steps,
    )


def read_state(state: Mapping[str, Any]) -> Position:
    """The position in a saved state.

    Raises:
        DatasetMismatch: The state or its order is of a version that this package does not know, or of a feature that
            it no longer has.
    """
    for name, ours in (("version", _READABLE), ("order_version", READABLE_ORDER_VERSIONS)):
        if state.get(name) not in ours:
            raise DatasetMismatch(
                f"The checkpoint's data state has {name} {state.get(name)!r}; this lightning_distplus reads "
                f"{' and '.join(map(str, ours))}. "
                "Resume with the version of lightning_distplus that wrote the checkpoint."
            )
    for name, what in _GONE.items():
        if state.get(name):
            raise DatasetMismatch(
                f"The checkpoint was written under {what}: {_text(state[name])}. This lightning_distplus does not read "
                "data that way any more. Load its weights into a new run, or resume with the version that wrote it."
            )
    names = Position.__dataclass_fields__.keys() - {"is_epoch_done"}  # which older states lack
    return Position(**{name: state[name] for name in names}, is_epoch_done=state.get("is_epoch_done", False))


def _text(record: Any) -> str:
    return str(record["text"] if isinstance(record, Mapping) else record)


def require_same_data(
    state: Mapping[str, Any],
    ours: Mapping[str, Any],
    names: Sequence[str],
    *,
    explain: Callable[[int], str],
    ignore_fingerprint: bool,
) -> list[list[Any]]:
    """Compares what defines the data and its order.

    Args:
        state: The saved one.
        ours: What defines them here.
        names: Of our sources.
        explain: What differs first inside a source of this number; empty where that is not known.
        ignore_fingerprint: Go on with what differs.

    Returns:
        What was ignored here and in the resumes before, for the next state: from which sample on, and what differs.

    Raises:
        DatasetMismatch: Something differs and ``ignore_fingerprint`` is False.
    """
    found = differences({name: state.get(name) for name in ours}, ours, names, explain)
    before = [list(record) for record in state.get("ignored", [])]
    if not found:
        return before
    text = "\n".join(f"  {line}" for line in found)
    if ignore_fingerprint:
        _log.warning("The data is not that of the checkpoint; going on, because ignore_fingerprint=True:\n%s", text)
        what = [*dict.fromkeys(line.split(": ", 1)[0][:_MAX_CHARACTERS] for line in found)]
        return [*before, [state["consumed_samples"], *what[:_MAX_DIFFERENCES]]][-_MAX_IGNORED:]
    raise DatasetMismatch(
        f"The checkpoint was written with other data or another order:\n{text}\n"
        "Give this run the data and settings of the checkpoint, or pass ignore_fingerprint=True to the data module to "
        "go on at the same position of the new order (samples may then repeat or be missed)."
    )


def require_same_batch(saved: Mapping[str, Any], geometry: Geometry, *, allow_change: bool) -> None:
    """Compares the global batch.

    Raises:
        DatasetMismatch: They differ and ``allow_change`` is False.
    """
    if saved["global_batch"] != geometry.global_batch and not allow_change:
        raise DatasetMismatch(
            f"The checkpoint was written with a global batch of {saved['global_batch']} samples; this run has "
            f"{geometry}. Choose batch size, ranks and accumulation with the same product, or pass "
            "allow_global_batch_change=True."
        )


def change_of_cut(state: Mapping[str, Any], geometry: Geometry) -> str:
    """How the global batches are cut now and were cut before; empty where nothing has changed."""
    saved = (state["global_batch"], state["micro_step"], state.get("ranks", geometry.ranks.size))
    if saved == (geometry.global_batch, geometry.micro_step, geometry.ranks.size):
        return ""
    global_batch, micro_step, ranks = saved
    before = Geometry(
        micro_batch=micro_step // ranks, accumulation=global_batch // micro_step, ranks=DataParallel(size=ranks)
    )
    return f"; global batch {geometry}, before {before}"


def differences(
    saved: Mapping[str, Any], ours: Mapping[str, Any], names: Sequence[str], explain: Callable[[int], str]
) -> list[str]:
    """One line for each thing that differs, with both sides; ``explain`` as in ``require_same_data``."""
    lines = []
    for name in sorted((saved.keys() | ours.keys()) - {"sources"}):
        if saved.get(name) != ours.get(name):
            lines.append(f"{name}: {saved.get(name)!r} in the checkpoint, {ours.get(name)!r} in this run")
    old, new = saved.get("sources", []), ours.get("sources", [])
    if len(old) != len(new):
        lines.append(f"number of sources: {len(old)} in the checkpoint, {len(new)} in this run")
        return lines
    labels = [f"source {place} ({name})" for place, name in enumerate(names)] or [
        f"source {n}" for n in range(len(new))
    ]
    for place, (label, *pair) in enumerate(zip(labels, old, new, strict=True)):
        for what, before, now in zip(("fingerprint", "weight / 2**32", "num_samples"), *pair, strict=True):
            if before != now:
                lines.append(f"{label}: {what}: {before!r} in the checkpoint, {now!r} in this run")
            if before != now and what == "fingerprint" and (inside := explain(place)):
                lines.append(f"{label}: {inside}")
    return lines


# -- the files of a source ---------------------------------------------------------------------------------------------

INVENTORY_VERSION = 2
_READABLE_INVENTORIES = (1, INVENTORY_VERSION)

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
    """Name, size, digest and time of each file; the digest is over the bytes that its source's fingerprint covers.

    Args:
        paths: In the order of the fingerprint.
        each_alone: Whether that is ``digest_file`` of each, and not ``digest_files`` of all.
    """
    paths = list(dict.fromkeys(paths))
    stats = [path.stat() for path in paths]
    sizes = [one.st_size for one in stats]
    samples = {} if each_alone or _is_each_alone(sizes) else _samples_of_files(len(paths))
    rows = []
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        digest, is_read = xxhash.xxh3_64(), not samples or number in samples
        is_whole = not samples and size <= _WHOLE_BELOW
        if not samples:
            digest_file(digest, path)
        elif is_read:
            _digest_samples(digest, path, size, samples[number])
        modified = 0 if is_whole else stats[number].st_mtime_ns
        rows.append([path.name[-_MAX_NAME:], size, digest.hexdigest() if is_read else "", modified])
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
    before = _source_of(record, place)
    old, new = before.get("facts", {}), now["facts"]
    for name in [*new, *(name for name in old if name not in new)]:
        if before and old.get(name) != new.get(name):
            return f"{name}: {old.get(name)!r} in the checkpoint, {new.get(name)!r} in this run"
    return _first_file(before, now) if before else ""


def rewritten(record: Any, place: int, now: Mapping[str, Any]) -> str:
    """The first file that was written to since a checkpoint, and in which nothing that is compared has changed.

    Args:
        record: As for ``first_difference``.
        place: Number of the source.
        now: This run's record of that source, whose fingerprint is that of the checkpoint.

    Returns:
        One line that says what was compared and what was not; empty where there is no such file.
    """
    before = _source_of(record, place)
    old, new = before.get("files", []), now["files"]
    if not old or before["facts"] != now["facts"] or [row[1:3] for row in old] != [row[1:3] for row in new]:
        return ""
    pairs = enumerate(zip(old, new, strict=True), 1)
    found = [(number, was, here) for number, (was, here) in pairs if was[3:] and was[3] != here[3]]
    if not found:
        return ""
    number, was, (name, size, digest, modified) = found[0]
    what = f"row {number}, files" if _SEVERAL in name else f"file {number},"
    more = f" (and {len(found) - 1} more of {len(new)} {'rows' if _SEVERAL in name else 'files'})" if found[1:] else ""
    compared = (
        f"its size ({size} bytes) and the samples of its content have not changed; what lies between the samples was "
        "not compared"
        if digest
        else f"its size ({size} bytes) has not changed; its content was not compared"
    )
    times = f"was modified at {_time(modified)}, and at {_time(was[3])} when the checkpoint was written"
    return f"{what} {name} {times}{more}: {compared}"


def _time(modified_ns: int) -> str:
    return f"{datetime.fromtimestamp(modified_ns / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _source_of(record: Any, place: int) -> Mapping[str, Any]:
    """One source of a record; empty where there is none, or the record is not there or newer."""
    if not isinstance(record, Mapping) or record.get("version") not in _READABLE_INVENTORIES:
        return {}
    sources: Sequence[Mapping[str, Any]] = record["sources"]
    return sources[place] if place < len(sources) else {}


def _first_file(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = before["files"], now["files"]
    text = ""
    if before["num_files"] != now["num_files"]:
        text = f"number of files: {before['num_files']} in the checkpoint, {now['num_files']} in this run"
        known, present = ({row[0] for row in rows if _SEVERAL not in row[0]} for rows in (old, new))
        if known & present:  # the files have kept their names, which say which is which
            lost = [f"; {name} ({size} bytes) is missing in this run" for name, size, *_ in old if name not in present]
            found = [f"; {name} ({size} bytes) is not in the checkpoint" for name, size, *_ in new if name not in known]
            return text + "".join([*lost, *found][:1])
    pairs = list(zip_longest(old, new, fillvalue=["no file", 0, ""]))
    places = [place for place, (was, here) in enumerate(pairs) if was[1:3] != here[1:3]]
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
    digest = xxhash.xxh3_64(repr([row[1:3] for row in group]).encode()).hexdigest()
    modified = max(row[3] for row in group)
    return [f"{group[0][0]}{_SEVERAL}{group[-1][0]}", sum(row[1] for row in group), digest, modified]


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
