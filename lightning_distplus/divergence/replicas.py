"""State that is equal on several ranks, or must not change between two steps: who differs, and in which element."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.checkpoint.tensors import parameters_of, pieces_of_live, sums_of_run
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.check import Check, digest
from lightning_distplus.majority import disagreement, first_difference, odd_ranks
from lightning_distplus.world import ranges

# -- fingerprints of tensors -------------------------------------------------------------------------------------------

# 64 bits of the exact bytes, computed on their device. On a CPU that is XXH3, which reads as fast as memory delivers;
# elsewhere the sums of ``checkpoint.tensors``, which take twice as long on a CPU.

_WORD_BYTES = 8
_SMALL_BYTES = 32 << 10  # below, the copy into one buffer costs less than sums of their own
_MASK = (1 << 64) - 1


def fingerprint_of_each(tensors: Sequence[Tensor]) -> Tensor:
    """One fingerprint per tensor, all of one device; returns (n,) int64 on it, without waiting."""
    return torch.stack([_of_pieces([tensor]) for tensor in tensors])


class _Piece(NamedTuple):
    """A part of one tensor: the elements ``start`` to ``stop`` of its flat view."""

    number: int
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
        self.pieces = _cut(self._tensors, count)

    def fingerprint(self, number: int) -> int | Tensor | None:
        """Of window ``number % count``, None if empty; elsewhere than on a CPU a 0-dim int64 there, without waiting."""
        pieces = self.pieces[number % self.count]
        if not pieces:
            return None
        held = [(self._tensors[piece.number], piece) for piece in pieces]
        if all(one.is_cpu and one.is_contiguous() and _is_held(one) for one, _ in held):  # ten times as fast as slices
            return _hashed(_bytes_of(one, piece.start, piece.stop) for one, piece in held)
        return _of_pieces([one.detach().reshape(-1)[piece.start : piece.stop] for one, piece in held])


def _cut(tensors: Sequence[Tensor], count: int) -> list[list[_Piece]]:
    """The pieces of each window; a piece ends at a whole word."""
    window_bytes = max(1, -(-sum(tensor.nbytes for tensor in tensors) // count))
    windows: list[list[_Piece]] = [[] for _ in range(count)]
    offset = 0
    for number, tensor in enumerate(tensors):
        start, size = 0, tensor.element_size()
        word_bytes = max(_WORD_BYTES, size)
        while start < tensor.numel():
            window = min((offset + start * size) // window_bytes, count - 1)
            left_bytes = (window + 1) * window_bytes - (offset + start * size)
            stop = start - (-left_bytes // word_bytes) * word_bytes // size
            # Small tensors stay whole: a cut costs more than it evens out.
            if window == count - 1 or (tensor.numel() - stop) * size < _SMALL_BYTES:
                stop = tensor.numel()
            windows[window].append(_Piece(number, start, stop))
            start = stop
        offset += tensor.nbytes
    return windows


def _is_held(tensor: Tensor) -> bool:
    """Whether it has elements, and its engine has not taken their memory away."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0


def _of_pieces(tensors: Sequence[Tensor]) -> Tensor:
    """One fingerprint of several tensors of one device: a 0-dim int64 there."""
    if tensors[0].device.type != "cpu":
        return from_sums(tensors)
    wholes = [one.detach().contiguous() for one in tensors if _is_held(one)]
    return torch.tensor(_hashed(_bytes_of(whole, 0, whole.numel()) for whole in wholes))  # while copies among them live


def _bytes_of(tensor: Tensor, start: int, stop: int) -> ctypes.Array[ctypes.c_char]:
    """Not by ``numpy()``: that makes the storage one that FSDP2 cannot free and fill again."""
    size = tensor.element_size()
    return (ctypes.c_char * ((stop - start) * size)).from_address(tensor.data_ptr() + start * size)


def _hashed(parts: Iterable[ctypes.Array[ctypes.c_char]]) -> int:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    value = hasher.intdigest()
    return value - (1 << 64) if value >> 63 else value


def from_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The same without XXH3, on any device: a 0-dim int64 there, without waiting."""
    held = [one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors if _is_held(one)]
    large = [raw for raw in held if raw.numel() >= _SMALL_BYTES]
    small = [raw for raw in held if raw.numel() < _SMALL_BYTES]
    sums, begin = torch.zeros(2, dtype=torch.int64, device=tensors[0].device), 0
    for raw in [torch.cat(small), *large] if small else large:
        sums = sums + sums_of_run(raw, begin)
        begin += raw.numel()
    return sums[0] ^ sums[1] << 1


# -- what other ranks hold too -----------------------------------------------------------------------------------------

EVERYWHERE = ""
"""The group of what is the same on all ranks."""
_STATES = "optimizer_state"
_LOCAL_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Replica:
    """One tensor of which other ranks hold a copy."""

    kind: str
    """``"parameters"``, ``"buffers"`` or ``"optimizer_state"``."""
    name: str
    tensor: Tensor
    group: str = EVERYWHERE
    """Ranks with the same group and name hold the same content."""

    @property
    def key(self) -> _Key:
        """By which ranks know that they hold the same."""
        return self.kind, self.name, self.group


def replicated_state(
    model: torch.nn.Module, optimizers: Iterable[Any] = (), *, holds_whole_parameters: bool = True
) -> list[Replica]:
    """What this rank holds and others hold too.

    A plain tensor is the same everywhere, a ``DTensor`` where its shard coordinates are the same. Of FSDP1 units come
    the shards that other ranks hold as well (hybrid sharding, no sharding). Running statistics of normalisations are
    each rank's own, and so are buffers that are not saved; DDP gives all ranks the buffers of rank 0 before a forward,
    unless it was told not to, so that each may change them in it.

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
    if not (isinstance(model, DistributedDataParallel) and model.broadcast_buffers):
        for name, buffer in _kept_buffers(model):
            found += _replica("buffers", name, buffer)
    for optimizer in optimizers:
        for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            name = names.get(id(parameter), f"parameter {number}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
                if isinstance(value, DTensor) or (isinstance(value, Tensor) and holds_whole_parameters):
                    found += _replica(_STATES, f"{name}: {key}", value)
    return found


def _replica(kind: str, name: str, tensor: Tensor) -> list[Replica]:
    if isinstance(tensor, DTensor):
        group = _shard_of(tensor)
        return [] if group is None else [Replica(kind, name, tensor.to_local(), group)]
    return [] if tensor.is_sparse or tensor.is_meta or tensor.is_quantized else [Replica(kind, name, tensor)]


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


def plain_name(name: str) -> str:
    """The name that the author of the model knows: without what the engines put before it."""
    parts = [part for part in _compat.state_dict_name(name).split(".") if part != "_forward_module"]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


# -- who differs, and in which element ---------------------------------------------------------------------------------

Exchange = Callable[[str, bytes], list[bytes]]
"""Every rank's bytes, in rank order, on all ranks."""
_PART_BYTES = 2 << 10  # of a tensor that differs: the parts of which the ranks compare fingerprints
_MAX_PARTS = 1 << 14  # whose fingerprints fit into a message
_SHOWN_PARTS = 32
_MAX_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where copies differ; the same on all ranks."""

    key: _Key
    wrong: list[int]
    """The minority; all holders where there is no majority."""
    source: int | None
    """The lowest rank of the majority; None without one."""
    names: list[str]
    """Everything that differs, the tensor of the key first."""
    values: Mapping[int, float | int | str]
    """The element that differs most, on each rank."""
    element: int = 0
    """Its index in the flat tensor."""
    largest: float = math.nan
    """By how much it differs."""


def find_difference(replicas: Sequence[Replica], exchange: Exchange) -> Difference | None:
    """Bisects to the first tensor that differs between ranks, and to its element that differs most.

    All ranks call it together. The ranks of one group hold the same list of tensors.

    Args:
        replicas: What this rank holds.
        exchange: How the ranks meet.
    """
    mine = [(*one.key, int(_of_pieces([one.tensor]))) for one in replicas]
    told = [json.loads(zlib.decompress(one)) for one in exchange("tensors", zlib.compress(json.dumps(mine).encode()))]
    values: dict[_Key, dict[int, int]] = defaultdict(dict)
    for rank, held in enumerate(told):
        for kind, name, group, value in held:
            values[kind, name, group][rank] = value
    differing = [key for key, held in values.items() if len(set(held.values())) > 1]
    if differing:
        key = differing[0]
        wrong, source = odd_ranks(values[key])
        names = [key[1], *sorted({other[1] for other in differing[1:]})]
        tensor = next((one.tensor for one in replicas if one.key == key), None)
        found = _look_closer(tensor, sorted(values[key]), wrong, source, exchange)
        return Difference(key=key, wrong=wrong, source=source, names=names, **found)
    missing = sorted(key for key, held in values.items() if key[2] == EVERYWHERE and len(held) < len(told))
    if not missing:
        return None
    kind, name, _ = missing[0]
    holds = {rank: "there" if rank in values[missing[0]] else "missing" for rank in range(len(told))}
    wrong, source = odd_ranks(holds)
    key = (kind, name, "not everywhere")
    return Difference(key=key, wrong=wrong, source=source, names=[one[1] for one in missing], values=holds)


def _look_closer(
    tensor: Tensor | None, holders: Sequence[int], wrong: Sequence[int], source: int | None, exchange: Exchange
) -> dict[str, Any]:
    """The element that differs most: the fields ``element``, ``largest`` and ``values``, the same on all ranks.

    Args:
        tensor: This rank's copy; None where it holds none.
        holders: The ranks that hold one.
        wrong: Those whose copy is another than the majority's, or all.
        source: The lowest rank of the majority, if there is one.
        exchange: How the ranks meet.
    """
    tensor = None if tensor is None else tensor.detach().contiguous()
    tensor = torch.view_as_real(tensor) if tensor is not None and tensor.is_complex() else tensor
    layouts = exchange("layout", b"" if tensor is None else json.dumps([str(tensor.dtype), tensor.shape]).encode())
    if len({layouts[rank] for rank in holders}) > 1:
        return {"values": {rank: "{} {}".format(*json.loads(layouts[rank])) for rank in holders}}
    name, shape = json.loads(layouts[holders[0]])
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    numel = math.prod(shape)
    per_part = max(_PART_BYTES // dtype.itemsize, -(-numel // _MAX_PARTS))
    pieces = () if tensor is None else torch.split(tensor.view(-1), per_part)
    told = exchange("parts", json.dumps([int(_of_pieces([piece])) for piece in pieces]).encode())
    reference = holders[0] if source is None else source
    others = [rank for rank in wrong if rank != reference]
    prints = {rank: json.loads(told[rank]) for rank in (reference, *others)}
    parts = [
        part for part, right in enumerate(prints[reference]) if any(prints[rank][part] != right for rank in others)
    ][:_SHOWN_PARTS]
    joined = torch.cat([piece[:0] for piece in pieces[:1]] + [pieces[part] for part in parts]) if pieces else None
    shown = b"" if joined is None else bytes(joined.cpu().view(torch.uint8).numpy())[:_MAX_BYTES]
    raw = exchange("elements", shown)
    if not parts:
        return {"values": dict.fromkeys(holders, "?")}
    elements = {rank: torch.frombuffer(bytearray(raw[rank]), dtype=dtype) for rank in holders}
    place, largest = _largest(elements[reference], [elements[rank] for rank in others])
    index = parts[place // per_part] * per_part + place % per_part
    return {"element": index, "largest": largest, "values": {rank: elements[rank][place].item() for rank in holders}}


def _largest(reference: Tensor, others: Sequence[Tensor]) -> tuple[int, float]:
    """The place where one of the others is furthest away, and how far."""
    gap = torch.zeros(len(reference), dtype=torch.float64)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[reference.element_size()]
    for other in others:
        # NaN on one side is further away than any number; bits that differ in equal values (-0.0) still differ.
        away = torch.nan_to_num((other.double() - reference.double()).abs(), nan=math.inf).clamp(min=5e-324)
        gap = torch.maximum(gap, torch.where(other.view(bits) != reference.view(bits), away, 0.0))
    place = int(gap.argmax())
    return place, float(gap[place])


# -- the check of copies: a window at each gate, all of them now and then ----------------------------------------------

log = logging.getLogger(__name__)
_NUM_WINDOWS = 16
_WINDOW_BYTES = 1 << 20  # less than this is not worth cutting
_SHOWN_NAMES = 6
_FINGERPRINT = attrgetter("state_fingerprint")


class ReplicaCheck(Check):
    """Names the rank whose copy of a weight, a buffer or an optimizer state is not that of the others.

    A gate carries the fingerprint of one window, so that everything has been read after 16 steps. Everything is read
    at once at the start, before each save and every ``parameters_every_n_steps``. Where that costs more than the budget
    allows, the windows are smaller, and windows and full comparisons come less often.

    Args:
        repairs: Whether a copy that differs from the majority's is overwritten with it, instead of raising.
    """

    def __init__(self, *, repairs: bool = False) -> None:
        self._repairs = repairs
        self._replicas: list[Replica] = []
        self._windows = Windows([])
        self._num_said = self._due_at = 0
        self._window_every = self._comparison_every = 1
        self._window: int | None = None
        self._looked_at = 0
        self._begun: tuple[int | None, int, int | Tensor | None] = (None, 0, None)
        self._agreed_at = [0]
        self._noted: dict[str, int] = {}
        self._num_repaired = 0

    def attach(self) -> None:
        """Looks at what kind of engine it is."""
        self._is_on_device = self.run.trainer.strategy.root_device.type != "cpu"
        model: Any = self.run.trainer.strategy.model
        self._is_zero = hasattr(model, "zero_optimization_stage") and model.zero_optimization_stage() > 0
        # FSDP2 shows whole parameters between a validation and the next backward, and takes their memory away then.
        is_sharded = any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())
        self._holds_whole = not is_sharded and not any(hasattr(one, "ds_id") for one in model.parameters())

    def start(self) -> None:
        """Everything, before the first step, and once more when that has made the optimizer's state."""
        self._compare_all("before the first step")
        self.forget()

    def forget(self) -> None:
        """The states were put back as other tensors, or are not made yet: everything again behind the next step."""
        self._due_at = self.run.trainer.global_step + 1

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The fingerprint of this step's window, where one is due; on a device that of the step before."""
        turn, rest = divmod(self._num_said, self._window_every)
        self._num_said += 1
        began, window, found = time.thread_time(), turn % self._windows.count if rest == 0 else None, None
        if window is not None:
            found = self._windows.fingerprint(window)
            self.run.budget.took("state", began, self._windows.count)
        look = window, self.run.trainer.global_step, found
        if self._is_on_device:  # to read it now would be to wait for the optimizer's step
            look, self._begun = self._begun, look
        self._window, self._looked_at, found = look
        return {} if found is None else {"state_fingerprint": int(found) & _MASK}

    def hear(self, records: Sequence[GateRecord]) -> None:
        """Compares the windows of all ranks, and now and then everything."""
        step = records[0].global_step
        if self._window is not None:
            if len(set(map(_FINGERPRINT, records))) > 1:
                self._find(f"before step {step}")
            else:
                self._agreed_at[self._window] = self._looked_at
        if step >= self._due_at:  # with several optimizers, steps are counted by twos and threes
            self._compare_all(f"before step {step}")
            self._due_at = (step // self._comparison_every + 1) * self._comparison_every

    def before_save(self) -> None:
        """Everything, so that no checkpoint holds a wrong copy."""
        self._compare_all(f"before the save after {self.run.trainer.global_step} steps")

    def metrics(self) -> dict[str, float]:
        """How many copies were overwritten."""
        return {"repaired_replicas": float(self._num_repaired)} if self._repairs else {}

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compare_all(self, when: str) -> None:
        run, began = self.run, time.thread_time()
        figures = run.budget.figures()
        optimizers = [] if self._is_zero else run.trainer.optimizers
        model: Any = run.trainer.strategy.model
        self._replicas = replicated_state(model, optimizers, holds_whole_parameters=self._holds_whole)
        states = digest([one.name for one in self._replicas if one.kind == _STATES and one.group == EVERYWHERE])
        mine = {"states": states, "tensors": self._totals(), "facts": self._facts(), "figures": figures}
        told = run.gather("state", mine)
        run.budget.took("everything", began)
        run.budget.agree([one["figures"] for one in told])
        if len({one["states"] for one in told}) > 1:  # an optimizer that spreads them over the ranks
            self._replicas = [one for one in self._replicas if one.kind != _STATES]
            for one in told:
                one["tensors"] = {key: value for key, value in one["tensors"].items() if not key.startswith(_STATES)}
        self._cut()
        held: dict[str, set[str]] = defaultdict(set)
        for one in told:
            for group, value in one["tensors"].items():
                held[group].add(value)
        if any(len(values) > 1 for values in held.values()):
            self._find(when)
        else:
            self._agreed_at = [run.trainer.global_step] * self._windows.count
        if odd := first_difference([one["facts"] for one in told]):
            remedy = "look for code that steps it on some ranks only, or with a metric that is not reduced"
            run.differ(*odd, where=when, remedy=remedy)

    def _cut(self) -> None:
        """Makes the windows anew: 16, or more where one is above the budget and large enough."""
        budget, device = self.run.budget, self.run.trainer.strategy.root_device.type
        everywhere = [
            one.tensor for one in self._replicas if one.group == EVERYWHERE and one.tensor.device.type == device
        ]
        most = max(1, sum(tensor.numel() * tensor.element_size() for tensor in everywhere) // _WINDOW_BYTES)
        count = min(most, max(_NUM_WINDOWS, budget.exceeds("state")))
        self._windows = Windows(everywhere, count)
        self._begun = (None, 0, None)
        self._agreed_at = [min(self._agreed_at)] * count
        self._window_every = budget.exceeds("state", count)
        every = self.run.parameters_every_n_steps
        self._comparison_every = every * budget.exceeds("everything", every)
        plan = {
            "windows": count,
            "steps_per_pass": count * self._window_every,
            "steps_per_full_comparison": self._comparison_every,
        }
        if plan != self._noted:  # the ledger tells how many steps a whole pass takes
            self._noted = plan
            self.run.note("monitor_plan", global_step=self.run.trainer.global_step, **plan)

    def _totals(self) -> dict[str, str]:
        """One fingerprint for each kind, group of ranks and device."""
        tensors: dict[str, list[Tensor]] = defaultdict(list)
        for one in self._replicas:
            tensors[f"{one.kind} {one.group}@{one.tensor.device.type}"].append(one.tensor)
        totals = {key: Windows(held, 1).fingerprint(0) for key, held in sorted(tensors.items())}
        return {key: f"{int(value) & _MASK:016x}" for key, value in totals.items() if value is not None}

    def _facts(self) -> dict[str, str]:
        """State that is no tensor: schedulers and the loss scaler, as text."""
        trainer: Any = self.run.trainer
        owners = {f"scheduler {number}": one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}
        owners["loss scaler"] = getattr(trainer.precision_plugin, "scaler", None)
        return {name: _as_text(owner.state_dict()) for name, owner in owners.items() if owner is not None}

    # -- finding -----------------------------------------------------------------------------------------------------

    def _find(self, when: str) -> None:
        for _ in range(len(self._replicas) + 1):
            difference = find_difference(self._replicas, self._exchange)
            if difference is None:
                return
            if not self._repair(difference):
                self._tell(difference, when)
                return

    def _exchange(self, name: str, data: bytes) -> list[bytes]:
        return self.run.plane.gather(f"divergence/state/{name}", data, self.run.patience)

    def _repair(self, found: Difference) -> bool:
        """Overwrites the wrong copies with the majority's; whether it could."""
        kind, name, group = found.key
        if not self._repairs or found.source is None or group != EVERYWHERE:
            return False
        (replica,) = [one for one in self._replicas if one.key == found.key]
        with torch.no_grad():
            content = replica.tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(content, src=found.source)
            replica.tensor.copy_(content)
        self._num_repaired += 1
        self.run.note(
            "repaired", state=kind, name=name, ranks=found.wrong, source=found.source, element=found.element,
            values=found.values, global_step=self.run.trainer.global_step,
        )  # fmt: skip
        log.warning(
            "rank %d: %s of rank %s is overwritten with that of rank %d; element %d was %s",
            self.run.rank, name, ranges(found.wrong), found.source, found.element, found.values,
        )  # fmt: skip
        return True

    def _tell(self, found: Difference, when: str) -> None:
        (kind, name, _), others = found.key, found.names[1:]
        more = f"; {len(others)} more differ: {', '.join(others[:_SHOWN_NAMES])}" if others else ""
        error = disagreement(
            kind, found.values, wrong=found.wrong,
            where=f"({name}, element {found.element}, off by {found.largest:g}) {when}{more}. "
            f"It happened at step {min(self._agreed_at)} or later",
            remedy="load the last checkpoint; look for code that changes weights on one rank only, then at that host's "
            "memory",
        )  # fmt: skip
        self.run.tell(error, parameter=name)


def _as_text(state: dict[str, Any]) -> str:
    plain = {key: value for key, value in state.items() if isinstance(value, (int, float, str, bool, list, tuple))}
    return repr(dict(sorted(plain.items())))[:1000]


# -- the check at rest: what a rank alone holds changes between two steps only by itself -------------------------------


class AtRestCheck(Check):
    """Names the rank and the tensor whose memory changed though nobody wrote to it.

    No other rank holds a copy of a shard, so that comparing ranks says nothing. What is compared is the same memory on
    the same rank, at the end of a step and before the next one: weights and the optimizer's state. Code that changes
    weights between two steps (an average of weights that is swapped in) is found too, and is no fault: such a run goes
    without this check.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, Tensor]] = []
        self._left: list[Tensor] = []
        self._step = -1

    def start(self) -> None:
        """The first step to come is not done yet."""
        self._step = self.run.trainer.global_step

    def forget(self) -> None:
        """Weights and states were put back, as other tensors."""
        self._left = []

    def train_batch_end(self) -> None:
        """Fingerprints everything, on its device, when an optimizer step is done; waits for nothing."""
        if self.run.trainer.global_step == self._step:
            return
        self._step = self.run.trainer.global_step
        held = [(name, tensor.detach()) for name, tensor in _held(self.run.trainer) if _is_held(tensor)]
        self._held = sorted(held, key=lambda one: str(one[1].device))
        self._left = self._fingerprints()

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Compares, before the forward."""
        self.before_save()
        self._left = []
        return {}

    def before_save(self) -> None:
        """Compares what is about to be saved."""
        if not self._left or self.run.trainer.global_step != self._step:
            return
        now = [value for found in self._fingerprints() for value in found.tolist()]
        left = [value for found in self._left for value in found.tolist()]
        pairs = zip(self._held, now, left, strict=True)
        if changed := [name for (name, _), one, other in pairs if one != other]:
            others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            where = f"({changed[0]}{others}) between step {self._step} and the next one, when nothing may write to it"
            remedy = "load the last checkpoint; look at that host's memory, and for code that changes weights between "
            values = {self.run.rank: f"changed: {', '.join(changed[:_SHOWN_NAMES])}"}
            error = disagreement(
                "state_at_rest", values, wrong=[self.run.rank], where=where, remedy=f"{remedy}two steps"
            )
            self.run.tell(error, parameter=changed[0])

    def _fingerprints(self) -> list[Tensor]:
        groups = itertools.groupby((tensor for _, tensor in self._held), key=lambda one: one.device)
        return [fingerprint_of_each(list(tensors)) for _, tensors in groups]


def _held(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of weights and optimizer state, between two steps."""
    module = trainer.lightning_module
    buffers = {
        f"weights/{_compat.state_dict_name(name)}" for name, _ in module.named_buffers()
    }  # a validation may write
    yield from ((one.name, one.tensor) for one in pieces_of_live(trainer.strategy) if one.name not in buffers)
    known = {id(parameter) for parameter in module.parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        if (inner := getattr(optimizer, "optimizer", None)) is not None:  # ZeRO keeps weights of its own
            # ZeRO-3 gives them to the optimizer for the length of a step only; their state stays.
            for number, one in enumerate(dict.fromkeys([*parameters_of(inner), *inner.state])):
                if id(one) not in known:
                    yield f"weights {number} of optimizer {index}", one
