"""The commit protocol: all ranks save into a stage, and it becomes the checkpoint only if every one of them succeeded.

Paths are local (or on a mounted file system); a directory checkpoint needs a folder that all ranks share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from lightning_distplus.checkpoint.digests import DigestedWrites
from lightning_distplus.checkpoint.files import Sync, discard, forget, list_files, remove_tree, write_file
from lightning_distplus.checkpoint.info import SaveInfo
from lightning_distplus.checkpoint.layout import META, Stage, new_nonce
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest
from lightning_distplus.checkpoint.swap import publish
from lightning_distplus.checkpoint.torn import claim
from lightning_distplus.checkpoint.voting import Gather, agree
from lightning_distplus.errors import CheckpointCorrupt

__all__ = ["Count", "StagedSave", "commit", "stage"]

Count: TypeAlias = Callable[[], dict[str, Any]]
"""Counts what this rank has saved of each tensor, as `fingerprints.sums_of_pieces` does."""


def commit(
    target: Path,
    write: Callable[[Path], object],
    *,
    rank: int,
    gather: Gather,
    info: SaveInfo,
    sync: Sync | None = os.fsync,
    with_sha256: bool = False,
) -> Manifest | None:
    """Saves a checkpoint that exists on all ranks' word, or not at all. All ranks call it together.

    What is at ``target`` before is loadable until the new one is committed, under its own name or aside.

    Args:
        target: Path of the checkpoint; rank 0's holds for all ranks.
        write: The save itself, given the path to write to: a file that rank 0 writes, or a directory that all fill.
        rank: This process's rank.
        gather: How the ranks exchange their outcomes.
        info: What goes into the manifest; rank 0's is used.
        sync: Forces files, folders and moves to the disk; None is for tests.
        with_sha256: Whether the files get SHA-256 digests beside those of XXH3.

    Returns:
        The manifest on rank 0, None on the others.

    Raises:
        SaveFailed: The save failed on a rank, named in the message and in ``.ranks``. It is raised on every rank; on
            those that failed it has their own exception as its cause. No checkpoint came into being.
        PeerError: A rank did not answer; raised by ``gather``.
    """
    digested = DigestedWrites(sync, with_sha256=with_sha256)
    return stage(target, write, rank=rank, gather=gather, digested=digested).commit(info)


def stage(
    target: Path,
    write: Callable[[Path], object],
    *,
    rank: int,
    gather: Gather,
    digested: DigestedWrites,
) -> StagedSave:
    """The first half of `commit`: what is saved lies in the stage, and nobody sees it yet.

    Files that ``write`` opens with ``digested`` are not read again for their digests; others get the same kind.
    """
    save = StagedSave(target, rank, gather, digested)
    with save.cleaning_up():
        save.begin()
        save.agree("probe", save.probe)
        save.agree("write", lambda: save.write(write))
    return save


class StagedSave:
    """One save on one rank: its stage, and the phases that all ranks go through together."""

    def __init__(self, target: Path, rank: int, gather: Gather, digested: DigestedWrites) -> None:
        self.stage = Stage(target.absolute(), new_nonce())
        self.manifest: Manifest | None = None
        self._rank = rank
        self._gather = gather
        self._digested = digested
        self._world_size = 1

    def commit(
        self,
        info: SaveInfo,
        *,
        finish: Callable[[], object] | None = None,
        count: Count = dict,
        reads_back: bool = False,
        gather: Gather | None = None,
    ) -> Manifest | None:
        """The second half of `commit`, for another thread where it is given a ``gather`` of its own.

        Args:
            info: What goes into the manifest; rank 0's is used.
            finish: Writes what the first half has left to be written.
            count: Counts what this rank has saved of each tensor.
            reads_back: Whether rank 0 reads the stage from the disk, and compares its tensors with what was counted,
                and its bytes with those that were handed to the system.
            gather: How the ranks exchange their outcomes from now on.

        Returns:
            The manifest on rank 0, None on the others.

        Raises:
            SaveFailed, PeerError: As `commit` does.
        """
        self._gather = gather or self._gather
        is_first = self._rank == 0
        with self.cleaning_up():
            if finish is not None:
                self.agree("finish", finish)
            lists = self.agree("list", self.list_stage)
            sizes = lists[0]["sizes"]
            written = {path: found for one in lists for path, found in one["written"].items()}
            shares = self.agree("digest", lambda: self.digest_share(sizes, written, count))
            self.agree("publish", lambda: self.publish(sizes, written, shares, info, reads_back) if is_first else None)
        return self.manifest

    @contextmanager
    def cleaning_up(self) -> Iterator[None]:
        """Gives the stage up where this block fails."""
        try:
            yield
        except BaseException:
            if self._rank == 0:
                remove_tree(self.stage.folder)
            raise

    def begin(self) -> None:
        """Makes the stage on rank 0 and adopts its place on all ranks."""
        stages = self.agree("begin", self._make_stage)
        self.stage = Stage(Path(stages[0]["target"]), stages[0]["nonce"])
        self._world_size = len(stages)

    def agree(self, phase: str, action: Callable[[], object]) -> list[Any]:
        """Runs a phase; returns every rank's result.

        Raises:
            SaveFailed: It failed somewhere.
        """
        return agree(phase, action, target=self.stage.target, rank=self._rank, gather=self._gather)

    def probe(self) -> None:
        """Writes a byte into the stage and takes it away.

        The save itself may have collectives in which the others would wait for a rank that may not write at all.
        Another host that does not see the stage is found later, by the files that are missing.
        """
        if self.stage.folder.exists():
            probe = self.stage.folder / f"{META}.probe-{self._rank}"
            write_file(probe, b"0", sync=None)
            discard(probe)

    def write(self, write: Callable[[Path], object]) -> None:
        """Runs the save itself; what it returns is of no interest to the other ranks."""
        write(self.stage.payload)

    def list_stage(self) -> dict[str, Any]:
        """The digests that this rank has taken while it wrote; on rank 0 the sizes of all files as well."""
        sizes = self.list_payload() if self._rank == 0 else {}
        return {"sizes": sizes, "written": self._digested.found(self._root)}

    def list_payload(self) -> dict[str, int]:
        """Sizes of the payload's files by relative path.

        Raises:
            FileNotFoundError: The save left nothing.
        """
        sizes = list_files(self.stage.payload) if self.stage.payload.exists() else {}
        if not sizes:
            raise FileNotFoundError(
                f"The save returned without an error and left no file at {self.stage.payload}. A checkpoint plugin "
                "that writes in the background or ignores errors cannot be committed; remove it from the Trainer."
            )
        return sizes

    def digest_share(self, sizes: dict[str, int], written: dict[str, dict[str, Any]], count: Count) -> dict[str, Any]:
        """Digests of this rank's share of the other files, as far as it sees them; its fingerprints go into the stage.

        Args:
            sizes: Of the files that rank 0 sees.
            written: The digests that some rank has taken while it wrote.
            count: Counts what this rank has saved of each tensor.

        Raises:
            FileNotFoundError: This rank wrote files that rank 0 does not see.
        """
        seen = list_files(self.stage.payload) if self.stage.payload.exists() else {}
        if strange := sorted(seen.keys() - sizes.keys()):
            raise FileNotFoundError(
                f"Rank {self._rank} sees {strange[0]} and {len(strange) - 1} more in {self.stage.payload}, which rank "
                "0 does not see. Save to a folder that all hosts share."
            )
        others = {path: size_bytes for path, size_bytes in sizes.items() if path not in written}
        digests = self._digest([path for path in self._share(others) if path in seen], sizes)
        return {"digests": digests, "has_tensors": self._leave_tensors(count)}

    def publish(
        self,
        sizes: dict[str, int],
        written: dict[str, dict[str, Any]],
        shares: list[dict[str, Any]],
        info: SaveInfo,
        reads_back: bool = False,
    ) -> None:
        """Writes the manifest and moves the stage in place, on rank 0.

        Raises:
            CheckpointCorrupt: What was read back is not what was counted.
        """
        digests = dict(written)
        for share in shares:
            digests.update(share["digests"])
        digests.update(self._digest([path for path in sizes if path not in digests], sizes))
        for path, size_bytes in sizes.items():
            self._require_size(path, size_bytes, digests[path]["size_bytes"])
        tensors = self._collect_tensors([rank for rank, share in enumerate(shares) if share["has_tensors"]])
        if reads_back:
            self._read_back(tensors, digests)
        manifest = Manifest(
            **vars(info),
            world_size=len(shares),
            files=tuple(
                FileEntry(
                    path, size_bytes, found["xxh3_128"], blocks_64_mib=tuple(found["blocks"]), sha256=found["sha256"]
                )
                for path, size_bytes in sizes.items()
                for found in [digests[path]]
            ),
            committed_at=time.time(),
            tensors=tensors,
        )
        publish(self.stage, manifest, sync=self._digested.sync)
        self.manifest = manifest

    def _make_stage(self) -> dict[str, str]:
        if self._rank == 0:
            self.stage.folder.mkdir(parents=True)
            claim(self.stage)
        return {"target": str(self.stage.target), "nonce": self.stage.nonce}

    def _share(self, sizes: dict[str, int]) -> list[str]:
        # Dealt out from the largest to the smallest, so that no rank gets two large files before each has one.
        return sorted(sizes, key=lambda path: (-sizes[path], path))[self._rank :: self._world_size]

    @property
    def _root(self) -> Path:
        """To which the paths of the files are relative."""
        return self.stage.payload if self.stage.payload.is_dir() else self.stage.folder

    def _digest(self, paths: list[str], sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
        """By path the digest of the file, and those of its blocks."""
        digests: dict[str, dict[str, Any]] = {}
        for path in paths:
            file = self._root / path
            found = self._digested.read(file)
            self._require_size(path, sizes[path], found.size_bytes)
            digests[path] = asdict(found)
        return digests

    def _require_size(self, path: str, listed_bytes: int, found_bytes: int) -> None:
        if found_bytes != listed_bytes:
            raise OSError(
                f"{self._root / path} had {listed_bytes} bytes when the save ended on all ranks and has {found_bytes} "
                "bytes now. Something still writes to it: remove a checkpoint plugin that writes in the background."
            )

    def _leave_tensors(self, count: Count) -> bool:
        """Leaves what this rank has counted of each tensor in the stage, for rank 0; whether there is anything."""
        counted = count()
        if not counted:
            return False
        write_file(self._tensors_of(self._rank), json.dumps(counted).encode(), sync=None)
        return True

    def _collect_tensors(self, ranks: list[int]) -> dict[str, str] | None:
        if not ranks:
            return None
        from lightning_distplus.checkpoint.fingerprints import add_up, describe

        return describe(add_up(json.loads(self._tensors_of(rank).read_bytes()) for rank in ranks)) or None

    def _read_back(self, tensors: dict[str, str] | None, digests: dict[str, dict[str, Any]]) -> None:
        from lightning_distplus.checkpoint.reading_back import byte_findings, tensor_findings

        by_file = {self._root / path: found["xxh3_128"] for path, found in digests.items()}
        for file in by_file:
            forget(file)  # else it is read from memory
        findings = tensor_findings(self.stage.payload, tensors or {}) + byte_findings(by_file)
        if findings:
            raise CheckpointCorrupt(
                f"What was just written to {self.stage.target} is not what was in memory: {findings[0]} (and "
                f"{len(findings) - 1} more). Look at the disk and the memory of this host, and save again."
            )

    def _tensors_of(self, rank: int) -> Path:
        return self.stage.folder / META / f"tensors-{rank}.json"
