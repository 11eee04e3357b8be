"""Checkpoints that are committed by all ranks or do not exist: manifest, commit, catalog.

Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_distplus.checkpoint.catalog import (
        CheckpointState,
        FileFinding,
        Report,
        is_committed,
        newest_valid,
        read_manifest,
        remove,
        state,
        verify,
        verify_or_raise,
    )
    from lightning_distplus.checkpoint.info import SaveInfo, info_like
    from lightning_distplus.checkpoint.manifest import FileEntry, Manifest
    from lightning_distplus.checkpoint.protocol import commit
    from lightning_distplus.checkpoint.retention import is_last_valid, rotate
    from lightning_distplus.checkpoint.torn import quarantine

__all__ = [
    "CheckpointState",
    "FileEntry",
    "FileFinding",
    "Gather",
    "Manifest",
    "Report",
    "SaveInfo",
    "commit",
    "gather_alone",
    "info_like",
    "is_committed",
    "is_last_valid",
    "newest_valid",
    "quarantine",
    "read_manifest",
    "remove",
    "rotate",
    "state",
    "verify",
    "verify_or_raise",
]

_HOMES = {
    "info": ("SaveInfo", "info_like"),
    "protocol": ("commit",),
    "voting": ("Gather", "gather_alone"),
    "manifest": ("FileEntry", "Manifest"),
    "torn": ("quarantine",),
    "retention": ("is_last_valid", "rotate"),
}  # the other names live in `catalog`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "catalog")
    return getattr(import_module(f"{__name__}.{home}"), name)
