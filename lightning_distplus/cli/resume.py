"""``--ckpt_path auto``: which checkpoint a run continues from."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus.checkpoint import newest_valid
from lightning_distplus.cli.verify import checkpoints_in
from lightning_distplus.errors import CheckpointCorrupt
from lightning_distplus.strategies.base import ResilientStrategy
from lightning_distplus.strategies.loading import Search

__all__ = ["AUTO", "checkpoint_folder", "newest_checkpoint"]

log = logging.getLogger(__name__)

AUTO = "auto"


def checkpoint_folder(trainer: Trainer) -> Path:
    """The folder that ``auto`` looks in: that of the first ModelCheckpoint, else ``<default_root_dir>/checkpoints``.

    A ModelCheckpoint without a folder would save below the logger's next version, where no later start looks; it gets
    this one.
    """
    folder = Path(trainer.default_root_dir) / "checkpoints"
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    if savers and savers[0].dirpath:
        return Path(savers[0].dirpath)
    for saver in savers[:1]:
        saver.dirpath = str(folder)
    return folder


def newest_checkpoint(trainer: Trainer, *, allow_fresh: bool = False) -> Path | None:
    """The newest valid checkpoint of a run; None where there is none yet.

    For a Resilient strategy its sizes are right; its bytes are read by all ranks together when they start.

    Args:
        trainer: The trainer of the run.
        allow_fresh: Start anew also where checkpoints lie, of which none can be trusted.

    Raises:
        CheckpointCorrupt: Checkpoints are there, but all are torn or unverified, and ``allow_fresh`` is not set.
    """
    folder = checkpoint_folder(trainer)
    strategy = trainer.strategy
    found = newest_valid(folder, verify="size" if isinstance(strategy, ResilientStrategy) else "full")
    if isinstance(strategy, ResilientStrategy):
        # Once they have met, the ranks share the reading, and look further where bytes are not as they were.
        strategy.search = Search(folder, allow_fresh)
    if found is not None:
        log.info("--ckpt_path auto: resuming from %s", found)
        return found
    untrusted = checkpoints_in(folder)
    if untrusted and not allow_fresh:
        names = ", ".join(path.name for path in untrusted[:3]) + (", ..." if len(untrusted) > 3 else "")
        raise CheckpointCorrupt(
            f"--ckpt_path auto: {folder} holds {len(untrusted)} checkpoint(s) ({names}), none of them committed "
            f"and sound; 'distplus verify {folder}' says why. Name one with --ckpt_path PATH, or start anew with "
            "--allow_fresh."
        )
    log.info("--ckpt_path auto: nothing to resume from in %s; starting anew", folder)
    return None
