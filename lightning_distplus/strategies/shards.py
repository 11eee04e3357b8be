"""The shards of FSDP and FSDP2, written by torch, with digests that are taken while they are written."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_distplus import _compat
from lightning_distplus.checkpoint.digests import DigestedWrites

__all__ = ["save_shards"]


def save_shards(
    state: dict[str, Any], path: Path, digested: DigestedWrites | None, group: dist.ProcessGroup | None
) -> None:
    """Writes this rank's part of a state into a folder. All ranks call it together.

    Args:
        state: DTensors, ShardedTensors and other values.
        path: The folder.
        digested: Takes the digests, and forces the files to the disk; None: torch does the latter.
        group: The ranks; None for all of them.
    """
    writer = None
    if digested is not None:
        writer = FileSystemWriter(path, sync_files=False)
        writer.fs = _DigestedFileSystem(digested)
    with _compat.without_crc():  # which takes torch longer than the writing, and which nobody compares
        save(state, checkpoint_id=path, storage_writer=writer, planner=_FirstCopies(), process_group=group)


class _FirstCopies(DefaultSavePlanner):
    """Has the lowest rank write what is not sharded: its copy is that of the fingerprints.

    Buffers may differ between the ranks of FSDP, as BatchNorm's do, and torch takes the copy of the rank that has least
    to write (torch 2.13, ``_dedup_save_plans.py`` 45).
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, written = [], set()
        for plan in all_plans:
            items = [one for one in plan.items if one.type is WriteItemType.SHARD or one.index not in written]
            written |= {one.index for one in items if one.type is not WriteItemType.SHARD}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


class _DigestedFileSystem(FileSystem):
    def __init__(self, digested: DigestedWrites) -> None:
        self._digested = digested

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode == "wb":
            with self._digested.open(Path(path)) as stream:
                yield stream
        else:
            with super().create_stream(path, mode) as stream:
                yield stream
