"""The commit protocol: all ranks save into a stage, which becomes the checkpoint only if each of them succeeded."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from lightning_distplus.checkpoint import files
from lightning_distplus.checkpoint.catalog import CheckpointState, look, verify
from lightning_distplus.checkpoint.files import MANIFEST, MARKER, META, DigestedWrites, Stage, Sync
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest
from lightning_distplus.errors import ExitCode, SaveFailed
from lightning_distplus.process import ProcessState, boot_id, process_state, start_time

logger = logging.getLogger(__name__)

Gather: TypeAlias = Callable[[str, dict[str, Any]], list[dict[str, Any]]]
"""Collects one JSON-able value of each rank, on all ranks, in rank order, under a name.

A rank calls with the same sequence of names as the others; names come again in the next save. The implementation has a
deadline of its own and raises a `PeerError` when a rank does not answer.
"""


def gather_alone(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
    """The `Gather` of a job with one process."""
    return [value]


def info_like(source: Path, *, is_successor: bool = False) -> Manifest:
    """What the manifest of a copy of ``source`` says of the run; step 0 where the source has none.

    The copy counts as a little older, so that a run goes on from the source, and never from the copy of an older one;
    as a little newer where it is the successor, from which a run is to go on instead.
    """
    report = look(source)
    if report.manifest is None or not report.ok:
        return Manifest(global_step=0, epoch=0, strategy="unknown")
    manifest = report.manifest
    return Manifest(
        global_step=manifest.global_step,
        epoch=manifest.epoch,
        strategy=manifest.strategy,
        data=manifest.data,
        parent=report.reference,
        committed_at=math.nextafter(manifest.committed_at, math.inf if is_successor else 0.0),
    )


# -- the protocol ------------------------------------------------------------------------------------------------------

# Paths are local (or on a mounted file system); a directory checkpoint needs a folder that all ranks share.

_MAX_ERROR_CHARACTERS = 4000
Count: TypeAlias = Callable[[], dict[str, Any]]
"""Counts what this rank has saved of each tensor, as `tensors.sums_of_pieces` does."""


def commit(
    target: Path,
    write: Callable[[Path], object],
    info: Manifest,
    *,
    rank: int = 0,
    gather: Gather = gather_alone,
    sync: Sync | None = os.fsync,
) -> Manifest | None:
    """Saves a checkpoint that exists on all ranks' word, or not at all. All ranks call it together.

    What is at ``target`` before is there, whole, until the new one takes its place in one step.

    Args:
        target: Path of the checkpoint; rank 0's holds for all ranks.
        write: The save itself, given the path to write to: a file that rank 0 writes, or a directory that all fill.
        info: What the manifest says of the run; rank 0's is used. Without a ``committed_at`` it is committed now.
        rank: This process's rank.
        gather: How the ranks exchange their outcomes.
        sync: Forces files, folders and moves to the disk; None is for tests.

    Returns:
        The manifest on rank 0, None on the others.

    Raises:
        SaveFailed: The save failed on a rank, named in the message and in ``.ranks``. It is raised on every rank; on
            those that failed it has their own exception as its cause. No checkpoint came into being.
        PeerError: A rank did not answer; raised by ``gather``.
    """
    save = StagedSave(target, rank, gather, DigestedWrites(sync))
    save.fill(write)
    return save.commit(info)


class StagedSave:
    """One save on one rank: its stage, and the phases that all ranks go through together."""

    def __init__(self, target: Path, rank: int, gather: Gather, digested: DigestedWrites) -> None:
        self.stage = Stage(target)
        self.manifest: Manifest | None = None
        self._rank = rank
        self._gather = gather
        self._digested = digested

    def fill(self, write: Callable[[Path], object]) -> None:
        """The first half of `commit`: what ``write`` saves lies in the stage, and nobody sees it yet.

        Files that it opens with ``digested`` are not read again for their digests; others get the same kind.
        """

        def write_payload() -> None:
            write(self.stage.payload)  # what it returns is of no interest to the other ranks

        with self._cleaning_up():
            first = self.agree("begin", self._make_stage)[0]
            self.stage = Stage(Path(first["target"]), first["nonce"])
            self.agree("probe", self._probe)
            self.agree("write", write_payload)

    def commit(
        self,
        info: Manifest,
        *,
        not_before: float = 0.0,
        finish: Callable[[], object] | None = None,
        count: Count = dict,
        gather: Gather | None = None,
    ) -> Manifest | None:
        """The second half of `commit`, for another thread where it is given a ``gather`` of its own.

        ``not_before`` is when the checkpoint before it was committed: none is older than what it follows, whatever the
        clocks of the hosts say. ``finish`` writes what the first half has left to be written.
        """
        self._gather = gather or self._gather
        with self._cleaning_up():
            if finish is not None:
                self.agree("finish", finish)
            lists = self.agree("list", self._list_stage)
            sizes = lists[0]["sizes"]
            written = {path: found for one in lists for path, found in one["written"].items()}
            shares = self.agree("digest", lambda: self._digest_share(sizes, written, len(lists), count))
            self.agree("publish", lambda: self._publish(sizes, written, shares, info, not_before))
        return self.manifest

    @contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        """Gives the stage up where this block fails."""
        try:
            yield
        except BaseException:
            if self._rank == 0:
                files.remove_tree(self.stage.folder)
            raise

    def agree(self, phase: str, action: Callable[[], object]) -> list[Any]:
        """Runs this rank's part of a phase: every rank gets the results of all, or `SaveFailed` if it failed on any."""
        failure: BaseException | None = None
        try:
            ballot = {"result": action()}
        except BaseException as error:  # whatever it is, the other ranks must hear of it before it leaves
            failure, ballot = error, _lament(error, self._rank)
        try:
            ballots = self._gather(f"checkpoint {phase}", ballot)
        except Exception as lost:
            if failure is None:
                raise
            raise lost from failure
        failed = {rank: ballot for rank, ballot in enumerate(ballots) if "error" in ballot}
        if not failed:
            return [ballot["result"] for ballot in ballots]
        if isinstance(failure, KeyboardInterrupt | SystemExit):
            raise failure
        failed = {rank: ballot for rank, ballot in failed.items() if not ballot["is_told"]} or failed
        first = min(failed, key=lambda rank: (failed[rank]["failed_at"], rank))
        others = sorted(set(range(len(ballots))) - failed.keys())
        refusal = SaveFailed(
            f"The checkpoint {self.stage.target} is not saved: rank {first} failed first, in phase '{phase}', with "
            f"{failed[first]['error']}. Failed ranks: {sorted(failed)}; ranks without an error: {others}. No "
            "checkpoint was committed and the previous one is as it was. Remove the cause and save again.",
            ranks=failed,
        )
        if self._rank in failed:
            refusal.exit_code = ExitCode.FAILED  # the cause is here, not with a peer
        raise refusal from failure

    # -- the phases, in their order ----------------------------------------------------------------------------------

    def _make_stage(self) -> dict[str, str]:
        if self._rank == 0:
            claim(self.stage)
        return {"target": str(self.stage.target), "nonce": self.stage.nonce}

    def _probe(self) -> None:
        """Writes a byte into the stage and takes it away.

        The save itself may have collectives in which the others would wait for a rank that may not write at all.
        Another host that does not see the stage is found later, by the files that are missing.
        """
        if self.stage.folder.exists():
            probe = self.stage.folder / f"{META}.probe-{self._rank}"
            files.write_file(probe, b"0", sync=None)
            probe.unlink(missing_ok=True)

    def _list_stage(self) -> dict[str, Any]:
        """The digests that this rank has taken while it wrote; on rank 0 the sizes of all files as well."""
        sizes = self._seen() if self._rank == 0 else {}
        if self._rank == 0 and not sizes:
            raise FileNotFoundError(
                f"The save returned without an error and left no file at {self.stage.payload}. A checkpoint plugin "
                "that writes in the background or ignores errors cannot be committed; remove it from the Trainer."
            )
        return {"sizes": sizes, "written": self._digested.found(self._root)}

    def _digest_share(
        self, sizes: Mapping[str, int], written: Collection[str], num_ranks: int, count: Count
    ) -> dict[str, Any]:
        """Digests of this rank's share of the files that nobody has digested while they were ``written``.

        ``sizes`` are those that rank 0 sees. What this rank has counted of each tensor goes into the stage.
        """
        seen = self._seen()
        if strange := sorted(seen.keys() - sizes.keys()):
            raise FileNotFoundError(
                f"Rank {self._rank} sees {strange[0]} and {len(strange) - 1} more in {self.stage.payload}, which rank "
                "0 does not see. Save to a folder that all hosts share."
            )
        # Dealt out from the largest to the smallest, so that no rank gets two large files before each has one.
        others = sorted(sizes.keys() - set(written), key=lambda path: (-sizes[path], path))
        digests = self._digest(path for path in others[self._rank :: num_ranks] if path in seen)
        if counted := count():
            files.write_file(self._tensors_of(self._rank), json.dumps(counted).encode(), sync=None)
        return {"digests": digests, "has_tensors": bool(counted)}

    def _publish(
        self,
        sizes: Mapping[str, int],
        written: dict[str, Any],
        shares: list[dict[str, Any]],
        info: Manifest,
        not_before: float,
    ) -> None:
        """Writes the manifest and moves the stage in place, on rank 0."""
        if self._rank != 0:
            return
        digests = dict(written)
        for share in shares:
            digests.update(share["digests"])
        digests.update(self._digest(sizes.keys() - digests.keys()))
        for path, size_bytes in sizes.items():
            if (found_bytes := digests[path]["size_bytes"]) != size_bytes:
                raise OSError(
                    f"{self._root / path} had {size_bytes} bytes when the save ended on all ranks and has "
                    f"{found_bytes} bytes now. Something still writes to it: remove a checkpoint plugin that writes in "
                    "the background."
                )
        self.manifest = replace(
            info,
            committed_at=info.committed_at or max(time.time(), math.nextafter(not_before, math.inf)),
            world_size=len(shares),
            files=tuple(
                FileEntry(path, size_bytes, digests[path]["xxh3_128"], tuple(digests[path]["blocks"]))
                for path, size_bytes in sizes.items()
            ),
            tensors=self._collect_tensors([rank for rank, share in enumerate(shares) if share["has_tensors"]]),
        )
        publish(self.stage, self.manifest.to_json().encode(), sync=self._digested.sync)

    def _collect_tensors(self, ranks: list[int]) -> dict[str, str] | None:
        if not ranks:
            return None
        from lightning_distplus.checkpoint.tensors import add_up, describe

        return describe(add_up(json.loads(self._tensors_of(rank).read_bytes()) for rank in ranks)) or None

    def _tensors_of(self, rank: int) -> Path:
        """Where a rank leaves what it has counted of each tensor, for rank 0."""
        return self.stage.folder / META / f"tensors-{rank}.json"

    def _seen(self) -> dict[str, int]:
        return files.list_files(self.stage.payload) if self.stage.payload.exists() else {}

    @property
    def _root(self) -> Path:
        """To which the paths of the files are relative."""
        return self.stage.payload if self.stage.payload.is_dir() else self.stage.folder

    def _digest(self, paths: Iterable[str]) -> dict[str, dict[str, Any]]:
        """By path the digests of files that something else has written; they are forced to the disk."""
        sync = self._digested.sync
        return {path: asdict(files.digest_file(self._root / path, sync=sync, with_blocks=True)) for path in paths}


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


# -- publishing: a finished stage takes its target's place -------------------------------------------------------------

_META_OF_NEW, _OLD = "meta", "old"  # in a draft


def publish(stage: Stage, manifest: bytes, *, sync: Sync | None) -> None:
    """Makes the payload of ``stage``, whose files are on the disk, the committed checkpoint at its target, in one step.

    ``manifest`` is the text of it. ``sync`` forces every move to the disk before the next one.

    Raises:
        OSError: The checkpoint is not committed, and what was at the target is there.
    """
    is_directory, is_first = stage.payload.is_dir(), not os.path.lexists(stage.target)
    strays = files.leftovers_of(stage.target, "aside") if is_first else []
    old = None
    try:
        meta = _write_meta(stage, manifest, is_directory, sync)
        if is_first:
            _put_where_nothing_is(stage, None if is_directory else meta)
        else:
            old = _put_where_something_is(stage, None if is_directory else meta, sync)
    except Exception:
        files.remove_tree(stage.draft)
        files.remove_tree(stage.aside)
        raise
    # Committed: whatever goes wrong from here on is left for the next save of this target to clear away.
    try:
        for folder in (stage.target.parent, stage.target.parent / META, *([old.parent] if old is not None else [])):
            files.sync_folder(folder, sync=sync)
        if not is_first:
            _move_metas(stage, old, is_directory, sync)
        _clear(stage, old, strays)
    except OSError as error:
        logger.warning("%s is committed; what saves of it have left cannot be cleared away (%s)", stage.target, error)


def _write_meta(stage: Stage, manifest: bytes, is_directory: bool, sync: Sync | None) -> Path:
    """Makes the stage a committed checkpoint, where nobody looks yet."""
    meta = files.meta_folder(stage.payload, is_directory=is_directory)
    meta.mkdir(parents=True, exist_ok=True)
    marker = json.dumps({"version": 1, "manifest_xxh3_128": files.bytes_digest(manifest)}) + "\n"
    files.write_file(meta / MANIFEST, manifest, sync=sync)
    files.write_file(meta / MARKER, marker.encode(), sync=sync)
    for folder in (*files.list_folders(stage.payload), meta, stage.folder, stage.folder.parent, stage.target.parent):
        files.sync_folder(folder, sync=sync)
    return meta


def _put_where_nothing_is(stage: Stage, meta: Path | None) -> None:
    """Moves the payload to its target; of a file the manifest goes first, and means nothing until the file is there."""
    beside_target = files.meta_folder(stage.target, is_directory=False)
    files.remove_tree(beside_target)  # of a file that was removed by hand
    if meta is not None:
        meta.rename(beside_target)
    try:
        stage.payload.rename(stage.target)
    except BaseException:
        files.remove_tree(beside_target)
        raise


def _put_where_something_is(stage: Stage, meta: Path | None, sync: Sync | None) -> Path | None:
    """Exchanges the payload for what is at its target; returns where that lies now, if anywhere."""
    name = stage.target.name
    (stage.draft / _OLD).mkdir(parents=True)
    new = stage.aside_payload
    if meta is not None:
        new = stage.draft / name
        files.second_name(stage.payload, new, sync=sync)
        (stage.draft / _META_OF_NEW).mkdir()
        for file in (MANIFEST, MARKER):
            files.second_name(meta / file, stage.draft / _META_OF_NEW / file, sync=sync)
    stage.folder.rename(stage.aside)
    for folder in (stage.draft, stage.draft / _META_OF_NEW, stage.aside, stage.aside.parent):
        if folder.is_dir():
            files.sync_folder(folder, sync=sync)
    return files.put_in_place(new, stage.target, stage.draft / _OLD / name)


def _move_metas(stage: Stage, old: Path | None, is_directory: bool, sync: Sync | None) -> None:
    """Moves the manifest beside the target to the file that it belongs to, and that of a new file in its place."""
    beside_target = files.meta_folder(stage.target, is_directory=False)
    if old is None:  # somebody has removed it meanwhile; or it was a link, where names cannot be exchanged
        files.remove_tree(beside_target)
    elif beside_target.is_dir():
        (old.parent / META).mkdir(exist_ok=True)
        beside_target.rename(old.parent / META / old.name)
    if not is_directory:
        (stage.draft / _META_OF_NEW).rename(beside_target)
    files.sync_folder(beside_target.parent, sync=sync)


def _clear(stage: Stage, old: Path | None, strays: list[Path]) -> None:
    """Clears away what saves of a committed target have left; keeps what is damaged, and what had no successor."""
    target = stage.target
    if old is not None and _is_damaged(old):
        old.parent.rename(files.beside(target, "torn"))
    for folder in strays:
        if verify(folder / target.name, "size").ok:
            folder.rename(files.beside(target, "torn"))
    _set_torn_aside(target)
    for folder in (stage.folder, *files.leftovers_of(target, "aside", "draft", "universal")):
        if folder.exists():
            trash = files.beside(target, "removed")
            folder.rename(trash)  # at once, so that no reader meets half an aside
            files.remove_tree(trash)


# -- quarantine --------------------------------------------------------------------------------------------------------

_OWNER = "owner.json"


def claim(stage: Stage) -> None:
    """Makes the folder of a stage, and says in it which process saves there: other jobs leave it alone."""
    owner = {"host": boot_id(), "pid": os.getpid(), "started": start_time(os.getpid())}
    (stage.folder / META).mkdir(parents=True)
    (stage.folder / META / _OWNER).write_text(json.dumps(owner))


def _set_torn_aside(target: Path) -> None:
    """Moves what is torn or damaged among the leftovers of saves of ``target`` into quarantine.

    A stage stays where it is while its owner lives, or belongs to another host, which cannot be asked.
    """
    for folder in files.leftovers_of(target, "stage"):
        if not _owner_is_gone(folder):
            continue
        if any(child.name != META for child in folder.iterdir()):
            folder.rename(files.beside(target, "torn"))
        else:
            files.remove_tree(folder)  # killed before it wrote anything, or after it was moved in place
    for folder in files.leftovers_of(target, "aside"):
        if _is_damaged(folder / target.name):
            folder.rename(files.beside(target, "torn"))


def _is_damaged(path: Path) -> bool:
    """Whether a checkpoint of ours is not what its manifest says, as far as sizes tell."""
    report = verify(path, "size")
    return not report.ok and report.state in (CheckpointState.COMMITTED, CheckpointState.TORN)


def _owner_is_gone(stage: Path) -> bool:
    try:
        owner = json.loads((stage / META / _OWNER).read_bytes())
        host, pid, started = str(owner["host"]), int(owner["pid"]), owner["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # killed before it could say who it is
    return host == boot_id() and process_state(pid, started) is ProcessState.GONE
