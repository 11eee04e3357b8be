"""Fingerprints of tensors that do not depend on how the tensors are sharded: those of the shards add up to it.

A tensor's bytes are read as 64-bit words. The fingerprint is two sums modulo 2^64: of the words, and of each word times
its place in the whole tensor (Fletcher's idea: the second sum knows the order). Both are linear, so that each rank adds
up what it holds, and the total is the same on any number of ranks. They are computed on the tensor's own device, from
the sums of rows and columns of blocks, at the speed of two plain sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Piece", "Sums", "add_up", "describe", "differing", "sums_of_pieces"]

_WORD_BYTES = 8
_COLUMNS = 1 << 14  # of a row of words on a CPU: 128 KiB, three of which stay in the second cache
_BLOCK_ROWS, _BLOCK_COLUMNS = 1 << 16, 256  # of a block on a GPU
_PART_ELEMENTS = 1 << 20  # at once, where each element needs its own index
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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
        name: f"{dtype} {numel} {first:016x}{second:016x}"
        for name, (dtype, numel, counted, first, second) in sorted(total.items())
        if counted == numel
    }


def differing(expected: Mapping[str, str], total: Sums) -> dict[str, tuple[str, str]]:
    """Tensors whose content is not what was expected: name, expected, found.

    A tensor that several ranks hold has been counted as often. What is not there, has been cast to another type, or was
    not counted completely, cannot be compared.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, text in expected.items():
        dtype, numel, fingerprint = text.split()
        mine = total.get(name)
        if mine is None or mine[:2] != (dtype, int(numel)) or not mine[2] or mine[2] % mine[1]:
            continue
        copies = mine[2] // mine[1]
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
    flat, size = tensor.contiguous().view(-1), tensor.element_size()
    # What shares its first or last word with another part is counted element by element.
    head = min(flat.numel(), -start * size % _WORD_BYTES // size)
    num_words = (flat.numel() - head) * size // _WORD_BYTES
    tail = head + num_words * _WORD_BYTES // size
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    if num_words:
        sums = _sums_of_words(_words(flat[head:tail]), (start + head) * size // _WORD_BYTES)
    for first, last in ((0, head), (tail, flat.numel())):
        if first < last:
            places = torch.arange(start + first, start + last, device=flat.device)
            sums = sums + _sums_of_elements(flat[first:last], places)
    return sums


def _words(flat: Tensor) -> Tensor:
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)


def _sums_of_words(words: Tensor, start: int) -> Tensor:
    """The sums of whole words, of which the first is word ``start`` of the tensor."""
    if words.device.type == "cpu":
        first, second = _sums_in_rows(words.numpy())
        return torch.tensor([_signed(first), _signed(first * start + second)])
    total, weighted = _sums_in_blocks(words)
    return torch.stack([total, total * start + weighted])


def _sums_in_rows(words: np.ndarray) -> tuple[int, int]:
    """On a CPU: the sum of words (n,), and of each times its index.

    One pass over the memory. Before each row the sums of the columns so far are added to another sum, in which the
    words of row r of n are at last n - 1 - r times. All of it stays in the second cache; numpy's calls cost less than
    those of torch.
    """
    columns = min(_COLUMNS, words.size)
    by_column, later = words[:columns].copy(), np.zeros(columns, dtype=np.int64)
    for first in range(columns, words.size, columns):
        row = words[first : first + columns]
        np.add(later, by_column, out=later)
        np.add(by_column[: row.size], row, out=by_column[: row.size])
    total, rows_after = int(by_column.sum()), (words.size - 1) // columns
    by_row = total * rows_after - int(later.sum())
    return total, by_row * columns + int((by_column * _indices()[:columns]).sum())


@functools.cache
def _indices() -> np.ndarray:
    return np.arange(_COLUMNS)


def _sums_in_blocks(words: Tensor) -> tuple[Tensor, Tensor]:
    """`_sums_in_rows` with few calls, for a GPU, without waiting."""
    columns = min(_BLOCK_COLUMNS, words.numel())
    num_rows = words.numel() // columns
    rows, rest = words[: num_rows * columns].view(num_rows, columns), words[num_rows * columns :]
    by_row, by_column = [], torch.zeros(columns, dtype=torch.int64, device=words.device)
    for block in torch.split(rows, _BLOCK_ROWS):
        by_row.append(block.sum(1))
        by_column += block.sum(0)
    numbers = torch.arange(max(num_rows, columns), device=words.device)
    places = torch.arange(num_rows * columns, words.numel(), device=words.device)
    weighted = (torch.cat(by_row) * numbers[:num_rows]).sum() * columns + (by_column * numbers[:columns]).sum()
    return by_column.sum() + rest.sum(), weighted + (rest * places).sum()


def _signed(number: int) -> int:
    """A sum as 64 bits have it."""
    return (number + (1 << 63) & _MASK) - (1 << 63)


def _sums_of_elements(values: Tensor, places: Tensor) -> Tensor:
    """The sums of elements at any ``places`` in the flat view of the whole, both (n,)."""
    size = values.element_size()
    integers = values.contiguous().view(_INTEGERS[size]).to(torch.int64)
    if size < _WORD_BYTES:
        integers = integers & ((1 << 8 * size) - 1)
    first_byte = places * size
    words = integers << (first_byte % _WORD_BYTES * 8)
    return torch.stack([words.sum(), (words * (first_byte // _WORD_BYTES)).sum()])


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
