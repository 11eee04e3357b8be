"""The verdict on an incident: who is to blame, who only waits, where, and what to do."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from lightning_distplus.liveness import ProcessState
from lightning_distplus.watchdog.lonely_call import REMEDY, lonely_call

__all__ = ["Evidence", "Verdict", "judge"]

_PRINTED_LINES = 30
_PRINTED_STACK_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of one rank when nobody has moved for too long."""

    rank: int
    host: str
    pid: int
    state: str
    """``ProcessState`` of its process, as its own host sees it."""
    answers: bool
    """Whether its Python still runs: its watchdog thread has sent its stack."""
    phase: str = ""
    operation: str = ""
    global_step: int = 0
    silence_s: float = 0.0
    waits: bool = False
    """Whether its training thread stands in a collective or in another wait for peers."""
    location: str | None = None
    stack: str = ""

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.state == ProcessState.GONE.value

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped by a signal."""
        return self.state == ProcessState.STOPPED.value

    def describe(self) -> str:
        """Where it is, in one line."""
        name = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        if self.is_gone:
            return f"{name}: its process is gone"
        if self.is_stopped:
            return f"{name}: its process is stopped (SIGSTOP, a debugger or a terminal)"
        if not self.answers:
            return f"{name}: its process runs, and its Python does not answer (a C call holds the GIL)"
        place = f" at {self.location}" if self.location else ""
        return f"{name}: in {self.operation!r}{place}, for {self.silence_s:.0f} s"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Version 1 of the file ``verdict-<incident>-<host>.json``; the fields are those of DESIGN.md."""

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
    stacks: dict[str, str] = dataclass_field(default_factory=dict)
    lines: list[str] = dataclass_field(default_factory=list)
    """One line per rank, culprits first."""
    field: str | None = None
    """What differs between ranks, in a divergence."""
    values: dict[str, Any] = dataclass_field(default_factory=dict)
    """Its value on each rank."""
    parameter: str | None = None
    version: int = 1

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Reads a verdict."""
        return cls(**json.loads(text))

    def render(self) -> str:
        """The verdict for people: at most 30 lines, the rest is in the file."""
        head = [
            f"=== {self.kind}: {_ranks(self.culprits)} to blame, {_ranks(self.waiting)} waiting; phase {self.phase!r}, "
            f"step {self.global_step}, {self.elapsed_s:.0f} s without progress",
            *(f"  {line}" for line in self.lines[:8]),
        ]
        if len(self.lines) > 8:
            head.append(f"  and {len(self.lines) - 8} more ranks")
        tail = [f"  cause: {self.cause}", f"  do:    {self.remedy}"]
        stack: list[str] = []
        if self.culprits and (text := self.stacks.get(str(self.culprits[0]))):
            stack = [f"  stack of rank {self.culprits[0]}, innermost last:"]
            stack += [f"    {line}" for line in text.rstrip().splitlines()[-_PRINTED_STACK_LINES:]]
        return "\n".join([*head, *stack, *tail][:_PRINTED_LINES])

    def write(self, folder: Path, host: str) -> Path:
        """Writes the file beside its name and renames it; the first one for a host stays."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"verdict-{self.incident}-{host}.json"
        stage = path.with_suffix(f".{os.getpid()}")
        stage.write_text(self.to_json())
        stage.rename(path)
        return path


def judge(evidence: Mapping[int, Evidence], incident: str) -> Verdict:
    """Finds who is to blame.

    In this order: processes that are gone; stopped ones and those whose Python does not answer; ranks that do not wait
    for peers while others do; where all of them wait, those in a call that only some ranks make, then those that wait
    somewhere else than most.
    """
    gone = [rank for rank, one in evidence.items() if one.is_gone]
    stuck = [rank for rank, one in evidence.items() if one.is_stopped or not one.answers]
    busy = [rank for rank, one in evidence.items() if one.answers and not one.waits]
    if gone:
        culprits, kind = gone, "peer_lost"
        cause = "the process was killed (out of memory, a signal, the scheduler) and left no error"
        remedy = "look at the last lines of its log and at dmesg on its host"
    elif stuck:
        culprits, kind = stuck, "hang"
        cause, remedy = _cause_of_stuck(evidence[stuck[0]])
    elif busy:
        culprits, kind = busy, "hang"
        cause, remedy = _cause_of_busy(evidence[busy[0]])
    elif (lonely := lonely_call(evidence)) is not None:
        (culprits, cause), kind, remedy = lonely, "hang", REMEDY
    else:
        culprits, kind = _odd_ones(evidence), "hang"
        cause = (
            "the ranks wait in different collectives: one of them was called on some ranks only, or in another order"
        )
        remedy = "compare the stacks in the file; code under `if rank == 0` must not synchronise"
    first = evidence[min(culprits)]
    order = sorted(evidence, key=lambda rank: (rank not in culprits, rank))
    return Verdict(
        incident=incident,
        kind=kind,
        culprits=sorted(culprits),
        waiting=sorted(set(evidence) - set(culprits)),
        phase=first.phase,
        operation=first.operation,
        location=first.location,
        global_step=first.global_step,
        elapsed_s=first.silence_s,
        cause=cause,
        remedy=remedy,
        hosts={str(rank): one.host for rank, one in evidence.items()},
        stacks={str(rank): one.stack for rank, one in evidence.items()},
        lines=[evidence[rank].describe() for rank in order],
    )


def _cause_of_stuck(one: Evidence) -> tuple[str, str]:
    if one.is_stopped:
        return "the process is stopped by a signal", f"find out who sent SIGSTOP; `kill -CONT {one.pid}` would wake it"
    return (
        "a C call holds Python's global lock, so that no Python of this process runs",
        "look at the file and line where it was last seen; release the lock in the extension, or bound the call",
    )


def _cause_of_busy(one: Evidence) -> tuple[str, str]:
    if "dataloader" in one.operation:
        return (
            "the data did not come",
            "look at storage and at the data workers; raise timeout=Timeouts(step=...) if slow",
        )
    if "file_baton.py" in one.stack:
        return (
            "it waits for the lock of a compilation of torch extensions, which a killed process has left behind",
            "remove the file `lock` below $TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions)",
        )
    return (
        f"it stands in {one.operation!r} while its peers wait for it",
        "look at the file and line; if the work is legitimate and only long, raise this phase's deadline",
    )


def _odd_ones(evidence: Mapping[int, Evidence]) -> list[int]:
    """The ranks that wait elsewhere than most; all of them where there is no majority."""
    places = {rank: (one.operation, one.location) for rank, one in evidence.items()}
    (common, count), *others = Counter(places.values()).most_common()
    if others and others[0][1] == count:
        return sorted(places)
    return [rank for rank, place in places.items() if place != common] or sorted(places)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" if ranks else "nobody"
