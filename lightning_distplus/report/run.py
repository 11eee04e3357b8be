"""What a job has left behind, read from the ledgers and verdicts of all ranks, as plain data for every view of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lightning_distplus.checkpoint.catalog import CheckpointState, read_manifest, state
from lightning_distplus.errors import DistplusError
from lightning_distplus.events import ckpt_path_for, ledger_files, read_ledger
from lightning_distplus.report.goodput import Attempt, Window, find_attempts, split_wall_time
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts
from lightning_distplus.world import name_ranks

__all__ = [
    "VERSION",
    "Ledgers",
    "artefacts_of",
    "chains_of",
    "describe_job",
    "describe_runs",
    "read_ledgers",
    "step_parts",
]

VERSION = 1
"""Of the data that ``describe_job`` returns."""
_MOST_CHECKPOINTS = 50
_MOST_STACKS = 16
_MOST_NOTICES = 50
_MOST_WINDOWS = 1024  # of a rank and attempt: a thousand ranks of a million steps write some seven million
_COLUMNS, _ROWS, _POINTS = 120, 64, 600
_LATE_SHARE, _LATE_S = 0.2, 0.01
_PARTS_OF_STEP = ("data", "forward", "backward", "optimizer")
_NOTICES = (
    "difference", "step_skipped", "not_finite", "repaired", "straggler", "save_failed", "copy_failed",
    "preemption_late", "run_lock_taken_over", "quarantine",
)  # fmt: skip
_HARMLESS = "initial_weights"  # differ where no seed is set, and the strategy makes them equal
COSTS = {
    "gate": "the exchange of each step, when nobody is late",
    "monitor": "the hooks of the divergence monitor",
    "watchdog": "marks of progress",
    "ledger": "this measurement, and the ledger",
    "checkpoints": "standing still for saves",
}
"""What protects a run, as the event ``costs`` measures it."""


def artefacts_of(run: Path) -> Path:
    """The folder of the ledgers: that of a ``default_root_dir``, or the path itself."""
    return run / "distplus" if (run / "distplus").is_dir() else run


@dataclass
class Ledgers:
    """The ledgers and verdicts of a folder, with the steps apart."""

    home: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    """All but the steps, oldest first."""
    windows: dict[tuple[str, int], dict[int, list[Window]]] = field(default_factory=dict)
    """The steps, by run and attempt, and by rank."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    """Verdicts that this release cannot read."""

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank, as it started last."""
        return {event["rank"]: event.get("host", "") for event in self.events if event["kind"] == "start"}

    @property
    def newest(self) -> dict[int, list[Window]]:
        """By rank, the steps of the attempt that has trained last."""
        return max(self.windows.values(), key=lambda ranks: max(one[-1].end for one in ranks.values()), default={})

    def of_runs(self, runs: Sequence[str]) -> Ledgers:
        """The part that belongs to some runs."""
        return Ledgers(
            self.home,
            [event for event in self.events if event["run_id"] in runs],
            {key: ranks for key, ranks in self.windows.items() if key[0] in runs},
            [one for one in self.verdicts if one.get("run_id", "") in runs],
            self.strange,
        )


def read_ledgers(home: Path, run_id: str | None = None, rank: int | None = None) -> Ledgers:
    """Reads the ledgers and verdicts of a folder, on the clock of rank 0; torn lines are left out.

    Where a rank has told of very many windows, two older ones become one.

    Args:
        home: The folder of the artefacts; a missing one has none.
        run_id: The run that is wanted; None: all of this folder.
        rank: The rank whose ledger is wanted; None: those of all.
    """
    found = Ledgers(home)
    offsets_s: dict[int, float] = {}
    for file in ledger_files(home):
        if rank is not None and not file.name.startswith(f"events-rank{rank:05d}."):
            continue
        for event in read_ledger(file):
            if event["kind"] == "start":
                offsets_s[event["rank"]] = event.get("clock_offset_s", 0.0)
            if run_id not in (None, event["run_id"]):
                continue
            if offset_s := offsets_s.get(event["rank"]):
                event |= {name: event[name] - offset_s for name in ("time", "began_at") if name in event}
            if event["kind"] == "steps":
                ranks = found.windows.setdefault((event["run_id"], event["attempt"]), {})
                windows = ranks.setdefault(event["rank"], [])
                windows.append(Window.from_event(event))
                if len(windows) == _MOST_WINDOWS:
                    half = _MOST_WINDOWS // 2
                    pairs = zip(windows[:half:2], windows[1:half:2], strict=True)
                    windows[:half] = [one.before(other) for one, other in pairs]
            else:
                found.events.append(event)
    found.events.sort(key=lambda event: (event["time"], event["rank"], event["seq"]))
    for told in find_verdicts(home, run_id=run_id):
        path: Path = told.pop("path")
        if told.get("version") == Verdict.version:
            found.verdicts.append({**told, "at": path.stat().st_mtime, "path": str(path)})
        else:
            found.strange.append(
                f"{path}: version {told.get('version')} of a verdict; this program reads version {Verdict.version}."
            )
    return found


def describe_runs(ledgers: Ledgers, mtbf_s: float | None = None) -> list[dict[str, Any]]:
    """``describe_job`` for each job of a folder: the runs that have gone on from each other's checkpoints are one."""
    return [describe_job(ledgers.of_runs(runs), mtbf_s=mtbf_s) for runs in chains_of(ledgers)]


def chains_of(ledgers: Ledgers) -> list[list[str]]:
    """The ids of the runs of each job."""
    chains: list[list[str]] = []
    saved: list[set[str]] = []
    runs = dict.fromkeys(event["run_id"] for event in (*ledgers.events, *ledgers.verdicts) if "run_id" in event)
    for run in runs or {"": None}:
        of_run = [event for event in ledgers.events if event["run_id"] == run]
        loaded = {event.get("path") for event in of_run if event["kind"] == "loaded"}
        before = next((index for index, paths in enumerate(saved) if paths & loaded), len(chains))
        if before == len(chains):
            chains.append([])
            saved.append(set())
        chains[before].append(run)
        saved[before] |= {event["path"] for event in of_run if event["kind"] == "saved"}
    return chains


# -- one job -----------------------------------------------------------------------------------------------------------


def describe_job(ledgers: Ledgers, *, now: float | None = None, mtbf_s: float | None = None) -> dict[str, Any]:
    """What happened to a job, and what to do; JSON can hold it.

    Args:
        ledgers: Of that job alone.
        now: Unix time; by default this moment.
        mtbf_s: Mean time between failures, for the advice on saves.
    """
    now = time.time() if now is None else now
    verdicts = [_verdict(one) for one in ledgers.verdicts]
    attempts = find_attempts(ledgers.events, ledgers.windows, verdicts, now)
    lowest = min((event["rank"] for event in ledgers.events if event["rank"] >= 0), default=0)
    saves = [event for event in ledgers.events if event["kind"] == "saved" and event["rank"] == lowest]
    stalls_s = [event["stall_s"] for event in saves if "stall_s" in event]
    checkpoints = _checkpoints(saves, [event for event in ledgers.events if event["kind"] == "removed"])
    starts = [event for event in ledgers.events if event["kind"] == "start"]
    notices = [event for event in ledgers.events if event["kind"] in _NOTICES and event.get("field") != _HARMLESS]
    return {
        "version": VERSION,
        "home": str(ledgers.home),
        "made_at": now,
        "runs": list(dict.fromkeys(one.run_id for one in attempts)),
        "world_size": max((one.world_size for one in attempts), default=0),
        "hosts": sorted({event["host"] for event in starts if "host" in event}),
        "strategy": next((event["strategy"] for event in starts if "strategy" in event), ""),
        "began": attempts[0].began if attempts else None,
        "last": max((one.last for one in attempts), default=None),
        "step": max((one.last_step for one in attempts), default=0),
        **_last_word(attempts, verdicts, checkpoints, starts[-1].get("auto_folder") if starts else None, now),
        "attempts": [_attempt(one, follower) for one, follower in zip(attempts, [*attempts[1:], None], strict=True)],
        "goodput": split_wall_time(attempts, stalls_s, mtbf_s),
        "verdicts": verdicts,
        "unread": ledgers.strange,
        "checkpoints": checkpoints,
        "num_saves": len(saves),
        "data": next((one["data"] for one in reversed(checkpoints) if one.get("data")), None),
        "stragglers": _stragglers(ledgers),
        "deadlines": _deadlines(ledgers.events),
        "costs": _costs(ledgers.events, saves),
        "notices": [{name: one[name] for name in one if name != "run_id"} for one in notices[-_MOST_NOTICES:]],
        "num_notices": len(notices),
        "failures": _failures(ledgers.events, attempts),
        "steps": _heat_map(ledgers.windows),
        "loss": _loss(attempts),
        "ranks": _ranks(ledgers),
    }


def _verdict(told: Mapping[str, Any]) -> dict[str, Any]:
    """The file, with its printed text; and the stacks of some ranks only, the culprits first."""
    fields = {name: value for name, value in told.items() if name not in ("at", "path")}
    text = ""
    with suppress(TypeError, KeyError, IndexError, ValueError):
        text = Verdict(**fields).render()
    stacks = fields.get("stacks", {})
    culprits = [str(rank) for rank in fields.get("culprits", ())]
    ranks = sorted(stacks, key=lambda rank: culprits.index(rank) if rank in culprits else len(culprits))
    return {
        **fields,
        "at": told["at"],
        "path": told["path"],
        "text": text,
        "headline": text.partition("\n")[0],
        "stacks": {rank: stacks[rank] for rank in ranks[:_MOST_STACKS]},
    }


def _last_word(
    attempts: Sequence[Attempt], verdicts: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]],
    auto_folder: str | None, now: float,
) -> dict[str, str]:  # fmt: skip
    """What happened last, and what to do."""
    if not attempts:
        return {"state": "unknown", "headline": "No rank has begun.", "todo": ""}
    last = attempts[-1]
    kept = next((one for one in reversed(checkpoints) if one["state"] == CheckpointState.COMMITTED.value), None)
    again = "loads the same checkpoint again" if last.phase == "resume" else "starts at the beginning"
    go_on = f"No committed checkpoint is there: the same command {again}."
    if kept is not None:
        ckpt_path = ckpt_path_for(kept["path"], auto_folder)
        go_on = f'The same command with ckpt_path="{ckpt_path}" goes on from {kept["path"]} (step {kept["step"]}).'
    where = f"at step {last.last_step}"
    kinds = ("no_progress", last.end)  # of the launcher, after that of the ranks
    judged = next((one for one in reversed(verdicts) if one["at"] >= last.began and one["kind"] in kinds), None)
    match last.end:
        case "done":
            headline, todo = f"The run is done, {where}.", ""
        case "running":
            headline, todo = f"The run goes on, {where}.", ""
        case "preempted" | "regrouped":
            why = f": {last.why}" if last.why else ""
            headline, todo = f"The run was stopped when asked, {where}{why}.", go_on
        case _ if judged is not None:
            headline = f"{judged['headline'] or judged['cause']} ({where})"
            todo = f"{judged.get('remedy', '').rstrip('.')}. {go_on}".lstrip(". ")
        case "failed":
            headline, todo = f"{name_ranks(last.culprits).capitalize()} failed {where}: {last.why}", go_on
        case _:
            why = last.why or f"nothing was heard for {now - last.last:.0f} s"
            headline = f"The run ended {where} without a word ({why})."
            todo = f"Look at the log of the job and of its hosts for what killed it. {go_on}"
    return {"state": last.end, "headline": headline, "todo": todo}


def _attempt(one: Attempt, follower: Attempt | None) -> dict[str, Any]:
    fields = {name: value for name, value in vars(one).items() if name != "windows"}
    return {**fields, "steps_lost": one.steps_lost(follower), "has_failed": one.has_failed}


def _checkpoints(saves: Sequence[Mapping[str, Any]], removals: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The newest saves, and what is there of each now; ``rotated`` where the run itself has removed it."""
    removed = {str(Path(event["path"]).absolute()): event["time"] for event in removals}
    newest = {event["path"]: event for event in saves}  # a path may be saved again: the last one counts
    found = []
    for path, event in sorted(newest.items(), key=lambda item: item[1]["time"])[-_MOST_CHECKPOINTS:]:
        entry = {
            "path": path,
            "step": event.get("global_step"),
            "at": event["time"],
            "stall_s": event.get("stall_s"),
            "state": "elsewhere" if "://" in path else "unknown",
        }
        with suppress(OSError, DistplusError):
            if "://" not in path:
                entry["state"] = state(path).value
            if entry["state"] == CheckpointState.MISSING.value and removed.get(path, 0.0) >= event["time"]:
                entry["state"] = "rotated"
            if entry["state"] == CheckpointState.COMMITTED.value:
                manifest = read_manifest(path)
                entry |= {"size_bytes": manifest.size_bytes, "data": manifest.data}
        found.append(entry)
    return found


def _deadlines(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What ``timeout="auto"`` has found last, each value with its reason."""
    last = next((event for event in reversed(events) if event["kind"] == "calibrated"), None)
    if last is None:
        return None
    reasons, deadlines_s = last.get("reasons", {}), sorted(last["deadlines_s"].items())
    phases = [{"phase": name, "seconds": seconds, "reason": reasons.get(name, "")} for name, seconds in deadlines_s]
    return {"attempt": last["attempt"], "phases": phases}


def _costs(events: Sequence[Mapping[str, Any]], saves: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What each protection took of a step, in microseconds, as the lowest rank has measured it last."""
    told = [event for event in events if event["kind"] == "costs"]
    if not told:
        return None
    last = [event for event in told if event["rank"] == min(one["rank"] for one in told)][-1]
    of_attempt = [one for one in saves if (one["run_id"], one["attempt"]) == (last["run_id"], last["attempt"])]
    stall_us = 1e6 * sum(one.get("stall_s", 0.0) for one in of_attempt) / last["steps"]
    parts = {name: last.get(f"{name}_us", 0.0) for name in COSTS if name != "checkpoints"}
    return {"rank": last["rank"], "attempt": last["attempt"], "steps": last["steps"], "parts": [
        {"name": name, "microseconds": value, "meaning": COSTS[name]}
        for name, value in {**parts, "checkpoints": round(stall_us, 1)}.items()
    ]}  # fmt: skip


def _failures(events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Errors that ranks have told, without those of ranks that stopped because another one is blamed."""
    blamed = {one.number: one.culprits for one in attempts if one.culprits}
    found = []
    for event in (one for one in events if one["kind"] == "failed"):
        rank, number, error = event["rank"], event["attempt"], str(event.get("error", "")).partition("\n")[0]
        is_of_peers = error.startswith(("PeerFailed", "PeerLost", "PeerMissing"))
        if not is_of_peers or rank in blamed.get(number, [rank]):
            found.append({"rank": rank, "at": event["time"], "attempt": number, "error": error})
    return found[:_MOST_NOTICES]


# -- steps -------------------------------------------------------------------------------------------------------------


def step_parts(windows: Sequence[Window]) -> dict[str, float]:
    """Seconds of each part of a mean step; what is left of it is ``other``."""
    steps = sum(window.steps for window in windows) or 1
    parts = {part: sum(getattr(window, f"{part}_s") for window in windows) / steps for part in _PARTS_OF_STEP}
    parts["wait"] = sum(window.wait_s for window in windows) / steps
    whole = sum(window.step_s * window.steps for window in windows) / steps
    return {**parts, "other": max(whole - sum(parts.values()), 0.0), "whole": whole}


def _stragglers(ledgers: Ledgers) -> list[dict[str, Any]]:
    """The ranks that the run has named, or whose own part of a step is longer than the others' in the last windows.

    The run itself names none above 64 ranks, and none where no monitor is there.
    """
    if not ledgers.windows:
        return []
    ranks, hosts = ledgers.newest, ledgers.hosts
    attempt = next(number for (_, number), windows in ledgers.windows.items() if windows is ranks)
    since: dict[int, Any] = {}
    for event in ledgers.events:
        if event["kind"] == "straggler" and event["attempt"] == attempt:
            for rank in event.get("ranks", ()):
                since.setdefault(rank, event.get("since_step", event.get("global_step")))
    first = min(since.values(), default=0) or 0
    late = {
        rank: step_parts([one for one in windows if one.step > first][-_COLUMNS:] or windows[-1:])
        for rank, windows in ranks.items()
    }
    found = []
    for rank, parts in late.items():
        peers = [theirs for other, theirs in late.items() if other != rank] or [parts]
        others = {part: median([theirs[part] for theirs in peers]) for part in _PARTS_OF_STEP}
        part = max(_PARTS_OF_STEP, key=lambda name: parts[name] - others[name])
        excess = parts[part] - others[part]
        if rank in since or (excess > _LATE_SHARE * parts["whole"] and excess > _LATE_S and part != "backward"):
            host, first_step = hosts.get(rank, ""), since.get(rank)
            told = f"{name_ranks([rank])}{f' (host {host})' if host else ''} is slow: {part} takes "
            told += f"{1e3 * parts[part]:.0f} ms"
            if others[part]:
                told += f", {parts[part] / others[part]:.1f} x the median of the others"
            told += f", since step {first_step}" if first_step else ""
            place = {"rank": rank, "host": host, "part": part, "since_step": first_step, "text": told}
            found.append({**place, "seconds": parts[part], "median_s": others[part]})
    return found


def _heat_map(windows: Mapping[tuple[str, int], Mapping[int, Sequence[Window]]]) -> dict[str, Any] | None:
    """The slowest step by rank and time, and the most that a rank did itself; above 64 ranks a row is several."""
    every = [window for ranks in windows.values() for of_rank in ranks.values() for window in (of_rank[0], of_rank[-1])]
    if not every:
        return None
    begin = min(window.end - window.seconds for window in every)
    end = max(window.end for window in every)
    ranks = sorted({rank for of_ranks in windows.values() for rank in of_ranks})
    per_row = math.ceil(len(ranks) / _ROWS)
    columns = min(_COLUMNS, max(sum(len(one.get(rank, ())) for one in windows.values()) for rank in ranks))
    width = max(end - begin, 1e-6) / columns
    rows = []
    for members in (ranks[first : first + per_row] for first in range(0, len(ranks), per_row)):
        step_s, own_s = [0.0] * columns, [0.0] * columns
        for window in (one for of_ranks in windows.values() for rank in members for one in of_ranks.get(rank, ())):
            # The columns whose middle it covers, else the one in which its own middle lies.
            first = math.ceil((window.end - window.seconds - begin) / width - 0.5)
            last = math.floor((window.end - begin) / width - 0.5)
            if first > last:
                first = last = int((window.end - window.seconds / 2 - begin) / width)
            for column in range(max(first, 0), min(last, columns - 1) + 1):
                step_s[column] = max(step_s[column], window.step_s)
                own_s[column] = max(own_s[column], window.own_s)
        cells = {"step_s": step_s, "own_s": own_s}
        rows.append({"ranks": members, **{name: [round(one, 5) or None for one in cells[name]] for name in cells}})
    return {"begin": begin, "end": end, "rows": rows}


def _loss(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    lines = []
    for attempt in attempts:
        points = [(window.step, window.loss) for window in attempt.windows if window.loss is not None]
        finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
        every = math.ceil(len(finite) / _POINTS) or 1
        if finite:
            lines.append({"attempt": attempt.number, "run_id": attempt.run_id, "points": finite[::-every][::-1]})
    return lines


def _ranks(ledgers: Ledgers) -> list[dict[str, Any]]:
    hosts = ledgers.hosts
    return [
        {
            "rank": rank,
            "host": hosts.get(rank, ""),
            "step": windows[-1].step,
            **{part: round(seconds, 5) for part, seconds in step_parts(windows[-3:]).items()},
        }
        for rank, windows in sorted(ledgers.newest.items())
    ]
