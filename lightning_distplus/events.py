"""The ledger: what happened to a run, one JSON object per line, one append-only file per rank.

Also here: what a rank tells its launcher beside it, the folder and the samples that it has in hand.

Every line has ``time`` (unix seconds), ``run_id`` (several runs may share a folder), ``rank``, ``attempt`` (restarts
before this process), ``seq`` (0, 1, ... within one process) and ``kind``; the other fields belong to the kind.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_distplus import env

__all__ = [
    "LEDGER_VERSION",
    "EventLog",
    "InHand",
    "SampleNote",
    "ckpt_path_for",
    "folder_of_run",
    "ledger_files",
    "parse_event",
    "read_events",
    "read_ledger",
    "told_by_rank",
]

logger = logging.getLogger(__name__)

LEDGER_VERSION = 1
"""Stands in each ``start``. A field that is added later needs no new version; another meaning of one does."""
_MOST_BYTES = 16 << 20  # of a file; a run of a month writes less than 4 MB
_KEPT = 4  # files beside the one that is written
_REQUIRED = frozenset({"time", "rank", "attempt", "seq", "kind"})
_RESERVED = _REQUIRED | {"run_id"}  # older ledgers have none


def folder_of_run(root: str) -> Path:
    """Where the artefacts of a run go: below its root, or below the working directory where that is a URL."""
    return Path("distplus") if "://" in root else Path(root) / "distplus"


def ckpt_path_for(path: str | Path, auto_folder: str | Path | None) -> str:
    """The ``ckpt_path`` that goes on from a checkpoint: its path, or "auto" where that looks in its folder.

    The ``start`` of a run names that folder; older ledgers do not.
    """
    return "auto" if auto_folder is None or Path(path).parent == Path(auto_folder) else str(path)


class EventLog:
    """Writes one rank's events. It opens its file at the first event and may be used from several threads.

    A disk error never reaches the caller: it is reported once, and the number of lost events stands in the next one
    that can be written, as ``num_lost``. A file of 16 MiB becomes ``events-rank00003.1.jsonl``, and a new one begins;
    four such files are kept. The folder is made when it is missing.
    """

    def __init__(self, directory: str | Path, rank: int, *, attempt: int = 0, run_id: str = "") -> None:
        self.path = Path(directory) / f"events-rank{rank:05d}.jsonl"
        self._rank = rank
        self._attempt = attempt
        self._run_id = run_id
        self._seq = 0
        self._num_lost = 0
        self._has_warned = False
        self._ends_in_newline = True
        self._size_bytes = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Appends one event. Values that JSON does not know are written as their text.

        Raises:
            ValueError: A field has a name that every event has.
        """
        if taken := _RESERVED & fields.keys():
            raise ValueError(f"The event {kind!r} has the fields {sorted(taken)}, which the ledger sets. Rename them.")
        with self._lock:
            event = {
                "time": time.time(),
                "run_id": self._run_id,
                "rank": self._rank,
                "attempt": self._attempt,
                "seq": self._seq,
                "kind": kind,
            }
            if self._num_lost:
                event["num_lost"] = self._num_lost
            self._seq += 1
            try:
                self._append(json.dumps({**event, **fields}, default=str).encode() + b"\n")
                self._num_lost = 0
            except OSError as error:
                self._num_lost += 1
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "rank %d: events cannot be written to %s (%s); training goes on without them.",
                        self._rank,
                        self.path,
                        error,
                    )

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        if not self._ends_in_newline:
            line = b"\n" + line
        # One call, so that a reader meets whole lines, save for the last one before a full disk or a kill.
        num_written = os.write(self._descriptor, line)
        self._ends_in_newline = num_written == len(line)
        if not self._ends_in_newline:
            raise OSError(f"{num_written} of {len(line)} bytes were written")
        self._size_bytes += num_written
        if self._size_bytes >= _MOST_BYTES:
            self._rotate()

    def _rotate(self) -> None:
        """The next event opens a new file; where that cannot be, this one goes on."""
        self._close()
        with suppress(OSError):
            for number in range(_KEPT - 1, -1, -1):
                if (file := self._rotated(number)).exists():
                    file.replace(self._rotated(number + 1))

    def _rotated(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}.jsonl") if number else self.path

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size_bytes = self._size_bytes = os.fstat(descriptor).st_size
        self._ends_in_newline = size_bytes == 0 or os.pread(descriptor, 1, size_bytes - 1) == b"\n"
        self._descriptor = descriptor


def ledger_files(directory: str | Path, *, has_launcher: bool = True) -> list[Path]:
    """The files of a ledger, rank by rank, the older ones of each first; the launcher's among them, where wanted."""
    found = []
    for file in Path(directory).glob("events-rank*.jsonl"):
        rank, _, number = file.stem.removeprefix("events-rank").partition(".")
        if f"{rank}{number}".lstrip("-").isdecimal() and (has_launcher or int(rank) >= 0):
            found.append((int(rank), -int(number or 0), file))
    return [file for _, _, file in sorted(found)]


def read_events(directory: str | Path, *, run_id: str | None = None) -> list[dict[str, Any]]:
    """All ranks' events, of one run or of all, by time, then rank and sequence number. Torn lines are left out."""
    events: list[dict[str, Any]] = []
    for file in ledger_files(directory):
        events += (event for event in read_ledger(file) if run_id in (None, event["run_id"]))
    return sorted(events, key=lambda event: (event["time"], event["rank"], event["seq"]))


def read_ledger(file: Path) -> list[dict[str, Any]]:
    """One rank's events, as they were written. Torn lines are left out."""
    parsed = (parse_event(line) for line in file.read_bytes().split(b"\n"))
    return [event for event in parsed if event is not None]


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One line of a ledger; None where it is torn."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return {"run_id": "", **event} if isinstance(event, dict) and event.keys() >= _REQUIRED else None


# -- what a rank tells its launcher ------------------------------------------------------------------------------------


def told_by_rank(file: str | Path | None) -> tuple[Path | None, str | None]:
    """The folder that a rank has named, and the command or URL for verdicts that its strategy was given.

    Both are None where no rank came so far.
    """
    with suppress(FileNotFoundError, IsADirectoryError):
        told = json.loads(Path(file or "").read_text())
        return Path(told["home"]), told.get("on_verdict")
    return None, None


# -- samples in hand ---------------------------------------------------------------------------------------------------

# CRC-32 of what follows, global rank, numbers, numbers per id (0: an id is a number)
_NOTE_HEAD = struct.Struct("<IIII")
_REGION_BYTES = 1 << 20  # of each rank; memory is taken for what is written only
_NUMBER_BYTES = 8


class InHand:
    """The launcher's side: one region for each rank of this host, which outlives the rank's process."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._descriptor = os.memfd_create("distplus-in-hand")
        env.DISTPLUS_IN_HAND.set(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def forget(self) -> None:
        """Empties all regions: another attempt begins."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, self._num_ranks * _REGION_BYTES)

    def read(self) -> dict[int, list[Any]]:
        """The ids by global rank, of the ranks that have told them: numbers, or lists of numbers."""
        found = {}
        for local_rank in range(self._num_ranks):
            data = os.pread(self._descriptor, _REGION_BYTES, local_rank * _REGION_BYTES)
            checksum, rank, count, width = _NOTE_HEAD.unpack_from(data)
            end = _NOTE_HEAD.size + count * _NUMBER_BYTES
            if count and zlib.crc32(data[4:end]) == checksum:  # else it was killed while it wrote
                numbers = list(struct.unpack_from(f"<{count}q", data, _NOTE_HEAD.size))
                found[rank] = [numbers[at : at + width] for at in range(0, count, width)] if width else numbers
        return found

    def close(self) -> None:
        """Gives the memory back."""
        os.close(self._descriptor)


class SampleNote:
    """A rank's side; without a launcher that asks for it, nothing is written.

    A note takes 1 microsecond for 64 ids (2026-11-22, 2 cores): one system call into memory.
    """

    def __init__(self) -> None:
        path, local_rank = env.DISTPLUS_IN_HAND.get(), env.LOCAL_RANK.integer()
        self._rank = env.RANK.integer() or 0
        self._start = (local_rank or 0) * _REGION_BYTES
        self._descriptor: int | None = None
        if path and local_rank is not None:
            with suppress(OSError):  # the launcher has gone
                self._descriptor = os.open(path, os.O_WRONLY)

    def write(self, ids: bytes, width: int) -> None:
        """Takes the place of what was noted before: int64 numbers, of which ``width`` are an id; 0: each one is."""
        if self._descriptor is None or _NOTE_HEAD.size + len(ids) > _REGION_BYTES:
            return
        record = _NOTE_HEAD.pack(0, self._rank, len(ids) // _NUMBER_BYTES, width)[4:] + ids
        os.pwrite(self._descriptor, struct.pack("<I", zlib.crc32(record)) + record, self._start)

    def close(self) -> None:
        """Closes the launcher's memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
