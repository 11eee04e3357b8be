"""Fingerprints of tensors that do not depend on how the tensors are sharded: those of the shards add up to it.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Piece", "Sums", "add_up", "describe", "differing", "is_current", "sums_of_pieces"]

_VERSION = "v2:"  # before a fingerprint in a manifest; those without, of plain sums, are not compared any more
_LANE_BYTES = 4
_COLUMNS = 1 << 10  # the sum of a row is below 2^31 * 2^20, the sum of the odd numbers up to 2,047
_ROW_BYTES = _COLUMNS * _LANE_BYTES
_CPU_ROWS, _GPU_ROWS = 64, 1 << 12  # at once: 512 KiB of doubles, in a second cache; 32 MiB of integers, in a GPU's
_KNOWN_ROWS = 1 << 14  # whose numbers are kept: those of 64 MiB
_PART_ELEMENTS = 1 << 20  # at once, where each element needs its own index
_MASK = (1 << 64) - 1
# Odd constants of splitmix64, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = dict[str, tuple[str, int, int, int, int]]
"""By name: dtype, elements of the whole tensor, elements counted so far, and the two sums."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor.

    Args:
        name: Of the whole tensor, the same on all ranks.
        tensor: The part.
        offsets: Where the part begins in the whole, for each axis.
        shape: Of the whole tensor.
    """

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
            before = total.get(name, (dtype, numel, 0, 0, 0))
            total[name] = (
                dtype,
                numel,
                before[2] + counted,
                (before[3] + first) & _MASK,
                (before[4] + second) & _MASK,
            )
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
    if tuple(tensor.shape[1:]) != tuple(shape[1:]):
        return _sums_of_scattered(tensor, offsets, shape)
    start = offsets[0] * (tensor.numel() // tensor.shape[0]) if tensor.dim() else 0
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


def _sums_of_elements(values: Tensor, places: Tensor) -> Tensor:
    """The sums of elements at any ``places`` in the flat view of the whole, both (n,)."""
    size = values.element_size()
    integers = values.contiguous().view(_INTEGERS[size]).to(torch.int64)
    if size > _LANE_BYTES:
        integers = torch.stack([integers << 32 >> 32, integers >> 32], 1).view(-1)
        lanes = torch.stack([places * 2, places * 2 + 1], 1).view(-1)
    else:
        first_byte = places * size
        shift = first_byte % _LANE_BYTES * 8
        # Only the last bytes of a lane have its sign.
        integers = torch.where(shift + size * 8 == 32, integers, integers & ((1 << 8 * size) - 1)) << shift
        lanes = first_byte // _LANE_BYTES
    integers = integers * _column_factors().to(values.device)[lanes % _COLUMNS]
    return (integers * _row_factors(lanes // _COLUMNS)).sum(1)


def _sums_of_scattered(tensor: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The sums of a part that does not lie in one run in the whole: sharded by another axis than the first."""
    stride = 1
    strides: list[int] = []
    for length in reversed(shape):
        strides.insert(0, stride)
        stride *= length
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    rows_at_once = max(1, _PART_ELEMENTS // max(1, tensor.numel() // tensor.shape[0]))
    for first in range(0, tensor.shape[0], rows_at_once):
        part = tensor[first : first + rows_at_once]
        places = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for axis, length in enumerate(part.shape):
            begin = offsets[axis] + (first if axis == 0 else 0)
            along = torch.arange(begin, begin + length, device=tensor.device) * strides[axis]
            places = places + along.view(-1, *[1] * (part.dim() - axis - 1))
        sums = sums + _sums_of_elements(part.reshape(-1), places.reshape(-1))
    return sums
