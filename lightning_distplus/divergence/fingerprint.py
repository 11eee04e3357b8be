"""Fingerprints of tensors: 64 bits of their exact bytes, computed on their device at the speed of a sum.

On a CPU that is XXH3, which reads as fast as memory delivers. Elsewhere it is made of torch's reductions: the bytes are
read as 64-bit words and laid out in blocks of rows of 255. The sums of all rows and of all columns, modulo
2^64, are each mixed with their position and then added up. So a word counts by its row and by its column (Fletcher's
idea: a plain sum, and a second one that knows the position), and the mixing keeps two flips of a sign bit from
cancelling as they do in a linear sum. The flips of all sign bits do not cancel either, as 255 is odd. What reductions
miss: changes that leave every row and every column sum of a block as it is (four changed words at the corners of a
rectangle). Both miss one pair of contents in 2^64. They do not add up over shards, as `checkpoint.tensors` do,
which take twice as long as XXH3.

``torch.hash_tensor`` is no fingerprint: it is an XOR, blind to a swap, to the same flip in two elements, and to a
constant tensor that turns into NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

__all__ = [
    "WORD_BYTES",
    "Piece",
    "Windows",
    "fingerprint",
    "fingerprint_of_each",
    "from_reductions",
    "row_sums",
    "words_of",
]

WORD_BYTES = 8

_COLUMNS = 255
_ROW_WORDS = 256  # of `row_sums`
# Rows of a block. On a CPU 512 KiB, so that the second pass comes out of its second cache; elsewhere few launches.
_ROWS = {True: 256, False: 1 << 16}
_SMALL_WORDS = 4096  # below, the copy into one buffer costs less than reductions of their own
_MASK = (1 << 64) - 1
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)


def fingerprint(tensor: Tensor) -> int:
    """64 bits of one tensor's bytes; equal bytes, equal fingerprint. Waits for the device."""
    return int(_of_pieces([tensor])) & _MASK


def fingerprint_of_each(tensors: Sequence[Tensor]) -> Tensor:
    """One fingerprint per tensor, all of one device; returns (n,) int64 on it, without waiting."""
    return torch.stack([_of_pieces([tensor]) for tensor in tensors])


def row_sums(tensor: Tensor) -> Tensor:
    """A sum of mixed words for each 2 KiB of a tensor's bytes: where two ranks differ, the differing rows are few."""
    return _mixed(_padded(words_of(tensor), _ROW_WORDS)).view(-1, _ROW_WORDS).sum(1)


def words_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes as (n,) int64: a view where they are contiguous, aligned and whole words, else a copy.

    A tensor whose memory an engine has taken away has none.
    """
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() * flat.element_size() % WORD_BYTES:
        flat = _padded(flat.view(torch.uint8), WORD_BYTES)
    elif flat.storage_offset() * flat.element_size() % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)


_Bytes = ctypes.Array[ctypes.c_char]


@dataclass(frozen=True)
class Piece:
    """A part of one tensor: the elements ``start`` to ``stop`` of its flat view."""

    index: int
    """Of the tensor in the list."""
    start: int
    stop: int


class Windows:
    """Cuts a list of tensors into windows of equal bytes, so that each step reads only one of them.

    The cut depends on the shapes and dtypes alone: ranks with the same tensors have the same windows.

    Args:
        tensors: What is fingerprinted, in the same order on all ranks.
        count: How many windows; all tensors have been read after so many steps.
    """

    def __init__(self, tensors: Sequence[Tensor], count: int = 16) -> None:
        self._tensors = list(tensors)
        self.count = count
        self.pieces = _cut([(tensor.numel(), tensor.element_size()) for tensor in tensors], count)
        self._known: dict[int, tuple[tuple[int, int, torch.dtype], _Bytes]] = {}

    def fingerprint(self, number: int) -> Tensor | None:
        """The fingerprint of window ``number % count``: a 0-dim int64 on the device, without waiting; None if empty."""
        pieces = self.pieces[number % self.count]
        if not pieces:
            return None
        parts = [self._bytes_of(piece) for piece in pieces]
        if None not in parts:
            return _hashed(parts)  # type: ignore[arg-type]
        return _of_pieces([self._part(piece) for piece in pieces])

    def _bytes_of(self, piece: Piece) -> _Bytes | None:
        """Of a whole tensor that lies in the memory of the CPU; those that lie where they lay are known."""
        tensor = self._tensors[piece.index]
        if not tensor.is_cpu or piece.stop - piece.start != tensor.numel() or not tensor.is_contiguous():
            return None
        place = tensor.data_ptr(), tensor.numel(), tensor.dtype
        known = self._known.get(piece.index)
        if known is None or known[0] != place:
            if not tensor.untyped_storage().nbytes():  # an engine has taken it away
                return None
            known = self._known[piece.index] = place, _bytes_of(tensor)
        return known[1]

    def _part(self, piece: Piece) -> Tensor:
        tensor = self._tensors[piece.index].detach()
        if piece.start == 0 and piece.stop == tensor.numel():
            return tensor
        return tensor.reshape(-1)[piece.start : piece.stop]


def _cut(sizes: Sequence[tuple[int, int]], count: int) -> list[list[Piece]]:
    """For each window its pieces; ``sizes`` are numbers of elements and bytes per element."""
    total_bytes = sum(numel * size for numel, size in sizes)
    window_bytes = max(1, -(-total_bytes // count))
    windows: list[list[Piece]] = [[] for _ in range(count)]
    offset = 0
    for index, (numel, size) in enumerate(sizes):
        start = 0
        # Small tensors stay whole: a cut costs more than it evens out.
        while start < numel:
            window = min((offset + start * size) // window_bytes, count - 1)
            left_bytes = (window + 1) * window_bytes - (offset + start * size)
            stop = min(numel, start + _whole_words(left_bytes, size)) if window < count - 1 else numel
            if (numel - stop) * size < _SMALL_WORDS * WORD_BYTES:
                stop = numel
            windows[window].append(Piece(index, start, stop))
            start = stop
        offset += numel * size
    return windows


def _whole_words(size_bytes: int, element_size: int) -> int:
    """Elements in this many bytes, rounded up so that the next piece begins at a word."""
    step = max(1, WORD_BYTES // element_size)
    return -(-size_bytes // (step * element_size)) * step


def _of_pieces(tensors: Sequence[Tensor]) -> Tensor:
    """One fingerprint of several tensors of one device: a 0-dim int64 there."""
    return _xxh3(tensors) if tensors[0].device.type == "cpu" else from_reductions(tensors)


def _xxh3(tensors: Sequence[Tensor]) -> Tensor:
    wholes = [tensor.detach().contiguous() for tensor in tensors if tensor.numel()]
    return _hashed([_bytes_of(whole) for whole in wholes if whole.untyped_storage().nbytes()])


def _bytes_of(tensor: Tensor) -> _Bytes:
    """Not by ``numpy()``: that makes the storage one that FSDP2 cannot free and fill again."""
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


def _hashed(parts: Sequence[_Bytes]) -> Tensor:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    value = hasher.intdigest()
    return torch.tensor(value - (1 << 64) if value >> 63 else value)


def from_reductions(tensors: Sequence[Tensor]) -> Tensor:
    """The same without XXH3, on any device: a 0-dim int64 there."""
    small = [tensor for tensor in tensors if tensor.numel() * tensor.element_size() < _SMALL_WORDS * WORD_BYTES]
    large = [tensor for tensor in tensors if tensor.numel() * tensor.element_size() >= _SMALL_WORDS * WORD_BYTES]
    sums: list[Tensor] = []
    if small:
        raw = [
            tensor.detach().contiguous().view(-1).view(torch.uint8)
            for tensor in small
            if tensor.numel() == 0 or tensor.untyped_storage().nbytes()
        ]
        if raw:
            sums += _sums(words_of(raw[0] if len(raw) == 1 else torch.cat(raw)))
    for tensor in large:
        sums += _sums(words_of(tensor))
    return _mixed(torch.cat(sums) if sums else torch.zeros(1, dtype=torch.int64, device=tensors[0].device)).sum()


def _sums(words: Tensor) -> list[Tensor]:
    """The sums of the rows and of the columns of each block."""
    num_rows = words.numel() // _COLUMNS
    sums: list[Tensor] = []
    rows = words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS)
    for block in torch.split(rows, _ROWS[words.device.type == "cpu"]):
        sums += [block.sum(1), block.sum(0)]
    rest = words[num_rows * _COLUMNS :]
    return [*sums, rest] if rest.numel() else sums


def _padded(flat: Tensor, multiple: int) -> Tensor:
    missing = -flat.numel() % multiple
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _mixed(sums: Tensor) -> Tensor:
    """What splitmix64's finaliser makes of each number and its position."""
    mixed = torch.arange(1, sums.numel() + 1, device=sums.device).mul_(_STEP).add_(sums)
    scratch = torch.empty_like(mixed)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        # A right shift of int64 copies the sign; the mask takes that back.
        torch.bitwise_right_shift(mixed, shift, out=scratch).bitwise_and_((1 << (64 - shift)) - 1)
        mixed.bitwise_xor_(scratch).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31 & _MASK >> 31)
