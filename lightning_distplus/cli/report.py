"""``distplus report``: the verdicts of a run, the error of each rank, and where its deadlines come from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_distplus.events import read_events
from lightning_distplus.watchdog.verdict import Verdict

__all__ = ["main"]

_VERSION = 1


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 where the run has left nothing to show."""
    arguments = _parser().parse_args(argv)
    home = _artefacts_of(arguments.run)
    events = read_events(home)
    verdicts = sorted(home.glob("verdict-*.json"), key=lambda path: path.stat().st_mtime)
    if not events and not verdicts:
        print(
            f"distplus report: {home} holds neither events nor verdicts. A Resilient strategy writes them below the "
            "default_root_dir of its Trainer.",
            file=sys.stderr,
        )
        return 1
    for line in (*_history(events), *_deadlines(events), *_incidents(verdicts)):
        print(line)
    return 0


def _artefacts_of(run: Path) -> Path:
    return run / "distplus" if (run / "distplus").is_dir() else run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distplus report", description="Shows what a run has left behind.")
    parser.add_argument("run", type=Path, metavar="RUN", help="default_root_dir of the run, or its folder distplus")
    return parser


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


def _incidents(paths: Sequence[Path]) -> Iterator[str]:
    """Each verdict as it was printed, oldest first."""
    for path in paths:
        told = json.loads(path.read_text())
        if told.get("version") != _VERSION:
            yield f"{path}: version {told.get('version')} of a verdict; this program reads version {_VERSION}."
            continue
        yield Verdict.from_json(path.read_text()).render()
        yield f"  file:  {path}"


def _moment(event: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(event['time'], tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
