"""How many bytes a rank needs for parameters, gradients and optimizer, by the engine that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from lightning_distplus import _compat
from lightning_distplus.preflight.finding import Finding, Status

__all__ = ["ADAM_STATES", "Census", "Engine", "Estimate", "count", "estimate", "fits", "free_bytes", "states_of"]

ADAM_STATES = 2.0
"""Values that Adam keeps for each trainable parameter."""

_FULL = 4  # bytes of a float32
_LIVE_BLOCKS = 2  # one that computes, one that is fetched
_MEMORY = Path("/proc/meminfo")
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True, kw_only=True)
class Census:
    """The whole model in numbers, however it is cut; all are elements except ``buffer_bytes``."""

    parameters: int
    trainable: int
    buffer_bytes: int
    largest_block: int
    """Of the members of its module lists: the layers, which engines gather one at a time."""
    outside_blocks: int


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How an engine holds a model."""

    name: str
    """As people call it: "ZeRO-2"."""
    kind: Literal["ddp", "fsdp", "zero"]
    ranks: int
    shards: int
    """Ranks over which it cuts; fewer than ``ranks`` where groups of ranks hold copies."""
    stage: int
    """What is cut: 0 nothing, 1 the optimizer, 2 gradients too, 3 parameters too."""
    itemsize: int = _FULL
    """Bytes of a parameter at rest."""
    compute_itemsize: int = _FULL
    """Bytes of a parameter while it is gathered."""
    copies_gradients: bool = False
    """DDP's buckets, unless gradients are views of them."""
    gathers_all: bool = False
    """FSDP without a wrapping policy, or with SHARD_GRAD_OP: all parameters are there during a step."""
    bucket: int = 0
    """Elements of one of ZeRO's communication buffers."""
    offloads_optimizer: bool = False
    offloads_parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one rank. ``at_rest`` is exact for the engines that the tests count; ``working`` is an upper bound."""

    engine: Engine
    parameters: int
    gradients: int
    optimizer: int
    working: int
    """Gathered layers and communication buffers."""

    @property
    def at_rest(self) -> int:
        """What is there from the end of a backward to the end of the step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def on_device(self) -> int:
        """Bytes of the device."""
        offloaded = self.parameters * self.engine.offloads_parameters
        offloaded += (self.gradients + self.optimizer) * self.engine.offloads_optimizer
        return self.at_rest + self.working - offloaded

    @property
    def least(self) -> int:
        """Bytes of the device that every optimizer needs."""
        held = 0 if self.engine.offloads_parameters else self.parameters
        return held + (0 if self.engine.offloads_optimizer else self.gradients)

    def to_dict(self) -> dict[str, int | str]:
        """Plain values, for JSON."""
        parts = {name: getattr(self, name) for name in ("parameters", "gradients", "optimizer", "working", "on_device")}
        return {"engine": self.engine.name, "ranks": self.engine.ranks, **{f"{key}_bytes": parts[key] for key in parts}}

    def __str__(self) -> str:
        is_cut = self.engine.stage and self.engine.shards != self.engine.ranks
        cut = f", cut over {self.engine.shards}" if is_cut else ""
        offloaded = [
            *(["parameters"] if self.engine.offloads_parameters else []),
            *(["gradients and optimizer"] if self.engine.offloads_optimizer else []),
        ]
        away = f"; {' and '.join(offloaded)} in the memory of the host" if offloaded else ""
        return (
            f"{self.engine.name} on {self.engine.ranks} ranks{cut}: {gib(self.on_device)} GiB per rank without "
            f"activations (parameters {gib(self.parameters)}, gradients {gib(self.gradients)}, optimizer "
            f"{gib(self.optimizer)}, gathered layers and buffers {gib(self.working)}{away})"
        )


def count(module: nn.Module, ranks: int = 1) -> Census:
    """Counts a model that may be whole, on the meta device, or cut already by FSDP, FSDP2 or ZeRO-3.

    Args:
        module: The model.
        ranks: Over which FSDP1 has cut it.
    """
    sizes = {parameter: _numel(parameter, ranks) for parameter in module.parameters()}
    blocks = [sum(sizes[one] for one in block.parameters()) for block in _blocks(module)]
    total = sum(sizes.values())
    return Census(
        parameters=total,
        trainable=sum(size for parameter, size in sizes.items() if parameter.requires_grad),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        largest_block=max(blocks, default=total),
        outside_blocks=total - sum(blocks),
    )


def _numel(parameter: nn.Parameter, ranks: int) -> int:
    if isinstance(parameter, nn.UninitializedParameter):
        return 0
    if _compat.is_fsdp_shard(parameter):
        return parameter.numel() * ranks
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def states_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Values that an optimizer keeps per trainable parameter, found by a step; None where it cannot step here.

    Its parameters are on the meta device, or need not keep their values.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):  # it reads values, which the meta device does not have
        return None
    finally:
        for parameter in parameters:
            parameter.grad = None
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    kept = sum(tensor.numel() for tensor in tensors if tensor.dim() > 0)  # scalars count steps
    return float(kept / max(1, sum(parameter.numel() for parameter in parameters)))


def estimate(census: Census, engine: Engine, *, states: float = ADAM_STATES) -> Estimate:
    """What one rank needs.

    Args:
        census: The whole model.
        engine: How it is held.
        states: Values that the optimizer keeps per trainable parameter.
    """
    item, compute = engine.itemsize, engine.compute_itemsize
    whole, trainable = census.parameters, census.trainable

    def cut(size_bytes: float, stage: int) -> int:
        return int(size_bytes / (engine.shards if engine.stage >= stage else 1))

    # ZeRO steps a float32 copy of its own, also where the model is float32 already.
    stepped = (1 + states) * _FULL if engine.kind == "zero" else states * item
    return Estimate(
        engine=engine,
        parameters=cut(whole * item, 3) + census.buffer_bytes,
        gradients=cut(trainable * item, 2),
        optimizer=cut(trainable * stepped, 1),
        working=_working(census, engine, compute),
    )


def _working(census: Census, engine: Engine, compute: int) -> int:
    if engine.kind == "ddp":
        return census.trainable * engine.itemsize if engine.copies_gradients else 0
    buffers = 0
    if engine.kind == "zero":  # it allocates its buckets in full, however small the model
        buffers = engine.bucket * compute * (2 if engine.stage < 3 else 1)
        buffers += census.trainable * _FULL // engine.shards  # the step's float32 gradients of this rank's part
    if engine.stage < 3:
        return buffers
    gathered = census.outside_blocks + _LIVE_BLOCKS * census.largest_block
    if engine.gathers_all:
        gathered = census.parameters
    return min(gathered, census.parameters) * compute + min(gathered, census.trainable) * compute + buffers


def free_bytes(device: torch.device, processes: int = 1) -> int | None:
    """Bytes that one more process may take there, or None where nobody can tell.

    Args:
        device: A GPU, or the CPU, where the limit of the container counts too.
        processes: That share the memory of the host.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" or not _MEMORY.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    found = [int(lines["MemAvailable"].split()[0]) << 10]
    for limit, used in _LIMITS:
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            found.append(int(text) - int(used.read_text()))
    return max(0, min(found)) // max(1, processes)


def fits(needed: Estimate, free: int, where: str, *, optimizer: str, held: int = 0) -> Iterator[Finding]:
    """Holds an estimate against what is free.

    An error only where no optimizer at all would make it fit.

    Args:
        needed: The estimate.
        free: Bytes of the device.
        where: The device, for the message.
        optimizer: The name of the optimizer, or what was assumed.
        held: Bytes that this rank has taken there already.
    """
    if needed.on_device - held <= free:
        return
    is_sure = needed.least - held > free
    name = needed.engine.name
    yield Finding(
        check="memory",
        status=Status.ERROR if is_sure else Status.WARNING,
        subject=f"{name} needs ~{gib(needed.on_device)} GiB per rank without activations, {gib(free + held)} are free.",
        detail=f"{where}; {needed}; {optimizer}",
        remedy="Cut more (FSDP, or ZeRO-3), over more ranks, offload the optimizer, or use a smaller model"
        if needed.engine.stage < 3
        else "Cut it over more ranks, offload the optimizer or the parameters, or use a smaller model",
    )


def gib(size_bytes: float) -> str:
    """Two digits that count."""
    value = size_bytes / 2**30
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"
