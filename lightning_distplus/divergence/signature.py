"""The signature of a model: its parameters and buffers in order, and the first place where two ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_distplus import _compat
from lightning_distplus.divergence.batch import digest
from lightning_distplus.divergence.fingerprint import fingerprint_of_each
from lightning_distplus.majority import is_equal

__all__ = ["first_odd_entry", "signature", "weights"]

_MAX_ENTRIES = 50_000  # the digests of so many fit into one message


def signature(module: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer, in the order of registration, which is that of gradient buckets.

    What FSDP1 has sharded already, in a ``validate`` or another ``fit`` before, has another shape on each rank.
    """
    lines = [
        f"parameter {name}: {'a shard' if _compat.is_fsdp_shard(tensor) else _kind(tensor)}, "
        f"{'trainable' if tensor.requires_grad else 'frozen'}"
        for name, tensor in module.named_parameters()
    ]
    return lines + [f"buffer {name}: {_kind(tensor)}" for name, tensor in module.named_buffers()]


def weights(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """One line for each tensor: its name and the fingerprint of its values."""
    found = fingerprint_of_each(list(tensors.values())).tolist() if tensors else []
    return [f"{name}: {value & (1 << 64) - 1:016x}" for name, value in zip(tensors, found, strict=True)]


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def first_odd_entry(entries: list[str], gather: Callable[[str, Any], list[Any]]) -> tuple[int, dict[int, str]] | None:
    """The first entry in which two ranks differ, with what each of them has there; None where all agree.

    Args:
        entries: This rank's list.
        gather: Collects a value from every rank; all ranks call this function alike.
    """
    if is_equal(gather("signature", digest(entries))):
        return None
    digests = gather("signature entries", [digest(entry) for entry in entries[:_MAX_ENTRIES]])
    length = max(len(one) for one in digests)
    index = next(
        (index for index in range(length) if not is_equal(tuple(one[index : index + 1]) for one in digests)), length
    )
    found = gather("signature entry", entries[index] if index < len(entries) else "nothing")
    return index, dict(enumerate(found))
