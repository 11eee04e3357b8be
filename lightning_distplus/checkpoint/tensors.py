"""The tensors of a checkpoint, by one name in all strategies: what was saved, and what this rank holds.

A tensor is called ``weights/NAME`` or ``optimizer 0/NAME/exp_avg``, after the parameter. ZeRO keeps the moments of many
parameters in one buffer per rank: ``optimizer 0/exp_avg of part 0, rank 1 of 2``, which another number of ranks lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distplus import _compat
from lightning_distplus.checkpoint.catalog import FileFinding
from lightning_distplus.checkpoint.export import is_sharded, tensors_of_shards
from lightning_distplus.checkpoint.fingerprints import Piece, Sums, differing, sums_of_pieces

__all__ = [
    "named_tensors",
    "parameters_of",
    "parameters_of_optimizers",
    "pieces_of_live",
    "pieces_of_saved",
    "tensor_findings",
]

_OURS = "lightning_distplus"  # where a checkpoint holds what we add, the names of the parameters among it
_IS_OPTIMIZER = re.compile(r"optimizer_\d+")


def tensor_findings(path: Path, expected: Mapping[str, str], *, weights_only: bool = True) -> list[FileFinding]:
    """Tensors that are not what they should be; DeepSpeed's folders hold none by name, and are not read.

    At most 256 MB, or the largest tensor, are in memory at once.
    """
    if not (path.is_file() or is_sharded(path)):
        return []
    total: Sums = {}
    for name, tensor in _read(path, weights_only):
        total.update(sums_of_pieces([Piece.whole(name, tensor)]))
    odd = differing(expected, total)
    missing = [name for name in expected if name not in total]
    return [
        *(FileFinding(f"{path}: {name}", f"fingerprint {want}", found) for name, (want, found) in odd.items()),
        *(FileFinding(f"{path}: {name}", expected[name], "no such tensor") for name in missing),
    ]


def _read(path: Path, weights_only: bool) -> Iterator[tuple[str, Tensor]]:
    if path.is_file():
        yield from named_tensors(torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))
        return
    for (first, *inner), tensor in tensors_of_shards(path):
        number = str(first).removeprefix("optimizer_")
        if number == first:
            yield f"weights/{'.'.join(map(str, inner))}", tensor
        elif inner[0] == "state":
            yield f"optimizer {number}/{'/'.join(map(str, inner[1:]))}", tensor


def named_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a single-file checkpoint, or of what FSDP and FSDP2 write, by the names that a manifest has."""
    parameters = (state.get(_OURS) or {}).get("parameters", [])
    for key in ("state_dict", "model"):
        for name, value in (state.get(key) or {}).items():
            if isinstance(value, Tensor):
                yield f"weights/{name}", value
    optimizers = dict(enumerate(state.get("optimizer_states") or []))
    optimizers |= {int(key[10:]): value for key, value in state.items() if _IS_OPTIMIZER.fullmatch(key)}
    for number, optimizer in optimizers.items():
        for parameter, values in optimizer.get("state", {}).items():
            by_number = parameters[number] if isinstance(parameter, int) and number < len(parameters) else {}
            name = by_number[parameter] if by_number else parameter
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield f"optimizer {number}/{name}/{key}", value


# -- what a strategy saves and holds -----------------------------------------------------------------------------------


# -- saved -------------------------------------------------------------------------------------------------------------
def pieces_of_saved(state: Mapping[str, Any], *, is_first: bool) -> Iterator[Piece]:
    """This rank's part of what is handed to a writer: a single-file checkpoint, or the shards of FSDP and FSDP2.

    Args:
        state: What is written.
        is_first: Whether this rank answers for what all ranks hold alike.
    """
    for name, value in named_tensors(state):
        if hasattr(value, "local_shards"):  # of FSDP1
            for shard in value.local_shards():
                yield Piece(name, shard.tensor, tuple(shard.metadata.shard_offsets), tuple(value.size()))
        elif isinstance(value, DTensor):
            yield from _part(name, value, only_first_copy=True)
        elif is_first:
            yield Piece.whole(name, value)


def _part(name: str, tensor: DTensor, *, only_first_copy: bool = False) -> Iterator[Piece]:
    coordinate: Any = tensor.device_mesh.get_coordinate() or []
    copies = [place for place, kind in zip(coordinate, tensor.placements, strict=False) if kind.is_replicate()]
    if any(kind.is_partial() for kind in tensor.placements) or (only_first_copy and any(copies)):
        return
    local = tensor.to_local()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if local.numel() and tuple(local.shape) == tuple(chunk.sizes):
        yield Piece(name, local, tuple(chunk.offsets), tuple(tensor.shape))


def parameters_of_optimizers(strategy: Any) -> list[list[str]]:
    """The names of the parameters of each optimizer, in the order of its numbers."""
    names = {
        id(parameter): _compat.state_dict_name(name) for name, parameter in strategy.lightning_module.named_parameters()
    }
    return [
        [names.get(id(parameter), f"parameter {number}") for number, parameter in enumerate(parameters_of(optimizer))]
        for optimizer in strategy.optimizers
    ]


# -- live --------------------------------------------------------------------------------------------------------------
def pieces_of_live(strategy: Any, *, is_first: bool = True) -> Iterator[Piece]:
    """What this rank holds of weights, persistent buffers and the optimizers' state. No rank waits for another one.

    Args:
        strategy: Of ours.
        is_first: Whether this rank answers for the weights that all ranks hold alike.
    """
    module, model = strategy.lightning_module, strategy.model
    units = _compat.flat_units(model) if isinstance(model, torch.nn.Module) else []
    sections = _Sections(units)
    for name, parameter in module.named_parameters():
        if _compat.state_dict_name(name) not in sections.by_name:
            yield from _held(f"weights/{_compat.state_dict_name(name)}", parameter, is_first)
    for prefix, part in module.named_modules():
        unsaved = _compat.non_persistent_buffers(part)
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in unsaved:
                yield from _held(f"weights/{_compat.state_dict_name(name)}", buffer, is_first)
    for unit in units:
        yield from sections.pieces("weights/{}", unit, unit.local)
    for number, optimizer in enumerate(strategy.optimizers):
        inner = getattr(optimizer, "optimizer", optimizer)  # ZeRO wraps the one that has the state
        if inner is optimizer:
            names = dict(zip(parameters_of(optimizer), parameters_of_optimizers(strategy)[number], strict=True))
            yield from _moments(f"optimizer {number}", optimizer.state, names, sections)
        else:
            yield from _parts_of_zero(f"optimizer {number}", inner)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, in the order of its numbers."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _held(name: str, value: Any, is_first: bool = True) -> Iterator[Piece]:
    shard = getattr(value, "ds_tensor", None)
    if shard is not None:  # of ZeRO-3, which pads the last one
        start = dist.get_rank(value.ds_process_group) * shard.numel()
        yield Piece.of_flat(name, shard[: max(0, value.ds_numel - start)], start, value.ds_numel)
    elif isinstance(value, DTensor):
        yield from _part(name, value)
    elif is_first:
        yield Piece.whole(name, value)


def _moments(
    prefix: str, state: Mapping[Tensor, Any], names: Mapping[Tensor, str], sections: _Sections
) -> Iterator[Piece]:
    for parameter, values in state.items():
        unit = sections.flat.get(id(parameter))
        name = names.get(parameter, "?")
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if unit is not None and value.numel() == unit.local.numel():
                yield from sections.pieces(f"{prefix}/{{}}/{key}", unit, value)
            elif name in sections.by_name:
                if value.dim() == 0 and parameter.numel() == 0:
                    continue  # a counter of steps of what this rank holds nothing of
                is_part = value.dim() > 0 and value.numel() == parameter.numel()
                where = f"{prefix}/{name}/{key}"
                yield Piece.of_flat(where, value, *sections.by_name[name]) if is_part else Piece.whole(where, value)
            else:
                yield from _held(f"{prefix}/{name}/{key}", value)


def _parts_of_zero(prefix: str, inner: Any) -> Iterator[Piece]:
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, state in enumerate(getattr(inner, "state", {}).values()):
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield Piece.whole(f"{prefix}/{key} of part {number}, rank {rank} of {size}", value)


class _Sections:
    """Where the parameters of FSDP1 lie in its flat ones."""

    def __init__(self, units: list[_compat.FlatUnit]) -> None:
        self.flat = {id(unit.parameter): unit for unit in units}
        self.by_name: dict[str, tuple[int, int]] = {}
        """At which of its elements this rank's part of a parameter begins, and how many it has."""
        for unit in units:
            for name, numel, start, _ in unit.parts():
                self.by_name[_compat.state_dict_name(unit.prefix + name)] = (start, numel)

    def pieces(self, pattern: str, unit: _compat.FlatUnit, local: Tensor) -> Iterator[Piece]:
        """The parts of the parameters in what this rank holds of a flat one, or of something of the same length."""
        for name, numel, start, place in unit.parts():
            if place.start < place.stop:
                where = pattern.format(_compat.state_dict_name(unit.prefix + name))
                yield Piece.of_flat(where, local.reshape(-1)[place], start, numel)
