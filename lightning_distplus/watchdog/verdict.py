"""The verdict on an incident: who is to blame, by rule, as a file and as text for people."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_distplus import errors
from lightning_distplus.control.collective_check import sides
from lightning_distplus.control.first_error import FirstError
from lightning_distplus.control.plane import Peer
from lightning_distplus.control.secret import words_of
from lightning_distplus.events import ckpt_path_for, ledger_files, read_ledger
from lightning_distplus.majority import odd_ranks
from lightning_distplus.process import HostLoad, ProcessState, running_time
from lightning_distplus.timeouts import Phase
from lightning_distplus.watchdog import flight_recorder
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.flight_recorder import Collective, Ends, Mismatch, Recording
from lightning_distplus.watchdog.heartbeat import Sighting
from lightning_distplus.watchdog.progress import Marks
from lightning_distplus.watchdog.stacks import fold_traceback, is_library, stack_of, user_location
from lightning_distplus.world import World, name_ranks

MOST_LINES = 30
"""A printed verdict has no more."""
_PRINTED_STACK_LINES = 10
_PRINTED_RANKS = 8
_TOLD_RANKS = 16
_PRINTED_FINDINGS = 4
_LONGEST_OPERATION = 60
_BATCH = re.compile(r" batch \d+$")
_DEEDS = {
    "hang": ("HANGS", "HANG"),
    "peer_lost": ("IS GONE", "ARE GONE"),
    "exception": ("FAILED", "FAILED"),
    "divergence": ("DIFFERS", "DIFFER"),
    "no_progress": ("FAILS IN THE SAME STEP AGAIN", "FAIL IN THE SAME STEP AGAIN"),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Version 1 of the file ``verdict-<incident>-<host>.json``; docs/reference/verdict.md explains its fields."""

    incident: str
    kind: str
    culprits: list[int]
    waiting: list[int]
    phase: str
    operation: str
    location: str | None
    global_step: int
    elapsed_s: float
    cause: str
    remedy: str
    hosts: dict[str, str] = dataclass_field(default_factory=dict)
    pids: dict[str, int] = dataclass_field(default_factory=dict)
    stacks: dict[str, str] = dataclass_field(default_factory=dict)
    lines: list[str] = dataclass_field(default_factory=list)
    is_decided: bool = True
    silent: list[int] = dataclass_field(default_factory=list)
    findings: list[str] = dataclass_field(default_factory=list)
    locations: dict[str, str | None] = dataclass_field(default_factory=dict)
    collectives: dict[str, dict[str, Any] | None] = dataclass_field(default_factory=dict)
    mismatch: dict[str, Any] | None = None
    cycles: list[list[int]] = dataclass_field(default_factory=list)
    load: dict[str, dict[str, Any]] = dataclass_field(default_factory=dict)
    load_of_culprit: str = ""
    field: str | None = None
    values: dict[str, Any] = dataclass_field(default_factory=dict)
    parameter: str | None = None
    run_id: str = ""
    ends_run: bool = True
    last_seen_s: float | None = None
    version: int = 1

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Reads a verdict."""
        return cls(**words_of(text))

    def shortened(self) -> Verdict:
        """The same for the other hosts of a large job: what it says of each rank, for a few ranks only."""
        ranks = [*self.culprits[:_TOLD_RANKS], *self.waiting[:_TOLD_RANKS]]
        keys = set(map(str, ranks))
        told: dict[str, Any] = {
            name: {key: value for key, value in getattr(self, name).items() if key in keys}
            for name in ("hosts", "pids", "stacks", "locations", "collectives")
        }
        return replace(
            self,
            **told,
            lines=self.lines[: len(ranks)],
            load={host: load for host, load in self.load.items() if host in told["hosts"].values()},
            mismatch=None if self.mismatch is None else {**self.mismatch, "calls": {}},
        )

    def render(self) -> str:
        """The verdict for people: with what its printer adds, at most 30 lines; the rest is in the file."""
        head = [self._headline(), *self._source_line(), f"  {self._moment()}"]
        shown = f"rank {self.culprits[0]} " if len(self.culprits) == 1 else "\0"  # by the headline
        others = [line for line in self.lines if not line.startswith(shown)]
        head += [f"  {line}" for line in others[:_PRINTED_RANKS]]
        if len(others) > _PRINTED_RANKS:
            head.append(f"  and {len(others) - _PRINTED_RANKS} more ranks")
        tail = [f"  found: {finding}" for finding in self.findings[:_PRINTED_FINDINGS]]
        tail += [f"  load:  {self.load_of_culprit}"] if self.load_of_culprit else []
        tail += [f"  cause: {self.cause}", f"  do:    {self.remedy}"]
        room = MOST_LINES - len(head) - len(tail) - 6  # a title; "next" and "file", and lines that are wrapped
        return "\n".join([*head, *self._stack_of_culprit(min(room, _PRINTED_STACK_LINES)), *tail])

    def _headline(self) -> str:
        """Who, what, where: ``RANK 1 HANGS (host a, pid 3308) in training_step, train.py:24``."""
        does, do = _DEEDS.get(self.kind, ("FAILS", "FAIL"))
        if not self.is_decided:
            return f"{name_ranks(self.culprits).upper()} {do}: nothing tells which of them is to blame"
        if len(self.culprits) != 1:
            return f"{name_ranks(self.culprits).upper()} {do}{self._place()}"
        rank = str(self.culprits[0])
        known = [f"host {self.hosts[rank]}"] if self.hosts.get(rank, "unknown") != "unknown" else []
        known += [f"pid {self.pids[rank]}"] if self.pids.get(rank) else []
        return f"RANK {rank} {does}" + (f" ({', '.join(known)})" if known else "") + self._place()

    def _place(self) -> str:
        """Where the first culprit stands; a batch is named by the step below."""
        operation = _BATCH.sub("", self.operation).rpartition("]")[2].lstrip(".") if self.operation else ""
        is_place = operation not in ("", "start") and len(operation) <= _LONGEST_OPERATION  # "start": not heard of yet
        where = f" {operation}" if operation.startswith("after ") else f" in {operation}"
        where = where if is_place else ""
        if self.location is not None:
            file, _, line = self.location.rpartition(":")
            where += f"{',' if where else ' at'} {Path(file).name}:{line}"
        if self.last_seen_s is None or not where:
            return where
        return f", last seen{where}, {self.last_seen_s:.1f} s before"

    def _source_line(self) -> list[str]:
        """The culprit's line of source, as its stack shows it."""
        file, _, number = (self.location or "").rpartition(":")
        lines = self.stacks.get(str(self.culprits[0]), "").splitlines() if self.culprits else []
        at = [i for i, line in enumerate(lines) if f'File "{file}", line {number},' in line]
        return [f"    {lines[at[-1] + 1].strip()}"] if at and at[-1] + 1 < len(lines) else []

    def _moment(self) -> str:
        silence = f", {self.elapsed_s:.0f} s without progress" if self.kind in ("hang", "peer_lost") else ""
        waits = f"; {name_ranks(self.waiting)} waiting" if self.waiting else ""
        return f"phase {self.phase!r}, step {self.global_step}{silence}{waits}" if self.phase else waits[2:]

    def _stack_of_culprit(self, num_lines: int) -> list[str]:
        rank = next((rank for rank in self.culprits if self.stacks.get(str(rank))), None)
        if rank is None:
            return []
        lines = fold_traceback(self.stacks[str(rank)]).splitlines()
        lines = [line for line in lines if not line.startswith("Traceback (")]
        if len(lines) > num_lines:
            lines = ["  ...", *lines[1 - num_lines :]]
        return [f"  stack of rank {rank}, innermost last:", *(f"    {line}" for line in lines)]

    def path(self, folder: Path, host: str) -> Path:
        """Where it is written."""
        return folder / f"verdict-{self.incident}-{host}.json"

    def write(self, folder: Path, host: str) -> Path:
        """Writes the file aside and renames it."""
        folder.mkdir(parents=True, exist_ok=True)
        stage = (path := self.path(folder, host)).with_suffix(f".{os.getpid()}")
        stage.write_text(self.to_json())
        return stage.rename(path)


def name_incident(kind: str, run_id: str, at: float | None = None) -> str:
    """Names an incident so that no other run on this host, and no other second, has the same name."""
    run = re.sub(r"[^\w.]", "_", run_id)
    return "-".join([kind, *([run] if run else []), str(int(time.time() if at is None else at))])


def find_verdicts(
    folder: Path, *, run_id: str | None = None, host: str = "*", since: float = 0.0, of_end: bool = False
) -> list[dict[str, Any]]:
    """Reads the verdicts of a folder, oldest first, each with its ``path``; of any version.

    Args:
        folder: Where the artefacts are.
        run_id: The run whose verdicts are wanted; None: those of all runs.
        host: The host whose ranks have written them; by default all hosts.
        since: Unix time; older ones are left out.
        of_end: Whether those are left out after which the run went on: a difference that is a warning, a hang that is
            only reported. Of the others the first one tells the cause, and what came after it is its consequence.
    """
    times = sorted((path.stat().st_mtime, path) for path in folder.glob(f"verdict-*-{host}.json"))
    found = [{**json.loads(path.read_text()), "path": path} for at, path in times if at >= since]
    found = [one for one in found if run_id in (None, one.get("run_id", ""))]
    return [one for one in found if one.get("ends_run", True)] if of_end else found


# -- the block that comes last on the terminal -------------------------------------------------------------------------

_LABEL = re.compile(r"  (\w+): ")


def describe_next(folder: Path, run_id: str, global_step: int, ended_at: float, *, phase: str = "") -> str:
    """Tells how to go on, from which checkpoint, and what is lost of a run that ended at this step and Unix time."""
    files = ledger_files(folder, has_launcher=False)
    lowest = [file for file in files if file.name[:16] == files[0].name[:16]]  # the ranks commit together
    events = [one for file in lowest for one in read_ledger(file) if one["run_id"] == run_id]
    path, auto_folder, step, at = "", None, 0, events[0]["time"] if events else time.time()
    is_loading = phase == Phase.RESUME  # what it read may be what it refuses
    for event in events:
        if event["kind"] == "saved" or (event["kind"] == "loaded" and not is_loading):
            path, step, at = event["path"], event["global_step"] or 0, event["time"]
        elif event["kind"] == "start":
            auto_folder, at = event.get("auto_folder"), at if path else event["time"]
    lost = f"{max(global_step - step, 0)} steps, {duration_in_words(ended_at - at)} of work lost"
    if not path:
        again = "loads the same checkpoint again" if is_loading else "starts at the beginning"
        return f"no checkpoint has been committed yet; the same command {again} ({lost})"
    ckpt_path = ckpt_path_for(path, auto_folder)
    how = f'the same command with fit(..., ckpt_path="{ckpt_path}")'
    if Path(sys.argv[0]).name in ("distplus", "__main__.py"):
        typed, is_launch = " ".join(sys.argv), sys.argv[1:2] == ["launch"]
        if is_launch and " -- fit" in typed and ckpt_path == "auto" and "--ckpt_path" not in typed:
            how = "the same command"  # to which the launcher adds it; of a script, only to what it restarts
        elif not is_launch or " -- fit" in typed:
            how = f"the same command with --ckpt_path {ckpt_path}"
    where = "" if path in how else f" from {path}"
    return f"{how} goes on{where} (step {step}; {lost})"


def duration_in_words(seconds: float) -> str:
    """Seconds in the unit that a person would say: ``"12 s"``, ``"14 min"``, ``"2 h 30 min"``."""
    seconds = max(round(seconds), 0)
    if seconds < 120:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min" if hours < 2 else f"{hours} h {minutes % 60} min"


def print_block(verdict: Verdict, path: Path) -> None:
    """Prints a verdict and what to do next, 30 lines at most; coloured and as wide as the terminal, where one is."""
    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    file, ended_at = f"none; {path.parent} takes no file", time.time()
    with suppress(OSError):
        file, ended_at = str(path), path.stat().st_mtime
    goes_on = describe_next(path.parent, verdict.run_id, verdict.global_step, ended_at, phase=verdict.phase)
    lines = [*verdict.render().splitlines(), f"  next:  {goes_on}", f"  file:  {file}"]
    wrapped = [part for line in lines for part in _wrap(line, console.width)] if console.is_terminal else lines
    if len(wrapped) > MOST_LINES:  # long paths: better broken by the terminal than cut off here
        wrapped = lines
    text = Text("\n")
    for number, line in enumerate(wrapped):
        text.append(f"{line}\n", style="bold red" if number == 0 else "bold" if _LABEL.match(line) else "")
    with suppress(OSError, ValueError):
        console.print(text, end="")
        sys.stderr.flush()


def print_once(verdict: Verdict, path: Path) -> bool:
    """Prints a verdict, unless another process has; returns whether it was this one."""
    try:
        shown_mark(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk: better told twice than by nobody
        pass
    print_block(verdict, path)
    return True


def shown_mark(verdict: Path) -> Path:
    """The file that is there once a verdict has been shown."""
    return verdict.with_name(f".{verdict.stem}.shown")


def _wrap(line: str, width: int) -> list[str]:
    label = _LABEL.match(line)
    if label is None or label[1] == "file" or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


# -- the rules ---------------------------------------------------------------------------------------------------------


# In the stack of a rank that stands in a checked call to which not all have come.
_CHECKED = ("lightning_distplus/control/collective_check.py", "in meet")
_LONELY = (
    "call it on every rank or on none: code under `if rank == 0` must not synchronise, and trainer.save_checkpoint, "
    "trainer.log_dir, barriers and logging with sync_dist=True do"
)
_ALONE = "look at the file and line; if the work is legitimate and only long, raise timeout=Timeouts(teardown=...)"


@dataclass(frozen=True, kw_only=True)
class _Opinion:
    """What a rule says of an incident."""

    culprits: list[int]
    cause: str
    remedy: str
    kind: str = "hang"
    is_decided: bool = True
    findings: list[str] = dataclass_field(default_factory=list)
    mismatch: Mismatch | None = None
    cycles: list[list[int]] = dataclass_field(default_factory=list)


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
        lowest = next(iter(evidence.values()))
        where = f"stands in {lowest.operation!r}" if lowest.answers else opinion.cause
        cause = f"all other ranks have ended their run; this one has not within the deadline for that ({where})"
        opinion = replace(opinion, cause=cause, remedy=_ALONE)
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
        last_seen_s=first.beat_s if first.is_last_seen else None,
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
        load_of_culprit=HostLoad(**load[first.host]).describe() if first.host in load else "",
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


def _in_a_cycle(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    calls = {rank: one.collective for rank, one in evidence.items()}
    found = flight_recorder.cycles(
        {
            rank: call.peer
            for rank, call in calls.items()
            if call is not None and call.peer is not None and not _is_answered(evidence, rank, call)
        }
    )
    if not found:
        return None
    ends = _ends(evidence)
    if ends is not None and ends.is_decided and all(one.is_recorded_only for one in evidence.values()):
        return None  # parts of batches, which wait for other calls of theirs
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
    """Ranks that wait in a call through Lightning while the others wait elsewhere.

    No rank enters the collective of such a call before all have come to it: the others are not in it. Fewer ranks are
    to blame than are not; in a tie, those in the call, because the others are where every step comes by.
    """
    inside = sorted(rank for rank, one in evidence.items() if one.waits and all(text in one.stack for text in _CHECKED))
    outside = sorted(set(evidence) - set(inside))
    if not inside or not outside:
        return None
    places = {rank: f"in {one.operation}" for rank, one in evidence.items()}
    for rank in inside:
        places[rank] += f" at {evidence[rank].location}" if evidence[rank].location else ""
    culprits = inside if len(inside) <= len(outside) else outside
    return _Opinion(culprits=culprits, cause=sides(places), remedy=_LONELY)


def _in_another_collective(evidence: Mapping[int, Evidence]) -> _Opinion | None:
    found = flight_recorder.match({rank: one.calls for rank, one in evidence.items() if one.answers})
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
    return flight_recorder.follow(records, elsewhere=unseen)


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
    odd, right = odd_ranks(places)
    return _Opinion(
        culprits=odd or sorted(places),
        is_decided=bool(odd) and right is not None,
        cause="the ranks wait in different places: something was called on some ranks only, or in another order",
        remedy="compare the stacks in the file; code under `if rank == 0` must not synchronise",
    )


# -- the same rules on dumps that torch's recorder has left ------------------------------------------------------------


def judge_dumps(folder: Path) -> Verdict:
    """Gives the verdict on the job that has left these dumps; see ``load_dumps`` for what it holds, and the errors."""
    dumps = flight_recorder.load_dumps(folder)
    recordings = flight_recorder.read_recordings(dumps)
    if not any(recording.unfinished for recording in recordings.values()):
        raise flight_recorder.DumpError(
            f"no rank had a call in flight when the {len(dumps)} dumps in {folder} were written; no hang seen"
        )
    ranks = set(recordings).union(*(ranks for one in recordings.values() for ranks in one.groups.values()))
    evidence = {rank: _evidence(rank, recordings.get(rank), dumps.get(rank)) for rank in sorted(ranks)}
    return judge(evidence, "dumps")


def _evidence(rank: int, recording: Recording | None, dump: Mapping[str, Any] | None) -> Evidence:
    nothing = Evidence(
        rank=rank, host="unknown", pid=0, state=ProcessState.UNKNOWN.value, answers=False, is_recorded_only=True
    )
    if recording is None or dump is None:
        return nothing
    standing = next(iter(recording.unfinished), None)
    return replace(
        nothing,
        answers=True,
        operation=f"last call: {recording.calls[-1].describe()}" if recording.calls else "",
        waits=standing is not None,
        location=_location(dump),
        stands_in=None if standing is None else asdict(standing),
        recording=recording.to_plain(),
    )


def _location(dump: Mapping[str, Any]) -> str | None:
    """Where the rank made its last call; dumps in JSON hold no frames."""
    frames = dump["entries"][-1].get("frames", []) if dump["entries"] else []
    own = (one for one in frames if not is_library(one["filename"]))
    return next((f"{one['filename']}:{one['line']}" for one in own), None)


# -- the verdict on a rank that has raised, or whose process is gone ---------------------------------------------------


_KINDS = {"DivergenceError": "divergence", "PeerLost": "peer_lost", "PeerMissing": "peer_lost"}
# The user or the scheduler has asked for the end; or the run has not begun, and all ranks show the same.
_NO_INCIDENT = ("KeyboardInterrupt", "SIGTERMException", "Preempted", "PreflightError", "RendezvousError")
# Their last sentence says what to do, and no line of code is to blame.
_TELLS_REMEDY = ("CheckpointCorrupt", "CheckpointMismatch", "CheckpointUnsafe", "DatasetMismatch")
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z])|\n(?=[A-Z])")
_CAUSE_CHARACTERS = 1000
_REMEDY = re.compile(r"(?<=[.;:]) (?=[Ll]ook at |Nothing was exchanged)")
_TEXT_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_WHEREABOUTS = re.compile(r"in (.+?)(?: at (\S+:\d+))?$", re.DOTALL)
_OF_WORKER = "in DataLoader worker process"
_REMEDIES = {
    "OutOfMemory": "take a smaller batch, or find out what made this one larger on this rank",
    "DataLoader worker (pid": "look at dmesg: a data worker is killed where memory is short; try fewer num_workers",
    "enable unused parameter detection": "where some parameters are not used in each step, on purpose: "
    "ResilientDDP(find_unused_parameters=True)",
}
"""Of errors whose line of code tells less than they do, by a part of their text."""
_EXITS_ALONE = "end on all ranks in the same step, by trainer.should_stop = True"
_NOWHERE: Mapping[str, Any] = {"phase": "", "operation": "", "location": None, "global_step": 0, "elapsed_s": 0.0}


@dataclass
class PlaceOfFailure:
    """Knows where this rank has failed; asked on the thread that has raised, or is about to."""

    marks: Marks

    def place_of(self, error: BaseException) -> dict[str, Any]:
        """See ``control.Locator``."""
        mark = self.marks.at_failure
        stack = [*stack_of(threading.get_ident()), *traceback.extract_tb(error.__traceback__)]
        return {
            "phase": mark.phase,
            "operation": mark.operation,
            "global_step": mark.global_step,
            "location": _in_worker(errors.message_of(error)) or user_location(stack),
        }


def _in_worker(message: str) -> str | None:
    """The line of a data set at which a data worker has raised; its traceback comes as text."""
    if _OF_WORKER not in message:
        return None
    return user_location([traceback.FrameSummary(file, int(line), "") for file, line in _TEXT_FRAME.findall(message)])


def judge_failure(
    first: FirstError,
    world: World,
    run_id: str,
    peers: Mapping[int, Peer],
    last_seen: Callable[[int], Sighting | None],
    *,
    ends_others: bool = False,
) -> Verdict | None:
    """Gives the verdict on the first error of the job; None where that is no incident.

    A ``sys.exit(0)`` is one only where it ``ends_others``, which do not end by themselves.
    """
    if first.has_verdict or first.type in _NO_INCIDENT or (_is_orderly_exit(first) and not ends_others):
        return None
    culprits = list(world.ranks) if first.is_shared else sorted(first.ranks) or [first.rank]
    values = {str(rank): value for rank, value in first.differs.get("values", {}).items()}
    # Ranks that refuse a checkpoint together all stand where the one does that tells of it.
    is_there = {rank for rank in culprits if first.is_shared} | {first.rank}
    places = {
        rank: first.place if rank in is_there else _newer(_place_of(last_seen(rank)), first.place)
        for rank in sorted({*culprits, first.rank})
    }
    places |= {int(rank): {**places.get(int(rank), {}), **_place_in(str(value))} for rank, value in values.items()}
    place = places[culprits[0]]
    kind = _KINDS.get(first.type, "exception")
    cause, remedy = _explain(first, place.get("location"))
    known = {str(rank): (peer.host, peer.pid) for rank, peer in peers.items()}
    known |= {str(first.rank): (first.host, first.pid)}
    load = HostLoad.now()
    is_here = known.get(str(culprits[0]), ("", 0))[0] == world.host
    return Verdict(
        incident=name_incident(kind.replace("_", "-"), run_id, first.at),
        run_id=run_id,
        kind=kind,
        culprits=culprits,
        waiting=sorted(set(world.ranks) - set(culprits)),
        **{name: place.get(name, nothing) for name, nothing in _NOWHERE.items()},
        last_seen_s=place.get("beat_s"),
        cause=cause,
        remedy=remedy,
        hosts={rank: host for rank, (host, _) in known.items()},
        pids={rank: pid for rank, (_, pid) in known.items()},
        stacks={str(first.rank): first.traceback},
        lines=[
            f"{name_ranks([rank])} (host {host}, pid {pid}): {told}"
            for rank in ([first.rank] if first.is_shared else dict.fromkeys((*culprits, first.rank, *sorted(places))))
            for host, pid in [known.get(str(rank), ("unknown", 0))]
            for told in [values.get(str(rank)) or _state(rank, first, places[rank])]
        ],
        locations={str(rank): one.get("location") for rank, one in places.items()},
        load={world.host: asdict(load)},
        load_of_culprit=load.describe() if is_here else "",
        field=first.differs.get("field"),
        values=values,
    )


def _place_of(seen: Sighting | None) -> dict[str, Any]:
    """Of a rank that cannot say it any more: its last beat."""
    if seen is None:
        return {}
    beat_s = running_time() - seen.changed_at
    return {**vars(seen.mark), "location": seen.place, "elapsed_s": seen.silence_s, "beat_s": beat_s}


def _newer(place: dict[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The same with step and phase of the rank that has told of it, where that is further: they train in step."""
    if told.get("global_step", 0) <= place.get("global_step", -1):
        return place
    return {**place, "phase": told.get("phase", ""), "global_step": told["global_step"]}


def _place_in(value: str) -> dict[str, Any]:
    """Of a rank in another call: what stands in ``Whereabouts.describe``."""
    found = _WHEREABOUTS.match(value)
    return {"operation": found[1], "location": found[2], "beat_s": None} if found else {}


def _state(rank: int, first: FirstError, place: Mapping[str, Any]) -> str:
    is_own = rank == first.rank
    is_gone = first.type == errors.PeerLost.__name__
    what = f"raised {first.type}" if is_own else "its process is gone" if is_gone else f"named by rank {first.rank}"
    where = f", {'' if is_own else 'last seen '}in {place['operation']!r}" if place.get("operation") else ""
    age = "" if place.get("beat_s") is None else f", {place['beat_s']:.1f} s before"
    return what + where + (f" at {place['location']}" if place.get("location") else "") + age


def _is_orderly_exit(first: FirstError) -> bool:
    return first.type == "SystemExit" and first.message in ("", "0")


def _explain(first: FirstError, location: str | None) -> tuple[str, str]:
    """Cause and remedy, in words; our own messages end with what to do."""
    message = first.message.strip()
    if first.type in _KINDS:
        cause, _, remedy = _REMEDY.sub("\0", message, count=1).partition("\0")
        return cause[:_CAUSE_CHARACTERS], remedy or "see the cause"
    if first.type in _TELLS_REMEDY and (ends := [one.span() for one in _SENTENCE.finditer(message)]):
        return f"{first.type}: {message[: ends[-1][0]]}"[:_CAUSE_CHARACTERS], message[ends[-1][1] :]
    told = message.partition("\n")[0]
    if _OF_WORKER in message:
        told = f"{told} {message.splitlines()[-1]}"
    cause = f"{first.type}: {told}" if told else first.type
    if _is_orderly_exit(first):
        return cause[:_CAUSE_CHARACTERS], _EXITS_ALONE
    known = next((remedy for sign, remedy in _REMEDIES.items() if sign in f"{first.type}: {message}"), None)
    if known is not None:
        return cause[:_CAUSE_CHARACTERS], known
    return cause[:_CAUSE_CHARACTERS], f"look at {location or 'the stack'}; the whole traceback is in the file"
