"""Single-file checkpoints written straight to their stage, without a copy in memory and one in ``$TMPDIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_distplus.strategies.background import Writes

__all__ = ["StreamingCheckpointIO", "stream_single_files"]


class StreamingCheckpointIO(TorchCheckpointIO):
    """``TorchCheckpointIO`` for a place where nobody looks yet, so that the file need not appear at once.

    The parent pickles into memory, writes that to ``$TMPDIR`` and moves the file, a copy wherever that is another file
    system, which may be full while the target is not (lightning 2.6.6, ``cloud_io.py`` 85-122).
    """

    writes: Writes | None = None
    """Where the writes of a save that is committed go."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes the file; a remote one, or one with options, is the parent's."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if self.writes is None:
            torch.save(checkpoint, path)
        else:
            self.writes.save_file(checkpoint, Path(path))


def stream_single_files(strategy: Strategy) -> None:
    """Replaces the stock plugin of a strategy; a plugin of the user's stays."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = StreamingCheckpointIO()
