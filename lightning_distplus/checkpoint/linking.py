"""Links to checkpoints, as ``save_last="link"`` wants them: swapped in one step, and never to what is not there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lightning_distplus.checkpoint.catalog import remove
from lightning_distplus.checkpoint.files import discard, remove_tree
from lightning_distplus.checkpoint.layout import META, meta_folder, new_nonce

__all__ = ["link"]

logger = logging.getLogger(__name__)


def link(checkpoint: Path, name: Path) -> None:
    """Makes ``name`` a relative link to ``checkpoint``, in the place of what is there. One rank calls it.

    A checkpoint that is not there, because its save has failed, leaves the older link as it is; a file system without
    links leaves it too, with a warning.
    """
    if checkpoint.absolute() == name.absolute():
        return
    if not checkpoint.exists():
        logger.warning("%s is not there; %s stays as it is", checkpoint, name)
        return
    fresh = name.parent / META / f"{name.name}.link-{new_nonce()}"
    fresh.parent.mkdir(parents=True, exist_ok=True)
    try:
        fresh.symlink_to(os.path.relpath(checkpoint, name.parent))
        if name.is_dir() and not name.is_symlink():
            remove(name)  # a directory cannot be replaced in one step; what is linked to is there meanwhile
        fresh.replace(name)
        remove_tree(meta_folder(name, is_directory=False))  # of a single file that was there
    except OSError as error:
        logger.warning("%s cannot be linked to %s (%s); it stays as it is", name, checkpoint, error)
        discard(fresh)
