"""The one staged copy of what a strategy is about to write, whose memory is that of the next one."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Staging"]

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Staging:
    """Copies states, each tensor into the memory of the copy that lay at the same place before.

    The first touch of new memory costs more than a copy into memory that is there. torch's own stager keeps the memory
    of a storage as long as the storage lives, which is no longer than the save where a strategy gathers its state, and
    copies whole storages for small parts of them (torch 2.13, ``_state_dict_stager.py`` 128).

    Args:
        group: A process group for the saves alone, whose collectives come from another thread; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._kept: dict[Any, tuple[Any, Tensor]] = {}  # by their place, with the form of what they are copies of
        self._touched: set[Any] = set()
        # Of this save, by what they are copies of. Memory that was freed since may have been given to another tensor.
        self._copies: dict[Any, tuple[StorageWeakRef, Tensor]] = {}
        self._waits_for_cuda = False

    def begin(self) -> None:
        """A save begins: the copies of the one before have been written."""
        self._touched, self._copies = set(), {}

    def copy(self, state: Any, place: Any) -> Any:
        """The state as it is now, in memory of its own.

        Args:
            state: Containers, tensors and other values.
            place: Which one it is of those of a save; the same in the next save.
        """
        staged = self._copied(state, (place,), {})
        if self._waits_for_cuda:
            torch.cuda.synchronize()
            self._waits_for_cuda = False
        return staged

    def end(self) -> None:
        """All states of a save are copied: memory of what is not saved any more goes."""
        self._kept = {place: tensor for place, tensor in self._kept.items() if place in self._touched}

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """What was copied from this tensor in this save; None: nothing was."""
        known = self._copies.get(_identity(tensor))
        return None if known is None or known[0].expired() else known[1]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Frees the copies."""
        self._kept, self._copies = {}, {}

    def _copied(self, value: Any, place: tuple[Any, ...], memo: dict[Any, Any]) -> Any:
        if isinstance(value, dict):
            copied = copy(value)  # with its type and its attributes, such as those of a module's state
            for key, inner in value.items():
                copied[key] = self._copied(inner, (*place, key), memo)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copied(inner, (*place, number), memo) for number, inner in enumerate(value))
        if isinstance(value, DTensor):
            return self._copied_dtensor(value, place, memo)
        if type(value) in _PLAIN and value.layout is torch.strided and not value.is_quantized:
            return self._copied_tensor(value, place, memo)
        if hasattr(value, "local_shards"):
            return value  # FSDP1 has gathered it for this save, and nobody else has it
        return deepcopy(value, memo)

    def _copied_tensor(self, tensor: Tensor, place: tuple[Any, ...], memo: dict[Any, Any]) -> Tensor:
        identity = _identity(tensor)
        if identity in memo:  # tied weights stay tied
            return cast(Tensor, memo[identity])
        form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cuda)
        before, kept = self._kept.get(place, (None, None))
        if kept is None or before != form:
            self._kept.pop(place, None)
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self._kept[place] = form, kept
        kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        self._waits_for_cuda |= tensor.is_cuda
        self._touched.add(place)
        if tensor.numel():
            memo[identity] = kept
            self._copies[identity] = StorageWeakRef(tensor.untyped_storage()), kept  # type: ignore[no-untyped-call]
        return kept

    def _copied_dtensor(self, tensor: DTensor, place: tuple[Any, ...], memo: dict[Any, Any]) -> Any:
        # By the protocol of tensor subclasses: ``DTensor.from_local`` moves what is not on the device of the mesh.
        names, how = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
        parts = {name: getattr(tensor, name) for name in names}
        copied = self._copied_tensor(tensor.to_local().detach(), place, memo)
        parts = {name: copied if isinstance(part, Tensor) else part for name, part in parts.items()}
        return DTensor.__tensor_unflatten__(parts, how, tensor.size(), tensor.stride())  # type: ignore[no-untyped-call]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
