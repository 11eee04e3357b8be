"""Any data set's state as bytes that ``torch.load(weights_only=True)`` reads: plain values, tensors, numpy arrays."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["pack", "unpack"]

_ARRAY = "__lightning_distplus_array__"
_BYTES = "__lightning_distplus_bytes__"
_PLAIN = (bool, int, float, str, type(None))


def pack(state: Any, *, owner: str) -> bytes:
    """A state as bytes.

    Args:
        state: Containers, numbers, strings, bytes, tensors and numpy arrays.
        owner: Whose state it is, for the message.

    Raises:
        TypeError: Something else is in it; the message names the place.
    """
    stream = io.BytesIO()
    torch.save(_to_plain(state, "", owner), stream)
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """What ``pack`` was given."""
    return _from_plain(torch.load(io.BytesIO(packed), weights_only=True))


def _to_plain(value: Any, place: str, owner: str) -> Any:
    if type(value) in _PLAIN or type(value) is torch.Tensor:
        return value
    if isinstance(value, bytes | bytearray):
        return {_BYTES: _tensor(value)}  # torch does not read empty bytes back
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.hasobject is False:
        return {_ARRAY: [value.dtype.str, list(value.shape)], "data": _tensor(value.tobytes())}
    if isinstance(value, Mapping):
        return {_to_plain(key, place, owner): _to_plain(one, f"{place}[{key!r}]", owner) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        items = [_to_plain(one, f"{place}[{number}]", owner) for number, one in enumerate(value)]
        return items if isinstance(value, list) else set(items) if isinstance(value, set) else tuple(items)
    raise TypeError(
        f"The state of {owner} holds a {type(value).__module__}.{type(value).__qualname__} at state_dict(){place}; a "
        "checkpoint takes containers, numbers, strings, bytes, tensors and numpy arrays. Return those."
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            dtype, shape = value[_ARRAY]
            return np.frombuffer(value["data"].numpy().tobytes(), dtype=dtype).reshape(shape).copy()
        if _BYTES in value:
            return value[_BYTES].numpy().tobytes()
        return {_from_plain(key): _from_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_from_plain(one) for one in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
