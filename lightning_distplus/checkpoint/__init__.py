"""Checkpoints that are committed by all ranks or do not exist: manifest, commit, catalog."""

from lightning_distplus.checkpoint.catalog import (
    CheckpointState,
    FileFinding,
    Report,
    is_last_valid,
    newest_valid,
    read_manifest,
    remove,
    state,
    verify,
    verify_or_raise,
)
from lightning_distplus.checkpoint.commit import Gather, info_like
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest

__all__ = [
    "CheckpointState",
    "FileEntry",
    "FileFinding",
    "Gather",
    "Manifest",
    "Report",
    "info_like",
    "is_last_valid",
    "newest_valid",
    "read_manifest",
    "remove",
    "state",
    "verify",
    "verify_or_raise",
]
