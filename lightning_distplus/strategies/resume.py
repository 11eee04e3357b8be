"""Which checkpoint a fit begins from: ``ckpt_path="auto"``, and what a script that was restarted goes on from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus import env
from lightning_distplus.checkpoint.catalog import AUTO, JobSaves, newest_in, num_fits
from lightning_distplus.events import folder_of_run
from lightning_distplus.preemption import checkpoint_folder

__all__ = ["Search", "choose_checkpoint", "newest_checkpoint", "settle_checkpoint_folder"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Search:
    """Where a run looks for the newest valid checkpoint when it starts.

    Args:
        folder: Holds the checkpoints.
        allow_fresh: Whether it starts anew where none can be trusted.
        but: Checkpoints that are passed over, because they are of another job.
    """

    folder: Path
    allow_fresh: bool = False
    but: tuple[Path, ...] = ()


@runtime_checkable
class SearchesTogether(Protocol):
    """A strategy whose ranks read the bytes of what was found together, and look further where they are damaged."""

    search: Search | None
    """Where they look in the next run."""


def choose_checkpoint(trainer: Any, ckpt_path: Any) -> Any:
    """What a run of a Resilient strategy begins from, in the place of the ``ckpt_path`` that it was called with.

    Args:
        trainer: The Trainer, before its run.
        ckpt_path: What the user gave.

    Raises:
        CheckpointCorrupt: There are checkpoints to choose from, and none is valid.
        ValueError: There is none, and the run is no fit.
    """
    if not isinstance(trainer.strategy, SearchesTogether):
        return ckpt_path
    is_fit = trainer.state.fn == "fit"
    if ckpt_path == AUTO:
        found = newest_checkpoint(trainer)
        if found is None and not is_fit:
            raise ValueError(f"ckpt_path auto found no checkpoint to {trainer.state.fn.value}. Name one by its path.")
    elif ckpt_path is None and is_fit:
        found = _newest_of_job(trainer, trainer.strategy)
    else:
        return ckpt_path
    return None if found is None else str(found)


def newest_checkpoint(trainer: Any, *, allow_fresh: bool = False) -> Path | None:
    """The newest valid checkpoint of a run's folder; None where there is none yet.

    For a Resilient strategy its sizes are right; its bytes are read by all ranks together when they start.

    Args:
        trainer: The trainer of the run.
        allow_fresh: Start anew also where checkpoints lie, of which none can be trusted.

    Raises:
        CheckpointCorrupt: Checkpoints are there, but all are torn or unverified, and ``allow_fresh`` is not set.
    """
    folder = settle_checkpoint_folder(trainer)
    if not isinstance(trainer.strategy, SearchesTogether):
        return newest_in(folder, allow_fresh=allow_fresh)
    trainer.strategy.search = Search(folder, allow_fresh)
    return newest_in(folder, verify="size", allow_fresh=allow_fresh)


def settle_checkpoint_folder(trainer: Any) -> Path:
    """The folder that ``auto`` looks in, which the first ModelCheckpoint takes where it has none.

    It would save below the logger's next version, where no later start looks.
    """
    folder = checkpoint_folder(trainer)
    for saver in _savers(trainer)[:1]:
        saver.dirpath = saver.dirpath or str(folder)
    return folder


def _savers(trainer: Any) -> list[ModelCheckpoint]:
    return [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]


def _newest_of_job(trainer: Any, strategy: SearchesTogether) -> Path | None:
    """Where ``distplus launch`` has restarted a script, the newest valid checkpoint that this fit of it has saved."""
    attempt, run_id = env.DISTPLUS_ATTEMPT.integer() or 0, env.DISTPLUS_RUN_ID.get()
    if attempt == 0 or run_id is None or env.DISTPLUS_RESUME.get() != "1":
        return None
    home = folder_of_run(trainer.default_root_dir)
    number = 1 + num_fits(home, run_id, attempt, trainer.global_rank)
    saves = JobSaves.of_fit(home, run_id, number)
    found = saves.newest_valid()
    if found is not None:
        _save_on(trainer, saves)
        strategy.search = Search(found.parent, but=tuple(saves.passed_over(found.parent)))
    if trainer.global_rank == 0:
        what = "starts anew: this job has no checkpoint yet" if found is None else f"goes on from {found}"
        log.warning(
            "attempt %d: fit names no checkpoint, and %s (distplus launch --no-resume leaves it to the script)",
            attempt + 1,
            what,
        )
    return found


def _save_on(trainer: Any, saves: JobSaves) -> None:
    """Has a ModelCheckpoint without a folder go on in the one that it had, and not below the logger's next version."""
    named = {Path(saver.dirpath).absolute() for saver in _savers(trainer) if saver.dirpath}
    chosen = [folder for folder in saves.folders if folder.absolute() not in named]
    if len(chosen) == 1:
        for saver in _savers(trainer):
            saver.dirpath = saver.dirpath or str(chosen[0])
