"""What a batch is made of, and a sum of its content: small enough to be compared before every step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

__all__ = ["StructureDigests", "content", "digest", "structure"]

_MAX_LEAVES = 64
_WHOLE_BYTES = 8 << 10
_PROBES = 64


def digest(value: Any) -> int:
    """64 bits of anything whose ``repr`` is the same on all ranks."""
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def structure(batch: Any, *, sizes: bool = False) -> dict[str, str]:
    """The path of each leaf, and what it is: type, number of dimensions and dtype of tensors.

    Sizes may differ between ranks: sequences have different lengths, the last batch of an epoch is smaller. A list is
    told by its first element, because it holds one for each sample.

    Args:
        batch: Any tree of tensors and other things.
        sizes: Whether the shapes of tensors are told too.
    """
    found: dict[str, str] = {}
    for path, leaf in _leaves(batch, "batch"):
        if isinstance(leaf, torch.Tensor):
            what = f"shape {list(leaf.shape)}" if sizes else f"{leaf.dim()} dimensions"
            found[path] = f"{str(leaf.dtype).removeprefix('torch.')} tensor of {what}"
        else:
            found[path] = type(leaf).__name__
        if len(found) >= _MAX_LEAVES:
            break
    return found


class StructureDigests:
    """The digests of structures, each computed once: a run has few, and asks before every step.

    Args:
        sizes: As for ``structure``.
    """

    _MOST = 256  # of sequences by their length there may be many, when sizes count

    def __init__(self, *, sizes: bool) -> None:
        self._has_sizes = sizes
        self._known: dict[Hashable, int] = {}

    def of(self, batch: Any) -> int:
        """64 bits of the structure of a batch."""
        try:
            kind = self._kind(batch)
        except _Unknown:
            return digest(structure(batch, sizes=self._has_sizes))
        found = self._known.get(kind)
        if found is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            found = self._known[kind] = digest(structure(batch, sizes=self._has_sizes))
        return found

    def _kind(self, value: Any) -> Hashable:
        """What decides the structure, without the text of it."""
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape if self._has_sizes else value.dim()
        kind = type(value)
        if kind is dict:
            return dict, *((key, self._kind(item)) for key, item in value.items())
        if kind is tuple:
            return tuple, *map(self._kind, value)
        if kind is list:
            return list, self._kind(value[0]) if value else None
        if kind in _PLAIN:
            return kind.__name__
        raise _Unknown


_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class _Unknown(Exception):
    """Only ``structure`` can tell."""


def content(batch: Any) -> int:
    """64 bits of the values of a batch, of which large tensors give a sample; 0 where it holds no tensor.

    Waits for the device where the batch lies on one.
    """
    hasher = xxhash.xxh3_64()
    has_values = False
    for count, (path, leaf) in enumerate(_leaves(batch, "")):
        if count >= _MAX_LEAVES:
            break
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            has_values = True
            hasher.update(f"{path}{tuple(leaf.shape)}".encode())
            hasher.update(_probe(leaf))
        elif isinstance(leaf, (str, int, float)):
            hasher.update(repr(leaf).encode())
    return (hasher.intdigest() or 1) if has_values else 0


def _probe(tensor: torch.Tensor) -> bytes:
    """All bytes of a small tensor; of a large one, elements at equal distances and both ends."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    if flat.numel() * flat.element_size() > _WHOLE_BYTES:
        edge = _WHOLE_BYTES // 4 // flat.element_size()
        flat = torch.cat([flat[:edge], flat[edge : -edge or None : max(1, flat.numel() // _PROBES)], flat[-edge:]])
    return bytes(flat.cpu().clone().view(torch.uint8).numpy())  # the storage of the batch stays as it is


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield from _leaves(value[0], f"{path}[:]") if len(value) else [(f"{path}[:]", None)]
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (torch.Tensor, torch.nn.Module)):
        for name, item in vars(value).items():
            yield from _leaves(item, f"{path}.{name}")
    else:
        yield path, value
