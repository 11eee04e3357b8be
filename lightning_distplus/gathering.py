"""Nested results: what a tree of tensors is, and `gather`, also where the ranks hold different numbers of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from lightning_distplus.control import Point, active_points
from lightning_distplus.control.collective_check import sides
from lightning_distplus.errors import DivergenceError
from lightning_distplus.majority import odd_ranks

_SHOWN_LEAVES = 6
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """What one rank holds in one place of its tree; the same on all ranks, as the number of rows is left out."""

    path: str
    dtype: str
    """Of the tensor; for what cannot be gathered, the name of its type."""
    row: tuple[int, ...] = ()
    """The shape without the first dimension."""
    is_single: bool = True
    """Whether it is a number, or a tensor without dimensions: one row."""
    is_refused: bool = False

    def describe(self) -> str:
        shape = "" if self.is_refused else "[]" if self.is_single else f"[{', '.join(map(str, ('*', *self.row)))}]"
        return f"{self.path}{': ' if self.path else ''}{self.dtype}{shape}"


def gather(tree: Any) -> Any:
    """Collects a tree of tensors from all ranks, on all ranks; for evaluation: no gradients flow through it.

    All ranks of the default process group call it at the same place. It works under every strategy, and without a
    process group, where the tree is that of the only rank.

    Args:
        tree: Tensors and numbers in dictionaries, lists, tuples and named tuples. Keys, lengths of lists, dtypes and
            all dimensions but the first must be the same on all ranks; the first may differ, and may be 0.

    Returns:
        The same containers (mappings become plain dictionaries). A tensor of shape (rows, ...) becomes (rows of all
        ranks, ...), rank 0's rows first. A number, or a tensor without dimensions, becomes (ranks,); bool, int and
        float become torch.bool, torch.int64 and torch.float64. A tensor is on the device of the one that was given.

    Raises:
        DivergenceError: The ranks hold different structures, or one of them holds something that cannot be gathered; on
            all ranks, with both sides.
    """
    places, rebuild = flatten(tree)
    rows = [_as_rows(value) for _, value in places]
    mine = [_leaf(path, value, tensor) for (path, value), tensor in zip(places, rows, strict=True)]
    points = active_points()
    if points is not None and points.are_due and dist.is_initialized():
        points.meet(Point(operation="gather"))
    _refuse_differences(_from_all_ranks(mine))
    tensors = [tensor for tensor in rows if tensor is not None]
    # Of a view, its whole storage would travel.
    told = _from_all_ranks([tensor.cpu().clone() for tensor in tensors])
    columns = zip(tensors, zip(*told, strict=True), strict=True)
    return rebuild(torch.cat([one.to(own.device) for one in column]) for own, column in columns)


def _as_rows(value: Any) -> torch.Tensor | None:
    """The value with a first dimension of rows; None: it cannot be gathered."""
    if type(value) in _NUMBERS:
        return torch.tensor([value], dtype=_NUMBERS[type(value)])
    if type(value) not in _PLAIN_TENSORS or value.layout is not torch.strided or value.is_quantized:
        return None
    plain: torch.Tensor = value.detach().resolve_conj().resolve_neg()
    return plain.reshape(1) if plain.ndim == 0 else plain


def _leaf(path: str, value: Any, tensor: torch.Tensor | None) -> _Leaf:
    if tensor is None:
        return _Leaf(path=path, dtype=type(value).__name__, is_refused=True)
    is_single = not isinstance(value, torch.Tensor) or value.ndim == 0
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Leaf(path=path, dtype=dtype, row=tuple(tensor.shape[1:]), is_single=is_single)


def _from_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def _refuse_differences(all_leaves: Sequence[Sequence[_Leaf]]) -> None:
    """Raises, on all ranks alike, where the trees do not fit together."""
    refused = {
        rank: _shown(odd)
        for rank, leaves in enumerate(all_leaves)
        if (odd := [leaf for leaf in leaves if leaf.is_refused])
    }
    if refused:
        raise DivergenceError(
            f"lightning_distplus.gather takes plain tensors and numbers: {sides(refused)}. Nothing was exchanged. "
            "Leave it out, or exchange it with torch.distributed.all_gather_object.",
            ranks=refused,
            field="structure",
            values=refused,
        )
    wrong, _ = odd_ranks(dict(enumerate(all_leaves)))
    if not wrong:
        return
    shared = set(all_leaves[0]).intersection(*all_leaves[1:])
    texts = {rank: _shown([leaf for leaf in leaves if leaf not in shared]) for rank, leaves in enumerate(all_leaves)}
    raise DivergenceError(
        f"The trees that the ranks gather differ in more than the number of rows: {sides(texts)}. Nothing was "
        "exchanged. Make keys, lengths of lists, dtypes and all dimensions but the first the same; a rank without rows "
        "gathers torch.empty((0, ...)).",
        ranks=wrong,
        field="structure",
        values=texts,
    )


def _shown(leaves: Sequence[_Leaf]) -> str:
    texts = [leaf.describe() for leaf in leaves[:_SHOWN_LEAVES]] or ["nothing in that place"]
    more = f" and {len(leaves) - _SHOWN_LEAVES} more" if len(leaves) > _SHOWN_LEAVES else ""
    return f"holds {', '.join(texts)}{more}"


# -- taking trees apart ------------------------------------------------------------------------------------------------

# What Lightning's all_gather turns numbers into.
_NUMBER_TEXTS: Mapping[type, str] = {bool: "uint8[]", int: "int32[]", float: "float32[]"}

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
    if type(tree) in _NUMBER_TEXTS:
        return _NUMBER_TEXTS[type(tree)]
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
