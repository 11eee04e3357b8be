"""torch's Flight Recorder and the sends and receives it does not see: recorded, and matched across ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_distplus import _compat, env
from lightning_distplus.world import name_ranks

__all__ = [
    "Collective",
    "Mismatch",
    "Recording",
    "arm",
    "cycles",
    "dump",
    "match",
    "p2p_call",
    "read_entries",
    "waits_for_work",
]

_ENTRIES = 2000  # torch's own default
_LONGEST_CONTEXT = 8  # how many collectives before a call say whether it was to be expected
_P2P = ("send", "recv")
_HOME = "torch/distributed/distributed_c10d.py"
# The arguments that name the other end: by its global rank, by its rank within the group.
_PEER = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}
# What may differ between ranks in a correct call: only the root gives or gets a list of tensors, or sizes are uneven.
_COMPARES_INPUTS_ONLY = ("gather", "reduce", "all_gather_v", "alltoall", "all_to_all", "all_to_all_single")
_COMPARES_OUTPUTS_ONLY = ("scatter", "reduce_scatter_v")
_UNEVEN = ("alltoall", "all_to_all", "all_to_all_single", "all_to_all_v_single")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call on one rank, as the recorder saw it."""

    group: str
    """The name of its process group."""
    seq: int
    """Its number within the group; the n-th collective of one rank pairs with the n-th of the others."""
    op: str
    """For example ``"all_reduce"``."""
    inputs: list[list[int]] = field(default_factory=list)
    """Shapes of the input tensors."""
    outputs: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    """Of the inputs, then of the outputs."""
    is_done: bool = False
    peer: int | None = None
    """The global rank at the other end of a send or a receive."""
    created_ns: int = 0
    """When this rank made it, by the clock of its host."""
    is_gloo: bool = False

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes that all ranks must give alike."""
        if self.op in _UNEVEN:
            return []
        if self.op in _COMPARES_INPUTS_ONLY:
            return self.inputs
        return self.outputs if self.op in _COMPARES_OUTPUTS_ONLY else [*self.inputs, *self.outputs]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal on all ranks of the group for the same number."""
        return (self.op, tuple(map(tuple, self.shapes)), tuple(sorted(set(self.dtypes))))

    def describe(self) -> str:
        """The call in a few words, for example ``all_reduce #5 on group 0, [4] Float``."""
        if self.peer is not None:
            direction = "to" if self.op == "send" else "from"
            name = f"{self.op} {direction} rank {self.peer} on group {self.group}"
        else:
            name = f"{self.op} #{self.seq} on group {self.group}"
        shapes = "".join(str(shape) for shape in (self.inputs or self.outputs)[:4])
        dtypes = "/".join(sorted(set(self.dtypes)))
        return f"{name}, {shapes} {dtypes}" if shapes else name


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The last collectives of one rank, oldest first, and the groups in which they ran."""

    calls: list[Collective] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Global ranks of each group, by name. Gloo does not tell them to the recorder; they are added here."""
    roles: dict[str, str] = field(default_factory=dict)
    """What each group is for, by name, as whoever made it has said: ``"mesh_tp"``."""
    enqueued: dict[str, int] = field(default_factory=dict)
    """The number of the last collective in each group, where the dump leaves out what has ended."""
    completed: dict[str, int] = field(default_factory=dict)
    """The number of the last call in each group that has ended."""

    @property
    def unfinished(self) -> list[Collective]:
        """The calls that have begun and not ended."""
        return [call for call in self.calls if not call.is_done]

    def last(self, count: int) -> Recording:
        """The same with the newest calls only, and with every unfinished one."""
        start = len(self.calls) - count
        kept = [call for index, call in enumerate(self.calls) if index >= start or not call.is_done]
        return replace(self, calls=kept)

    def to_plain(self, *, with_members: bool = True) -> dict[str, Any]:
        """As JSON takes it; calls are written as lists, because there are many.

        Args:
            with_members: Whether to write the ranks of each group. A comparison needs its name only, and a large job
                has as many lists of all ranks as it has ranks.
        """
        groups = {name: ranks if with_members else [] for name, ranks in self.groups.items()}
        calls = [list(vars(call).values()) for call in self.calls]
        rest = {"roles": self.roles, "enqueued": self.enqueued, "completed": self.completed}
        return {"calls": calls, "groups": groups, **rest}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Recording:
        """Reads what ``to_plain`` wrote."""
        names = list(Collective.__dataclass_fields__)
        calls = [Collective(**dict(zip(names, call, strict=True))) for call in values.get("calls", [])]
        rest = {name: values.get(name, {}) for name in ("groups", "roles", "enqueued", "completed")}
        return cls(calls=calls, **rest)


def arm() -> bool:
    """Turns the recorder on before the first collective, without leaving a variable in the environment.

    It reads its size once, when it is first used: here. A size that the user has set stays, also 0.

    Returns:
        Whether it records.
    """
    given = env.TORCH_FR_BUFFER_SIZE.get() or env.TORCH_NCCL_TRACE_BUFFER_SIZE.get()
    if given is not None:
        _compat.flight_recorder_dumps(with_collectives=False)
        return given != "0"
    with env.changed(TORCH_FR_BUFFER_SIZE=_ENTRIES):
        return bool(_compat.flight_recorder_dumps(with_collectives=False))


def dump() -> Recording:
    """What this process has called, gloo and NCCL; from any thread, also while another one stands in a collective."""
    groups, roles = {}, {}
    for group in _compat.process_groups():
        name = str(group.group_name)
        groups[name], roles[name] = dist.get_process_group_ranks(group), str(getattr(group, "group_desc", ""))
    dumps = _compat.flight_recorder_dumps(with_collectives=True)
    calls = [call for dump in dumps for call in read_entries(dump.get("entries", []), groups)]
    return Recording(calls=sorted(calls, key=lambda call: call.created_ns), groups=groups, roles=roles)


def read_entries(entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]]) -> list[Collective]:
    """The calls in a dump of torch's recorder, in the order in which they were made.

    NCCL launches coalesced calls as one kernel: its entry follows theirs, and it alone knows whether they have ended.
    A dump without what has ended holds the parts of a batch for ever, and the entry of the batch only while it runs.
    """
    batches: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        batches[_batch_of(entry)].append(entry)
    batched = {_batch_of(entry)[:2] for entry in entries if _is_end_of_batch(entry)}
    leaves_out_what_ended = not any(_is_done(entry) for entry in entries)
    calls = []
    for entry in entries:
        if _is_end_of_batch(entry):
            continue
        batch = batches[_batch_of(entry)]
        ends = [one for one in batch if _is_end_of_batch(one)]
        is_done = _is_done(entry) or any(_is_done(end) for end in ends)
        if not ends and leaves_out_what_ended and (len(batch) > 1 or _batch_of(entry)[:2] in batched):
            is_done = True
        calls.append(_read(entry, groups, is_done=is_done))
    return calls


def _batch_of(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    is_p2p = _is_p2p(entry)
    return (entry["process_group"][0], is_p2p, entry["p2p_seq_id" if is_p2p else "collective_seq_id"])


def _is_p2p(entry: Mapping[str, Any]) -> bool:
    op = entry["profiling_name"].partition(":")[2].partition(" ")[0]
    return bool(entry.get("is_p2p", op in _P2P))


def _is_end_of_batch(entry: Mapping[str, Any]) -> bool:
    return bool(entry["profiling_name"].endswith("coalesced")) and not entry["input_sizes"]


def _is_done(entry: Mapping[str, Any]) -> bool:
    """Gloo leaves the state at "scheduled"; what NCCL has retired without an end has timed out."""
    if entry["state"] == "completed":
        return True
    return bool(entry["retired"]) and entry["profiling_name"].startswith("gloo:")


def _read(entry: Mapping[str, Any], groups: Mapping[str, Sequence[int]], *, is_done: bool) -> Collective:
    """An entry of a dump; ``nccl:recv 0<-1`` names ranks within its group, the receiver first."""
    group = entry["process_group"][0]
    op, _, ends = entry["profiling_name"].partition(":")[2].partition(" ")
    peer = None
    if op in _P2P and ends:
        within = int(ends.replace("<-", "->").split("->")[1])
        peer = groups[group][within] if within < len(groups.get(group, [])) else within
    return Collective(
        group=group,
        seq=entry["p2p_seq_id"] if peer is not None else entry["collective_seq_id"],
        op=op,
        inputs=entry["input_sizes"],
        outputs=entry["output_sizes"],
        dtypes=[*entry["input_dtypes"], *entry["output_dtypes"]],
        is_done=is_done,
        peer=peer,
        created_ns=int(entry.get("time_created_ns", 0)),
        is_gloo=entry["profiling_name"].startswith("gloo:"),
    )


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first place where the ranks of a group do not do the same."""

    kind: str
    """``"order"``, ``"shape"``, ``"dtype"``, or ``"count"``: some ranks never made the call."""
    group: str
    seq: int
    culprits: list[int]
    """Those that left the common sequence; both sides where nobody can tell."""
    is_decided: bool
    """Whether the culprits stand out: by majority, or because only their call differs from what they did before."""
    calls: dict[int, Collective | None]
    """What each rank of the group has as this call; None: nothing."""

    def describe(self) -> str:
        """One sentence, the culprits' side first."""
        sides: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(self.calls, key=lambda rank: (rank not in self.culprits, rank)):
            call = self.calls[rank]
            sides["made no such call" if call is None else call.describe()].append(rank)
        text = "; ".join(f"{name_ranks(ranks)}: {call}" for call, ranks in sides.items())
        return f"collective #{self.seq} on group {self.group} differs in {self.kind}: {text}"


def match(recordings: Mapping[int, Recording]) -> Mismatch | None:
    """Compares the ranks' recordings; None where they agree, or where the recorder is off.

    Calls of one group pair by their number. Who differs from most ranks is to blame; where no majority decides (two
    ranks), who does something that did not follow these calls before.
    """
    members: dict[str, dict[int, list[Collective]]] = defaultdict(dict)
    for rank, recording in recordings.items():
        for group in recording.groups:
            members[group][rank] = [call for call in recording.calls if call.group == group and call.peer is None]
    found = [_first_difference(group, ranks, recordings) for group, ranks in sorted(members.items()) if len(ranks) > 1]
    mismatches = [mismatch for mismatch in found if mismatch is not None]
    # A call that differs explains ranks that never came to another one; a decided one explains an undecided one.
    return min(mismatches, key=lambda one: (one.kind == "count", not one.is_decided), default=None)


def _first_difference(
    group: str, ranks: Mapping[int, Sequence[Collective]], recordings: Mapping[int, Recording]
) -> Mismatch | None:
    by_number = {rank: {call.seq: call for call in calls} for rank, calls in ranks.items()}
    begins = max((min(calls, default=0) for calls in by_number.values()), default=0)
    for seq in sorted({seq for calls in by_number.values() for seq in calls if seq >= begins}):
        calls = {rank: of_rank.get(seq) for rank, of_rank in by_number.items()}
        made = {rank: call for rank, call in calls.items() if call is not None}
        if len({call.signature for call in made.values()}) > 1:
            culprits, is_decided = _guilty({rank: call.signature for rank, call in made.items()}, made, recordings)
            return Mismatch(
                kind=_kind(list(made.values())),
                group=group,
                seq=seq,
                culprits=culprits,
                is_decided=is_decided,
                calls=calls,
            )
        if len(made) < len(calls):
            if all(call.is_done for call in made.values()):  # the others are only behind
                continue
            culprits, is_decided = _guilty({rank: rank in made for rank in calls}, made, recordings)
            return Mismatch(kind="count", group=group, seq=seq, culprits=culprits, is_decided=is_decided, calls=calls)
    return None


def _kind(calls: Sequence[Collective]) -> str:
    if len({call.op for call in calls}) > 1:
        return "order"
    return "shape" if len({str(call.shapes) for call in calls}) > 1 else "dtype"


def _guilty(
    sides: Mapping[int, Any], made: Mapping[int, Collective], recordings: Mapping[int, Recording]
) -> tuple[list[int], bool]:
    """The ranks to blame, and whether that is certain.

    Args:
        sides: What each rank did; equal values did the same.
        made: The call of each rank that made one.
        recordings: What the ranks did before.
    """
    (common, count), *others = Counter(sides.values()).most_common()
    if not others or others[0][1] < count:
        return sorted(rank for rank, side in sides.items() if side != common), True
    expected = {rank: _was_expected(call, recordings[rank].calls) for rank, call in made.items()}
    odd = {sides[rank] for rank, was in expected.items() if was is False}
    usual = {sides[rank] for rank, was in expected.items() if was}
    if odd and not odd & usual and odd != set(sides.values()):
        return sorted(rank for rank, side in sides.items() if side in odd), True
    if usual and not odd and len(usual) == 1 and set(sides.values()) - usual:
        return sorted(rank for rank, side in sides.items() if side not in usual), True
    return sorted(sides), False


def _was_expected(call: Collective, calls: Sequence[Collective]) -> bool | None:
    """Whether this rank has made such a call after such calls before; None: nothing like it came before.

    The longest context that came before decides: after the gradients of one step, a barrier that never followed them is
    what is new, and the next step's first collective is not.
    """
    past = [(one.group, one.signature) for one in calls if one.peer is None]
    place = next(index for index, one in enumerate(calls) if one is call)
    place -= sum(one.peer is not None for one in calls[:place])
    now = past[place]
    for length in range(min(_LONGEST_CONTEXT, place), 0, -1):
        context = past[place - length : place]
        followers = [past[index] for index in range(length, place) if past[index - length : index] == context]
        if followers:
            return now in followers
    return None


def p2p_call(frame: FrameType | None) -> Collective | None:
    """The blocking send or receive in which a thread stands, read from its frames: gloo does not record them.

    Args:
        frame: The innermost frame of the thread.
    """
    for one in _outwards(frame):
        name = one.f_code.co_name
        if name in _PEER and one.f_code.co_filename.endswith(_HOME):
            return _read_frame(name, one.f_locals)
    return None


def waits_for_work(frame: FrameType | None) -> bool:
    """Whether the thread's innermost frame holds the handle of an asynchronous call that is not complete."""
    values = [] if frame is None else list(frame.f_locals.values())
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return any(isinstance(one, dist.Work) and not one.is_completed() for one in flat)


def cycles(waits_for: Mapping[int, int]) -> list[list[int]]:
    """The cycles of a graph in which each rank waits for at most one other, each from its lowest rank on."""
    found: list[list[int]] = []
    seen: set[int] = set()
    for start in sorted(waits_for):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for.get(rank)
        if rank in path:
            cycle = path[path.index(rank) :]
            first = cycle.index(min(cycle))
            found.append(cycle[first:] + cycle[:first])
    return found


def _read_frame(op: str, known: Mapping[str, Any]) -> Collective | None:
    tensor, group = known.get("tensor"), known.get("group") or dist.group.WORLD
    if not isinstance(tensor, torch.Tensor) or group is None:
        return None
    peer, within = (known.get(name) for name in _PEER[op])
    if peer is None and within is not None:
        peer = dist.get_global_rank(group, within)
    if peer is None:  # a receive from anybody
        return None
    return Collective(
        group=str(group.group_name),
        seq=0,
        op=op,
        inputs=[list(tensor.shape)],
        dtypes=[str(tensor.dtype).removeprefix("torch.")],
        peer=peer,
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
