"""The tensors of a checkpoint: their names, what this rank holds of them, and their fingerprints.

A tensor is called ``weights/NAME`` or ``optimizer 0/NAME/exp_avg``, after the parameter. ZeRO keeps the moments of many
parameters in one buffer per rank: ``optimizer 0/exp_avg of part 0, rank 1 of 2``, which another number of ranks lacks.

A fingerprint does not depend on how a tensor is sharded: those of the shards add up to it.
A tensor's bytes are read as lanes: signed 32-bit integers, in rows of 1,024. The sum of a row's lanes, each times an
odd number of its column, is an exact integer: nothing wraps, so that a sign bit counts like any other. The fingerprint
is two sums modulo 2^64 of those of the rows, each times two odd random numbers of its place. All of it is linear in the
lanes: each rank adds up what it holds, and the total is the same on any number of ranks.

One flipped bit always shows, as odd times odd times a power of two below 2^32 is not 0 modulo 2^64. Two always show
within a row (no two columns have the same number), and where they are not the same bit of their lanes; else they go
unseen once in 2^64. On a CPU the lanes are summed in doubles, which hold such sums exactly in any order of addition, by
the matrix product of numpy: at the speed of two plain sums of integers. XXH3, which the divergence monitor uses there,
is faster, but does not add up.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distplus import _compat

_OURS = "lightning_distplus"  # where a checkpoint holds what we add, the names of the parameters among it
_IS_OPTIMIZER = re.compile(r"optimizer_\d+")


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


# -- saved -------------------------------------------------------------------------------------------------------------


def pieces_of_saved(state: Mapping[str, Any], *, is_first: bool) -> Iterator[Piece]:
    """This rank's part of what is handed to a writer: a single-file checkpoint, or the shards of FSDP and FSDP2.

    The first rank answers for what all ranks hold alike.
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

    The first rank answers for the weights that all ranks hold alike.
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


# -- fingerprints ------------------------------------------------------------------------------------------------------

_VERSION = "v2:"  # before a fingerprint in a manifest; those without, of plain sums, are not compared any more
_LANE_BYTES = 4
_COLUMNS = 1 << 10  # the sum of a row is below 2^31 * 2^20, the sum of the odd numbers up to 2,047
_ROW_BYTES = _COLUMNS * _LANE_BYTES
_CPU_ROWS, _GPU_ROWS = 64, 1 << 12  # at once: 512 KiB of doubles, in a second cache; 32 MiB of integers, in a GPU's
_KNOWN_ROWS = 1 << 14  # whose numbers are kept: those of 64 MiB
_WIDENED_ELEMENTS = 1 << 22  # at once, of a tensor that is sharded by another axis than the first
_MASK = (1 << 64) - 1
# Odd constants of splitmix64, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)

Sums = dict[str, tuple[str, int, int, int, int]]
"""By name: dtype, elements of the whole tensor, elements counted so far, and the two sums."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor: where it begins in the whole, on each axis, and the name and shape of that."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """A tensor that this rank holds completely."""
        return cls(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @classmethod
    def of_flat(cls, name: str, tensor: Tensor, start: int, numel: int) -> Piece:
        """A part of the flat view of a tensor with ``numel`` elements, from element ``start`` on."""
        return cls(name, tensor.reshape(-1), (start,), (numel,))


def sums_of_pieces(pieces: Iterable[Piece]) -> Sums:
    """What a rank counts; waits for the device. Tensors of no plain memory (sparse, quantized, meta) are left out."""
    found: list[tuple[str, str, int, int]] = []
    sums: list[Tensor] = []
    for piece in pieces:
        tensor = piece.tensor
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            continue
        if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
            continue  # its engine has taken its memory away
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append((piece.name, dtype, torch.Size(piece.shape).numel(), tensor.numel()))
        sums.append(_sums(piece))
    halves = [[half & _MASK for half in pair.tolist()] for pair in sums]
    return add_up(
        {name: (dtype, numel, counted, first, second)}
        for (name, dtype, numel, counted), (first, second) in zip(found, halves, strict=True)
    )


def add_up(parts: Iterable[Mapping[str, Any]]) -> Sums:
    """The sums of all ranks together."""
    total: Sums = {}
    for part in parts:
        for name, (dtype, numel, counted, first, second) in part.items():
            _, _, before, one, two = total.get(name, (dtype, numel, 0, 0, 0))
            total[name] = (dtype, numel, before + counted, (one + first) & _MASK, (two + second) & _MASK)
    return total


def describe(total: Sums) -> dict[str, str]:
    """What a manifest says of each tensor that was counted exactly once: dtype, elements, fingerprint."""
    return {
        name: f"{dtype} {numel} {_VERSION}{first:016x}{second:016x}"
        for name, (dtype, numel, counted, first, second) in sorted(total.items())
        if counted == numel
    }


def is_current(text: str) -> bool:
    """Whether what a manifest says of a tensor can be compared; older versions counted plain sums."""
    return text.split()[2].startswith(_VERSION)


def differing(expected: Mapping[str, str], total: Sums) -> dict[str, tuple[str, str]]:
    """Tensors whose content is not what was expected: name, expected, found.

    A tensor that several ranks hold has been counted as often. What is not there, has been cast to another type, was
    not counted completely, or has a fingerprint of another version, cannot be compared.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, text in expected.items():
        dtype, numel, fingerprint = text.split()
        mine = total.get(name)
        if not is_current(text) or mine is None or mine[:2] != (dtype, int(numel)) or not mine[2] or mine[2] % mine[1]:
            continue
        copies = mine[2] // mine[1]
        fingerprint = fingerprint.removeprefix(_VERSION)
        wanted = tuple(int(half, 16) * copies & _MASK for half in (fingerprint[:16], fingerprint[16:]))
        if wanted != mine[3:]:
            held = f" in {copies} copies together" if copies > 1 else ""
            found[name] = (f"{wanted[0]:016x}{wanted[1]:016x}{held}", f"{mine[3]:016x}{mine[4]:016x}")
    return found


def _sums(piece: Piece) -> Tensor:
    """The two sums of a part: (2,) int64 on its device, without waiting."""
    tensor, offsets, shape = piece.tensor.detach(), piece.offsets, piece.shape
    if tensor.is_complex():
        tensor, offsets, shape = torch.view_as_real(tensor.resolve_conj()), (*offsets, 0), (*shape, 2)
    if tensor.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    num_inner = math.prod(shape[1:])
    if tuple(tensor.shape[1:]) == tuple(shape[1:]):
        return sums_of_run(tensor, offsets[0] * num_inner if offsets else 0)
    # Sharded by another axis than the first. What other ranks hold is zeros here, which add nothing.
    inner = zip(offsets[1:], tensor.shape[1:], strict=True)
    mine = (slice(None), *(slice(begin, begin + length) for begin, length in inner))
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = offsets[0]
    for part in torch.split(tensor, max(1, _WIDENED_ELEMENTS // num_inner)):
        wide = part.new_zeros((len(part), *shape[1:]))
        wide[mine] = part
        sums, first = sums + sums_of_run(wide, first * num_inner), first + len(part)
    return sums


def sums_of_run(tensor: Tensor, start: int) -> Tensor:
    """The two sums of elements that follow each other in the flat view of the whole, from element ``start`` on."""
    raw, begin = tensor.contiguous().view(-1).view(torch.uint8), start * tensor.element_size()
    # A row of which this is not all has zeros in the place of the rest.
    head = min(raw.numel(), -begin % _ROW_BYTES)
    tail = raw.numel() - (raw.numel() - head) % _ROW_BYTES
    parts = ((0, head, begin % _ROW_BYTES), (head, tail, 0), (tail, raw.numel(), 0))
    sums = [_row_sums(_rows(raw[first:last], before)) for first, last, before in parts if first < last]
    return _sums_of_rows(sums[0] if len(sums) == 1 else torch.cat(sums), begin // _ROW_BYTES)


def _rows(raw: Tensor, before: int) -> Tensor:
    """Bytes as rows of lanes, after so many bytes of zeros; a view where they are whole rows."""
    if after := -(before + raw.numel()) % _ROW_BYTES:
        raw = torch.nn.functional.pad(raw, (before, after))
    elif before:
        raw = torch.nn.functional.pad(raw, (before, 0))
    elif raw.storage_offset() % _LANE_BYTES:
        raw = raw.clone()
    return raw.view(torch.int32).view(-1, _COLUMNS)


def _row_sums(rows: Tensor) -> Tensor:
    """The sum of each row (n, 1024) of lanes times the numbers of their columns: (n,) int64."""
    if rows.device.type != "cpu":
        return _row_sums_in_integers(rows)
    lanes, sums = rows.numpy(), np.empty(len(rows))
    scratch = np.empty((min(_CPU_ROWS, len(rows)), _COLUMNS))
    for first in range(0, len(lanes), _CPU_ROWS):
        block = lanes[first : first + _CPU_ROWS]
        np.copyto(scratch[: len(block)], block)
        np.dot(scratch[: len(block)], _column_factors_in_doubles(), out=sums[first : first + len(block)])
    return torch.from_numpy(sums.astype(np.int64))


def _row_sums_in_integers(rows: Tensor) -> Tensor:
    """`_row_sums` with few calls, for a GPU, without waiting."""
    factors = _column_factors().to(rows.device)
    return torch.cat([(block * factors).sum(1) for block in torch.split(rows, _GPU_ROWS)])


def _sums_of_rows(sums: Tensor, start: int) -> Tensor:
    """The two sums (2,) of those of rows, of which the first is row ``start`` of the tensor."""
    end = start + len(sums)
    if end <= _KNOWN_ROWS:
        factors = _known_row_factors(sums.device)[:, start:end]
    else:
        factors = _row_factors(torch.arange(start, end, device=sums.device))
    return (factors * sums).sum(1)


@functools.cache
def _column_factors() -> Tensor:
    """Each odd number below 2,048 once, shuffled, half of them negative: (1024,) int64."""
    columns = np.arange(_COLUMNS)
    order = np.argsort(_mixed(torch.from_numpy(columns)).numpy(), kind="stable")
    return torch.from_numpy((2 * order + 1) * (1 - 2 * (columns % 2)))


@functools.cache
def _column_factors_in_doubles() -> np.ndarray:
    return _column_factors().double().numpy()


@functools.cache
def _known_row_factors(device: torch.device) -> Tensor:
    return _row_factors(torch.arange(_KNOWN_ROWS, device=device))


def _row_factors(rows: Tensor) -> Tensor:
    """Two odd random numbers for each row: (2, n)."""
    return _mixed(torch.stack([rows * 2, rows * 2 + 1])) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """The outputs of splitmix64 (Steele, Lea, Flood 2014) at these places of its sequence."""
    mixed = (numbers + 1) * _STEP
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        # A right shift of int64 copies the sign; the mask takes that back.
        mixed = (mixed ^ (mixed >> shift & (1 << (64 - shift)) - 1)) * factor
    return mixed ^ (mixed >> 31 & (1 << 33) - 1)
