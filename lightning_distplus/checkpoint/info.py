"""What a save tells its manifest about the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_distplus.checkpoint.catalog import is_committed, read_manifest, reference
from lightning_distplus.checkpoint.manifest import installed_packages

__all__ = ["SaveInfo", "info_like"]


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """What the manifest says about the run at the moment of the save.

    Args:
        global_step: Completed optimizer steps.
        epoch: Current epoch.
        strategy: Class name of the strategy.
        data: Place in the data, JSON-able, or None.
        packages: Versions by package name.
        layout: How the ranks share data and model.
        configuration: A digest of the configuration.
        deadlines_s: What ``timeout="auto"`` has found, by phase, for the run that resumes.
        parent: Path and manifest digest of the checkpoint before this one, as ``catalog.reference`` gives them.
    """

    global_step: int
    epoch: int
    strategy: str
    data: dict[str, Any] | None = None
    packages: dict[str, str] = field(default_factory=installed_packages)
    layout: dict[str, Any] = field(default_factory=dict)
    configuration: str | None = None
    deadlines_s: dict[str, float] = field(default_factory=dict)
    parent: dict[str, str] | None = None

    def __post_init__(self) -> None:
        json.dumps(self.data, allow_nan=False)  # refused now, not after a long save


def info_like(source: Path) -> SaveInfo:
    """What the manifest of a copy of ``source`` says; step 0 where the source has none."""
    if not is_committed(source):
        return SaveInfo(global_step=0, epoch=0, strategy="unknown")
    manifest = read_manifest(source)
    return SaveInfo(
        global_step=manifest.global_step,
        epoch=manifest.epoch,
        strategy=manifest.strategy,
        data=manifest.data,
        configuration=manifest.configuration,
        parent=reference(source),
    )
