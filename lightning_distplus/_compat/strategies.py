"""What the strategies of Lightning and torch keep to themselves: how they hold a model."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import ShardingStrategy

from lightning_distplus._compat.probing import warn_once

__all__ = ["HYBRID_GRAD_OP", "ddp_arguments", "give_mesh", "tensor_parallel_size"]

HYBRID_GRAD_OP: ShardingStrategy | None = getattr(ShardingStrategy, "_HYBRID_SHARD_ZERO2", None)
"""FSDP1 that shards gradients and moments within a node and keeps the gathered parameters."""


def ddp_arguments(strategy: Any) -> dict[str, Any]:
    """What a DDPStrategy passes to DistributedDataParallel; of any other strategy nothing."""
    found: dict[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    return found


def tensor_parallel_size(strategy: Any) -> int | None:
    """Of a ModelParallelStrategy; None where it is as large as a node ("auto")."""
    size = getattr(strategy, "_tensor_parallel_size", 1)
    return size if isinstance(size, int) else None


def give_mesh(strategy: Any, model: Any, mesh: Any) -> None:
    """Puts a device mesh where ``configure_model`` looks for it, without setting up the strategy."""
    for owner in (strategy, model):
        if not hasattr(type(owner), "device_mesh"):
            warn_once(f"{type(owner).__name__}.device_mesh", "a model that asks for its mesh is not rehearsed")
            return
        owner._device_mesh = mesh
