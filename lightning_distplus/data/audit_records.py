"""The records of an audit: one append-only file per rank and run, each record whole or left out."""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.data.request import Request

__all__ = ["AuditBatch", "AuditFile", "AuditWriter", "SampleSum", "read_audit", "sum_of_samples"]

# kind, numbers per id, samples (in a header: bytes), epoch, step, unix time; then the payload and its CRC-32.
_HEAD = struct.Struct("<cBIqqd")
_CRC = struct.Struct("<I")
_HEADER, _BATCH, _END = b"H", b"B", b"E"
_MULTIPLIERS = tuple(
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_SHIFT = np.uint64(32)
_MAX_WAITING = 256  # micro-batches


def sum_of_samples(epoch: int, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> int:
    """The sum, modulo 2**64, of a hash of each sample: the order and the cut into batches do not matter to it.

    Args:
        epoch: The epoch of the positions.
        positions: int64 of shape (num_samples,).
        ids: int64 of shape (num_samples,) or (num_samples, numbers per id).
    """
    mixed = positions.astype(np.uint64) * _MULTIPLIERS[0]
    mixed += np.uint64(epoch)
    for column in ids.reshape(len(ids), -1).T:
        mixed ^= mixed >> _SHIFT
        mixed *= _MULTIPLIERS[1]
        mixed ^= column.astype(np.uint64) * _MULTIPLIERS[3]
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIERS[2]
    mixed ^= mixed >> _SHIFT
    return int(np.add.reduce(mixed))


class SampleSum:
    """A growing ``sum_of_samples``. It hashes many micro-batches at once: one alone costs 30 microseconds.

    Args:
        total: The sum so far.
        num_samples: How many samples are in it.
    """

    def __init__(self, total: int = 0, num_samples: int = 0) -> None:
        self._total = total
        self._num_samples = num_samples
        self._waiting: list[tuple[int, Request]] = []

    def add(self, batches: Iterable[tuple[int, Request]]) -> None:
        """Takes micro-batches, each with the epoch of its positions."""
        self._waiting += batches
        if len(self._waiting) >= _MAX_WAITING:
            self._fold()

    def value(self) -> tuple[int, int]:
        """The sum, not reduced, and the number of samples."""
        self._fold()
        return self._total, self._num_samples

    def _fold(self) -> None:
        of_epoch: dict[int, list[Request]] = {}
        for epoch, request in self._waiting:
            of_epoch.setdefault(epoch, []).append(request)
        for epoch, requests in of_epoch.items():
            positions = np.concatenate([request.positions for request in requests])
            self._total += sum_of_samples(epoch, positions, np.concatenate([request.ids for request in requests]))
            self._num_samples += len(positions)
        self._waiting = []


class AuditWriter:
    """Appends the records of one rank and one run, each with one system call and without a wait for the disk.

    What a killed process has written is there; what a crashed host has written in the last seconds may not be.

    Args:
        folder: Of all records of the job; made when missing.
        run: The name of this run, the same on all ranks; names order like time.
        rank: Global rank.
        facts: What is true of the whole run; plain values.
    """

    def __init__(self, folder: str | Path, run: str, rank: int, facts: dict[str, Any]) -> None:
        self.path = Path(folder) / f"{run}-rank{rank:05d}.audit"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        payload = json.dumps({**facts, "run": run, "rank": rank}).encode()
        self._write(_HEADER, 0, len(payload), 0, 0, payload)

    def write(self, epoch: int, step: int, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        """Appends one micro-batch; shapes as in ``sum_of_samples``."""
        width = 1 if ids.ndim == 1 else ids.shape[1]
        self._write(_BATCH, width, len(positions), epoch, step, positions.tobytes() + ids.tobytes())

    def end(self) -> None:
        """Notes that the run ended by itself."""
        self._write(_END, 0, 0, 0, 0, b"")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _write(self, kind: bytes, width: int, count: int, epoch: int, step: int, payload: bytes) -> None:
        record = _HEAD.pack(kind, width, count, epoch, step, time.time()) + payload
        os.write(self._file, record + _CRC.pack(zlib.crc32(record)))


@dataclass(frozen=True, kw_only=True)
class AuditBatch:
    """One micro-batch that went through ``training_step``."""

    epoch: int
    step: int
    at: float
    positions: NDArray[np.int64]
    """int64 of shape (num_samples,)."""
    ids: NDArray[np.int64]
    """int64 of shape (num_samples, numbers per id): what the data set was asked for."""
    arrived: NDArray[np.int64] | None = None
    """Likewise, as the batch carried them into ``training_step``; None where the records do not have them."""

    def sum(self) -> int:
        """The ``sum_of_samples`` of what was recorded."""
        recorded = self.ids if self.arrived is None else np.concatenate([self.ids, self.arrived], axis=1)
        return sum_of_samples(self.epoch, self.positions, recorded)


@dataclass(kw_only=True)
class AuditFile:
    """The records of one rank in one run."""

    path: Path
    facts: dict[str, Any]
    batches: list[AuditBatch] = field(default_factory=list)
    has_ended: bool = False
    num_torn_bytes: int = 0
    """Behind the last whole record: what a kill has cut off."""


def read_audit(path: Path) -> AuditFile:
    """Reads a file up to its first torn record.

    Raises:
        ValueError: It does not begin with a header.
    """
    data = path.read_bytes()
    records = _records(data)
    first = next(records, None)
    if first is None or first[0] != _HEADER:
        raise ValueError(f"{path} does not begin with the header of an audit. Remove it, or restore it.")
    found = AuditFile(path=path, facts=json.loads(first[-2]))
    end = first[-1]
    for kind, width, count, epoch, step, at, payload, after in records:
        end = after
        if kind == _END:
            found.has_ended = True
            continue
        numbers = np.frombuffer(payload, dtype=np.int64)
        positions, ids = numbers[:count], numbers[count:].reshape(count, width)
        arrived = None
        if found.facts.get("ids") == "arrived":
            ids, arrived = ids[:, : width // 2], ids[:, width // 2 :]
        found.batches.append(AuditBatch(epoch=epoch, step=step, at=at, positions=positions, ids=ids, arrived=arrived))
    found.num_torn_bytes = len(data) - end
    return found


def _records(data: bytes) -> Iterator[tuple[Any, ...]]:
    """(kind, width, count, epoch, step, time, payload, place behind it) of each whole record."""
    start = 0
    while start + _HEAD.size + _CRC.size <= len(data):
        kind, width, count, epoch, step, at = _HEAD.unpack_from(data, start)
        size = {_HEADER: count, _BATCH: 8 * count * (1 + width), _END: 0}.get(kind)
        if size is None or start + _HEAD.size + size + _CRC.size > len(data):
            return
        end = start + _HEAD.size + size
        if zlib.crc32(data[start:end]) != _CRC.unpack_from(data, end)[0]:
            return
        yield kind, width, count, epoch, step, at, data[start + _HEAD.size : end], end + _CRC.size
        start = end + _CRC.size
