"""Process groups: their stores, backends, time-outs and sequence numbers."""

from __future__ import annotations

import atexit
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from lightning_distplus._compat.probing import warn_once

# The stores are public as torch.distributed.*Store, but torch's type stubs know them only here.
__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "default_group_timeout",
    "default_store",
    "init_default_group",
    "num_collectives",
    "process_groups",
    "read_group_timeout",
    "set_group_timeout",
]

# A torch.distributed.Store. Torch's stubs lack ``append`` and ``clone``, which every store has.
Store: TypeAlias = Any


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of which this process is a member, the default group first."""
    world = getattr(c10d, "_world", None)
    if world is None or not hasattr(world, "pg_map"):
        warn_once("torch.distributed.distributed_c10d._world.pg_map", "only the default group gets our deadlines")
        default = dist.group.WORLD
        return [] if default is None else [default]
    return list(world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Gives a live group another time-out; operations already in flight keep the old one."""
    for backend in _backends(group):
        setter = getattr(backend, "_set_default_timeout", None)
        if setter is None:
            warn_once(
                f"{type(backend).__name__}._set_default_timeout", "its groups keep the time-out of their creation"
            )
        else:
            setter(timeout)


def read_group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out in force on a group; None where its backend does not tell."""
    for backend in _backends(group):
        options = getattr(backend, "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, one per device type, each once."""
    found: list[Any] = []
    if not hasattr(group, "_get_backend"):
        warn_once("ProcessGroup._get_backend", "groups keep the time-out of their creation")
        return found
    for device_type in ("cpu", "cuda", "xpu"):
        try:
            backend = group._get_backend(torch.device(device_type))
        except RuntimeError:  # no backend for this device type
            continue
        if not any(backend is other for other in found):
            found.append(backend)
    return found


def init_default_group(
    backend: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta | None,
    device: torch.device,
) -> None:
    """Forms the default process group on a store of ours; otherwise as Lightning does it."""
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if backend == "nccl":
        # Lightning destroys an NCCL group at exit, where an interrupt would leave the communicators behind.
        fabric = importlib.import_module("lightning.fabric.utilities.distributed")
        atexit.register(getattr(fabric, "_destroy_dist_connection", dist.destroy_process_group))


def default_store() -> Store:
    """The store over which the default process group was formed.

    Raises:
        RuntimeError: Torch keeps it elsewhere now; a control plane on a stock strategy cannot do without it.
    """
    find = getattr(c10d, "_get_default_store", None)
    if find is None:
        raise RuntimeError(
            "torch.distributed.distributed_c10d._get_default_store is not in this version of torch. Use a Resilient "
            "strategy, which forms the process group on a store of its own."
        )
    return find()


def num_collectives() -> int:
    """How many collectives this process has started on the default group; 0 where the group does not tell."""
    group = dist.group.WORLD
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        warn_once("ProcessGroup._get_sequence_number_for_group", "the numbers of collectives are not compared")
        return 0
    try:
        return int(count())
    except RuntimeError:  # a backend without sequence numbers
        return 0


@contextmanager
def default_group_timeout(timeout: timedelta | None) -> Iterator[None]:
    """Gives every group that is made in this block, by anybody, this time-out instead of torch's 30 minutes.

    ``new_group`` does not inherit the time-out of the default group (torch 2.13, ``distributed_c10d.py`` 5980), so that
    the clone on which all ZeRO traffic runs, and the axes of a device mesh, keep torch's default otherwise.
    """
    name = "_get_default_timeout"
    original = getattr(c10d, name, None)
    if timeout is None or original is None:
        if original is None:
            warn_once(
                f"torch.distributed.distributed_c10d.{name}", "groups made during set-up wait for 30 minutes in it"
            )
        yield
        return
    setattr(c10d, name, lambda *_args, **_kwargs: timeout)
    try:
        yield
    finally:
        setattr(c10d, name, original)
