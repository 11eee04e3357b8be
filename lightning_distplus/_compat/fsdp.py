"""FSDP: its flat parameters, and how Lightning reads and writes its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_distplus._compat.probing import replaced, warn_once

__all__ = [
    "FlatUnit",
    "flat_units",
    "full_state_dict_without_offload",
    "in_shards",
    "is_fsdp_shard",
    "loading_unsharded_models",
    "replacing_sharded_saves",
]


@contextmanager
def full_state_dict_without_offload() -> Iterator[None]:
    """Gathers full FSDP1 state dicts without ``offload_to_cpu`` in this block.

    On the CPU the offload is a use-after-free that crashes the process (Lightning-AI/pytorch-lightning#21804, fixed
    after lightning 2.6.6).
    """
    modules = ("lightning.pytorch.strategies.fsdp", "lightning.fabric.strategies.model_parallel")
    consequence = "a full FSDP checkpoint on the CPU may crash the process"
    with replaced(modules, "_get_full_state_dict_context", _full_state_dict_on_cpu, consequence):
        yield


def _full_state_dict_on_cpu(module: Any, world_size: int, rank0_only: bool = True) -> Any:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.api import FullOptimStateDictConfig

    return FullyShardedDataParallel.state_dict_type(
        module=module,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


def in_shards(model: torch.nn.Module) -> Any:
    """FSDP1 gives and takes shards on the CPU in this block, as Lightning has it."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
    from torch.distributed.fsdp.api import ShardedOptimStateDictConfig

    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )


@contextmanager
def loading_unsharded_models() -> Iterator[None]:
    """Lets ModelParallelStrategy load, in this block, a model of which nothing is sharded.

    It saves such a model, and refuses to load it (lightning 2.6.6, fabric's ``model_parallel.py`` 424).
    """
    modules = ("lightning.fabric.strategies.model_parallel",)
    consequence = "the checkpoint of a model without shards is not loaded"
    with replaced(modules, "_has_dtensor_modules", lambda part: isinstance(part, torch.nn.Module), consequence):
        yield


@contextmanager
def replacing_sharded_saves(save: Callable[[dict[str, Any], Any], None]) -> Iterator[None]:
    """Has FSDPStrategy and ModelParallelStrategy hand their shards to ``save`` in this block, instead of writing them.

    Lightning calls ``torch.distributed.checkpoint.save`` on the default group (lightning 2.6.6, ``fsdp.py`` 860).
    """
    modules = ("lightning.pytorch.strategies.fsdp", "lightning.pytorch.strategies.model_parallel")
    consequence = "sharded checkpoints are written while training waits"
    with replaced(modules, "_distributed_checkpoint_save", save, consequence):
        yield


def is_fsdp_shard(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 has taken this parameter over, so that each rank may see its own part of it only."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


@dataclass(frozen=True)
class FlatUnit:
    """The flat parameter of one FSDP1 unit."""

    parameter: torch.Tensor
    """The leaf whose gradient is the whole, flat gradient of this rank."""
    local: torch.Tensor
    """What this rank holds of it between steps."""
    sections: list[tuple[str, int]]
    """Name and number of elements of each parameter in it, in order."""
    shard: str | None
    """Ranks with the same value hold the same content; None where this rank is the only holder."""
    prefix: str
    """What stands before the names of the sections in the names of the whole model."""
    start: int
    """At which element of the flat parameter ``local`` begins."""
    module: Any
    """The unit itself."""

    def parts(self) -> list[tuple[str, int, int, slice]]:
        """Of each parameter: its name, its elements, at which of them this rank's part begins, and where in ``local``.

        The part is empty where this rank holds nothing of the parameter.
        """
        found, first, held = [], 0, self.local.numel()
        for name, numel in self.sections:
            if name != "padding":
                begin = min(max(first - self.start, 0), held)
                end = min(max(first + numel - self.start, 0), held)
                found.append((name, numel, min(max(self.start - first, 0), numel), slice(begin, end)))
            first += numel
        return found


def flat_units(model: torch.nn.Module) -> list[FlatUnit]:
    """The units of an FSDP1 model; none of another one."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, getattr(ShardingStrategy, "_HYBRID_SHARD_ZERO2", None))
    found: list[FlatUnit] = []
    for prefix, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        handle = getattr(unit, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            if not hasattr(unit, "_handle"):
                warn_once("FullyShardedDataParallel._handle", "gradients and shards of FSDP are not compared")
            continue
        names = iter(getattr(flat, "_fqns", ()))
        numels = getattr(flat, "_numels_with_padding", ())
        padding = getattr(flat, "_is_padding_mask", [False] * len(numels))
        sections = [
            ("padding" if is_padding else next(names, "?"), numel)
            for numel, is_padding in zip(numels, padding, strict=False)
        ]
        shard = "" if unit.sharding_strategy is ShardingStrategy.NO_SHARD else None
        if unit.sharding_strategy in hybrid:
            shard = f"shard {dist.get_rank(unit.process_group)}"
        local = getattr(flat, "_local_shard", flat.data)
        start = 0 if shard == "" else dist.get_rank(unit.process_group) * local.numel()
        found.append(FlatUnit(flat, local, sections, shard, f"{prefix}." if prefix else "", start, unit))
    return found
