"""How a strategy holds a model, for the estimate of its memory, and that estimate before the engine wraps the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import ShardingStrategy

from lightning_distplus import _compat
from lightning_distplus.preflight import Facts, Finding, Settings, run_checks
from lightning_distplus.preflight.memory import Census, Engine, count, estimate, fits, free_bytes
from lightning_distplus.strategies.starting import facts_of

__all__ = ["checkpoint_bytes", "engine_of", "memory_findings"]

_HALF, _FULL, _DOUBLE = 2, 4, 8
_HYBRID = (ShardingStrategy.HYBRID_SHARD, _compat.HYBRID_GRAD_OP)
_KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, _compat.HYBRID_GRAD_OP)


def engine_of(strategy: Any, *, precision: str, ranks: int, per_node: int) -> Engine:
    """The engine of a strategy, ours or Lightning's, on so many ranks.

    Args:
        strategy: Made with its arguments; nothing needs to be set up.
        precision: The Trainer's, for example ``"bf16-mixed"``.
        ranks: Of the run.
        per_node: Ranks of a node, within which a hybrid shards.
    """
    kind, _, mode = precision.partition("-")
    width = {"64": _DOUBLE, "32": _FULL}.get(kind, _HALF)
    at_rest = _FULL if mode == "mixed" else width
    if isinstance(strategy, DeepSpeedStrategy):
        return _zero(strategy, ranks, width)
    if isinstance(strategy, FSDPStrategy):
        return _fsdp(strategy, ranks, per_node, at_rest, width)
    if isinstance(strategy, ModelParallelStrategy):
        tensor = _compat.tensor_parallel_size(strategy)
        name = "FSDP2" if tensor in (1, None) else f"FSDP2 with tensor parallelism of {tensor}"
        return Engine(
            name=name, kind="fsdp", ranks=ranks, shards=ranks, stage=3, itemsize=at_rest, compute_itemsize=width
        )
    views = _compat.ddp_arguments(strategy).get("gradient_as_bucket_view", False)
    copies = ranks > 1 and not views
    name = "DDP" if ranks > 1 else "One process"
    return Engine(name=name, kind="ddp", ranks=ranks, shards=1, stage=0, itemsize=at_rest, copies_gradients=copies)


def _zero(strategy: Any, ranks: int, width: int) -> Engine:
    zero = (strategy.config or {}).get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    to = {name: (zero.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param")}
    return Engine(
        name=f"ZeRO-{stage}",
        kind="zero",
        ranks=ranks,
        shards=ranks,
        stage=stage,
        itemsize=width,
        compute_itemsize=width,
        bucket=int(zero.get("reduce_bucket_size", 0)),
        offloads_optimizer=to["optimizer"] != "none",
        offloads_parameters=to["param"] != "none",
    )


def _fsdp(strategy: Any, ranks: int, per_node: int, at_rest: int, width: int) -> Engine:
    sharding = strategy.sharding_strategy
    if sharding is ShardingStrategy.NO_SHARD:
        return Engine(name="FSDP without sharding", kind="ddp", ranks=ranks, shards=1, stage=0, itemsize=at_rest)
    mesh = strategy.kwargs.get("device_mesh")
    hybrid = mesh[1] if isinstance(mesh, Sequence) else getattr(mesh, "shape", (0, per_node))[-1]
    offloads = bool(getattr(strategy.cpu_offload, "offload_params", False))
    return Engine(
        name="FSDP" if sharding is ShardingStrategy.FULL_SHARD else f"FSDP {sharding.name}",
        kind="fsdp",
        ranks=ranks,
        shards=max(1, min(ranks, hybrid)) if sharding in _HYBRID else ranks,
        stage=3,
        itemsize=at_rest,
        compute_itemsize=width,
        gathers_all=sharding in _KEEPS_GATHERED or strategy.kwargs.get("auto_wrap_policy") is None,
        offloads_optimizer=offloads,
        offloads_parameters=offloads,
    )


def memory_findings(strategy: Any, trainer: Any, settings: Settings) -> list[Finding]:
    """What the estimate says against the free memory of this rank's device, before the engine wraps the model."""

    def check(facts: Facts) -> Iterator[Finding]:
        device, module = strategy.root_device, strategy.lightning_module
        per_node = len(strategy.parallel_devices or [device])
        free = free_bytes(device, processes=per_node)
        if free is None:
            return
        engine = engine_of(strategy, precision=str(trainer.precision), ranks=strategy.world_size, per_node=per_node)
        needed = estimate(count(module, strategy.world_size), engine)
        where = f"{device} of {facts.host}"
        yield from fits(needed, free, where, optimizer="Adam is assumed", held=_held(module, device))

    return run_checks({"memory": check}, facts_of(strategy), settings)


def checkpoint_bytes(census: Census, engine: Engine, states: float) -> int:
    """Bytes of one checkpoint of all ranks: parameters, buffers, and the state of the optimizer."""
    kept = estimate(census, replace(engine, stage=0), states=states)
    return kept.parameters + kept.optimizer


def _held(module: torch.nn.Module, device: torch.device) -> int:
    """Bytes of the model that are on the device already."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type == device.type)
