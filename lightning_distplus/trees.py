"""Nested containers of tensors: their structure as one line, and taking them apart and putting them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

__all__ = ["Rebuild", "describe", "describe_tensor", "flatten"]

# What Lightning's all_gather turns numbers into.
_NUMBERS: Mapping[type, str] = {bool: "uint8[]", int: "int32[]", float: "float32[]"}

Rebuild = Callable[[Iterator[Any]], Any]
"""Puts the tree together again, with other leaves in the order in which ``flatten`` gave them."""


def describe_tensor(tensor: torch.Tensor) -> str:
    """For example ``"float32[2, 3]"``, or ``"cuda float32[2, 3]"``."""
    return _describe_tensor(tensor.device.type, tensor.dtype, tensor.shape)


@lru_cache(maxsize=1000)
def _describe_tensor(device: str, dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{'' if device == 'cpu' else f'{device} '}{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe(tree: Any) -> str:
    """The containers, dtypes and shapes of a tree in the order of its leaves; what holds no tensor is left out."""
    return _describe(tree) or "no tensors"


def _describe(tree: Any) -> str:
    if isinstance(tree, torch.Tensor):
        return describe_tensor(tree)
    if type(tree) in _NUMBERS:
        return _NUMBERS[type(tree)]
    if hasattr(tree, "__array__") and hasattr(tree, "dtype"):
        return f"{tree.dtype}{list(tree.shape)}"
    named = _named_children(tree)
    if named is not None:
        parts = {name: _describe(child) for name, child in named.items()}
        inner = ", ".join(f"{name}: {text}" for name, text in parts.items() if text)
        return f"{_name_of(tree)}{{{inner}}}" if inner else ""
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        inner = ", ".join(text for text in (_describe(child) for child in tree) if text)
        opening, closing = "[]" if isinstance(tree, list) else "()"
        return f"{opening}{inner}{closing}" if inner else ""
    return ""


def _named_children(tree: Any) -> dict[str, Any] | None:
    if isinstance(tree, Mapping):
        return {repr(key): value for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {name: getattr(tree, name) for name in tree._fields}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def _name_of(tree: Any) -> str:
    return "" if isinstance(tree, Mapping) else type(tree).__name__


def flatten(tree: Any) -> tuple[list[tuple[str, Any]], Rebuild]:
    """Takes a tree apart.

    Dictionaries are walked in the order of their sorted keys, so that ranks which filled them in another order agree.

    Returns:
        The leaves with their paths, for example ``("['loss'][0]", tensor)``, and what puts the tree together.
    """
    leaves: list[tuple[str, Any]] = []
    return leaves, _flatten(tree, "", leaves)


def _flatten(tree: Any, path: str, leaves: list[tuple[str, Any]]) -> Rebuild:
    if isinstance(tree, Mapping):
        keys = sorted(tree, key=lambda key: (type(key).__name__, repr(key)))
        children = {key: _flatten(tree[key], f"{path}[{key!r}]", leaves) for key in keys}
        order = list(tree)

        def rebuild_mapping(values: Iterator[Any]) -> dict[Any, Any]:
            made = {key: child(values) for key, child in children.items()}
            return {key: made[key] for key in order}

        return rebuild_mapping
    if isinstance(tree, (list, tuple)):
        fields = getattr(tree, "_fields", None)
        places = [f"{path}[{place}]" if fields is None else f"{path}.{fields[place]}" for place in range(len(tree))]
        parts = [_flatten(child, place, leaves) for child, place in zip(tree, places, strict=True)]
        kind: Any = type(tree)

        def rebuild_sequence(values: Iterator[Any]) -> Any:
            made = [part(values) for part in parts]
            return kind(made) if fields is None else kind(*made)

        return rebuild_sequence
    leaves.append((path, tree))
    return next
