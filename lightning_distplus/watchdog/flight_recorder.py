"""torch's Flight Recorder, and the sends and receives it does not see: of this process or of dumps, and across ranks.

``match`` compares the calls of all ranks; ``follow`` tells who waits for whom.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_distplus import _compat, env
from lightning_distplus.errors import DistplusError
from lightning_distplus.majority import odd_ranks
from lightning_distplus.world import name_ranks

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
    seq: int
    """Its number within the group; the n-th collective of one rank pairs with the n-th of the others."""
    op: str
    inputs: list[list[int]] = field(default_factory=list)
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
    """The last calls of one rank, oldest first, and the groups in which they ran."""

    calls: list[Collective] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Global ranks of each group, by name. Gloo does not tell them to the recorder; they are added here."""
    roles: dict[str, str] = field(default_factory=dict)
    """What each group is for, by name, as whoever made it has said: ``"mesh_tp"``."""

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
        return {**vars(self), "calls": [list(vars(call).values()) for call in self.calls], "groups": groups}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Recording:
        """Reads what ``to_plain`` wrote."""
        names = list(Collective.__dataclass_fields__)
        calls = [Collective(**dict(zip(names, call, strict=True))) for call in values.get("calls", [])]
        return cls(**{**values, "calls": calls})


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
    """
    batches: dict[tuple[str, bool, int], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        batches[_batch_of(entry)].append(entry)
    ended = {key for key, parts in batches.items() if any(_is_end_of_batch(one) and _is_done(one) for one in parts)}
    if not any(_is_done(entry) for entry in entries):
        ended = _ended_unseen(batches)
    return [
        _read(entry, groups, is_done=_is_done(entry) or _batch_of(entry) in ended)
        for entry in entries
        if not _is_end_of_batch(entry)
    ]


def _ended_unseen(batches: Mapping[tuple[str, bool, int], Sequence[Mapping[str, Any]]]) -> set[tuple[str, bool, int]]:
    """The batches that have ended, in a dump without what has ended.

    It holds their parts for ever, and their own entry only while they run. Those of one group end in order: what comes
    before one that runs or has ended has ended too. So has a send or receive alone, which may be a batch of its own, or
    what the ring has left of one; behind a batch that runs it has not.
    """
    by_kind: dict[tuple[str, bool], list[tuple[str, bool, int]]] = defaultdict(list)
    for key in batches:
        by_kind[key[:2]].append(key)
    ended: set[tuple[str, bool, int]] = set()
    for (_, is_p2p), keys in by_kind.items():
        running = [place for place, key in enumerate(keys) if any(map(_is_end_of_batch, batches[key]))]
        whole = [place for place, key in enumerate(keys) if place not in running and len(batches[key]) > 1]
        end = running[0] if running else max(whole, default=-1) + 1
        ended |= {key for key in keys[:end] if is_p2p or len(batches[key]) > 1}
    return ended


def _batch_of(entry: Mapping[str, Any]) -> tuple[str, bool, int]:
    """Its group, whether it is of sends and receives, and its number among those of the group."""
    op = entry["profiling_name"].partition(":")[2].partition(" ")[0]
    is_p2p = bool(entry.get("is_p2p", op in _P2P))
    return (entry["process_group"][0], is_p2p, entry["p2p_seq_id" if is_p2p else "collective_seq_id"])


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
        sides: dict[int, Any] = {rank: call.signature for rank, call in made.items()}
        if len(set(sides.values())) > 1:
            kind = _kind(made.values())
        elif len(made) < len(calls) and not all(call.is_done for call in made.values()):  # else some are only behind
            kind, sides = "count", {rank: rank in made for rank in calls}
        else:
            continue
        culprits, is_decided = _guilty(sides, made, recordings)
        return Mismatch(kind=kind, group=group, seq=seq, culprits=culprits, is_decided=is_decided, calls=calls)
    return None


def _kind(calls: Collection[Collective]) -> str:
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
    wrong, right = odd_ranks(sides)
    if right is not None:
        return wrong, True
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

    After the gradients of one step, a barrier that never followed them is what is new, and the next step's first
    collective is not.
    """
    collectives = [one for one in calls if one.peer is None]
    signs = [(one.group, one.signature) for one in collectives]
    place = next(index for index, one in enumerate(collectives) if one is call)
    found = [signs[index] for index in _earlier(signs, place)]
    return signs[place] in found if found else None


def _earlier(signs: Sequence[Any], place: int, *, least: int = 1) -> list[int]:
    """The places before this one that such calls led to; the longest way that came before decides."""
    for length in range(min(_LONGEST_CONTEXT, place), least - 1, -1):
        way = signs[place - length : place]
        if found := [index for index in range(length, place) if signs[index - length : index] == way]:
            return found
    return []


def p2p_call(frame: FrameType | None) -> Collective | None:
    """The blocking send or receive in which a thread stands, read from its frames: gloo does not record them.

    Args:
        frame: The innermost frame of the thread.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if name in _PEER and frame.f_code.co_filename.endswith(_HOME):
            return _read_frame(name, frame.f_locals)
        frame = frame.f_back
    return None


def waits_for_work(frame: FrameType | None) -> bool:
    """Whether the thread's innermost frame holds the handle of an asynchronous call that is not complete."""
    values = [] if frame is None else list(frame.f_locals.values())
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return any(isinstance(one, dist.Work) and not one.is_completed() for one in flat)


def cycles(waits_for: Mapping[int, int]) -> list[list[int]]:
    """The cycles of a graph in which each rank waits for at most one other, each from its lowest rank on."""
    found = []
    for knot in _knots({rank: [other] for rank, other in waits_for.items()}):
        cycle = [min(knot)]
        while len(cycle) < len(knot):
            cycle.append(waits_for[cycle[-1]])
        found.append(cycle)
    return sorted(found)


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


# -- the dumps that torch leaves behind: one file per rank -------------------------------------------------------------

_MAJOR = "2"
_RANK = re.compile(r"(\d+)(\.(json|pickle|pkl))?$")
_NEEDED = ("version", "pg_config", "entries")


class DumpError(DistplusError, ValueError):
    """A folder or file that holds no dumps of torch's Flight Recorder."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, strings and numbers; a name of a class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}; a dump holds plain values only")


def load_dumps(folder: Path) -> dict[int, dict[str, Any]]:
    """Loads every dump in a folder, by rank.

    Args:
        folder: Holds one file per rank, named as torch does: the rank comes last (``nccl_trace_rank_12``), with
            ``.json``, ``.pickle`` or nothing after it. Files without a number at the end are left alone.

    Raises:
        DumpError: The folder is none, holds no dump or two of one rank, or a file is not what torch writes.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DumpError(f"{folder} {what}; name the folder that holds one dump per rank")
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if (found := _RANK.search(path.name)) and path.is_file() and paths.setdefault(int(found[1]), path) != path:
            raise DumpError(
                f"{paths[int(found[1])].name} and {path.name} in {folder} are both of rank {int(found[1])}; "
                "name a folder with the dumps of one incident"
            )
    if not paths:
        raise DumpError(
            f"{folder} holds no dump of torch's Flight Recorder: no file name ends with a rank, as nccl_trace_rank_0 "
            "does. Torch writes them where TORCH_FR_DUMP_TEMP_FILE says, with TORCH_NCCL_DUMP_ON_TIMEOUT=1"
        )
    return {rank: _read_file(path) for rank, path in sorted(paths.items())}


def _read_file(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    dump: dict[str, Any]
    try:
        dump = json.loads(content) if content[:1] == b"{" else _PlainUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise DumpError(f"{path} is no dump of torch's Flight Recorder, or was cut short: {error}") from error
    missing = [name for name in _NEEDED if not isinstance(dump, dict) or name not in dump]
    if missing:
        raise DumpError(f"{path} is no dump of torch's Flight Recorder: it lacks {', '.join(missing)}")
    if str(dump["version"]).partition(".")[0] != _MAJOR:
        raise DumpError(f"{path} has version {dump['version']} of torch's format; this program reads {_MAJOR}.x")
    return dump


def read_recordings(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, Recording]:
    """The dumps as records whose groups have one name each on all ranks.

    Raises:
        DumpError: A dump has an entry that torch does not write.
    """
    rank = -1
    try:
        members: dict[int, dict[str, list[int]]] = {rank: {} for rank in dumps}
        sets: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for rank, dump in dumps.items():
            for name, values in dump["pg_config"].items():
                if ranks := sorted(ast.literal_eval(str(values["ranks"]))):  # gloo's groups tell none
                    members[rank][str(name)] = ranks
                    sets[str(name)].add(tuple(ranks))
        found = {}
        for rank, dump in dumps.items():
            # Groups that were split from one another may have one name and different ranks.
            names = {
                name: name if len(sets[name]) == 1 else f"{name} of ranks {','.join(map(str, ranks))}"
                for name, ranks in members[rank].items()
            }
            groups = {names[name]: ranks for name, ranks in members[rank].items()}
            entries = []
            for entry in dump["entries"]:
                name, desc = entry["process_group"]
                entries.append({**entry, "process_group": [names.get(name, name)]})
                # Gloo tells the ranks of no group; those of the default group are all.
                groups.setdefault(names.get(name, name), sorted(dumps) if desc == "default_pg" else [])
            found[rank] = Recording(
                calls=read_entries(entries, groups),
                groups=groups,
                roles={names[name]: str(dump["pg_config"][name].get("desc", "")) for name in names},
            )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise DumpError(f"the dump of rank {rank} has an entry that torch does not write: {error!r}") from error
    return found


# -- who waits for whom: the calls in flight of all ranks, followed across all groups to the ranks at their ends -------

# No rank ends one of these before every member has begun it.
_NEEDS_ALL = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_reduce", "all_to_all", "all_to_all_single",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "reduce_scatter",
)  # fmt: skip
_PLAIN_ROLES = ("", "undefined")
_AT_ONCE_NS = 200_000  # a processor that waits for nothing makes its next call within less
_ALIKE = 3  # times as long as its peers took may still be called the same
_SHORT_CONTEXT = 2  # how many say that it is the same kind of place
_MOST_MISSING = 4  # with more than one of so many ranks missing, nothing is certain


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The ranks for which the others wait, and that wait for nobody themselves."""

    reasons: dict[int, str]
    """Why each of them is at an end."""
    is_decided: bool

    @property
    def culprits(self) -> list[int]:
        """These ranks; where it is not decided, one of them at least is to blame."""
        return sorted(self.reasons)


def follow(recordings: Mapping[int, Recording], *, elsewhere: Collection[int] = ()) -> Ends | None:
    """Follows who waits for whom to its ends.

    A rank waits for every member of a group that has not come to a call which it has in flight; where all have come,
    its members wait for each other. A rank at an end is to blame: it waits for nobody. So is one whose call the others
    have ended, and one that has stopped short of a call to which its like went on with such calls in flight.

    Args:
        recordings: The record of each rank; a rank that a group names and that has none has left no dump.
        elsewhere: Ranks that are known to wait for peers where no recorder sees it.

    Returns:
        None where no rank has anything in flight: then nothing tells.
    """
    job = _Job(recordings, elsewhere)
    if not any(job.in_flight.values()):
        return None
    knots = list(_knots(job.edges(attended=True)))
    reasons = {**_at_ends(job, knots), **_halted(job)}
    doubtful: dict[int, str] = {}
    for rank in sorted(set(recordings) - set(reasons)):
        call, is_sure = _stopped_short(job, rank)
        if call is not None:
            (reasons if is_sure else doubtful)[rank] = (
                f"has not come to {call.describe()}, though such calls as it has in flight did not hold up ranks before"
            )
    idle = {rank for rank in job.ranks if not job.in_flight.get(rank)}
    loose = dict.fromkeys(
        idle - set(job.awaited) - job.elsewhere - set(reasons),
        "has nothing in flight, and nobody is seen to wait for it",
    )
    # So many dumps may be missing that the true cause is in one of them.
    is_patchy = bool(job.silent & set(reasons)) and len(job.silent) * _MOST_MISSING > len(job.ranks)
    if reasons and not loose and not doubtful and not is_patchy:
        return Ends(reasons=reasons, is_decided=True)
    if not reasons:  # of the last knots nobody can say who ties them
        reasons = {
            rank: f"waits in {job.in_flight[rank][0].describe()}"
            for knot in knots
            if len(knot) > 1
            for rank in knot
            if job.in_flight.get(rank)
        }
    reasons = {**doubtful, **loose, **reasons}
    return Ends(reasons=reasons, is_decided=False) if reasons else None


class _Job:
    """The records of all ranks, and the two kinds of waiting that they show."""

    def __init__(self, recordings: Mapping[int, Recording], elsewhere: Collection[int]) -> None:
        self.recordings = recordings
        self.members: dict[str, set[int]] = defaultdict(set)
        for rank, recording in recordings.items():
            for group, ranks in recording.groups.items():
                self.members[group] |= {rank, *ranks}
        self.ranks = sorted(set(recordings).union(*self.members.values()))
        self.silent = set(self.ranks) - set(recordings)
        self.elsewhere = set(elsewhere) & set(self.ranks)
        self.in_flight = {rank: recording.unfinished for rank, recording in recordings.items()}
        self.reached: dict[tuple[int, str], int] = defaultdict(int)
        """The number of the last collective to which a rank has come in a group."""
        self.ended: dict[tuple[int, str], int] = defaultdict(int)
        for rank, recording in recordings.items():
            for call in recording.calls:
                place = (rank, call.group)
                if call.peer is None:
                    self.reached[place] = max(self.reached[place], call.seq)
                    self.ended[place] = max(self.ended[place], call.seq if call.is_done else 0)
        self.absent = {rank: self._absent(rank) for rank in recordings}
        """For whom each rank waits, with the first call to which that one has not come."""
        self.awaited = {
            other: call for rank in sorted(recordings, reverse=True) for other, call in self.absent[rank].items()
        }
        """The ranks to whose call others have come, with that of the lowest rank."""
        self.ways = {
            rank: {call.peer - rank for call in one.calls if call.peer is not None} for rank, one in recordings.items()
        }
        """Where the sends and receives of each rank go; equal on ranks of the same stage."""
        self.signs = {rank: [_sign(rank, one, call) for call in one.calls] for rank, one in recordings.items()}
        """What each call is: the same at the same place of the program on two ranks that run it."""
        self.places = {
            rank: [(*sign, call.seq) for sign, call in zip(self.signs[rank], one.calls, strict=True)]
            for rank, one in recordings.items()
        }
        """The same with its number: the place itself."""

    def likes(self, rank: int) -> list[int]:
        """The other ranks of its stage, with a record."""
        return [one for one, ways in self.ways.items() if one != rank and self.signs[one] and ways == self.ways[rank]]

    def _absent(self, rank: int) -> dict[int, Collective]:
        found: dict[int, Collective] = {}
        for index, call in enumerate(self.in_flight[rank]):
            if call.peer is None:
                missing = {one for one in self.members[call.group] if self.reached[one, call.group] < call.seq}
            else:
                missing = set() if self._other_end_has_come(rank, call, is_first=index == 0) else {call.peer}
            for one in missing - {rank}:
                found.setdefault(one, call)
        return found

    def _other_end_has_come(self, rank: int, call: Collective, *, is_first: bool) -> bool:
        other = "recv" if call.op == "send" else "send"
        end = None if call.peer is None else self.recordings.get(call.peer)
        theirs = [one for one in end.calls if (one.peer, one.op, one.group) == (rank, other, call.group)] if end else []
        # A short message may have been sent, and its receiver's stream be busy with what came before.
        return any(not one.is_done for one in theirs) or (other == "send" and bool(theirs) and not is_first)

    def _attended(self, rank: int) -> set[int]:
        """With whom a rank stands in its oldest call in flight, to which all have come."""
        call = next(iter(self.in_flight[rank]), None)
        others = set() if call is None else self.members[call.group] if call.peer is None else {call.peer}
        return set() if others & set(self.absent[rank]) else others - {rank}

    def edges(self, *, attended: bool) -> dict[int, set[int]]:
        """Who waits for whom; ``attended`` takes in those that stand together in a call."""
        seen = {
            rank: set(absent) | (self._attended(rank) if attended else set()) for rank, absent in self.absent.items()
        }
        nobody: dict[int, set[int]] = {rank: set() for rank in self.silent}
        return {**seen, **nobody, **dict.fromkeys(self.elsewhere, set(self.ranks) - self.elsewhere)}


def _at_ends(job: _Job, knots: Iterable[set[int]]) -> dict[int, str]:
    """The ranks that wait for nobody while others wait for them, and why."""
    waits = job.edges(attended=False)
    found: dict[int, str] = {}
    for knot in knots:
        # Ranks that stand together in a call are told apart by the calls to which only some of them have come.
        inner = set().union(*(waits[rank] for rank in knot))
        ends = knot if len(knot) == 1 else {rank for rank in knot & inner if not waits[rank]}
        for rank in ends & set(job.awaited):
            call = job.awaited[rank].describe().partition(",")[0]
            if rank in job.silent:
                found[rank] = f"has left no dump, and others wait for it in {call}"
            elif not job.recordings[rank].calls:
                found[rank] = f"has an empty record, and others wait for it in {call}"
            else:
                idle = "" if job.in_flight[rank] else "; it has nothing in flight"
                found[rank] = f"has not come to {call}, in which others wait for it{idle}"
    return found


def _halted(job: _Job) -> dict[int, str]:
    """Ranks with a call in flight that others have ended: their own device or driver stands."""
    found: dict[int, str] = {}
    for rank, calls in job.in_flight.items():
        for call in calls:
            if call.peer is None and not call.is_gloo and call.op in _NEEDS_ALL and rank not in found:
                others = job.members[call.group] - {rank}
                if ended := sorted(one for one in others if job.ended[one, call.group] >= call.seq):
                    found[rank] = f"has {call.describe()} in flight, which {name_ranks(ended)} ended"
    return found


def _knots(edges: Mapping[int, Collection[int]]) -> Iterator[set[int]]:
    """The sets of ranks that reach each other and nobody else: the ends of all ways through the graph."""
    into: dict[int, list[int]] = defaultdict(list)
    for rank, others in edges.items():
        for other in others:
            into[other].append(rank)
    settled: set[int] = set()
    for rank in edges:
        if rank not in settled:
            ahead, behind = _reached_from(rank, edges), _reached_from(rank, into)
            settled |= {rank} | behind  # whoever leads to this rank is in its knot, or in none
            if ahead <= behind:
                yield {rank} | ahead


def _reached_from(start: int, edges: Mapping[int, Collection[int]]) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        fresh = set(edges.get(todo.pop(), ())) - found
        found |= fresh
        todo += fresh
    return found


# -- one that has stopped short ----------------------------------------------------------------------------------------


def _stopped_short(job: _Job, rank: int) -> tuple[Collective | None, bool]:
    """The call to which a rank has not come although the calls that it has in flight do not hold it up.

    Ranks run the same program: where its like went on from such calls while they were in flight, it would have gone on
    as well, unless it alone waits there, as one rank does that prints the loss. Its own earlier rounds tell: it used to
    go on at once from there, or not.

    Returns:
        The call, or None; and whether that is certain.
    """
    missed = _missed(job, rank) if job.in_flight[rank] else None
    if missed is None:
        return None, False
    is_alike = _has_gone_on_alike(job, rank)
    calls, is_passed = job.recordings[rank].calls, is_alike or _is_passed(job, rank)
    # Where its like has stopped too, ranks may be meant to wait.
    is_accompanied = any(job.places[one][-1] == job.places[rank][-1] for one in job.likes(rank))
    if is_accompanied and not is_alike:
        return (missed if is_passed else None), False
    gaps = _gaps(calls)
    # In a dump of active calls only, what stands side by side did not follow on each other.
    has_rounds = any(call.peer is None for call in calls if call.is_done)
    rounds = _earlier(job.signs[rank], len(calls), least=2) if has_rounds else []
    mine = [gap for place in rounds if (gap := gaps[place - 1]) is not None]
    spent = sorted(gap for gap in gaps if gap is not None)
    usual = spent[len(spent) // 4] if spent else 0  # at a quarter of its calls, at least, it does not wait
    at_once = _ALIKE * max(usual, _AT_ONCE_NS)
    if (mine and median(mine) > at_once) or not (mine or is_passed):
        return None, False
    goes_on = max(mine, default=0) <= at_once  # now and then it took longer: it may print every so often
    # A processor that is slow everywhere does not show where it waits.
    shows_waits = bool(mine) and usual <= _AT_ONCE_NS
    may_be_meant = is_accompanied or _may_be_meant_alone(job, rank)
    return missed, is_passed and goes_on and (shows_waits or not may_be_meant)


def _missed(job: _Job, rank: int) -> Collective | None:
    """The call that this rank would make next, by what others wait for."""
    for other in sorted(job.absent):
        if (call := job.absent[other].get(rank)) is not None:
            if call.peer is None:
                return replace(call, seq=job.reached[rank, call.group] + 1)
            return replace(call, op="recv" if call.op == "send" else "send", peer=other)
    return None


def _has_gone_on_alike(job: _Job, rank: int) -> bool:
    """Whether a rank of its stage has gone on from the same place of the program with the same calls in flight."""
    places, own = job.places[rank], _places_in_flight(job, rank)
    for other in job.likes(rank):
        theirs = job.places[other]
        end = theirs.index(places[-1]) + 1 if places[-1] in theirs[:-1] else 0
        length = min(_LONGEST_CONTEXT, len(places), end)
        if length and theirs[end - length : end] == places[-length:] and own <= _places_in_flight(job, other, end):
            return True
    return False


def _places_in_flight(job: _Job, rank: int, end: int | None = None) -> set[tuple[Any, ...]]:
    """Those of the calls that a rank has in flight, of all its calls or of the first so many."""
    calls = zip(job.places[rank], job.recordings[rank].calls, strict=True)
    return {place for place, call in islice(calls, end) if not call.is_done}


def _is_passed(job: _Job, rank: int) -> bool:
    """Whether a rank of its stage has gone on from such calls as its last ones, while they were in flight."""
    last = job.signs[rank][-_SHORT_CONTEXT:]
    for other in (rank, *job.likes(rank)):
        calls, signs = job.recordings[other].calls, job.signs[other]
        for end, gap in enumerate(_gaps(calls), 1):
            if gap is not None and not calls[end - 1].is_done and signs[max(end - len(last), 0) : end] == last:
                return True
    return False


def _sign(rank: int, recording: Recording, call: Collective) -> tuple[Any, ...]:
    role = recording.roles.get(call.group, "")
    place = role if role not in _PLAIN_ROLES else call.group
    return (place, call.op, None if call.peer is None else call.peer - rank, str(call.shapes))


def _may_be_meant_alone(job: _Job, rank: int) -> bool:
    """Whether a program may mean this rank: the first of a group, or the last of its stage."""
    p2p = {call.group for call in job.recordings[rank].calls if call.peer is not None}
    firsts = {min(job.members[group]) for group in job.recordings[rank].groups if group not in p2p}
    return rank in firsts or rank == max([rank, *job.likes(rank)])


def _gaps(calls: Sequence[Collective]) -> list[int | None]:
    """Nanoseconds from each call to the next one; None between parts of one batch."""
    return [
        None
        if None not in (one.peer, other.peer) and (one.group, one.seq) == (other.group, other.seq)
        else other.created_ns - one.created_ns
        for one, other in pairwise(calls)
    ]
