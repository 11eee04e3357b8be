"""State that is the same on several ranks: which it is, which rank differs in it, in which element, and by how much."""

from __future__ import annotations

import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_distplus import _compat
from lightning_distplus.divergence.elements import Exchange, look_closer
from lightning_distplus.divergence.fingerprint import fingerprint_of_each

__all__ = ["EVERYWHERE", "Difference", "Replica", "find_difference", "odd_ranks", "plain_name", "replicated_state"]

EVERYWHERE = ""
"""The group of what is the same on all ranks."""

_LOCAL_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(frozen=True)
class Replica:
    """One tensor of which other ranks hold a copy."""

    kind: str
    """``"parameters"``, ``"buffers"`` or ``"optimizer_state"``."""
    name: str
    tensor: Tensor
    group: str = EVERYWHERE
    """Ranks with the same group and name hold the same content."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where copies differ; the same on all ranks that hold them."""

    kind: str
    name: str
    group: str
    wrong: list[int]
    """The minority; all holders where there is no majority."""
    source: int | None
    """The lowest rank of the majority; None without one."""
    names: list[str]
    """Everything that differs, this first."""
    values: dict[int, float | int | str]
    """The element that differs most, on each rank."""
    element: int
    """Its index in the flat tensor."""
    largest: float
    """By how much it differs."""


def replicated_state(
    model: torch.nn.Module, optimizers: Iterable[Any] = (), *, holds_whole_parameters: bool = True
) -> list[Replica]:
    """What this rank holds and others hold too.

    A plain tensor is the same everywhere, a ``DTensor`` where its shard coordinates are the same. Of FSDP1 units come
    the shards that other ranks hold as well (hybrid sharding, no sharding). Running statistics of normalisations are
    each rank's own, and so are buffers that are not saved.

    Args:
        model: As the engine has wrapped it.
        optimizers: Whose state belongs to it; none where the engine spreads it over the ranks (ZeRO).
        holds_whole_parameters: Whether a parameter that is a plain tensor is whole: not under FSDP and ZeRO-3.
    """
    found = [*_flat_parameters(model)]
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = plain_name(name)
        if isinstance(parameter, DTensor) or holds_whole_parameters:
            found += _replica("parameters", plain_name(name), parameter)
    for name, buffer in _kept_buffers(model):
        found += _replica("buffers", name, buffer)
    for optimizer in optimizers:
        found += _optimizer_state(optimizer, names, holds_whole_parameters)
    return found


def _replica(kind: str, name: str, tensor: Tensor) -> list[Replica]:
    if isinstance(tensor, DTensor):
        group = _shard_of(tensor)
        return [] if group is None else [Replica(kind, name, tensor.to_local(), group)]
    if tensor.is_sparse or tensor.is_meta or tensor.is_quantized:
        return []
    return [Replica(kind, name, tensor)]


def _shard_of(tensor: DTensor) -> str | None:
    """The shard that this rank holds, by its coordinates; None where it is the only holder."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    copies = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    if coordinate is None or all(mesh.size(dim) == 1 for dim in copies):
        return None
    sharded = [dim for dim in range(mesh.ndim) if dim not in copies and mesh.size(dim) > 1]
    return ",".join(f"{dim}:{coordinate[dim]}" for dim in sharded)


def _flat_parameters(model: torch.nn.Module) -> Iterator[Replica]:
    for unit in _compat.flat_units(model):
        if unit.shard is not None:
            names = [name for name, _ in unit.sections if name != "padding"]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield Replica("parameters", plain_name(f"{names[0]}{more}"), unit.local, unit.shard)


def _kept_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        local = _compat.non_persistent_buffers(module)
        if _LOCAL_BUFFERS & {name for name, _ in module.named_buffers(recurse=False)}:
            local = local | _LOCAL_BUFFERS
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in local:
                yield plain_name(name), buffer


def _optimizer_state(optimizer: Any, names: Mapping[int, str], holds_whole_parameters: bool) -> Iterator[Replica]:
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        name = names.get(id(parameter), f"parameter {number}")
        for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            if isinstance(value, DTensor) or (isinstance(value, Tensor) and holds_whole_parameters):
                yield from _replica("optimizer_state", f"{name}: {key}", value)


def plain_name(name: str) -> str:
    """The name that the author of the model knows: without what the engines put before it."""
    parts = [part for part in _compat.state_dict_name(name).split(".") if part != "_forward_module"]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


# -- who differs -------------------------------------------------------------------------------------------------------


def odd_ranks(values: Mapping[int, Any]) -> tuple[list[int], int | None]:
    """The ranks that differ from the majority, and the lowest rank of the majority.

    Without a majority all ranks differ, and nobody is the majority.
    """
    (common, count), *others = Counter(values.values()).most_common()
    if others and others[0][1] == count:
        return sorted(values), None
    wrong = sorted(rank for rank, value in values.items() if value != common)
    return wrong, min(rank for rank, value in values.items() if value == common)


def find_difference(replicas: Sequence[Replica], exchange: Exchange) -> Difference | None:
    """Bisects to the first tensor that differs between ranks, and to its element that differs most.

    All ranks call it together. The ranks of one group hold the same list of tensors.

    Args:
        replicas: What this rank holds.
        exchange: How the ranks meet.
    """
    mine = _fingerprints(replicas)
    ranks = [_unpack(item) for item in exchange("tensors", _pack(replicas, mine))]
    differing = _differing(ranks)
    if not differing:
        return _missing(ranks)
    key = min(differing, key=lambda key: (differing[key][1], key))
    holders = {rank: held[key] for rank, held in enumerate(ranks) if key in held}
    wrong, source = odd_ranks({rank: value for rank, (_, value) in holders.items()})
    replica = next((one for one in replicas if _key(one) == key), None)
    tensor = None if replica is None else replica.tensor
    element, largest, values = look_closer(tensor, sorted(holders), wrong, source, exchange)
    kind, name, group = key
    return Difference(
        kind=kind,
        name=name,
        group=group,
        wrong=wrong,
        source=source,
        names=[name, *sorted({other[1] for other in differing if other != key})],
        values=values,
        element=element,
        largest=largest,
    )


_Key = tuple[str, str, str]  # kind, name, group
_ENTRY = struct.Struct("<IQ")  # length of the key, fingerprint


def _key(replica: Replica) -> _Key:
    return replica.kind, replica.name, replica.group


def _fingerprints(replicas: Sequence[Replica]) -> list[int]:
    """One device at a time, one transfer for each."""
    found = [0] * len(replicas)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, replica in enumerate(replicas):
        by_device[replica.tensor.device].append(index)
    for indices in by_device.values():
        values = fingerprint_of_each([replicas[index].tensor for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            found[index] = value & (1 << 64) - 1
    return found


def _pack(replicas: Sequence[Replica], fingerprints: Sequence[int]) -> bytes:
    parts = []
    for replica, value in zip(replicas, fingerprints, strict=True):
        key = "\0".join(_key(replica)).encode()
        parts.append(_ENTRY.pack(len(key), value) + key)
    return b"".join(parts)


def _unpack(data: bytes) -> dict[_Key, tuple[int, int]]:
    """For each key its place in the list and its fingerprint."""
    found: dict[_Key, tuple[int, int]] = {}
    start = 0
    while start < len(data):
        length, value = _ENTRY.unpack_from(data, start)
        start += _ENTRY.size + length
        kind, name, group = data[start - length : start].decode().split("\0")
        found[kind, name, group] = (len(found), value)
    return found


def _differing(ranks: Sequence[dict[_Key, tuple[int, int]]]) -> dict[_Key, tuple[int, int]]:
    """The keys whose holders differ, with how many they are and the first place in a list."""
    values: dict[_Key, dict[int, int]] = defaultdict(dict)
    places: dict[_Key, int] = {}
    for rank, held in enumerate(ranks):
        for key, (place, value) in held.items():
            values[key][rank] = value
            places[key] = min(place, places.get(key, place))
    return {key: (len(held), places[key]) for key, held in values.items() if len(set(held.values())) > 1}


def _missing(ranks: Sequence[dict[_Key, tuple[int, int]]]) -> Difference | None:
    """What some ranks hold and others do not, though all should."""
    keys = sorted({key for held in ranks for key in held if key[2] == EVERYWHERE and not all(key in h for h in ranks)})
    if not keys:
        return None
    holds = {rank: "there" if keys[0] in held else "missing" for rank, held in enumerate(ranks)}
    wrong, source = odd_ranks(holds)
    kind, name, _ = keys[0]
    return Difference(
        kind=kind,
        name=name,
        group="not everywhere",
        wrong=wrong,
        source=source,
        names=[other[1] for other in keys],
        values=dict(holds),
        element=0,
        largest=math.nan,
    )
