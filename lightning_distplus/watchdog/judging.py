"""Who is to blame, by rule, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from lightning_distplus.process import HostLoad
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.flight_recorder import Collective, Mismatch, cycles, match
from lightning_distplus.watchdog.lonely_call import REMEDY, lonely_call
from lightning_distplus.watchdog.verdict import Verdict
from lightning_distplus.watchdog.wait_graph import Ends, follow

__all__ = ["judge"]


_ALONE = "look at the file and line; if the work is legitimate and only long, raise timeout=Timeouts(teardown=...)"


@dataclass(frozen=True, kw_only=True)
class _Opinion:
    """What a rule says of an incident."""

    culprits: list[int]
    cause: str
    remedy: str
    kind: str = "hang"
    is_decided: bool = True
    findings: list[str] = field(default_factory=list)
    mismatch: Mismatch | None = None
    cycles: list[list[int]] = field(default_factory=list)


def judge(evidence: Mapping[int, Evidence], incident: str, run_id: str = "") -> Verdict:
    """Finds who is to blame among the ranks that have not ended their run.

    In this order: processes that are gone; hosts that do not answer; stopped processes and those whose Python does not
    answer; ranks that do not wait for peers while others do. A rank with a call in flight waits, whatever its Python
    does. Where all of them wait: cycles of sends and receives, a call that only some ranks make, the first collective
    that differs, the ranks at the ends of all waiting, and at last those that wait elsewhere than most.
    """
    everybody = dict(sorted(evidence.items()))
    evidence = {rank: one for rank, one in everybody.items() if not one.ended}
    rules = (_ended, _gone, _unreachable, _stuck, _busy, _in_a_cycle, _in_a_lonely_call, _in_another_collective)
    opinion = next((found for rule in rules if (found := rule(evidence)) is not None), None) or _elsewhere(evidence)
    if len(evidence) < len(everybody) and not any(one.waits for one in evidence.values()) and opinion.kind == "hang":
        opinion = replace(opinion, cause=_alone(evidence, opinion.cause), remedy=_ALONE)
    culprits = sorted(opinion.culprits)
    first = evidence[culprits[0]]
    newest = max(evidence.values(), key=lambda one: one.global_step)  # they train in step
    known = newest if not first.answers and newest.global_step > first.global_step else first
    order = sorted(everybody, key=lambda rank: (rank not in culprits, rank))
    load = {one.host: one.load for one in everybody.values() if one.load}
    return Verdict(
        incident=incident,
        kind=opinion.kind,
        culprits=culprits,
        waiting=sorted(set(evidence) - set(culprits)),
        phase=known.phase,
        operation=first.operation,
        location=first.location,
        global_step=known.global_step,
        elapsed_s=first.silence_s,
        cause=opinion.cause,
        remedy=opinion.remedy,
        hosts={str(rank): one.host for rank, one in everybody.items()},
        pids={str(rank): one.pid for rank, one in everybody.items()},
        stacks={str(rank): one.stack for rank, one in everybody.items()},
        lines=[everybody[rank].describe() for rank in order],
        is_decided=opinion.is_decided,
        silent=[rank for rank, one in everybody.items() if not one.answers],
        findings=opinion.findings,
        locations={str(rank): one.location for rank, one in everybody.items()},
        collectives={str(rank): one.stands_in if one.waits else None for rank, one in everybody.items()},
        mismatch=None if opinion.mismatch is None else asdict(opinion.mismatch),
        cycles=opinion.cycles,
        load=load,
        run_id=run_id,
        load_of_culprit=HostLoad.from_plain(load[first.host]).describe() if first.host in load else "",
    )


def _ended(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    """C++ ends a process; gloo does so where a peer's message does not fit, which may hit the innocent side."""
    ended = [rank for rank, one in evidence.items() if one.was_ended_by]
    if not ended:
        return None
    found = _in_another_collective(evidence)
    what = evidence[ended[0]].was_ended_by
    if found is None:
        return _Opinion(
            kind="exception",
            culprits=ended,
            cause=f"an exception in C++ ({what}) that nobody catches ends the process",
            remedy="look at the last lines of its log",
        )
    return replace(found, kind="exception", cause=f"{found.cause}; gloo ends a process for it")


def _gone(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    gone = [rank for rank, one in evidence.items() if one.is_gone]
    if not gone:
        return None
    return _Opinion(
        kind="peer_lost",
        culprits=gone,
        cause="the process was killed (out of memory, a signal, the scheduler) and left no error",
        remedy="look at the last lines of its log and at dmesg on its host",
    )


def _unreachable(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    cut = [rank for rank, one in evidence.items() if one.is_unreachable]
    if not cut:
        return None
    hosts = sorted({evidence[rank].host for rank in cut})
    here = sorted({one.host for one in evidence.values() if one.answers})
    return _Opinion(
        kind="peer_lost",
        culprits=cut,
        cause=f"no packet comes back from host {', '.join(hosts)} to {', '.join(here)}: the link is cut, or it is down",
        remedy=f"look at the link and at the power of {', '.join(hosts)}, and at the switch between them",
    )


def _stuck(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    stuck = [rank for rank, one in evidence.items() if one.is_stopped or one.holds_lock]
    if not stuck:
        return None
    first = evidence[min(stuck)]
    if first.is_stopped:
        cause = "the process is stopped by a signal"
        remedy = f"find out who sent SIGSTOP; `kill -CONT {first.pid}` would wake it"
    else:
        cause = "a C call holds Python's global lock, so that no Python of this process runs"
        remedy = "look at the file and line; release the lock in the extension, or bound the call"
    return _Opinion(culprits=stuck, cause=cause, remedy=remedy)


def _busy(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    busy = [rank for rank, one in evidence.items() if one.answers and not one.waits and not one.is_recorded_only]
    if not busy:
        return None
    ends = _ends(evidence)
    others = set(ends.culprits if ends is not None and ends.is_decided else ()) - set(busy)
    one = evidence[min(busy)]
    if "dataloader" in one.operation:
        cause = "the data did not come"
        remedy = "look at the file and line, at storage, at the data workers; raise timeout=Timeouts(step=...) if slow"
    elif "file_baton.py" in one.stack:
        cause = "it waits for the lock of a compilation of torch extensions, which a killed process has left behind"
        remedy = "remove the file `lock` below $TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions)"
    else:
        cause = f"it stands in {one.operation!r} while its peers wait for it"
        remedy = "look at the file and line; if the work is legitimate and only long, raise this phase's deadline"
    found = [] if ends is None else [f"rank {rank} {ends.reasons[rank]}" for rank in sorted(others)]
    return _Opinion(culprits=sorted({*busy, *others}), cause=cause, remedy=remedy, findings=found)


def _alone(evidence: Mapping[int, Evidence], cause: str) -> str:
    """The cause where nobody waits: all others have ended their run, and these have not within their deadline."""
    one = next(iter(evidence.values()))
    where = f"stands in {one.operation!r}" if one.answers else cause
    return f"all other ranks have ended their run; this one has not within the deadline for that ({where})"


def _in_a_cycle(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    calls = {rank: one.collective for rank, one in evidence.items()}
    found = cycles(
        {
            rank: call.peer
            for rank, call in calls.items()
            if call is not None and call.peer is not None and not _is_answered(evidence, rank, call)
        }
    )
    if not found:
        return None
    return _Opinion(
        culprits=sorted(rank for cycle in found for rank in cycle),
        cause="ranks wait for each other in a cycle of sends and receives: each one's other half comes only later",
        remedy="let one rank of each cycle receive before it sends, or use dist.batch_isend_irecv",
        findings=[_draw(cycle, evidence) for cycle in found],
        cycles=found,
    )


def _is_answered(evidence: Mapping[int, Evidence], rank: int, call: Collective) -> bool:
    """Whether the other end of a send or receive is in flight, so that neither waits for the other to come."""
    peer = evidence.get(-1 if call.peer is None else call.peer)
    return peer is not None and any(one.peer == rank and one.op != call.op for one in peer.calls.unfinished)


def _draw(cycle: list[int], evidence: Mapping[int, Evidence]) -> str:
    stages = []
    for rank in cycle:
        call = evidence[rank].collective
        assert call is not None
        stages.append(f"rank {rank} ({call.op} at {evidence[rank].location}) -> ")
    return f"{''.join(stages)}rank {cycle[0]}"


def _in_a_lonely_call(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    found = lonely_call(evidence)
    if found is None:
        return None
    culprits, cause = found
    return _Opinion(culprits=culprits, cause=cause, remedy=REMEDY)


def _in_another_collective(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    found = match({rank: one.calls for rank, one in evidence.items() if one.answers})
    if found is None or found.kind == "count":
        ends = _ends(evidence)
        if ends is not None and (ends.is_decided or all(one.is_recorded_only for one in evidence.values())):
            return _at_the_ends(ends)
    if found is None:
        return None
    doubt = "" if found.is_decided else "; nothing tells which side is right"
    if found.kind == "count":
        cause = f"a collective was called on some ranks only{doubt}"
        remedy = "look at the file and line of each rank; code under `if rank == 0` must not synchronise"
    elif found.kind == "order":
        cause = f"the ranks call different collectives in the same place{doubt}"
        remedy = "look at the file and line of each rank: a branch, or a loop, goes another way on the ranks to blame"
    else:
        cause = f"the ranks call the same collective with another {found.kind}{doubt}"
        remedy = f"make the {found.kind} the same on all ranks (pad, cast, or gather the sizes first)"
    return _Opinion(
        culprits=found.culprits,
        cause=cause,
        remedy=remedy,
        is_decided=found.is_decided,
        findings=[found.describe()],
        mismatch=found,
    )


def _ends(evidence: Mapping[int, Evidence]) -> Ends | None:
    """Follows the calls in flight; a rank whose wait no recorder shows may wait for anybody."""
    records = {rank: one.calls for rank, one in evidence.items() if one.answers}
    unseen = {rank for rank, one in evidence.items() if one.answers and one.waits and not records[rank].unfinished}
    unseen |= {rank for rank, one in evidence.items() if not one.answers and not one.is_recorded_only}
    return follow(records, elsewhere=unseen)


def _at_the_ends(ends: Ends) -> _Opinion:
    told = [f"rank {rank} {ends.reasons[rank]}" for rank in ends.culprits]
    if not ends.is_decided:
        cause = "the ranks wait for each other, and nothing tells which of these is to blame"
    else:
        cause = told[0] if len(told) == 1 else "these ranks hold up all others, who wait for them or behind each other"
    return _Opinion(
        culprits=ends.culprits,
        is_decided=ends.is_decided,
        cause=cause,
        remedy="look at the last lines of their logs, at their stacks (py-spy dump --pid PID) and at dmesg there",
        findings=told if len(told) > 1 else [],
    )


def _elsewhere(evidence: Mapping[int, Evidence]) -> _Opinion:
    """The ranks that wait elsewhere than most; all of them where there is no majority."""
    places = {rank: (one.operation, one.location) for rank, one in evidence.items()}
    (common, count), *others = Counter(places.values()).most_common()
    is_decided = bool(others) and others[0][1] < count
    odd = [rank for rank, place in places.items() if place != common] if is_decided else sorted(places)
    return _Opinion(
        culprits=odd,
        is_decided=is_decided,
        cause="the ranks wait in different places: something was called on some ranks only, or in another order",
        remedy="compare the stacks in the file; code under `if rank == 0` must not synchronise",
    )
