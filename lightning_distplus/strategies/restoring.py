"""Verified loads of a strategy: what all ranks agree to read, and that it is what was saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException

from lightning_distplus.checkpoint.catalog import (
    CheckpointState,
    check_unmanifested,
    newest_valid,
    read_manifest,
    reference,
    state,
    verify_or_raise,
    whole_one_of,
)
from lightning_distplus.checkpoint.copies import Copies
from lightning_distplus.checkpoint.fingerprints import is_current
from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, DistplusError
from lightning_distplus.phases import Phases
from lightning_distplus.rng import set_rng_state
from lightning_distplus.strategies.provenance import engine_in
from lightning_distplus.strategies.verdicts import SharedVerdicts
from lightning_distplus.timeouts import Phase

__all__ = ["KEY", "VERSION", "Search", "Verification", "VerifiedLoads", "local_path"]

log = logging.getLogger(__name__)

Verification = Literal["full", "size", "off"]
"""Of a load: every byte is read and every tensor compared, sizes are compared, or only manifest and marker are."""

KEY = "lightning_distplus"
"""Where a checkpoint holds what this package adds."""
VERSION = 1
_SIGNS_OF_ANOTHER_MODEL = (
    "Missing key",
    "Unexpected key",
    "size mismatch",
    "does not exist in the loaded",
    "Size mismatch",
)
_DIFFERENCES_CHARACTERS = 1000


@dataclass(frozen=True)
class Search:
    """Where a run looks for the newest valid checkpoint when it starts.

    Args:
        folder: Holds the checkpoints.
        allow_fresh: Whether it starts anew where none can be trusted.
    """

    folder: Path
    allow_fresh: bool = False


class VerifiedLoads(SharedVerdicts):
    """Loads the checkpoints of one strategy.

    Args:
        plane: The control plane over which the ranks agree.
        phases: The deadlines.
        strategy: The name of our strategy, for the manifest; of a user's subclass, its parent's.
        verification: What is checked of a load.
        search: Where the ranks look further when the bytes of what they have found are not as they were.
        copies: From where rank 0 fetches a checkpoint when that folder has none.
    """

    def __init__(
        self,
        plane: ControlPlane,
        phases: Phases,
        *,
        strategy: str,
        verification: Verification = "full",
        search: Search | None = None,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(plane, phases)
        self._strategy = strategy
        self._verification = verification
        self._search = search
        self._copies = copies
        self._has_read: Path | None = None
        self._rng: dict[str, bytes] | None = None
        self.loaded: str | Path = ""
        """The checkpoint that was loaded last."""
        self._parent: dict[str, str] | None = None  # known to rank 0, which writes the manifest
        self._parent_committed_at = 0.0
        self.loaded_deadlines_s: dict[str, float] = {}
        """Calibrated deadlines of the checkpoint that was loaded."""
        self.expected: dict[str, str] = {}
        """Fingerprints of the tensors of the checkpoint that was loaded; empty where none are to be compared."""

    def load(
        self,
        path: str | Path,
        read: Callable[[Path], dict[str, Any]],
        *,
        fitting: Callable[[Path], Path] = lambda path: path,
        only_reads: bool = False,
    ) -> dict[str, Any]:
        """Verifies and reads what rank 0 has chosen.

        Args:
            path: The checkpoint; where a killed save has left a whole one aside and none there, that one is read.
            read: The parent's own load, given the verified checkpoint.
            fitting: Finds, on rank 0, what this run can read of a verified checkpoint, or refuses it.
            only_reads: Whether ``read`` of a file restores nothing and meets no other rank, so that the file can be
                verified at the same time. Nobody gets what was read before all ranks have heard that it is right.

        Raises:
            CheckpointCorrupt: A file is torn, missing or changed.
            CheckpointMismatch: It was saved by a strategy with another layout.
        """
        self._phases.enter(Phase.RESUME)
        local = local_path(path)
        self.loaded, self.expected = path, {}
        if local is None:
            checkpoint = read(path)  # type: ignore[arg-type]
        else:
            chosen = Path(self._agree("checkpoint-path", lambda: {"path": str(whole_one_of(local))})["path"])
            found = self._agree("checkpoint-verdict", lambda: self._verify(chosen))
            is_unread = found["has_files"] and chosen != self._has_read
            overlaps = only_reads and is_unread and self._copies is None and chosen.is_file()
            if found["has_manifest"] and not overlaps:
                findings = self._findings(chosen) if is_unread else []
                if self._copies is not None:
                    findings = self._fetch_where_it_lacks(chosen, findings, self._copies)
                self.hear("checkpoint-bytes", chosen, findings)
            if found["has_files"]:
                self.expected = _comparable(chosen, read_manifest(chosen).tensors or {}, is_heard=self._rank == 0)
            found = self._agree("checkpoint-form", lambda: {"path": str(fitting(chosen))})
            self.follow(chosen)
            with self.refusing_another_model(chosen):
                checkpoint = self._read_and_verify(chosen, read) if overlaps else read(Path(found["path"]))
        self._remember(checkpoint)
        return checkpoint

    def deadlines_in(self, path: str | Path) -> dict[str, float]:
        """The calibrated deadlines in the manifest of what the ranks are about to load; empty where it has none."""
        found: dict[str, float] = {}
        local = local_path(path)
        if self._rank == 0 and local is not None:
            # Nobody trusts this checkpoint yet: whatever is wrong with it, the load says so.
            with suppress(CheckpointCorrupt, CheckpointMismatch, OSError):
                found = read_manifest(local).deadlines_s
        heard = self._plane.gather_json("deadlines", found, self._phases.patience_in(Phase.RESUME))
        return dict(heard[0])

    def follow(self, path: Path) -> None:
        """What is saved from now on has this checkpoint before it."""
        if self._rank == 0:
            self._parent = reference(path)
            self._parent_committed_at = 0.0 if self._parent is None else read_manifest(path).committed_at

    @contextmanager
    def refusing_another_model(self, path: Path | None = None) -> Iterator[None]:
        """Turns what torch, DCP and DeepSpeed say of weights that do not fit into one error.

        Raises:
            CheckpointMismatch: The checkpoint is of another model.
        """
        try:
            yield
        except (RuntimeError, KeyError, ValueError, CheckpointException) as error:
            text = str(error)
            if isinstance(error, DistplusError) or not any(sign in text for sign in _SIGNS_OF_ANOTHER_MODEL):
                raise
            raise CheckpointMismatch(
                f"The checkpoint {path or self.loaded} is of another model than this run's: {_differences(text)}. "
                "Build the model that was saved, or start without ckpt_path."
            ) from error

    def agree_on_path(self, path: str | Path | None) -> str | None:
        """What rank 0 resumes from, or that it starts anew; each rank may have looked for itself, and seen another."""
        mine = None if path is None else str(path)
        chosen: str | None = self._plane.gather_json(
            "checkpoint-choice", {"path": mine}, self._phases.patience_in(Phase.RESUME)
        )[0]["path"]
        if chosen != mine:
            log.warning("rank %d would resume from %s; it follows rank 0: %s", self._rank, mine, chosen)
        return (
            chosen if self._search is None else self._search_on(None if chosen is None else Path(chosen), self._search)
        )

    def _read_and_verify(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Reads a file while another thread compares its bytes; what is wrong with those comes before other errors.

        Raises:
            CheckpointCorrupt: On all ranks.
        """
        look = self._look_for(path)
        checkpoint: dict[str, Any] = {}
        error: Exception | None = None
        with ThreadPoolExecutor(1, "distplus-verifier") as verifier:
            findings = verifier.submit(look)
            try:
                checkpoint = read(path)
            except Exception as caught:  # a torn file is hard to read; all ranks hear first that it is torn
                error = caught
        self.hear("checkpoint-bytes", path, findings.result())
        if error is not None:
            raise error
        return checkpoint

    def _search_on(self, first: Path | None, search: Search) -> str | None:
        """The newest checkpoint in which no rank finds anything wrong, from one on whose sizes are right.

        Where the folder has none, the newest copy is fetched.

        Raises:
            CheckpointCorrupt: On all ranks: there is none.
        """
        passed_over: list[Path] = []
        found: Path | None = first
        while found is not None:
            damage = self._all_findings("checkpoint-search", self._findings(found))
            if not damage:
                self._has_read = found
                return str(found)
            log.warning("Checkpoint %s is passed over: %s", found, damage[0])
            passed_over.append(found)
            older = newest_valid(search.folder, verify="size", but=passed_over) if self._rank == 0 else None
            answer = self._agree("checkpoint-older", lambda: {"path": older and str(older)})["path"]  # noqa: B023
            found = answer and Path(answer)
        if self._copies is not None:
            copies = self._copies
            fetched: str | None = self._agree("checkpoint-copy", lambda: _fetched(copies, search.folder))["path"]
            if fetched is not None:
                return fetched
        if search.allow_fresh or not passed_over:
            return None
        raise CheckpointCorrupt(
            f"{search.folder} holds {len(passed_over)} committed checkpoint(s), and none is as it was when it was "
            "saved. Name another one with --ckpt_path PATH, or start anew with --allow_fresh."
        )

    def restore_rng(self) -> None:
        """Puts this rank's generators back to where the checkpoint left them."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def _verify(self, path: Path) -> dict[str, Any]:
        """What rank 0 alone looks at: manifest, marker, sizes, and who has saved it; whether there is more to read."""
        if not path.exists():
            raise CheckpointMismatch(
                f"There is no checkpoint at {path}. Give a path that exists, or leave ckpt_path out."
            )
        found = state(path)
        if found is CheckpointState.UNMANIFESTED:
            self._check_unmanifested(path)
            return {"has_files": False, "has_manifest": False}
        if found is not CheckpointState.COMMITTED or self._verification != "off":
            verify_or_raise(path, "size")
        saved_by = engine_in(read_manifest(path))
        if path.is_dir() and saved_by != self._strategy:
            raise CheckpointMismatch(
                f"The checkpoint {path} was saved by {saved_by}; this run uses {self._strategy}, which cannot read its "
                f"shards. Resume with {saved_by}, or make one file of it: distplus export {path} "
                f"{path.with_name(f'{path.stem}-whole{path.suffix}')}"
            )
        return {"has_files": self._verification == "full", "has_manifest": True}

    def _check_unmanifested(self, path: Path) -> None:
        findings = () if self._verification == "off" else check_unmanifested(path)
        if findings:
            raise CheckpointCorrupt(
                f"The checkpoint {path} was not committed by lightning_distplus and cannot be loaded: {findings[0]}. "
                "Give another checkpoint, or restore the file from a copy."
            )
        log.warning("%s was not committed by lightning_distplus; it is loaded unverified", path)

    def _remember(self, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint.get(KEY)
        if ours is None:
            return
        if ours["version"] != VERSION:
            raise CheckpointMismatch(
                f"The checkpoint holds version {ours['version']} of lightning_distplus' state; this version reads "
                f"{VERSION}. Install the version that wrote it."
            )
        self.loaded_deadlines_s = ours.get("deadlines_s", {})
        if len(ours["rng"]) == self._plane.world.size:
            self._rng = ours["rng"][self._rank]
        elif self._rank == 0:
            log.warning(
                "the checkpoint holds the random states of %d ranks, this run has %d: they start afresh",
                len(ours["rng"]),
                self._plane.world.size,
            )


def _comparable(path: Path, tensors: Mapping[str, str], *, is_heard: bool) -> dict[str, str]:
    """The fingerprints of a manifest that can be compared with what is in memory."""
    found = {name: text for name, text in tensors.items() if is_current(text)}
    if is_heard and len(found) < len(tensors):
        log.warning(
            "%s was saved by an older lightning_distplus, whose fingerprints of tensors are not compared any more: "
            "its files are verified, its tensors in memory are not. The next save has the new ones.",
            path,
        )
    return found


def _fetched(copies: Copies, folder: Path) -> dict[str, Any]:
    found = copies.fetch_newest(folder)
    if found is not None:
        log.warning("%s holds no valid checkpoint; %s is fetched from %s", folder, found.name, copies.url)
    return {"path": found and str(found)}


def local_path(path: str | Path) -> Path | None:
    """The path, or None for a URL of a remote file system."""
    return None if "://" in str(path) else Path(path)


def _differences(text: str) -> str:
    """The lines that name tensors, without the frames of the ranks on which they were found."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if any(sign in line for sign in _SIGNS_OF_ANOTHER_MODEL)]
    return "; ".join(dict.fromkeys(named))[:_DIFFERENCES_CHARACTERS]
