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
from typing import Any, Protocol, TypeAlias

from lightning_distplus.checkpoint.files import Sync, digest_file, discard, list_files, remove_tree, write_file
from lightning_distplus.checkpoint.info import SaveInfo
from lightning_distplus.checkpoint.layout import META, Stage, new_nonce
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest
from lightning_distplus.checkpoint.swap import publish
from lightning_distplus.checkpoint.torn import claim
from lightning_distplus.errors import CheckpointCorrupt, ExitCode, SaveFailed

__all__ = ["Count", "Gather", "StagedSave", "commit", "gather_alone", "stage"]

_MAX_ERROR_CHARACTERS = 4000

Count: TypeAlias = Callable[[], dict[str, Any]]
"""Counts what this rank has saved of each tensor, as `fingerprints.sums_of_pieces` does."""


class Gather(Protocol):
    """Collects one JSON-able value of each rank, on all ranks, in rank order.

    A rank calls with the same sequence of names as the others; names come again in the next save. The implementation
    has a deadline of its own and raises a `PeerError` when a rank does not answer.
    """

    def __call__(self, name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
        """Returns the values of all ranks."""
        ...


def gather_alone(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
    """The `Gather` of a job with one process."""
    return [value]


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
    return stage(target, write, rank=rank, gather=gather, sync=sync, with_sha256=with_sha256).commit(info)


def stage(
    target: Path,
    write: Callable[[Path], object],
    *,
    rank: int,
    gather: Gather,
    sync: Sync | None = os.fsync,
    with_sha256: bool = False,
) -> StagedSave:
    """The first half of `commit`: what is saved lies in the stage, and nobody sees it yet."""
    save = StagedSave(target, rank, gather, sync, with_sha256)
    with save.cleaning_up():
        save.begin()
        save.agree("probe", save.probe)
        save.agree("write", lambda: save.write(write))
    return save


class StagedSave:
    """One save on one rank: its stage, and the phases that all ranks go through together."""

    def __init__(self, target: Path, rank: int, gather: Gather, sync: Sync | None, with_sha256: bool = False) -> None:
        self.stage = Stage(target.absolute(), new_nonce())
        self.manifest: Manifest | None = None
        self._rank = rank
        self._gather = gather
        self._sync = sync
        self._with_sha256 = with_sha256
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
            reads_back: Whether rank 0 reads the tensors from the stage and compares them with what was counted.
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
            sizes = self.agree("list", lambda: self.list_payload() if is_first else None)[0]
            shares = self.agree("digest", lambda: self.digest_share(sizes, count))
            self.agree("publish", lambda: self.publish(sizes, shares, info, reads_back) if is_first else None)
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
        """Runs the action; returns every rank's result, or raises on every rank if it failed on any.

        Raises:
            SaveFailed: It failed somewhere.
        """
        failure: BaseException | None = None
        result: Any = None
        try:
            result = action()
        except BaseException as error:  # whatever it is, the other ranks must hear of it before it leaves
            failure = error
        ballot = {"result": result} if failure is None else _lament(failure, self._rank)
        try:
            ballots = self._gather(f"checkpoint {phase}", ballot)
        except Exception as lost:
            if failure is None:
                raise
            raise lost from failure
        failed = {rank: ballot for rank, ballot in enumerate(ballots) if "error" in ballot}
        if not failed:
            return [ballot.get("result") for ballot in ballots]
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure
        raise self._error(phase, failed, len(ballots)) from failure

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

    def digest_share(self, sizes: dict[str, int], count: Count) -> dict[str, Any]:
        """Digests of this rank's share of the files, as far as it sees them; its fingerprints go into the stage.

        Raises:
            FileNotFoundError: This rank wrote files that rank 0 does not see.
        """
        seen = list_files(self.stage.payload) if self.stage.payload.exists() else {}
        if strange := sorted(seen.keys() - sizes.keys()):
            raise FileNotFoundError(
                f"Rank {self._rank} sees {strange[0]} and {len(strange) - 1} more in {self.stage.payload}, which rank "
                "0 does not see. Save to a folder that all hosts share."
            )
        digests = self._digest([path for path in self._share(sizes) if path in seen], sizes)
        return {"digests": digests, "has_tensors": self._leave_tensors(count)}

    def publish(
        self, sizes: dict[str, int], shares: list[dict[str, Any]], info: SaveInfo, reads_back: bool = False
    ) -> None:
        """Writes the manifest and moves the stage in place, on rank 0.

        Raises:
            CheckpointCorrupt: What was read back is not what was counted.
        """
        digests: dict[str, dict[str, Any]] = {}
        for share in shares:
            digests.update(share["digests"])
        digests.update(self._digest([path for path in sizes if path not in digests], sizes))
        tensors = self._collect_tensors([rank for rank, share in enumerate(shares) if share["has_tensors"]])
        if reads_back:
            self._read_back(tensors)
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
        publish(self.stage, manifest, sync=self._sync)
        self.manifest = manifest

    def _make_stage(self) -> dict[str, str]:
        if self._rank == 0:
            self.stage.folder.mkdir(parents=True)
            claim(self.stage)
        return {"target": str(self.stage.target), "nonce": self.stage.nonce}

    def _share(self, sizes: dict[str, int]) -> list[str]:
        # Dealt out from the largest to the smallest, so that no rank gets two large files before each has one.
        return sorted(sizes, key=lambda path: (-sizes[path], path))[self._rank :: self._world_size]

    def _digest(self, paths: list[str], sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
        """By path the digest of the file, and those of its blocks."""
        root = self.stage.payload if self.stage.payload.is_dir() else self.stage.folder
        digests: dict[str, dict[str, Any]] = {}
        for path in paths:
            found = digest_file(root / path, sync=self._sync, with_blocks=True, with_sha256=self._with_sha256)
            digests[path] = asdict(found)
            if found.size_bytes != sizes[path]:
                raise OSError(
                    f"{root / path} had {sizes[path]} bytes when the save ended on all ranks and has "
                    f"{found.size_bytes} bytes now. Something still writes to it: remove a checkpoint plugin that "
                    "writes in the background."
                )
        return digests

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

    def _read_back(self, tensors: dict[str, str] | None) -> None:
        from lightning_distplus.checkpoint.reading_back import tensor_findings

        if findings := tensor_findings(self.stage.payload, tensors or {}):
            raise CheckpointCorrupt(
                f"What was just written to {self.stage.target} is not what was in memory: {findings[0]} (and "
                f"{len(findings) - 1} more). Look at the disk and the memory of this host, and save again."
            )

    def _tensors_of(self, rank: int) -> Path:
        return self.stage.folder / META / f"tensors-{rank}.json"

    def _error(self, phase: str, failed: dict[int, dict[str, Any]], world_size: int) -> SaveFailed:
        failed = {rank: ballot for rank, ballot in failed.items() if not ballot["is_told"]} or failed
        first = min(failed, key=lambda rank: (failed[rank]["failed_at"], rank))
        others = sorted(set(range(world_size)) - failed.keys())
        error = SaveFailed(
            f"The checkpoint {self.stage.target} is not saved: rank {first} failed first, in phase '{phase}', with "
            f"{failed[first]['error']}. Failed ranks: {sorted(failed)}; ranks without an error: {others}. No "
            "checkpoint was committed and the previous one is as it was. Remove the cause and save again.",
            ranks=failed,
        )
        if self._rank in failed:
            error.exit_code = ExitCode.FAILED  # the cause is here, not with a peer
        return error


def _lament(error: BaseException, rank: int) -> dict[str, Any]:
    """A rank's ballot for its error.

    torch's distributed checkpoint raises one error on all ranks, a `BaseException` that holds those of the ranks that
    failed.
    """
    failures = getattr(error, "failures", None)
    is_told = isinstance(failures, dict) and rank not in failures
    if isinstance(failures, dict) and rank in failures:
        error = failures[rank][0]
    text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
    return {"error": text, "failed_at": time.time(), "is_told": is_told}
