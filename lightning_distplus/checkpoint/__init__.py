"""Checkpoints that are committed by all ranks or do not exist: manifest, commit, catalog."""

from lightning_distplus.checkpoint.catalog import (
    CheckpointState,
    Report,
    is_last_valid,
    newest_valid,
    read_manifest,
    remove,
    state,
    verify,
    verify_or_raise,
)
from lightning_distplus.checkpoint.commit import info_like
from lightning_distplus.checkpoint.manifest import Manifest

__all__ = [
    "CheckpointState",
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
