"""``distplus report``: the verdicts of a run, its errors and deadlines; or a verdict from torch's own dumps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_distplus.events import read_events
from lightning_distplus.watchdog.dumps import judge_dumps
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts

__all__ = ["main"]

_VERSION = 1
_MANY_FILES = 32  # from so many on, reading takes long enough to say how far it is


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 where the run has left nothing to show."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if (arguments.run is None) == (arguments.dumps is None):
        parser.error("name either RUN or --dumps FOLDER")
    if arguments.dumps is not None:
        verdict = judge_dumps(arguments.dumps, on_file=_say_how_far)
        print(verdict.to_json() if arguments.json else verdict.render())
        return 0
    if arguments.json:
        parser.error("--json goes with --dumps; the verdicts of a run are JSON files already")
    home = _artefacts_of(arguments.run)
    events = read_events(home, run_id=arguments.run_id)
    verdicts = find_verdicts(home, run_id=arguments.run_id)
    if not events and not verdicts:
        print(
            f"distplus report: {home} holds neither events nor verdicts. A Resilient strategy writes them below the "
            "default_root_dir of its Trainer.",
            file=sys.stderr,
        )
        return 1
    runs = list(dict.fromkeys(str(one.get("run_id", "")) for one in (*events, *verdicts)))
    for run_id in runs:
        if len(runs) > 1:
            print(f"run {run_id or '(without an id)'}:")
        of_run = [event for event in events if event["run_id"] == run_id]
        told = [one for one in verdicts if one.get("run_id", "") == run_id]
        for line in (*_history(of_run), *_deadlines(of_run), *_incidents(told)):
            print(line)
    return 0


def _artefacts_of(run: Path) -> Path:
    return run / "distplus" if (run / "distplus").is_dir() else run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus report",
        description="Shows what a run has left behind, or judges the dumps of torch's Flight Recorder of any job.",
    )
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="default_root_dir of the run, or its folder distplus"
    )
    parser.add_argument(
        "--dumps",
        type=Path,
        metavar="FOLDER",
        help="give the verdict on a job that did not use this package: FOLDER holds one dump of torch's Flight "
        "Recorder per rank (nccl_trace_rank_0, ...), pickled or JSON, format 2.x",
    )
    parser.add_argument("--json", action="store_true", help="with --dumps: print all fields of the verdict")
    parser.add_argument("--run-id", help="one run only, where several have written to that folder (default: all)")
    return parser


def _say_how_far(number: int, count: int) -> None:
    if count >= _MANY_FILES and (number % max(count // 10, 1) == 0 or number == count):
        print(f"distplus report: {number} of {count} dumps read", file=sys.stderr)


def _history(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """When the run was alive, and what ended ranks."""
    if not events:
        return
    ranks, attempts = ({event[name] for event in events} for name in ("rank", "attempt"))
    yield (
        f"{len(ranks)} ranks, {len(attempts)} attempts, from {_moment(events[0])} to {_moment(events[-1])} UTC; "
        f"{sum(event['kind'] == 'saved' and event['rank'] == 0 for event in events)} checkpoints saved"
    )
    for event in events:
        if event["kind"] == "failed":
            error = str(event.get("error", "")).partition("\n")[0]
            yield f"rank {event['rank']} failed at {_moment(event)}, attempt {event['attempt']}: {error}"


def _deadlines(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What ``timeout="auto"`` has found last, each value with its reason."""
    calibrated = [event for event in events if event["kind"] == "calibrated"]
    if not calibrated:
        return
    last = calibrated[-1]
    yield f"deadlines of timeout='auto', attempt {last['attempt']}:"
    for phase, seconds in sorted(last["deadlines_s"].items()):
        yield f"  {phase:<12}{seconds:>8g} s   {last.get('reasons', {}).get(phase, '')}".rstrip()


def _incidents(verdicts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each verdict as it was printed, oldest first."""
    for told in verdicts:
        path: Path = told["path"]
        if told.get("version") != _VERSION:
            yield f"{path}: version {told.get('version')} of a verdict; this program reads version {_VERSION}."
            continue
        yield Verdict.from_json(path.read_text()).render()
        yield f"  file:  {path}"


def _moment(event: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(event['time'], tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
