"""Who waits for whom: the calls in flight of all ranks, followed across all groups to the ranks at their ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from lightning_distplus.watchdog.flight_recorder import Collective, Recording
from lightning_distplus.world import name_ranks

__all__ = ["Ends", "follow"]

# No rank ends one of these before every member has begun it.
_NEEDS_ALL = (
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "reduce_scatter",
)
_CONTEXT = 8  # how many calls before a place say that it is the same place of the program
_PLAIN_ROLES = ("", "undefined")
_AT_ONCE_NS = 200_000  # a processor that waits for nothing makes its next call within less
_ALIKE = 3  # times as long as its peers took may still be called the same
_SHORT_CONTEXT = 2  # how many say that it is the same kind of place
_MOST_MISSING = 4  # with more than one of so many ranks missing, nothing is certain


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The ranks for which the others wait, and that wait for nobody themselves."""

    culprits: list[int]
    is_decided: bool
    reasons: dict[int, str] = field(default_factory=dict)
    """Why, by rank."""


def follow(recordings: Mapping[int, Recording], *, elsewhere: Collection[int] = ()) -> Ends | None:
    """Follows who waits for whom to its ends.

    A rank waits for every member of a group that has not come to a call which it has in flight; where all have come,
    its members wait for each other. A rank at an end is to blame: it waits for nobody. So is one whose call the others
    have ended, and one that has stopped short of a call to which its like went on with the same calls in flight.

    Args:
        recordings: The record of each rank; a rank that a group names and that has none has left no dump.
        elsewhere: Ranks that are known to wait for peers where no recorder sees it.

    Returns:
        None where no rank has anything in flight: then nothing tells.
    """
    job = _Job(recordings, elsewhere)
    if not any(job.in_flight.values()):
        return None
    reasons = {**_ends_of(job), **job.halted()}
    doubtful: dict[int, str] = {}
    for rank in sorted(set(job.in_flight) - set(reasons)):
        call, is_sure = _stopped_short(job, rank)
        if call is not None:
            why = (
                f"has not come to {call.describe()}, though such calls as it has in flight did not hold up ranks before"
            )
            (reasons if is_sure else doubtful)[rank] = why
    loose = dict.fromkeys(job.loose() - set(reasons), "has nothing in flight, and nobody is seen to wait for it")
    is_sure = bool(reasons) and not loose and not doubtful and not job.is_patchy(reasons)
    if is_sure:
        return Ends(culprits=sorted(reasons), is_decided=True, reasons=reasons)
    reasons = {**doubtful, **loose, **reasons, **({} if reasons else _knot(job))}
    if not reasons:
        return None
    return Ends(culprits=sorted(reasons), is_decided=False, reasons=reasons)


class _Job:
    """The records of all ranks, and the two kinds of waiting that they show."""

    def __init__(self, recordings: Mapping[int, Recording], elsewhere: Collection[int]) -> None:
        self.recordings = recordings
        self.elsewhere = set(elsewhere)
        self.members: dict[str, set[int]] = defaultdict(set)
        for rank, recording in recordings.items():
            for group, ranks in recording.groups.items():
                self.members[group] |= {rank, *ranks}
        self.ranks = sorted(set(recordings).union(*self.members.values()))
        self.silent = set(self.ranks) - set(recordings)
        self.in_flight = {rank: recording.unfinished for rank, recording in recordings.items()}
        self.reached: dict[tuple[int, str], int] = {}
        self.ended: dict[tuple[int, str], int] = {}
        self._read_numbers()
        self.ways = {rank: _ways(rank, recording) for rank, recording in recordings.items()}
        self.keys = {
            rank: [_key(rank, recording, call) for call in recording.calls] for rank, recording in recordings.items()
        }
        """The place of each call in the program."""
        self.absent = {rank: self._absent(rank) for rank in recordings}
        """For whom each rank waits, with the first call to which that one has not come."""
        self.attended = {rank: self._attended(rank) for rank in recordings}
        """With whom each rank stands in its oldest call in flight, to which all have come."""

    def _read_numbers(self) -> None:
        p2p = {
            call.group for recording in self.recordings.values() for call in recording.calls if call.peer is not None
        }
        for rank, recording in self.recordings.items():
            for call in recording.calls:
                if call.peer is None:
                    place = (rank, call.group)
                    self.reached[place] = max(self.reached.get(place, 0), call.seq)
                    if call.is_done:
                        self.ended[place] = max(self.ended.get(place, 0), call.seq)
        highest = {
            group: max(self.reached.get((rank, group), 0) for rank in self.members[group]) for group in self.members
        }
        for rank, recording in self.recordings.items():
            for group, number in recording.enqueued.items():
                # Torch counts sends and receives in the same place, so that the number may be one of theirs.
                if group not in p2p and number <= highest.get(group, 0):
                    self.reached[rank, group] = max(self.reached.get((rank, group), 0), number)
            for group, number in recording.completed.items():
                if group not in p2p:
                    self.ended[rank, group] = max(self.ended.get((rank, group), 0), number)

    def _absent(self, rank: int) -> dict[int, Collective]:
        found: dict[int, Collective] = {}
        for index, call in enumerate(self.in_flight[rank]):
            if call.peer is not None:
                if not self._other_end_has_come(rank, call, is_first=index == 0):
                    found.setdefault(call.peer, call)
                continue
            for member in self.members[call.group] - {rank}:
                if self.reached.get((member, call.group), 0) < call.seq:
                    found.setdefault(member, call)
        found.pop(rank, None)
        return found

    def _other_end_has_come(self, rank: int, call: Collective, *, is_first: bool) -> bool:
        assert call.peer is not None
        if call.peer in self.silent:
            return False
        other = "recv" if call.op == "send" else "send"
        theirs = [
            one
            for one in self.recordings[call.peer].calls
            if one.peer == rank and one.op == other and one.group == call.group
        ]
        if any(not one.is_done for one in theirs):
            return True
        # A short message may have been sent, and its receiver's stream be busy with what came before.
        return other == "send" and bool(theirs) and not is_first

    def _attended(self, rank: int) -> set[int]:
        call = next(iter(self.in_flight[rank]), None)
        if call is None:
            return set()
        if call.peer is not None:
            return {call.peer} if call.peer not in self.absent[rank] else set()
        members = self.members[call.group] - {rank}
        return members if not members & set(self.absent[rank]) else set()

    def edges(self, *, attended: bool) -> dict[int, set[int]]:
        """Who waits for whom; ``attended`` takes in those that stand together in a call."""
        rest = set(self.ranks) - self.elsewhere
        return {
            rank: (
                rest
                if rank in self.elsewhere
                else set(self.absent.get(rank, ())) | (self.attended.get(rank, set()) if attended else set())
            )
            for rank in self.ranks
        }

    def awaited(self) -> dict[int, Collective]:
        """The ranks to whose call others have come, with that call."""
        found: dict[int, Collective] = {}
        for rank in sorted(self.absent):
            for other, call in self.absent[rank].items():
                found.setdefault(other, call)
        return found

    def loose(self) -> set[int]:
        """Ranks with nothing in flight, or without a dump, for whom nobody is seen to wait."""
        idle = {rank for rank, calls in self.in_flight.items() if not calls} | self.silent
        return idle - set(self.awaited()) - self.elsewhere

    def is_patchy(self, culprits: Collection[int]) -> bool:
        """Whether so many dumps are missing that the true cause may be in one of them."""
        return bool(self.silent & set(culprits)) and len(self.silent) * _MOST_MISSING > len(self.ranks)

    def halted(self) -> dict[int, str]:
        """Ranks with a call in flight that others have ended: their own device or driver stands."""
        found: dict[int, str] = {}
        for rank, calls in self.in_flight.items():
            for call in calls:
                if call.peer is not None or call.is_gloo or call.op not in _NEEDS_ALL:
                    continue
                ended = [
                    one for one in self.members[call.group] - {rank} if self.ended.get((one, call.group), 0) >= call.seq
                ]
                if ended:
                    found[rank] = f"has {call.describe()} in flight, which {name_ranks(sorted(ended))} ended"
                    break
        return found


def _ends_of(job: _Job) -> dict[int, str]:
    """The ranks that wait for nobody while others wait for them, and why."""
    awaited = job.awaited()
    found: dict[int, str] = {}
    for knot in _knots(job.edges(attended=True)):
        # Ranks that stand together in a call are told apart by the calls to which only some of them have come.
        waits = job.edges(attended=False)
        inner = {other for rank in knot for other in waits[rank] if other in knot}
        ends = knot if len(knot) == 1 else {rank for rank in knot if not waits[rank] and rank in inner}
        for rank in ends & set(awaited):
            found[rank] = _describe(job, rank, awaited[rank])
    return found


def _describe(job: _Job, rank: int, call: Collective) -> str:
    name = call.describe().partition(",")[0]
    if rank in job.silent:
        return f"has left no dump, and others wait for it in {name}"
    if not job.recordings[rank].calls:
        return f"has an empty record, and others wait for it in {name}"
    in_flight = "; it has nothing in flight" if not job.in_flight[rank] else ""
    return f"has not come to {name}, in which others wait for it{in_flight}"


def _knot(job: _Job) -> dict[int, str]:
    """The ranks of the last knots, of which nobody can say who ties them."""
    return {
        rank: f"waits in {job.in_flight[rank][0].describe()}"
        for knot in _knots(job.edges(attended=True))
        if len(knot) > 1
        for rank in knot
        if job.in_flight.get(rank)
    }


def _knots(edges: Mapping[int, Collection[int]]) -> Iterator[set[int]]:
    """The sets of ranks that reach each other and nobody else: the ends of all ways through the graph."""
    reach = {rank: _reached_from(rank, edges) for rank in edges}
    seen: set[int] = set()
    for rank in edges:
        if rank not in seen and all(rank in reach[other] for other in reach[rank]):
            knot = {rank} | {other for other in reach[rank] if rank in reach[other]}
            seen |= knot
            yield knot


def _reached_from(start: int, edges: Mapping[int, Collection[int]]) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        for other in edges[todo.pop()]:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


# -- one that has stopped short --------------------------------------------------------------------------------------


def _stopped_short(job: _Job, rank: int) -> tuple[Collective | None, bool]:
    """The call to which a rank has not come although the calls that it has in flight do not hold it up.

    Ranks run the same program: where its like went on from the same place with the same calls in flight, or from such a
    place with such calls, it would have gone on as well, unless it alone waits there, as one rank does that prints the
    loss. Its own earlier rounds tell: it used to go on at once from there, or not.

    Returns:
        The call, or None; and whether that is certain.
    """
    calls = _missed(job, rank) if job.in_flight[rank] else []
    if not calls:
        return None, False
    recording = job.recordings[rank]
    is_passed = _went_on_alike(job, rank)
    if not is_passed:
        if _stops_with_its_like(job, rank):
            return None, False
        is_passed = _is_passed(job, rank)
    mine, usual = _gaps(recording, len(recording.calls) - 1), _usual(recording)
    at_once = _ALIKE * max(usual, _AT_ONCE_NS)
    if (mine and median(mine) > at_once) or not (mine or is_passed):
        return None, False
    goes_on = max(mine, default=0) <= at_once  # now and then it took longer: it may print every so often
    # A processor that is slow everywhere does not show where it waits.
    shows_waits = bool(mine) and usual <= _AT_ONCE_NS
    return calls[0], is_passed and goes_on and (shows_waits or not _may_be_meant_alone(job, rank))


def _missed(job: _Job, rank: int) -> list[Collective]:
    """The calls that this rank would make next, by what others wait for."""
    found = []
    for other in sorted(job.absent):
        call = job.absent[other].get(rank)
        if call is None:
            continue
        if call.peer is None:
            found.append(replace(call, seq=job.reached.get((rank, call.group), 0) + 1))
        else:
            found.append(replace(call, op="recv" if call.op == "send" else "send", peer=other))
    return found


def _went_on_alike(job: _Job, rank: int) -> bool:
    """Whether its like has gone on from the same place of the program with the same calls in flight."""
    keys = job.keys[rank]
    own = {key for key, call in zip(keys, job.recordings[rank].calls, strict=True) if not call.is_done}
    for other in _likes(job, rank):
        calls, theirs = job.recordings[other].calls, job.keys[other]
        end = theirs.index(keys[-1]) + 1 if keys[-1] in theirs[:-1] else 0
        length = min(_CONTEXT, len(keys), end)
        is_there = length and theirs[end - length : end] == keys[-length:]
        if is_there and own <= {key for key, call in zip(theirs[:end], calls, strict=False) if not call.is_done}:
            return True
    return False


def _stops_with_its_like(job: _Job, rank: int) -> bool:
    """Whether another rank has stopped at the same place of the program: then it may be a place where ranks wait."""
    return any(job.keys[other][-1] == job.keys[rank][-1] for other in _likes(job, rank))


def _is_passed(job: _Job, rank: int) -> bool:
    """Whether a rank of its stage has gone on from such calls as its last ones, while they were in flight."""
    last = _signs(job, rank)[-_SHORT_CONTEXT:]
    for other in [rank, *_likes(job, rank)]:
        calls, signs = job.recordings[other].calls, _signs(job, other)
        for i in range(_SHORT_CONTEXT - 1, len(calls) - 1):
            if not calls[i].is_done and signs[i - _SHORT_CONTEXT + 1 : i + 1] == last and not _are_one(calls, i):
                return True
    return False


def _likes(job: _Job, rank: int) -> list[int]:
    """The other ranks of its stage, with a record."""
    return [one for one, ways in job.ways.items() if one != rank and job.keys[one] and ways == job.ways[rank]]


def _ways(rank: int, recording: Recording) -> set[int]:
    """Where its sends and receives go; equal on ranks of the same stage."""
    return {call.peer - rank for call in recording.calls if call.peer is not None}


def _key(rank: int, recording: Recording, call: Collective) -> tuple[Any, ...]:
    """The same for calls that stand at the same place of the program on two ranks that run it."""
    role = recording.roles.get(call.group, "")
    place = role if role not in _PLAIN_ROLES else call.group
    return (place, call.op, call.seq, None if call.peer is None else call.peer - rank)


def _signs(job: _Job, rank: int) -> list[tuple[Any, ...]]:
    """What each call is, without its number."""
    pairs = zip(job.keys[rank], job.recordings[rank].calls, strict=True)
    return [(place, op, way, str(call.shapes)) for (place, op, _, way), call in pairs]


def _may_be_meant_alone(job: _Job, rank: int) -> bool:
    """Whether a program may mean this rank: the first of a group, or the last of its stage."""
    p2p = {call.group for call in job.recordings[rank].calls if call.peer is not None}
    firsts = {min(job.members[group]) for group in job.recordings[rank].groups if group not in p2p}
    return rank in firsts or rank == max([rank, *_likes(job, rank)])


def _usual(recording: Recording) -> int:
    """How long the rank takes from one call to the next where it does not wait: at a quarter of its calls, at least."""
    gaps = sorted(_gap(recording.calls, i) for i in range(len(recording.calls) - 1) if not _are_one(recording.calls, i))
    return gaps[len(gaps) // 4] if gaps else 0


def _gaps(recording: Recording, place: int) -> list[int]:
    """How long the rank took, in earlier rounds, from such a call after such calls to its next one."""
    if all(call.peer is not None for call in recording.calls if call.is_done):
        return []  # a dump of active calls only: what stands side by side there did not follow on each other
    signs = [(call.group, call.op, call.peer, str(call.shapes)) for call in recording.calls]
    for length in range(min(_CONTEXT, place), 0, -1):
        context = signs[place - length : place + 1]
        found = [
            i for i in range(length, place) if signs[i - length : i + 1] == context and not _are_one(recording.calls, i)
        ]
        if found:
            return [_gap(recording.calls, i) for i in found]
    return []


def _are_one(calls: Sequence[Collective], index: int) -> bool:
    """Whether a call and the next one are parts of one batch."""
    one, other = calls[index], calls[index + 1]
    return None not in (one.peer, other.peer) and (one.group, one.seq) == (other.group, other.seq)


def _gap(calls: Sequence[Collective], index: int) -> int:
    return calls[index + 1].created_ns - calls[index].created_ns
