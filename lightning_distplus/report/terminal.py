"""The report for a terminal, and a run as it goes on, for ``distplus top``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_distplus.events import ledger_files, parse_event
from lightning_distplus.report.goodput import Window
from lightning_distplus.report.run import step_parts
from lightning_distplus.watchdog.verdict import duration_in_words
from lightning_distplus.world import name_ranks

__all__ = ["LiveRun", "show_job"]


_COLOURS = {
    "training": "green", "data_wait": "yellow", "checkpoint": "blue", "validation": "magenta", "setup": "white",
    "redone": "red", "detection": "bright_red", "restart": "bright_magenta", "queue": "bright_black",
}  # fmt: skip
_MOODS = {"done": "green", "running": "green", "committed": "green", "preempted": "yellow", "regrouped": "yellow"}
_BAR = 60
_MOST_CHECKPOINTS = 8
_MOST_NOTICES = 8


def show_job(job: Mapping[str, Any]) -> Group:
    """All that is known of a job, the last word first."""
    parts = [
        _head(job), _failures(job), _attempts(job), _goodput(job), _verdicts(job), _stragglers(job),
        _checkpoints(job), _data(job), _deadlines(job), _costs(job), _notices(job),
    ]  # fmt: skip
    shown = [part for part in parts if part is not None]
    return Group(*(one for part in shown for one in (part, Text(""))))


def _as_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table that a log can hold as well: no frame."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _head(job: Mapping[str, Any]) -> RenderableType:
    text = Text()
    text.append(f"{job['headline']}\n", style=f"bold {_MOODS.get(job['state'], 'red')}")
    if job["todo"]:
        text.append(f"  do:    {job['todo']}\n", style="bold")
    hosts = job["hosts"][0] if len(job["hosts"]) == 1 else f"{len(job['hosts'])} hosts"
    num = len(job["attempts"])
    text.append(
        f"  {job['world_size']} ranks, {hosts}, {job['strategy']}, {num} attempt{'s' if num != 1 else ''}, "
        f"from {_moment(job['began'])} to {_moment(job['last'])} UTC, {len(job['checkpoints'])} checkpoints saved"
    )
    return text


def _failures(job: Mapping[str, Any]) -> Text | None:
    lines = [
        f"rank {one['rank']} failed at {_moment(one['at'])}, attempt {one['attempt']}: {one['error']}"
        for one in job["failures"]
    ]
    return Text("\n".join(lines)) if lines else None


def _attempts(job: Mapping[str, Any]) -> Table | None:
    if not job["attempts"]:
        return None
    numbers = ("attempt", "ranks", "lasted", "lost")
    table = _as_table("attempt", "began", "ranks", "steps", "lasted", "ended", "lost", "why", numbers=numbers)
    for one in job["attempts"]:
        table.add_row(
            str(one["number"]), _moment(one["began"]), str(one["world_size"]),
            f"{one['first_step']} to {one['last_step']}", duration_in_words(one["last"] - one["began"]),
            Text(one["end"], style=_MOODS.get(one["end"], "red")),
            f"{one['steps_lost']} steps" if one["steps_lost"] else "", Text(one["why"]),
        )  # fmt: skip
    return table


def _goodput(job: Mapping[str, Any]) -> Group | None:
    goodput = job["goodput"]
    if not goodput["wall_s"]:
        return None
    text, bar = Text(), Text()
    text.append(f"goodput {100 * goodput['share']:.1f} %", style="bold")
    text.append(f" of {duration_in_words(goodput['wall_s'])} trained the model\n")
    for part in goodput["parts"]:
        share = part["seconds"] / goodput["wall_s"]
        bar.append("█" * round(_BAR * share), style=_COLOURS[part["name"]])
        if part["seconds"] > 0:
            text.append("  ■ ", style=_COLOURS[part["name"]])
            seconds = duration_in_words(part["seconds"]) if part["seconds"] >= 1 else f"{part['seconds']:.2f} s"
            text.append(
                f"{part['name'].replace('_', ' '):<12}{100 * share:>6.1f} %  {seconds:>10}  {part['meaning']}\n"
            )
    for one in goodput["incidents"]:
        again = "not trained again yet" if one["recover_s"] is None else f"trained again {one['recover_s']:.1f} s later"
        text.append(
            f"  attempt {one['attempt']}: {one['kind']}, known after {one['detect_s']:.1f} s, {again}, "
            f"{one['steps_lost']} steps lost ({one['seconds_lost']:.1f} s)\n"
        )
    if goodput["advice"]:
        text.append(f"  advice: {goodput['advice']}\n", style="bold")
    text.rstrip()
    return Group(bar, text)


def _verdicts(job: Mapping[str, Any]) -> Text | None:
    texts = list(job["unread"])
    texts += [f"{one['text'] or one['incident']}\n  file:  {one['path']}" for one in job["verdicts"]]
    return Text("\n\n".join(texts)) if texts else None


def _stragglers(job: Mapping[str, Any]) -> Text | None:
    lines = [straggler_in_words(one) for one in job["stragglers"]]
    return Text("\n".join(lines), style="yellow") if lines else None


def straggler_in_words(one: Mapping[str, Any]) -> str:
    """For example ``rank 5 (host a) is slow: data takes 63 ms, 2.1 x the median of the others, since step 1200``."""
    host = f" (host {one['host']})" if one["host"] else ""
    factor = f", {one['factor']:.1f} x the median of the others" if one["factor"] else ""
    since = f", since step {one['since_step']}" if one["since_step"] else ""
    return (
        f"{name_ranks([one['rank']])}{host} is slow: {one['part']} takes {1e3 * one['seconds']:.0f} ms{factor}{since}"
    )


def _checkpoints(job: Mapping[str, Any]) -> Table | None:
    if not job["checkpoints"]:
        return None
    table = _as_table("step", "saved", "now", "stall", "checkpoint", numbers=("step", "stall"))
    for one in job["checkpoints"][-_MOST_CHECKPOINTS:]:
        stall = "" if one["stall_s"] is None else f"{one['stall_s']:.2f} s"
        state = Text(one["state"], style=_MOODS.get(one["state"], ""))
        table.add_row(str(one["step"]), _moment(one["at"]), state, stall, Text(one["path"]))
    return table


def _data(job: Mapping[str, Any]) -> Text | None:
    if not job["data"]:
        return None
    plain = [f"{name} {value}" for name, value in job["data"].items() if isinstance(value, str | int | float)]
    return Text(f"data at the newest checkpoint: {', '.join(plain)}") if plain else None


def _deadlines(job: Mapping[str, Any]) -> Text | None:
    if job["deadlines"] is None:
        return None
    lines = [f"deadlines of timeout='auto', attempt {job['deadlines']['attempt']}:"]
    for one in job["deadlines"]["phases"]:
        lines.append(f"  {one['phase']:<12}{one['seconds']:>8g} s   {one['reason']}".rstrip())
    return Text("\n".join(lines))


def _costs(job: Mapping[str, Any]) -> Text | None:
    if job["costs"] is None:
        return None
    lines = [f"microseconds of a step on rank {job['costs']['rank']}, over {job['costs']['steps']} steps:"]
    for one in job["costs"]["parts"]:
        lines.append(f"  {one['name']:<12}{one['microseconds']:>8.0f}     {one['meaning']}")
    return Text("\n".join(lines))


def _notices(job: Mapping[str, Any]) -> Text | None:
    lines = list(_lines_of_notices(job["notices"][-_MOST_NOTICES:]))
    more = job["num_notices"] - len(lines)
    return Text("\n".join([*([f"{more} earlier notices"] if more > 0 else []), *lines])) if lines else None


def _lines_of_notices(notices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in notices:
        rest = {name: value for name, value in one.items() if name not in ("time", "rank", "attempt", "seq", "kind")}
        more = ", ".join(f"{name} {value}" for name, value in rest.items())
        yield f"{_moment(one['time'])} rank {one['rank']}: {one['kind'].replace('_', ' ')}: {more}"[:200]


def _moment(at: float | None) -> str:
    return "" if at is None else f"{datetime.fromtimestamp(at, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"


# -- a run as it goes on -----------------------------------------------------------------------------------------------


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
        table = _as_table(*columns, numbers=("step", *_PARTS, "ms/step", "heard"))
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
