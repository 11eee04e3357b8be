"""Checkpoints that are committed by all ranks or do not exist: manifest, commit, catalog."""

from lightning_distplus.checkpoint.catalog import (
    CheckpointState,
    FileFinding,
    Report,
    is_committed,
    is_last_valid,
    newest_valid,
    read_manifest,
    remove,
    state,
    verify,
    verify_or_raise,
)
from lightning_distplus.checkpoint.commit import Gather, gather_alone, info_like
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest

__all__ = [
    "CheckpointState",
    "FileEntry",
    "FileFinding",
    "Gather",
    "Manifest",
    "Report",
    "gather_alone",
    "info_like",
    "is_committed",
    "is_last_valid",
    "newest_valid",
    "read_manifest",
    "remove",
    "state",
    "verify",
    "verify_or_raise",
]
