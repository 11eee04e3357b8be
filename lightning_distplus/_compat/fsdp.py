"""FSDP: its flat parameters, and how Lightning reads and writes its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_distplus._compat.probing import replaced, warn_once, wrapped

__all__ = [
    "FlatUnit",
    "flat_units",
    "full_state_dict_without_offload",
    "in_shards",
    "is_fsdp_shard",
    "loading_empty_optimizers_of_fsdp",
    "loading_empty_optimizers_of_fsdp2",
    "loading_unsharded_models",
    "loading_whole_files",
    "replacing_sharded_saves",
    "state_dict_name",
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
def loading_whole_files(weights_only: bool | None) -> Iterator[None]:
    """Has FSDPStrategy read a whole checkpoint as ModelParallelStrategy does: mapped into memory, by ``torch.load``.

    Its own reader finds any class that a pickle names (lightning 2.6.6, fabric's ``load.py`` 170).
    """

    def load(path: Any) -> Any:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)

    consequence = "a whole checkpoint that FSDP reads may run code"
    with replaced(("lightning.pytorch.strategies.fsdp",), "_lazy_load", load, consequence):
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


def state_dict_name(name: str) -> str:
    """A name in a model without what FSDP and activation checkpointing add to it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


# -- optimizers without state, which Lightning saves and cannot load ---------------------------------------------------

_CONSEQUENCE = "the checkpoint of an optimizer without state is not loaded"


@contextmanager
def loading_empty_optimizers_of_fsdp(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Lets FSDPStrategy load in this block what it has saved of optimizers of which none has any state.

    torch's distributed checkpoint drops the empty dict, which FSDP1 wants; and in a whole checkpoint the strategy looks
    at the first parameter that has a state (lightning 2.6.6, ``fsdp.py`` 614 and 655).
    """
    whole: dict[str, Any] = {}
    left: list[dict[str, Any]] = []

    def load_with_state(load: Callable[..., Any], **arguments: Any) -> Any:
        loaded = load(**arguments)
        loaded[arguments["optimizer_key"]].setdefault("state", {})
        return loaded

    def leave_out(materialize: Callable[..., Any], checkpoint: Any) -> Any:
        nonlocal whole
        whole = materialize(checkpoint)
        if not any(one["state"] for one in whole.get("optimizer_states") or ()):
            left.extend(whole.pop("optimizer_states", None) or ())
        return whole

    shards, strategy = "torch.distributed.checkpoint.optimizer", "lightning.pytorch.strategies.fsdp"
    with (
        wrapped(shards, "load_sharded_optimizer_state_dict", load_with_state, _CONSEQUENCE),
        wrapped(strategy, "_materialize_tensors", leave_out, _CONSEQUENCE),
    ):
        yield
    if left:
        whole["optimizer_states"] = left
        for optimizer, state in zip(optimizers, left, strict=False):  # only a fit has optimizers
            _set_groups(optimizer, state)


@contextmanager
def loading_empty_optimizers_of_fsdp2() -> Iterator[None]:
    """Lets ModelParallelStrategy load in this block what it has saved as one file of an optimizer without state.

    It looks at the first parameter that has one, and torch at its device (lightning 2.6.6, fabric's
    ``model_parallel.py`` 597; torch 2.13's ``set_optimizer_state_dict``).
    """

    def rekey_state(rekey: Callable[..., Any], state: dict[str, Any], module: Any) -> Any:
        return rekey(state, module) if state["state"] else state

    def set_any_state(
        set_state: Callable[..., Any], module: Any, optimizer: Any, optim_state_dict: Any, **named: Any
    ) -> None:
        if isinstance(optimizer, Optimizer) and not optim_state_dict.get("state"):
            _set_groups(optimizer, optim_state_dict)
        else:
            set_state(module, optimizer, optim_state_dict, **named)

    strategy, states = "lightning.fabric.strategies.model_parallel", "torch.distributed.checkpoint.state_dict"
    with (
        wrapped(strategy, "_rekey_optimizer_state_if_needed", rekey_state, _CONSEQUENCE),
        wrapped(states, "set_optimizer_state_dict", set_any_state, _CONSEQUENCE),
    ):
        yield


def _set_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Sets all that a state holds beside the parameters' states, such as learning rates."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
