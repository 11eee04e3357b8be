"""Committed saves of a strategy: what goes into a checkpoint beside the parent's state, and what comes back out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.api import CheckpointException

from lightning_distplus.checkpoint.catalog import (
    CheckpointState,
    read_manifest,
    reference,
    remove,
    state,
    verify_or_raise,
)
from lightning_distplus.checkpoint.files import Sync
from lightning_distplus.checkpoint.foreign import check_unmanifested
from lightning_distplus.checkpoint.protocol import Gather, SaveInfo, stage
from lightning_distplus.checkpoint.retention import is_last_valid
from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, DistplusError
from lightning_distplus.phases import Phases
from lightning_distplus.rng import rng_state, set_rng_state
from lightning_distplus.strategies.background import BackgroundSave, Staging
from lightning_distplus.timeouts import Phase

__all__ = ["CommittedSaves", "Verification"]

log = logging.getLogger(__name__)

Verification = Literal["full", "size", "off"]
"""Before a load: every byte is read, sizes are compared, or only manifest and marker are looked at."""

_KEY = "lightning_distplus"
_VERSION = 1
_SIGNS_OF_ANOTHER_MODEL = (
    "Missing key",
    "Unexpected key",
    "size mismatch",
    "does not exist in the loaded",
    "Size mismatch",
)
_DIFFERENCES_CHARACTERS = 1000
_REFUSALS: dict[str, type[DistplusError]] = {error.__name__: error for error in (CheckpointCorrupt, CheckpointMismatch)}


class CommittedSaves:
    """Saves and loads the checkpoints of one strategy.

    Args:
        plane: The control plane over which the ranks agree.
        phases: The deadlines.
        strategy: The name of the strategy, for the manifest.
        verification: What is checked before a load.
    """

    def __init__(
        self, plane: ControlPlane, phases: Phases, *, strategy: str, verification: Verification = "full"
    ) -> None:
        self._plane = plane
        self._phases = phases
        self._strategy = strategy
        self._verification = verification
        self._rng: dict[str, bytes] | None = None
        self._postponed: list[Path] = []
        self._second_line: ControlPlane | None = None
        self.sync: Sync = os.fsync
        """Forces what is saved to the disk."""
        self._loaded: str | Path = ""
        self._parent: dict[str, str] | None = None  # known to rank 0, which writes the manifest
        self.loaded_deadlines_s: dict[str, float] = {}
        """Calibrated deadlines of the checkpoint that was loaded."""

    def save(
        self,
        checkpoint: dict[str, Any],
        target: str | Path,
        write: Callable[[Path], object],
        *,
        data: dict[str, Any] | None = None,
        layout: dict[str, Any] | None = None,
        configuration: str | None = None,
        deadlines_s: dict[str, float] | None = None,
        staging: Staging | None = None,
    ) -> BackgroundSave | None:
        """Saves in a stage beside the target and commits it when every rank has succeeded.

        Args:
            checkpoint: What Lightning has collected; this rank's generators are added.
            target: Where the checkpoint shall be.
            write: The parent's own save, given the place in the stage.
            data: The place in the data, for people who read the manifest.
            layout: How the ranks share data and model, for the same.
            configuration: A digest of the configuration, for the same.
            deadlines_s: The calibrated deadlines, for the run that resumes.
            staging: Keeps what ``write`` writes, for a thread that finishes the save; None: it is finished here.

        Returns:
            The save that a thread finishes; ``committed`` has to follow it. None where it is committed.

        Raises:
            SaveFailed: A rank could not save; what was at the target is untouched.
        """
        path = _local(target)
        if path is None:
            log.warning("rank %d: %s is not on a local file system; it is saved without a commit", self._rank, target)
            write(target)  # type: ignore[arg-type]
            return None
        before = self._phases.current
        self._phases.enter(Phase.CHECKPOINT)
        checkpoint[_KEY] = {"version": _VERSION, "rng": self._gather_rng(), "deadlines_s": dict(deadlines_s or {})}
        info = SaveInfo(
            global_step=checkpoint.get("global_step", 0),
            epoch=checkpoint.get("epoch", 0),
            strategy=self._strategy,
            data=_plain(data),
            layout=dict(layout or {}),
            configuration=configuration,
            parent=self._parent,
        )
        staged = stage(path, write, rank=self._rank, gather=self._gather, sync=self.sync)
        begun = None
        if staging is None:
            staged.commit(info)
            self.committed(path)
        else:
            finish, gather = staging.take(), self._gather_behind()
            begun = BackgroundSave(
                str(path), info.global_step, lambda: staged.commit(info, finish=finish, gather=gather)
            )
        # Still the deadline of a save; the next gate, where all ranks meet, shrinks it.
        self._phases.current = max(before, Phase.CHECKPOINT, key=self._phases.patience_in)
        return begun

    def committed(self, path: str | Path) -> None:
        """A save is on the disk: what it stands in for can go."""
        self._follow(Path(path))
        postponed, self._postponed = self._postponed, []
        for old in postponed:
            if old.absolute() != Path(path).absolute():
                self.remove(old)

    def load(
        self,
        path: str | Path,
        read: Callable[[Path], dict[str, Any]],
        *,
        fitting: Callable[[Path], Path] = lambda path: path,
    ) -> dict[str, Any]:
        """Verifies and reads what rank 0 has chosen.

        Args:
            path: The checkpoint.
            read: The parent's own load, given the verified checkpoint.
            fitting: Finds, on rank 0, what this run can read of a verified checkpoint, or refuses it.

        Raises:
            CheckpointCorrupt: A file is torn, missing or changed.
            CheckpointMismatch: It was saved by a strategy with another layout.
        """
        self._phases.enter(Phase.RESUME)
        local = _local(path)
        self._loaded = path
        if local is None:
            checkpoint = read(path)  # type: ignore[arg-type]
        else:
            chosen = Path(self._agree("checkpoint-path", lambda: {"path": str(local)})["path"])
            found = self._agree("checkpoint-verdict", lambda: self._verify(chosen, fitting))
            self._follow(chosen)
            with self.refusing_another_model(chosen):
                checkpoint = read(Path(found["path"]))
        self._remember(checkpoint)
        return checkpoint

    def _follow(self, path: Path) -> None:
        """What is saved from now on has this checkpoint before it."""
        if self._rank == 0:
            self._parent = reference(path)

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
                f"The checkpoint {path or self._loaded} is of another model than this run's: {_differences(text)}. "
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
        return chosen

    def restore_rng(self) -> None:
        """Puts this rank's generators back to where the checkpoint left them."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def remove(self, path: str | Path, *, postpone: bool = False) -> None:
        """Removes a checkpoint together with its manifest, on rank 0.

        The last valid one of its folder stays until another one is committed.

        Args:
            path: The checkpoint.
            postpone: Whether it stays until then in any case.
        """
        local = Path(path)
        if postpone or is_last_valid(local):
            log.warning("%s is kept until another checkpoint is committed", local)
            self._postponed.append(local)
        else:
            remove(local)

    @property
    def _rank(self) -> int:
        return self._plane.world.rank

    def _gather(self, name: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        return self._plane.gather_json(name, value, self._phases.patience_in(Phase.CHECKPOINT))

    def _gather_behind(self) -> Gather:
        """``_gather`` for the thread of a save: over a connection and under names of its own."""
        if self._second_line is None:
            self._second_line = self._plane.second_line()
        plane, deadline = self._second_line, self._phases.patience_in(Phase.CHECKPOINT)
        return lambda name, value, /: plane.gather_json(f"behind {name}", value, deadline)

    def _gather_rng(self) -> list[dict[str, bytes]]:
        """Every rank's generators; Lightning stores the dictionary of rank 0 only."""
        packed = b"".join(_frame(key.encode()) + _frame(value) for key, value in rng_state().items())
        deadline = self._phases.patience_in(Phase.CHECKPOINT)
        return [_read_frames(data) for data in self._plane.gather("rng", packed, deadline)]

    def _agree(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 decides; its answer, or its error, is that of all ranks."""
        mine: dict[str, Any] = {}
        error: DistplusError | None = None
        if self._rank == 0:
            try:
                mine = decide()
            except (CheckpointCorrupt, CheckpointMismatch) as caught:
                error = caught
                mine = {"error": str(caught), "type": type(caught).__name__}
        answer = self._plane.gather_json(name, mine, self._phases.patience_in(Phase.RESUME))[0]
        if error is not None:
            raise error
        if "error" in answer:
            raise _REFUSALS[answer["type"]](f"Rank 0 refuses the checkpoint: {answer['error']}")
        return answer

    def _verify(self, path: Path, fitting: Callable[[Path], Path]) -> dict[str, Any]:
        if not path.exists():
            raise CheckpointMismatch(
                f"There is no checkpoint at {path}. Give a path that exists, or leave ckpt_path out."
            )
        found = state(path)
        if found is CheckpointState.UNMANIFESTED:
            self._check_unmanifested(path)
            return {"path": str(fitting(path))}
        if found is not CheckpointState.COMMITTED or self._verification != "off":
            verify_or_raise(path, "size" if self._verification == "size" else "full")
        saved_by = read_manifest(path).strategy
        if path.is_dir() and saved_by != self._strategy:
            raise CheckpointMismatch(
                f"The checkpoint {path} was saved by {saved_by}; this run uses {self._strategy}, which cannot read its "
                f"shards. Resume with {saved_by}, or make one file of it: distplus export {path} "
                f"{path.with_name(f'{path.stem}-whole{path.suffix}')}"
            )
        return {"path": str(fitting(path))}

    def _check_unmanifested(self, path: Path) -> None:
        findings = () if self._verification == "off" else check_unmanifested(path)
        if findings:
            raise CheckpointCorrupt(
                f"The checkpoint {path} was not committed by lightning_distplus and cannot be loaded: {findings[0]}. "
                "Give another checkpoint, or restore the file from a copy."
            )
        log.warning("%s was not committed by lightning_distplus; it is loaded unverified", path)

    def _remember(self, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint.get(_KEY)
        if ours is None:
            return
        if ours["version"] != _VERSION:
            raise CheckpointMismatch(
                f"The checkpoint holds version {ours['version']} of lightning_distplus' state; this version reads "
                f"{_VERSION}. Install the version that wrote it."
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


def _plain(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """The data module's state where JSON can hold it; a state of tensors stays in the checkpoint alone."""
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return data


def _local(path: str | Path) -> Path | None:
    """The path, or None for a URL of a remote file system."""
    return None if "://" in str(path) else Path(path)


def _differences(text: str) -> str:
    """The lines that name tensors, without the frames of the ranks on which they were found."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if any(sign in line for sign in _SIGNS_OF_ANOTHER_MODEL)]
    return "; ".join(dict.fromkeys(named))[:_DIFFERENCES_CHARACTERS]


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _read_frames(data: bytes) -> dict[str, bytes]:
    parts, start = [], 0
    while start < len(data):
        size = int.from_bytes(data[start : start + 4], "little")
        parts.append(data[start + 4 : start + 4 + size])
        start += 4 + size
    return {key.decode(): value for key, value in zip(parts[::2], parts[1::2], strict=True)}
