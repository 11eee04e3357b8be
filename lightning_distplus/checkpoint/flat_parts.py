"""A rank's part of a tensor that is cut in its flat view, in the boxes that torch's distributed checkpoint writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_distplus import _compat

__all__ = ["FlatPart", "boxes_of_range"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, for each axis."""

_KEEPS_PLACES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cuts a range of the flat view of a tensor into boxes: the rest of a row, whole rows, the begin of a row.

    Args:
        shape: Of the tensor.
        start: The first element.
        stop: The element behind the last one.

    Yields:
        At most two boxes for each axis but the first, and one more, in the order of their elements.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row, skipped = divmod(start, inner)
    if skipped:
        last = min(stop, (row + 1) * inner)
        yield from _in_row(shape, row, skipped, last - row * inner)
        start, row = last, row + 1
    if rows := (stop - start) // inner:
        yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
    if start < stop:
        yield from _in_row(shape, row + rows, 0, (stop - start) % inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of_range(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


class FlatPart(Tensor):
    """What one rank holds of a tensor: a range of its flat view.

    It has the shape and the dtype of the whole tensor, can be copied, moved and cast, and torch's distributed
    checkpoint writes it (torch 2.13, ``_checkpointable.py``). Everything else needs the whole tensor and raises.

    Args:
        flat: The part, with one axis; its memory is used, not copied.
        start: At which element of the whole tensor it begins.
        shape: Of the whole tensor.
        is_first_copy: Whether this rank answers for the part, where several ranks hold it.
    """

    flat: Tensor
    start: int
    is_first_copy: bool

    def __new__(cls, flat: Tensor, start: int, shape: Sequence[int], *, is_first_copy: bool = True) -> FlatPart:
        """A tensor without memory of its own."""
        part: FlatPart = _compat.wrapper_tensor(cls, shape, flat)
        part.flat, part.start, part.is_first_copy = flat, start, is_first_copy
        return part

    def with_flat(self, flat: Tensor) -> FlatPart:
        """The same place with other content."""
        return FlatPart(flat, self.start, self.shape, is_first_copy=self.is_first_copy)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _KEEPS_PLACES or not isinstance(args[0], FlatPart):
            _refuse(str(func))
        (part, *others) = args
        return part.with_flat(func(part.flat, *others, **(kwargs or {})))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        last = self.start + self.flat.numel()
        return f"FlatPart(elements {self.start} to {last} of shape {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> FlatPart:
        return self.with_flat(self.flat.clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")

    # -- the protocol of torch.distributed.checkpoint ------------------------------------------------------------------

    def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin = 0
        for offsets, sizes in self._boxes():
            size = math.prod(sizes)
            if tuple(index.offset or ()) == offsets:
                return self.flat[begin : begin + size].view(sizes)
            begin += size
        raise ValueError(f"{index.fqn} has no box at {index.offset} on this rank; its boxes: {list(self._boxes())}")

    def _boxes(self) -> Iterator[Box]:
        return boxes_of_range(self.shape, self.start, self.start + self.flat.numel())


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"{what} needs the whole tensor; a sharded save of FSDP collects what each rank holds (FlatPart), and gathers "
        "nothing. Keep or drop it by its name, or call trainer.strategy.lightning_module_state_dict() on all ranks, "
        "which gathers the weights."
    )
