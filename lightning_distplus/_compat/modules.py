"""Modules, their schedulers, and DDP around them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from lightning_distplus._compat.probing import warn_once

__all__ = ["inner_schedulers", "non_persistent_buffers", "register_ddp_comm_hook", "wrapper_tensor"]


def inner_schedulers(scheduler: Any) -> list[Any]:
    """The schedulers of a ``SequentialLR`` or ``ChainedScheduler``; of any other none."""
    if not isinstance(scheduler, (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)):
        return []
    inner = getattr(scheduler, "_schedulers", None)
    if inner is None:
        warn_once(f"{type(scheduler).__name__}._schedulers", "scale_lr does not scale the schedulers inside it")
        return []
    return list(inner)


def non_persistent_buffers(module: torch.nn.Module) -> frozenset[str]:
    """The buffers of a module, without its children, that are not saved."""
    return frozenset(getattr(module, "_non_persistent_buffers_set", ()))


def register_ddp_comm_hook(model: Any, state: Any, hook: Any, wrapper: Any) -> None:
    """Registers a DDP communication hook as Lightning does on CUDA."""
    module = importlib.import_module("lightning.pytorch.overrides.distributed")
    register = getattr(module, "_register_ddp_comm_hook", None)
    if register is None:
        warn_once(f"{module.__name__}._register_ddp_comm_hook", "DDP runs without its communication hook on the CPU")
        return
    register(model=model, ddp_comm_state=state, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)


def wrapper_tensor(kind: type[Any], shape: Sequence[int], like: torch.Tensor) -> Any:
    """A tensor of a subclass that has a shape, and the dtype and device of another tensor, but no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)
