"""What a rank and its launcher tell each other: the samples that the rank has in hand, and where its artefacts are."""

from __future__ import annotations

import json
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_distplus import env
from lightning_distplus.process import ProcessState, process_state, start_time

__all__ = [
    "InHand",
    "SampleNote",
    "introduce_starter",
    "launcher_has_ended",
    "starter_has_ended",
    "told_home",
    "told_on_verdict",
]

# -- samples in hand ---------------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<IIII")  # CRC-32 of what follows, global rank, numbers, numbers per id (0: an id is a number)
_REGION_BYTES = 1 << 20  # of each rank; memory is taken for what is written only
_NUMBER_BYTES = 8


class InHand:
    """The launcher's side: one region for each rank of this host, which outlives the rank's process.

    Args:
        num_ranks: Of this host.
    """

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
            checksum, rank, count, width = _HEAD.unpack_from(data)
            end = _HEAD.size + count * _NUMBER_BYTES
            if count and zlib.crc32(data[4:end]) == checksum:  # else it was killed while it wrote
                numbers = list(struct.unpack_from(f"<{count}q", data, _HEAD.size))
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
        """Takes the place of what was noted before.

        Args:
            ids: int64 numbers.
            width: Numbers of each id; 0 where an id is one number and no list.
        """
        if self._descriptor is None or _HEAD.size + len(ids) > _REGION_BYTES:
            return
        record = _HEAD.pack(0, self._rank, len(ids) // _NUMBER_BYTES, width)[4:] + ids
        os.pwrite(self._descriptor, struct.pack("<I", zlib.crc32(record)) + record, self._start)

    def close(self) -> None:
        """Closes the launcher's memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def launcher_has_ended() -> bool:
    """Whether ``distplus launch`` has started this rank and is gone, and with it the store that it served."""
    path = env.DISTPLUS_IN_HAND.get()
    return path is not None and path != "" and not Path(path).parents[1].exists()


def introduce_starter() -> None:
    """Says in the environment which process starts the other ranks; their job is known by it."""
    env.DISTPLUS_STARTER.set(f"{os.getpid()}:{start_time(os.getpid()) or 0}")


def starter_has_ended(job: str) -> bool:
    """Whether a job is known by the process that has started this rank, and is to serve the store, and that is gone.

    Whom torchrun or Slurm has started may have found the variable in its environment: its job has another name.
    """
    if not job or job != env.DISTPLUS_STARTER.get():
        return False
    pid, _, started = job.partition(":")
    return process_state(int(pid), int(started) or None) is ProcessState.GONE


# -- the folder of artefacts -------------------------------------------------------------------------------------------


def told_home(file: str | Path | None) -> Path | None:
    """The folder that a rank has named; None where no rank came so far."""
    home = _told(file).get("home")
    return None if home is None else Path(home)


def told_on_verdict(file: str | Path | None) -> str | None:
    """The command or URL for verdicts that the strategy of a rank was given; None where it has none."""
    return _told(file).get("on_verdict")


def _told(file: str | Path | None) -> dict[str, str | None]:
    try:
        told: dict[str, str | None] = json.loads(Path(file or "").read_text())
    except (FileNotFoundError, IsADirectoryError):
        return {}
    return told
