"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_distplus.watchdog.ending import duration_in_words
from lightning_distplus.world import name_ranks

__all__ = ["as_table", "show_job"]

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


def as_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
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
    table = as_table("attempt", "began", "ranks", "steps", "lasted", "ended", "lost", "why", numbers=numbers)
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
    table = as_table("step", "saved", "now", "stall", "checkpoint", numbers=("step", "stall"))
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
