"""Which element of a tensor differs most between ranks: rows that differ first, then their bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_distplus.divergence.fingerprint import WORD_BYTES, row_sums

__all__ = ["Exchange", "look_closer"]

Exchange = Callable[[str, bytes], list[bytes]]
"""Every rank's bytes, in rank order, on all ranks."""

_ROW_BYTES = 256 * WORD_BYTES  # what one row sum covers
_MAX_ROWS = 32_768  # 256 KiB of row sums per rank
_SHOWN_PARTS = 32
_MAX_BYTES = 1 << 19


def look_closer(
    tensor: Tensor | None,
    holders: Sequence[int],
    wrong: Sequence[int],
    source: int | None,
    exchange: Exchange,
) -> tuple[int, float, dict[int, float | int | str]]:
    """The element that differs most: its index in the flat tensor, the difference, and its value on each holder.

    All ranks call it together and get the same answer.

    Args:
        tensor: This rank's copy; None where it holds none.
        holders: The ranks that hold one.
        wrong: Those whose copy is another than the majority's, or all.
        source: The lowest rank of the majority, if there is one.
        exchange: How the ranks meet.
    """
    tensor = None if tensor is None else tensor.detach().contiguous()
    tensor = torch.view_as_real(tensor) if tensor is not None and tensor.is_complex() else tensor
    mine = None if tensor is None else _Layout(tensor.dtype, tuple(tensor.shape))
    told = exchange("layout", b"" if mine is None else mine.pack())
    layouts = {rank: _Layout.unpack(told[rank]) for rank in holders}
    if len(set(layouts.values())) > 1:
        return 0, math.nan, {rank: f"{one.dtype} {list(one.shape)}" for rank, one in layouts.items()}
    layout = layouts[holders[0]]
    reference = source if source is not None else holders[0]
    others = [rank for rank in wrong if rank != reference]
    sums = exchange("rows", b"" if tensor is None else _packed_sums(tensor, layout))
    columns = {rank: struct.unpack(f"<{len(sums[rank]) // WORD_BYTES}q", sums[rank]) for rank in holders}
    parts = sorted({
        part
        for rank in others
        for part, (one, other) in enumerate(zip(columns[rank], columns[reference], strict=True))
        if one != other
    })[:_SHOWN_PARTS]  # fmt: skip
    raw = exchange("elements", b"" if tensor is None else _bytes_of(tensor, layout, parts))
    if not parts:
        return 0, math.nan, dict.fromkeys(holders, "?")
    return _largest(layout, {rank: raw[rank] for rank in holders}, reference, others, parts)


@dataclass(frozen=True)
class _Layout:
    """What a tensor's bytes mean; also known to ranks that do not hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        return json.dumps([str(self.dtype).removeprefix("torch."), self.shape]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> _Layout:
        dtype, shape = json.loads(data)
        return cls(getattr(torch, dtype), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_per_part(self) -> int:
        """How many rows of 2 KiB one number of the exchange stands for."""
        num_rows = -(-self.num_elements * self.dtype.itemsize // _ROW_BYTES)
        return max(1, -(-num_rows // _MAX_ROWS))

    @property
    def part_bytes(self) -> int:
        return self.rows_per_part * _ROW_BYTES


def _packed_sums(tensor: Tensor, layout: _Layout) -> bytes:
    sums, step = row_sums(tensor).cpu(), layout.rows_per_part
    if step > 1:
        # An odd factor for each row, so that equal and opposite changes in two rows do not cancel.
        sums = sums * (2 * torch.arange(len(sums)) + 1)
        sums = torch.nn.functional.pad(sums, (0, -len(sums) % step)).view(-1, step).sum(1)
    return struct.pack(f"<{len(sums)}q", *sums.tolist())


def _bytes_of(tensor: Tensor, layout: _Layout, parts: Sequence[int]) -> bytes:
    """The differing parts, as far as a message takes them."""
    flat, elements = tensor.view(-1), layout.part_bytes // layout.dtype.itemsize
    chosen = [flat[part * elements : (part + 1) * elements] for part in parts]
    joined = torch.cat(chosen) if chosen else flat[:0]
    return joined.cpu().view(torch.uint8).numpy().tobytes()[:_MAX_BYTES]


def _largest(
    layout: _Layout, raw: Mapping[int, bytes], reference: int, others: Sequence[int], parts: Sequence[int]
) -> tuple[int, float, dict[int, float | int | str]]:
    elements = {rank: torch.frombuffer(bytearray(data), dtype=layout.dtype) for rank, data in raw.items()}
    gap = torch.zeros(len(elements[reference]), dtype=torch.float64)
    for rank in others:
        unequal = _bits(elements[rank]) != _bits(elements[reference])
        away = (elements[rank].double() - elements[reference].double()).abs()
        # NaN on one side is further away than any number; bits that differ in equal values (-0.0) still differ.
        away = torch.nan_to_num(away, nan=math.inf).clamp(min=5e-324)
        gap = torch.maximum(gap, torch.where(unequal, away, 0.0))
    place = int(gap.argmax())
    per_part = layout.part_bytes // layout.dtype.itemsize
    index = parts[place // per_part] * per_part + place % per_part
    return index, float(gap[place]), {rank: elements[rank][place].item() for rank in raw}


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])
