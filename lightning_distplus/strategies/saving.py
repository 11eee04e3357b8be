"""Committed saves of a strategy: what goes into a checkpoint beside the parent's state."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

from lightning_distplus.checkpoint.catalog import is_last_valid, remove
from lightning_distplus.checkpoint.commit import Gather, SaveInfo, StagedSave, stage
from lightning_distplus.checkpoint.copies import Copier
from lightning_distplus.checkpoint.digests import DigestedWrites
from lightning_distplus.checkpoint.files import Sync
from lightning_distplus.control import ControlPlane
from lightning_distplus.phases import Phases
from lightning_distplus.rng import rng_state
from lightning_distplus.strategies.background import BackgroundSave, Writes
from lightning_distplus.strategies.restoring import KEY, VERSION, VerifiedLoads, local_path
from lightning_distplus.timeouts import Phase

__all__ = ["CommittedSaves"]

log = logging.getLogger(__name__)


class CommittedSaves(VerifiedLoads):
    """Saves and loads the checkpoints of one strategy.

    Args:
        copier: Copies on rank 0 what is committed to another place; None: nobody does.
        moves: Held while a save or a removal moves something.
        **named: What `VerifiedLoads` takes.
    """

    def __init__(
        self,
        plane: ControlPlane,
        phases: Phases,
        *,
        copier: Copier | None = None,
        moves: Lock | None = None,
        **named: Any,
    ) -> None:
        super().__init__(plane, phases, **named)
        self._copier = copier
        self._moves = moves or Lock()
        self._postponed: list[Path] = []
        self._second_line: ControlPlane | None = None
        self.sync: Sync = os.fsync
        """Forces what is saved to the disk."""

    def save(
        self,
        checkpoint: dict[str, Any],
        target: str | Path,
        write: Callable[[Path], object],
        writes: Writes,
        *,
        data: dict[str, Any] | None = None,
        layout: dict[str, Any] | None = None,
        configuration: str | None = None,
        deadlines_s: dict[str, float] | None = None,
        parameters: list[list[str]] | None = None,
    ) -> BackgroundSave | None:
        """Saves in a stage beside the target and commits it when every rank has succeeded.

        Args:
            checkpoint: What Lightning has collected; this rank's generators are added.
            target: Where the checkpoint shall be.
            write: The parent's own save, given the place in the stage.
            writes: Where that save's writes go; where they are kept for later, a thread finishes the save.
            data: The place in the data, for people who read the manifest.
            layout: How the ranks share data and model, for the same.
            configuration: A digest of the configuration, for the same.
            deadlines_s: The calibrated deadlines, for the run that resumes.
            parameters: The names of the parameters of each optimizer, whose states have numbers.

        Returns:
            The save that a thread finishes; ``committed`` has to follow it. None where it is committed.

        Raises:
            SaveFailed: A rank could not save; what was at the target is untouched.
        """
        path = local_path(target)
        if path is None:
            log.warning("rank %d: %s is not on a local file system; it is saved without a commit", self._rank, target)
            write(target)  # type: ignore[arg-type]
            return None
        before = self._phases.current
        self._phases.enter(Phase.CHECKPOINT)
        checkpoint[KEY] = {
            "version": VERSION,
            "rng": self._gather_rng(),
            "deadlines_s": dict(deadlines_s or {}),
            "parameters": parameters or [],
        }
        info = SaveInfo(
            global_step=checkpoint.get("global_step", 0),
            epoch=checkpoint.get("epoch", 0),
            strategy=self._strategy,
            data=_plain(data),
            layout=dict(layout or {}),
            configuration=configuration,
            deadlines_s=dict(deadlines_s or {}),
            parent=self._parent,
            not_before=self._parent_committed_at,
        )
        writes.digested = DigestedWrites(self.sync)
        staged = stage(path, write, rank=self._rank, gather=self._gather, digested=writes.digested)
        begun = None
        how: dict[str, Any] = {"count": writes.count}
        if not writes.are_kept:
            self._commit(staged, info, how)
            self.committed(path)
        else:
            how |= {"finish": writes.finish, "gather": self._gather_behind()}
            begun = BackgroundSave(str(path), info.global_step, lambda: self._commit(staged, info, how))
        # Still the deadline of a save; the next gate, where all ranks meet, shrinks it.
        self._phases.current = max(before, Phase.CHECKPOINT, key=self._phases.patience_in)
        return begun

    def _commit(self, staged: StagedSave, info: SaveInfo, how: dict[str, Any]) -> None:
        with self._moves:
            staged.commit(info, **how)

    def committed(self, path: str | Path) -> None:
        """A save is on the disk: what it stands in for can go."""
        self.follow(Path(path))
        if self._copier is not None and self._rank == 0:
            self._copier.submit(Path(path).absolute())
        self.remove_postponed(Path(path))

    def remove_postponed(self, but: Path) -> None:
        """Removes what a newer checkpoint, which stays, stands in for by now."""
        postponed, self._postponed = self._postponed, []
        for old in postponed:
            if old.absolute() != but.absolute():
                self.remove(old)

    def remove(self, path: str | Path, *, postpone: bool = False) -> None:
        """Removes a checkpoint together with its manifest, on rank 0.

        The last valid one of its folder stays until another one is committed.

        Args:
            path: The checkpoint.
            postpone: Whether it stays until then in any case.
        """
        local = Path(path)
        if postpone or is_last_valid(local):
            log.info("%s is kept until another checkpoint is committed, or linked", local)
            self._postponed.append(local)
        else:
            with self._moves:
                remove(local)

    def close(self, *, has_failed: bool) -> None:
        """Waits for the last copy unless the run has failed."""
        deadline = timedelta(0) if has_failed else self._phases.patience_in(Phase.CHECKPOINT)
        if self._copier is not None and not self._copier.close(deadline):
            log.error("the last checkpoint is not copied within the deadline of a checkpoint; the run ends without it")

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


def _plain(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """The data module's state where JSON can hold it; a state of tensors stays in the checkpoint alone."""
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return data


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _read_frames(data: bytes) -> dict[str, bytes]:
    parts, start = [], 0
    while start < len(data):
        size = int.from_bytes(data[start : start + 4], "little")
        parts.append(data[start + 4 : start + 4 + size])
        start += 4 + size
    return {key.decode(): value for key, value in zip(parts[::2], parts[1::2], strict=True)}
