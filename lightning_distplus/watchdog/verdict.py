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

from lightning_distplus.watchdog.stacks import is_library, is_own
from lightning_distplus.world import name_ranks

__all__ = ["Verdict", "find_verdicts", "name_incident"]

T = TypeVar("T")

_PRINTED_LINES = 30
_PRINTED_STACK_LINES = 10
_PRINTED_RANKS = 8
_TOLD_RANKS = 16
_SAME_INCIDENT_S = 20
_PRINTED_FINDINGS = 4
_FRAME = re.compile(r'  File "(.+)", line \d+')


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
        """The verdict for people: at most 30 lines, the rest is in the file."""
        doubt = "" if self.is_decided else " (undecided)"
        moment = f"phase {self.phase!r}, step {self.global_step}, {self.elapsed_s:.0f} s without progress"
        head = [
            f"=== {self.kind}: {name_ranks(self.culprits)} to blame{doubt}, {name_ranks(self.waiting)} waiting"
            + (f"; {moment}" if self.phase else ""),
            *(f"  {line}" for line in self.lines[:_PRINTED_RANKS]),
        ]
        if len(self.lines) > _PRINTED_RANKS:
            head.append(f"  and {len(self.lines) - _PRINTED_RANKS} more ranks")
        tail = [f"  found: {finding}" for finding in self.findings[:_PRINTED_FINDINGS]]
        tail += [f"  load:  {self.load_of_culprit}"] if self.load_of_culprit else []
        tail += [f"  cause: {self.cause}", f"  do:    {self.remedy}"]
        room = _PRINTED_LINES - len(head) - len(tail) - 2  # a title, and whoever prints it adds the file's name
        return "\n".join([*head, *self._stack_of_culprit(min(room, _PRINTED_STACK_LINES)), *tail])

    def _stack_of_culprit(self, num_lines: int) -> list[str]:
        text = self.stacks.get(str(self.culprits[0])) if self.culprits else None
        if not text:
            return []
        lines = _shown_frames(text, num_lines)
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


def _shown_frames(stack: str, num_lines: int) -> list[str]:
    """The innermost frames that fit, without those of this package, which are many; the user's own one always."""
    frames: list[list[str]] = []
    for line in stack.rstrip().splitlines():
        if _FRAME.match(line) or not frames:
            frames.append([])
        frames[-1].append(line)
    files = [found[1] if (found := _FRAME.match(frame[0])) else "" for frame in frames]
    shown = [number for number, file in enumerate(files) if not is_own(file)]
    users = [number for number in shown if files[number] and not is_library(files[number])][-1:]
    room = num_lines - sum(len(frames[number]) for number in users)
    for number in reversed(shown):
        if number not in users and (room := room - len(frames[number])) >= 0:
            users.append(number)
        elif room < 0:
            break
    return [line for number in sorted(users) for line in frames[number]][-num_lines:]


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
