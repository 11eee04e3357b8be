"""The verdict on an incident, as a file and as text for people."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, TypeVar

from lightning_distplus.watchdog.stacks import fold_traceback
from lightning_distplus.world import name_ranks

__all__ = ["MOST_LINES", "Verdict", "find_verdicts", "name_incident"]

T = TypeVar("T")

MOST_LINES = 30
"""A printed verdict has no more."""
_PRINTED_STACK_LINES = 10
_PRINTED_RANKS = 8
_TOLD_RANKS = 16
_SAME_INCIDENT_S = 20
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
    """Version 1 of the file ``verdict-<incident>-<host>.json``."""

    incident: str
    """Its kind, the run, and the second; as ``name_incident`` writes it."""
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
    """One line per rank, culprits first."""
    is_decided: bool = True
    """False: the culprits are all ranks that may be to blame, and nothing tells them apart."""
    silent: list[int] = dataclass_field(default_factory=list)
    """Ranks that have not said themselves where they are."""
    findings: list[str] = dataclass_field(default_factory=list)
    """What the comparison of the ranks has shown: the collective that differs, or each cycle of sends and receives."""
    locations: dict[str, str | None] = dataclass_field(default_factory=dict)
    """``file.py:line`` per rank."""
    collectives: dict[str, dict[str, Any] | None] = dataclass_field(default_factory=dict)
    """The collective in which each rank waits: group, sequence number, op, shapes, dtypes."""
    mismatch: dict[str, Any] | None = None
    """The first collective that differs between ranks: kind, group, seq, and the call of each rank."""
    cycles: list[list[int]] = dataclass_field(default_factory=list)
    """Ranks that wait for each other in sends and receives."""
    load: dict[str, dict[str, Any]] = dataclass_field(default_factory=dict)
    """The load of each host at that moment."""
    load_of_culprit: str = ""
    """The same of the first culprit's host, in one line."""
    field: str | None = None
    """What differs between ranks, in a divergence."""
    values: dict[str, Any] = dataclass_field(default_factory=dict)
    """Its value on each rank."""
    parameter: str | None = None
    run_id: str = ""
    """``ControlPlane.run_id``: several runs may write to one folder."""
    version: int = 1

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Reads a verdict."""
        return cls(**json.loads(text))

    def shortened(self) -> Verdict:
        """The same for the other hosts of a large job: what it says of each rank, for a few ranks only."""
        ranks = [*self.culprits[:_TOLD_RANKS], *self.waiting[:_TOLD_RANKS]]

        def told(values: dict[str, T]) -> dict[str, T]:
            return {str(rank): values[str(rank)] for rank in ranks if str(rank) in values}

        hosts = told(self.hosts)
        return replace(
            self,
            hosts=hosts,
            pids=told(self.pids),
            stacks=told(self.stacks),
            locations=told(self.locations),
            collectives=told(self.collectives),
            lines=self.lines[: len(ranks)],
            load={host: load for host, load in self.load.items() if host in hosts.values()},
            mismatch=None if self.mismatch is None else {**self.mismatch, "calls": {}},
        )

    def render(self) -> str:
        """The verdict for people: with what its printer adds, at most 30 lines; the rest is in the file."""
        head = [self._headline(), *self._source_line(), f"  {self._moment()}"]
        others = [line for line in self.lines if self.is_decided or len(self.culprits) != 1]
        if self.is_decided and len(self.culprits) == 1:
            others = [line for line in self.lines if not line.startswith(f"rank {self.culprits[0]} ")]
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
        operation = _BATCH.sub("", self.operation).rpartition("]")[2] if self.operation else ""
        where = f" in {operation}" if operation and len(operation) <= _LONGEST_OPERATION else ""
        if self.location is None:
            return where
        file, _, line = self.location.rpartition(":")
        return f"{where}, {Path(file).name}:{line}" if where else f" at {Path(file).name}:{line}"

    def _source_line(self) -> list[str]:
        """The culprit's line of source, as its stack shows it."""
        stack = self.stacks.get(str(self.culprits[0]), "") if self.culprits else ""
        if self.location is None or not stack:
            return []
        file, _, number = self.location.rpartition(":")
        lines = stack.splitlines()
        at = [i for i, line in enumerate(lines) if f'File "{file}", line {number},' in line]
        return [f"    {lines[at[-1] + 1].strip()}"] if at and at[-1] + 1 < len(lines) else []

    def _moment(self) -> str:
        silence = f", {self.elapsed_s:.0f} s without progress" if self.kind in ("hang", "peer_lost") else ""
        waits = f"; {name_ranks(self.waiting)} waiting" if self.waiting else ""
        return f"phase {self.phase!r}, step {self.global_step}{silence}{waits}" if self.phase else waits[2:]

    def _stack_of_culprit(self, num_lines: int) -> list[str]:
        text = self.stacks.get(str(self.culprits[0])) if self.culprits else None
        if not text:
            return []
        lines = [line for line in fold_traceback(text).splitlines() if not line.startswith("Traceback (")]
        if len(lines) > num_lines:
            lines = ["  ...", *lines[1 - num_lines :]]
        return [f"  stack of rank {self.culprits[0]}, innermost last:", *(f"    {line}" for line in lines)]

    def is_written(self, folder: Path, host: str) -> bool:
        """Whether a rank of this host has written its verdict on this incident; they judge at about the same moment."""
        kind, _, second = self.incident.rpartition("-")
        others = (path.name.removeprefix(f"verdict-{kind}-") for path in folder.glob(f"verdict-{kind}-*-{host}.json"))
        return any(abs(int(other.partition("-")[0]) - int(second)) < _SAME_INCIDENT_S for other in others)

    def write(self, folder: Path, host: str) -> Path:
        """Writes the file beside its name and renames it."""
        path = folder / f"verdict-{self.incident}-{host}.json"
        self._stage_of(path).rename(path)
        return path

    def write_first(self, folder: Path, host: str) -> Path | None:
        """The same for what several ranks of a host find at once: the first one's file stays.

        Returns:
            The file, or None where another rank has written it.
        """
        path = folder / f"verdict-{self.incident}-{host}.json"
        if path.exists():
            return None
        stage = self._stage_of(path)
        try:
            path.hardlink_to(stage)
        except FileExistsError:
            return None
        finally:
            stage.unlink()
        return path

    def _stage_of(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        stage = path.with_suffix(f".{os.getpid()}")
        stage.write_text(self.to_json())
        return stage


def name_incident(kind: str, run_id: str, at: float | None = None) -> str:
    """Names an incident so that no other run on this host, and no other second, has the same name.

    Args:
        kind: What has happened, such as ``"hang"``.
        run_id: ``ControlPlane.run_id``; a user may have given it.
        at: Unix time; by default now.
    """
    run = re.sub(r"[^\w.]", "_", run_id)
    return "-".join([kind, *([run] if run else []), str(int(time.time() if at is None else at))])


def find_verdicts(folder: Path, *, run_id: str | None = None, since: float = 0.0) -> list[dict[str, Any]]:
    """Reads the verdicts of a folder, oldest first, each with its ``path``; of any version.

    Args:
        folder: Where the artefacts are.
        run_id: The run whose verdicts are wanted; None: those of all runs.
        since: Unix time; older ones are left out.
    """
    times = sorted((path.stat().st_mtime, path) for path in folder.glob("verdict-*.json"))
    found = [{**json.loads(path.read_text()), "path": path} for at, path in times if at >= since]
    return [one for one in found if run_id in (None, one.get("run_id", ""))]
