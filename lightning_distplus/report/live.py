"""A run as it goes on: the last that the ledgers tell of each rank, for ``distplus top``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_distplus.events import ledger_files, parse_event
from lightning_distplus.report.goodput import Window
from lightning_distplus.report.run import step_parts
from lightning_distplus.report.terminal import as_table
from lightning_distplus.watchdog.ending import duration_in_words

__all__ = ["LiveRun"]

_NUM_WINDOWS = 3
_MOST_RANKS = 32
_LATE = 1.2
_PARTS = ("data", "forward", "backward", "optimizer", "wait", "other")


@dataclass
class _Rank:
    host: str = ""
    state: str = "start"
    heard: float = 0.0
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=_NUM_WINDOWS))


class LiveRun:
    """Reads what the ranks append to their ledgers, from any host that sees the folder.

    Args:
        home: The folder of the artefacts.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._read: dict[Path, int] = {}
        self._newest: tuple[str, int] | None = None
        self._began = 0.0
        self._ranks: dict[int, _Rank] = {}
        self._saved: Mapping[str, Any] | None = None

    def refresh(self) -> None:
        """Reads what is new. A line that is not whole yet is read the next time."""
        for path in ledger_files(self._home, has_launcher=False):
            if "." in path.stem:  # what is in it has been read, or is old
                continue
            with path.open("rb") as file:
                if path.stat().st_size < self._read.get(path, 0):  # a new file of that name
                    self._read[path] = 0
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in data[:whole].splitlines():
                if (event := parse_event(line)) is not None:
                    self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        key = (event["run_id"], event["attempt"])
        if event["kind"] == "start" and key != self._newest and event["time"] > self._began:
            self._newest, self._began, self._ranks = key, event["time"], {}
        if key != self._newest:
            return
        rank = self._ranks.setdefault(event["rank"], _Rank())
        rank.heard = event["time"]
        if event["kind"] == "start":
            rank.host = event.get("host", "")
        elif event["kind"] == "steps":
            rank.windows.append(Window.from_event(event))
            rank.state = "training"
        elif event["kind"] in ("failed", "preempted"):
            rank.state = event["kind"]
        elif event["kind"] == "end":
            rank.state = "failed" if event.get("failed") else "done"
        elif event["kind"] == "saved" and (self._saved is None or event["time"] >= self._saved["time"]):
            self._saved = event

    def show(self, now: float | None = None) -> Group:
        """The ranks, slowest first; where they are many, a line for each host."""
        now = time.time() if now is None else now
        if not self._ranks:
            return Group(Text(f"nothing in {self._home} yet"))
        parts = {number: step_parts(rank.windows) for number, rank in self._ranks.items() if rank.windows}
        middle = median([self._own(one) for one in parts.values()] or [0.0])
        return Group(self._head(now, parts), Text(""), self._table(now, parts, middle))

    @property
    def is_over(self) -> bool:
        """Whether no rank of the newest attempt goes on."""
        return bool(self._ranks) and all(one.state not in ("start", "training") for one in self._ranks.values())

    def _head(self, now: float, parts: Mapping[int, Mapping[str, float]]) -> RenderableType:
        assert self._newest is not None
        steps = [rank.windows[-1].step for rank in self._ranks.values() if rank.windows]
        whole = median([one["whole"] for one in parts.values()] or [0.0])
        rate = f", {1 / whole:.2f} steps/s" if whole else ""
        text = Text(f"run {self._newest[0]}, attempt {self._newest[1]}: ", style="bold")
        text.append(f"{len(self._ranks)} ranks, step {max(steps, default=0)}{rate}, ")
        if self._saved is None:
            text.append("no checkpoint yet")
        else:
            age = duration_in_words(now - self._saved["time"])
            text.append(f"checkpoint of step {self._saved['global_step']} committed {age} ago")
        return text

    def _table(self, now: float, parts: Mapping[int, Mapping[str, float]], middle: float) -> Table:
        columns = ("rank", "host", "state", "step", *_PARTS, "ms/step", "heard")
        table = as_table(*columns, numbers=("step", *_PARTS, "ms/step", "heard"))
        for name, ranks in self._rows():
            slowest = max(ranks, key=lambda one: self._own(parts.get(one, {})))
            rank, told = self._ranks[slowest], parts.get(slowest, {})
            states = sorted({self._ranks[one].state for one in ranks})
            heard = min(self._ranks[one].heard for one in ranks)
            is_late = len(parts) > 1 and self._own(told) > _LATE * middle
            table.add_row(
                name + (f", slowest {slowest}" if len(ranks) > 1 else ""), rank.host, ", ".join(states),
                str(rank.windows[-1].step) if rank.windows else "",
                *(f"{1e3 * told[part]:.1f}" if told else "" for part in (*_PARTS, "whole")),
                duration_in_words(now - heard), style="bold yellow" if is_late else "",
            )  # fmt: skip
        return table

    def _rows(self) -> Iterator[tuple[str, Sequence[int]]]:
        if len(self._ranks) <= _MOST_RANKS:
            yield from ((str(number), [number]) for number in sorted(self._ranks))
            return
        hosts: dict[str, list[int]] = {}
        for number, rank in sorted(self._ranks.items()):
            hosts.setdefault(rank.host, []).append(number)
        yield from ((f"{ranks[0]} to {ranks[-1]}", ranks) for ranks in hosts.values())

    @staticmethod
    def _own(parts: Mapping[str, float]) -> float:
        """What a rank does by itself: in the backward, and at the gate, it may wait for others."""
        return sum(parts.get(part, 0.0) for part in ("data", "forward", "optimizer"))
