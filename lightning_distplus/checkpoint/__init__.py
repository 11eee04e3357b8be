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
        is_last_valid,
        newest_valid,
        read_manifest,
        remove,
        state,
        verify,
        verify_or_raise,
    )
    from lightning_distplus.checkpoint.commit import Gather, SaveInfo, gather_alone, info_like
    from lightning_distplus.checkpoint.manifest import FileEntry, Manifest

__all__ = [
    "CheckpointState",
    "FileEntry",
    "FileFinding",
    "Gather",
    "Manifest",
    "Report",
    "SaveInfo",
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

_HOMES = {
    "commit": ("Gather", "SaveInfo", "gather_alone", "info_like"),
    "manifest": ("FileEntry", "Manifest"),
}  # the other names live in `catalog`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "catalog")
    return getattr(import_module(f"{__name__}.{home}"), name)
