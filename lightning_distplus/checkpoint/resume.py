"""Which checkpoint a run goes on from: the newest valid one of a folder, or of what its own job has saved."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_distplus.checkpoint.catalog import (
    CheckpointState,
    Mode,
    committed_in,
    newest_valid,
    read_manifest,
    state,
)
from lightning_distplus.checkpoint.files import asides_in
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch
from lightning_distplus.events import read_events

__all__ = ["AUTO", "JobSaves", "checkpoints_in", "newest_in", "num_fits"]

log = logging.getLogger(__name__)

AUTO = "auto"
"""As ``ckpt_path``: the newest valid checkpoint, or a fresh start where there is none."""
_SUFFIX = ".ckpt"  # by which a checkpoint that is not ours is told from other files


def newest_in(folder: Path, *, verify: Mode = "full", allow_fresh: bool = False) -> Path | None:
    """The newest valid checkpoint of a folder; None where there is none yet.

    Args:
        folder: Holds the checkpoints.
        verify: As ``newest_valid`` takes it.
        allow_fresh: Return None also where checkpoints lie, of which none can be trusted.

    Raises:
        CheckpointCorrupt: Checkpoints are there, but all are torn or unverified, and ``allow_fresh`` is not set.
    """
    found = newest_valid(folder, verify=verify)
    if found is not None:
        log.info("ckpt_path auto: resuming from %s", found)
        return found
    untrusted = checkpoints_in(folder)
    if untrusted and not allow_fresh:
        raise CheckpointCorrupt(
            f"ckpt_path auto: {folder} holds {_named(untrusted)}, none of them committed and sound; "
            f"'distplus verify {folder}' says why. Name one by its path, or start anew: with --allow_fresh, or in a "
            "script without ckpt_path."
        )
    log.info("ckpt_path auto: nothing to resume from in %s; starting anew", folder)
    return None


def _named(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return f"{len(paths)} checkpoint(s) ({names})"


def checkpoints_in(directory: Path) -> list[Path]:
    """Direct children that are checkpoints, ours or not, sound or not, by name."""
    if not directory.is_dir():
        return []
    children = (path for path in sorted(directory.iterdir()) if not path.name.startswith("."))
    return [path for path in children if _is_checkpoint(path)]


def _is_checkpoint(path: Path) -> bool:
    found = state(path)
    if found is CheckpointState.UNMANIFESTED:
        return path.suffix == _SUFFIX
    return found is not CheckpointState.MISSING


@dataclass(frozen=True)
class JobSaves:
    """What one fit of a job has saved, in all attempts so far, as the ledger tells it.

    A script may fit more than once: its second fit goes on from what second fits have saved.

    Args:
        paths: The checkpoints that the ledger names, the first one first; not all of them need be there still.
        others: What other fits have saved to the same folders.
        began_at: Unix time at which the job began.
    """

    paths: tuple[Path, ...]
    others: frozenset[Path]
    began_at: float

    @classmethod
    def of_fit(cls, home: Path, run_id: str, number: int | None = None) -> JobSaves:
        """Reads it.

        Args:
            home: The folder of the run's artefacts.
            run_id: The job.
            number: Which fit of the script, counted from 1; None: the last one that has begun.
        """
        events = read_events(home, run_id=run_id)
        fits = list(_with_numbers(events))
        number = max((fit for fit, _ in fits), default=0) if number is None else number
        fit_of = {Path(event["path"]): fit for fit, event in fits if _names_a_checkpoint(event)}
        mine = tuple(path for path, fit in fit_of.items() if fit == number)
        others = frozenset(path for path, fit in fit_of.items() if fit != number)
        return cls(mine, others, min((event["time"] for event in events), default=0.0))

    @property
    def folders(self) -> list[Path]:
        """Where they were saved."""
        return list(dict.fromkeys(path.parent for path in self.paths))

    def newest_valid(self, *, verify: Mode = "size") -> Path | None:
        """The newest one that is valid, those included that a rank has committed and not lived to note.

        Raises:
            CheckpointCorrupt: Some are there, and none is valid.
        """
        found = [newest_valid(folder, verify=verify, but=self.passed_over(folder)) for folder in self.folders]
        valid = [path for path in found if path is not None]
        if valid:
            return max(valid, key=lambda path: read_manifest(path).committed_at)
        damaged = [path for path in self.paths if state(path) is not CheckpointState.MISSING]
        if damaged:
            raise CheckpointCorrupt(
                f"This job has saved {_named(damaged)} to {damaged[0].parent}, none of them sound; 'distplus verify "
                f"{damaged[0].parent}' says why. Name one by its path, or leave the choice to the script: --no-resume."
            )
        return None

    def passed_over(self, folder: Path) -> list[Path]:
        """The committed checkpoints of a folder that are another job's, or another fit's."""
        there = [report.path for report in committed_in(folder)] + [aside for aside, _ in asides_in(folder)]
        return [path for path in there if path not in self.paths and self._is_of_others(path)]

    def _is_of_others(self, path: Path) -> bool:
        with suppress(CheckpointCorrupt, CheckpointMismatch):
            return path in self.others or read_manifest(path).committed_at < self.began_at
        return True


def num_fits(home: Path, run_id: str, attempt: int, rank: int) -> int:
    """How many fits a rank has begun in an attempt, as the ledger tells it."""
    numbers = _with_numbers(read_events(home, run_id=run_id))
    return max((fit for fit, event in numbers if (event["attempt"], event["rank"]) == (attempt, rank)), default=0)


def _names_a_checkpoint(event: Mapping[str, Any]) -> bool:
    path = event.get("path") if event["kind"] in ("saved", "preempted") else None
    return isinstance(path, str) and "://" not in path


def _with_numbers(events: Collection[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each event of a fit with the number of that fit within its process."""
    processes = sorted(events, key=lambda event: (event["attempt"], event["rank"]))
    for _, of_process in itertools.groupby(processes, key=lambda event: (event["attempt"], event["rank"])):
        number, is_fit = 0, False
        for event in of_process:  # in their order: sorting keeps it
            if event["kind"] == "start":
                is_fit = event.get("function") == "fit"
                number += is_fit
            if is_fit:
                yield number, event
