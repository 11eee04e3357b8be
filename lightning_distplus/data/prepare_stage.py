"""The folder beside its target in which a preparation is made: one process at a time, and what it can go on from."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import xxhash

from lightning_distplus.data.documents import Extent, Shard
from lightning_distplus.data.shards import ShardFiles, write_durably

__all__ = ["Stage", "load_plan"]

_VERSION = 1
_LOCK_WAIT_S = 10.0  # workers of a killed preparation hold the lock until they notice, after one batch


class Stage:
    """A folder that survives a kill; the same preparation goes on in it, any other one begins anew.

    What was interrupted is kept where something of it is complete, else removed.

    Args:
        prefix: The target.
        identity: Everything that decides about the result; plain values.

    Raises:
        BlockingIOError: Another process prepares the same target.
    """

    def __init__(self, prefix: Path, identity: dict[str, Any]) -> None:
        self.folder = prefix.with_name(f".{prefix.name}.prepare")
        self._lock = _lock(self.folder)
        digest = xxhash.xxh3_64(json.dumps({"version": _VERSION, **identity}, sort_keys=True).encode()).hexdigest()
        mark = self.folder / "identity"
        if not mark.is_file() or mark.read_text() != digest:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink() if path.is_file() else shutil.rmtree(path)
            write_durably(mark, digest.encode())
        self.is_published = False
        self.is_worth_keeping = False

    @property
    def lock_descriptor(self) -> int:
        """Handed to worker processes, so that the lock is held until all of them are gone."""
        return self._lock.fileno()

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of this preparation, complete when it is there."""
        return self.folder / "tokenizer.json"

    def files(self, number: int) -> ShardFiles:
        """The files of a shard."""
        return ShardFiles(self.folder, number)

    def save_plan(self, shards: Sequence[Shard], settings: dict[str, Any]) -> None:
        """For worker processes."""
        plan = {"settings": settings, "shards": [asdict(shard) for shard in shards]}
        write_durably(self.folder / "plan.json", json.dumps(plan).encode())

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_worth_keeping = self.is_worth_keeping or any(self.folder.glob("*.done"))
        if self.is_published or not is_worth_keeping:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def load_plan(folder: Path) -> tuple[list[Shard], dict[str, Any]]:
    """The shards and settings that ``save_plan`` has written."""
    plan = json.loads((folder / "plan.json").read_bytes())
    shards = [
        Shard(tuple(Extent(**extent) for extent in one["extents"]), one["size_bytes"], one["max_documents"])
        for one in plan["shards"]
    ]
    return shards, plan["settings"]


def _lock(folder: Path) -> IO[str]:
    due = time.monotonic() + _LOCK_WAIT_S
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / "lock").open("a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip()
            stream.close()
            if time.monotonic() > due:
                raise BlockingIOError(
                    f"Another preparation (process {owner}) writes to the same target, in {folder}. Wait for it, or "
                    "choose another --output."
                ) from None
            time.sleep(0.1)
            continue
        path = folder / "lock"
        if path.exists() and path.stat().st_ino == os.fstat(stream.fileno()).st_ino:
            stream.truncate(0)
            stream.write(f"{os.getpid()}\n")
            stream.flush()
            return stream
        stream.close()  # the other one has finished and removed the folder
