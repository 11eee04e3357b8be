"""Quarantine: torn saves and damaged checkpoints are moved out of the way and kept, never loaded, never deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lightning_distplus.checkpoint.catalog import CheckpointState, verify
from lightning_distplus.checkpoint.files import remove_tree
from lightning_distplus.checkpoint.layout import META, Stage, leftovers_of, meta_folder, quarantine_for
from lightning_distplus.liveness import ProcessState, boot_id, process_state, start_time

__all__ = ["claim", "quarantine", "set_torn_aside"]

_OWNER = "owner.json"


def claim(stage: Stage) -> None:
    """Writes into a stage which process saves there, so that another job in the same folder leaves it alone."""
    owner = {"host": boot_id(), "pid": os.getpid(), "started": start_time(os.getpid())}
    folder = stage.folder / META
    folder.mkdir(exist_ok=True)
    (folder / _OWNER).write_text(json.dumps(owner))


def set_torn_aside(target: Path) -> None:
    """Moves what is torn or damaged among the leftovers of saves of ``target`` into quarantine.

    A stage stays where it is while its owner lives, or belongs to another host, which cannot be asked.
    """
    for folder in leftovers_of(target, "stage"):
        if not _owner_is_gone(folder):
            continue
        if any(child.name != META for child in folder.iterdir()):
            folder.rename(quarantine_for(target))
        else:
            remove_tree(folder)  # killed before it wrote anything, or after it was moved in place
    for folder in leftovers_of(target, "aside"):
        report = verify(folder / target.name, "size")
        if not report.ok and report.state in (CheckpointState.COMMITTED, CheckpointState.TORN):
            folder.rename(quarantine_for(target))


def quarantine(path: str | Path) -> Path:
    """Moves a damaged checkpoint, with its manifest, out of the way of the next save under its name.

    Returns:
        Where it is kept; `verify` says there what is wrong with it.

    Raises:
        OSError: It cannot be moved.
    """
    path = Path(path)
    kept = quarantine_for(path)
    beside = meta_folder(path, is_directory=False)
    is_directory = path.is_dir()
    (kept / META).mkdir(parents=True)
    if not is_directory and beside.is_dir():
        beside.rename(kept / META / path.name)
    path.rename(kept / path.name)
    return kept / path.name


def _owner_is_gone(stage: Path) -> bool:
    try:
        owner = json.loads((stage / META / _OWNER).read_bytes())
        host, pid, started = str(owner["host"]), int(owner["pid"]), owner["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # killed before it could say who it is
    return host == boot_id() and process_state(pid, started) is ProcessState.GONE
