"""``distplus report`` and ``distplus top``: a run for a terminal, as a page or as data; or a verdict from dumps."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_distplus.cli import count, duration, moment, print_json, stdout, table
from lightning_distplus.events import ledger_files, parse_event
from lightning_distplus.report import artefacts_of, describe_runs, read_ledgers, write_page
from lightning_distplus.report.goodput import Window
from lightning_distplus.report.run import step_parts
from lightning_distplus.watchdog.verdict import duration_in_words, judge_dumps

__all__ = ["LiveRun", "main", "run_top", "show_job"]

_EVERY_S = 2.0

# -- distplus report ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Exit code 0.

    Raises:
        FileNotFoundError: The run has left nothing to show.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if (arguments.run is None) == (arguments.dumps is None):
        parser.error("name either RUN or --dumps FOLDER")
    if arguments.html is not None and not arguments.html.absolute().parent.is_dir():
        parser.error(f"--html {arguments.html}: there is no folder {arguments.html.parent}")
    if arguments.dumps is not None:
        verdict = judge_dumps(arguments.dumps)
        print(verdict.to_json() if arguments.json else verdict.render())
        return 0
    home, mtbf = artefacts_of(arguments.run), arguments.mtbf

    def read() -> list[dict[str, Any]]:
        ledgers = read_ledgers(home, arguments.run_id)
        is_empty = not (ledgers.events or ledgers.windows or ledgers.verdicts or ledgers.strange)
        return [] if is_empty else describe_runs(ledgers, None if mtbf is None else mtbf.total_seconds())

    jobs = read()
    if not jobs:
        written = "A Resilient strategy writes them below the default_root_dir of its Trainer."
        raise FileNotFoundError(f"{home} holds neither events nor verdicts. {written}")
    if arguments.follow:
        with suppress(KeyboardInterrupt), Live(console=stdout(), auto_refresh=False) as live:
            while True:
                live.update(_shown(jobs), refresh=True)
                if arguments.html is not None:
                    write_page(home, arguments.html, jobs)
                if all(job["state"] != "running" for job in jobs):
                    return 0
                time.sleep(_EVERY_S)
                jobs = read()
        return 0
    if arguments.json:
        print_json(jobs)
    else:
        stdout().print(_shown(jobs))
    if arguments.html is not None:
        print(f"distplus report: wrote {write_page(home, arguments.html, jobs)}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus report",
        description="Shows what a run has left behind, or judges the dumps of torch's Flight Recorder of any job.",
    )
    add = parser.add_argument
    add("run", type=Path, nargs="?", metavar="RUN", help=_RUN)
    add(
        "--dumps",
        type=Path,
        metavar="FOLDER",
        help="give the verdict on a job that did not use this package: FOLDER holds one dump of torch's Flight "
        "Recorder per rank (nccl_trace_rank_0, ...), pickled or JSON, format 2.x",
    )
    how = parser.add_mutually_exclusive_group().add_argument
    how("--json", action="store_true", help="print the data of the report; with --dumps all fields of the verdict")
    how("--follow", action="store_true", help="show it anew every 2 s while the run goes on")
    add("--html", type=Path, metavar="FILE", help="write the report as one page, which needs no network")
    failures = "mean time between failures, such as 12h, for the advice on checkpoints"
    add("--mtbf", type=duration, metavar="DURATION", help=failures)
    add("--run-id", help="one run only, where several have written to that folder (default: all)")
    return parser


_RUN = "default_root_dir of the run, or its folder distplus"


def _shown(jobs: Sequence[dict[str, Any]]) -> Group:
    parts: list[RenderableType] = []
    for job in jobs:
        if len(jobs) > 1:
            parts.append(f"run {', '.join(job['runs']) or '(without an id)'}:")
        parts.append(show_job(job))
    return Group(*parts)


# -- a job -------------------------------------------------------------------------------------------------------------

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
    parts = (
        _head, _failures, _attempts, _goodput, _verdicts, _stragglers, _checkpoints, _data, _deadlines, _notices,
    )  # fmt: skip
    shown = [one for part in parts if (one := part(job)) is not None]
    return Group(*(one for part in shown for one in (part, Text(""))))


def _as_text(lines: Sequence[str], style: str = "", between: str = "\n") -> Text | None:
    return Text(between.join(lines), style=style) if lines else None


def _head(job: Mapping[str, Any]) -> RenderableType:
    text = Text()
    text.append(f"{job['headline']}\n", style=f"bold {_MOODS.get(job['state'], 'red')}")
    if job["todo"]:
        text.append(f"  do:    {job['todo']}\n", style="bold")
    hosts = job["hosts"][0] if len(job["hosts"]) == 1 else count(len(job["hosts"]), "host")
    ranks, attempts = count(job["world_size"], "rank"), count(len(job["attempts"]), "attempt")
    text.append(f"  {ranks}, {hosts}, {job['strategy']}, {attempts}, from {moment(job['began'])} ")
    text.append(f"to {moment(job['last'])} UTC, {count(job['num_saves'], 'checkpoint')} saved")
    return text


def _failures(job: Mapping[str, Any]) -> Text | None:
    told = job["failures"]
    words = "rank {rank} failed at {moment}, attempt {attempt}: {error}"
    return _as_text([words.format(moment=moment(one["at"]), **one) for one in told])


def _attempts(job: Mapping[str, Any]) -> Table | None:
    if not job["attempts"]:
        return None
    numbers = ("attempt", "ranks", "lasted", "lost")
    rows = table("attempt", "began", "ranks", "steps", "lasted", "ended", "lost", "why", numbers=numbers)
    for one in job["attempts"]:
        rows.add_row(
            str(one["number"]), moment(one["began"]), str(one["world_size"]),
            f"{one['first_step']} to {one['last_step']}", duration_in_words(one["last"] - one["began"]),
            Text(one["end"], style=_MOODS.get(one["end"], "red")),
            f"{one['steps_lost']} steps" if one["steps_lost"] else "", Text(one["why"]),
        )  # fmt: skip
    return rows


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
    told = [f"{one['text'] or one['incident']}\n  file:  {one['path']}" for one in job["verdicts"]]
    return _as_text([*job["unread"], *told], between="\n\n")


def _stragglers(job: Mapping[str, Any]) -> Text | None:
    return _as_text([one["text"] for one in job["stragglers"]], style="yellow")


def _checkpoints(job: Mapping[str, Any]) -> Table | None:
    if not job["checkpoints"]:
        return None
    rows = table("step", "saved", "now", "stall", "checkpoint", numbers=("step", "stall"))
    for one in job["checkpoints"][-_MOST_CHECKPOINTS:]:
        stall = "" if one["stall_s"] is None else f"{one['stall_s']:.2f} s"
        state = Text(one["state"], style=_MOODS.get(one["state"], ""))
        rows.add_row(str(one["step"]), moment(one["at"]), state, stall, Text(one["path"]))
    return rows


def _data(job: Mapping[str, Any]) -> Text | None:
    plain = [f"{name} {value}" for name, value in (job["data"] or {}).items() if isinstance(value, str | int | float)]
    return Text(f"data at the newest checkpoint: {', '.join(plain)}") if plain else None


def _deadlines(job: Mapping[str, Any]) -> Text | None:
    if job["deadlines"] is None:
        return None
    lines = [f"deadlines of timeout='auto', attempt {job['deadlines']['attempt']}:"]
    for one in job["deadlines"]["phases"]:
        lines.append(f"  {one['phase']:<12}{one['seconds']:>8g} s   {one['reason']}".rstrip())
    return _as_text(lines)


def _notices(job: Mapping[str, Any]) -> Text | None:
    shown = job["notices"][-_MOST_NOTICES:]
    more = job["num_notices"] - len(shown)
    lines = [f"{more} earlier notices"] if more > 0 else []
    for one in shown:
        rest = {name: value for name, value in one.items() if name not in ("time", "rank", "attempt", "seq", "kind")}
        told = ", ".join(f"{name} {value}" for name, value in rest.items())
        lines.append(f"{moment(one['time'])} rank {one['rank']}: {one['kind'].replace('_', ' ')}: {told}"[:200])
    return _as_text(lines)


# -- distplus top ------------------------------------------------------------------------------------------------------

_NUM_WINDOWS = 3
_MOST_RANKS = 32
_LATE = 1.2
_PARTS = ("data", "forward", "backward", "optimizer", "wait", "other")


def run_top(argv: Sequence[str]) -> int:
    """Shows the ranks of a run as it goes on; exit code 0 at its end, or after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="distplus top", description="Shows what each rank does, from any host that sees the folder of the run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    parser.add_argument("--every", type=float, default=_EVERY_S, metavar="SECONDS", help="default: %(default)g")
    parser.add_argument("--once", action="store_true", help="show it once, as for a log")
    arguments = parser.parse_args(argv)
    live_run = LiveRun(artefacts_of(arguments.run))
    if arguments.once:
        live_run.refresh()
        stdout().print(live_run.show())
        return 0
    with suppress(KeyboardInterrupt), Live(console=stdout(), auto_refresh=False) as live:
        while True:
            live_run.refresh()
            live.update(live_run.show(), refresh=True)
            if live_run.is_over:
                break
            time.sleep(max(arguments.every, 0.1))
    return 0


@dataclass
class _Rank:
    host: str = ""
    state: str = "start"
    heard: float = 0.0
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=_NUM_WINDOWS))
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of a mean step, in these windows."""

    @property
    def own_s(self) -> float:
        """What it does by itself: in the backward, and at the gate, it may wait for others."""
        return sum(self.parts.get(part, 0.0) for part in ("data", "forward", "optimizer"))


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
        self._per_step: Mapping[str, float] = {}
        self._saved: Mapping[str, Any] | None = None

    def refresh(self) -> None:
        """Reads what is new. A line that is not whole yet is read the next time."""
        for path in ledger_files(self._home, has_launcher=False):
            if "." not in path.stem:  # what is in the others has been read, or is old
                with suppress(FileNotFoundError):  # it is being rotated: the next one is not there yet
                    self._read_on(path)
        for rank in self._ranks.values():
            rank.parts = step_parts(rank.windows) if rank.windows else {}

    def _read_on(self, path: Path) -> None:
        begin = self._read.get(path, 0)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < begin:  # a new file of that name
                begin = 0
            file.seek(begin)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[path] = begin + whole
        for line in data[:whole].splitlines():
            if (event := parse_event(line)) is not None:
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        key = (event["run_id"], event["attempt"])
        if event["kind"] == "start" and key != self._newest and event["time"] > self._began:
            self._newest, self._began, self._ranks, self._per_step = key, event["time"], {}, {}
        if key != self._newest:
            return
        rank = self._ranks.setdefault(event["rank"], _Rank())
        rank.heard = event["time"]
        match event["kind"]:
            case "start":
                rank.host = event.get("host", "")
            case "steps":
                told = {unit: event[unit] / event["steps"] for unit in ("tokens", "samples") if unit in event}
                self._per_step = told or self._per_step  # rank 0 tells it
                rank.windows.append(Window.from_event(event))
                rank.state = "training"
            case "failed" | "preempted" as state:
                rank.state = state
            case "end":
                rank.state = "failed" if event.get("failed") else "done"
            case "saved" if self._saved is None or event["time"] >= self._saved["time"]:
                self._saved = event

    @property
    def is_over(self) -> bool:
        """Whether no rank of the newest attempt goes on."""
        return bool(self._ranks) and all(one.state not in ("start", "training") for one in self._ranks.values())

    def show(self, now: float | None = None) -> Group:
        """The ranks, slowest first; where they are many, a line for each host."""
        if self._newest is None:
            return Group(Text(f"nothing in {self._home} yet"))
        now = time.time() if now is None else now
        return Group(self._head(now, *self._newest), Text(""), self._table(now))

    def _head(self, now: float, run_id: str, attempt: int) -> RenderableType:
        trained = [rank for rank in self._ranks.values() if rank.windows]
        whole = median([rank.parts["whole"] for rank in trained] or [0.0])
        text = Text(f"run {run_id}, attempt {attempt}: ", style="bold")
        text.append(f"{len(self._ranks)} ranks, step {max((one.windows[-1].step for one in trained), default=0)}, ")
        if whole:
            text.append(f"{1 / whole:.2f} steps/s, ")
            for unit, count in list(self._per_step.items())[:1]:
                text.append(f"{count / whole:,.0f} {unit}/s, ")
        if self._saved is None:
            text.append("no checkpoint yet")
        else:
            age = duration_in_words(now - self._saved["time"])
            text.append(f"checkpoint of step {self._saved['global_step']} committed {age} ago")
        return text

    def _table(self, now: float) -> Table:
        columns = ("rank", "host", "state", "step", *_PARTS, "ms/step", "heard")
        rows = table(*columns, numbers=("step", *_PARTS, "ms/step", "heard"))
        own_s = [rank.own_s for rank in self._ranks.values() if rank.windows]
        late_s = _LATE * median(own_s) if len(own_s) > 1 else float("inf")
        for name, ranks in self._rows():
            slowest = max(ranks, key=lambda one: self._ranks[one].own_s)
            rank = self._ranks[slowest]
            heard = min(self._ranks[one].heard for one in ranks)
            rows.add_row(
                name + (f", slowest {slowest}" if len(ranks) > 1 else ""), rank.host,
                ", ".join(sorted({self._ranks[one].state for one in ranks})),
                str(rank.windows[-1].step) if rank.windows else "",
                *(f"{1e3 * rank.parts[part]:.1f}" if rank.parts else "" for part in (*_PARTS, "whole")),
                duration_in_words(now - heard), style="bold yellow" if rank.own_s > late_s else "",
            )  # fmt: skip
        return rows

    def _rows(self) -> Iterator[tuple[str, Sequence[int]]]:
        if len(self._ranks) <= _MOST_RANKS:
            yield from ((str(number), [number]) for number in sorted(self._ranks))
            return
        hosts: dict[str, list[int]] = {}
        for number, rank in sorted(self._ranks.items()):
            hosts.setdefault(rank.host, []).append(number)
        yield from ((f"{ranks[0]} to {ranks[-1]}", ranks) for ranks in hosts.values())
