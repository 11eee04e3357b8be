"""Torch's process group that pretends: collectives return at once, so that one process can play one rank of many."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_distplus._compat.probing import warn_once

__all__ = ["fake_default_group"]

_MODULE = "torch.testing._internal.distributed.fake_pg"


@contextmanager
def fake_default_group(size: int) -> Iterator[bool]:
    """This process is rank 0 of ``size`` in this block; False where torch has no such group."""
    try:
        store = importlib.import_module(_MODULE).FakeStore()
    except (ImportError, AttributeError):
        warn_once(f"{_MODULE}.FakeStore", "no device mesh is there in a rehearsal")
        yield False
        return
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        yield True
    finally:
        dist.destroy_process_group()
