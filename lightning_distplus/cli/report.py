"""``distplus report``: what a run has left behind, for a terminal, as a page or as data; or a verdict from dumps."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from lightning_distplus.report import artefacts_of, describe_runs, read_ledgers, write_page
from lightning_distplus.report.terminal import LiveRun, show_job
from lightning_distplus.timeouts import parse_duration
from lightning_distplus.watchdog.verdict import judge_dumps

__all__ = ["main", "run_top"]

_EVERY_S = 2.0
_WIDTH_OF_A_FILE = 200
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
    mtbf_s = None
    if arguments.mtbf is not None:
        try:
            mtbf_s = parse_duration(arguments.mtbf, field="--mtbf").total_seconds()
        except ValueError as error:
            parser.error(str(error))
    home = artefacts_of(arguments.run)
    jobs = _read(home, arguments, mtbf_s)
    if not jobs:
        print(
            f"distplus report: {home} holds neither events nor verdicts. A Resilient strategy writes them below the "
            "default_root_dir of its Trainer.",
            file=sys.stderr,
        )
        return 1
    if arguments.follow:
        return _follow(home, arguments, mtbf_s)
    if arguments.json:
        print(json.dumps(jobs, default=str, indent=1))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE).print(_shown(jobs))
    if arguments.html is not None:
        print(f"distplus report: wrote {write_page(home, arguments.html, jobs)}", file=sys.stderr)
    return 0


def run_top(argv: Sequence[str]) -> int:
    """Shows the ranks of a run as it goes on; exit code 0 at its end, or after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="distplus top", description="Shows what each rank does, from any host that sees the folder of the run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="default_root_dir of the run, or its folder distplus")
    parser.add_argument("--every", type=float, default=_EVERY_S, metavar="SECONDS", help="default: %(default)g")
    parser.add_argument("--once", action="store_true", help="show it once, as for a log")
    arguments = parser.parse_args(argv)
    live_run = LiveRun(artefacts_of(arguments.run))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live_run.refresh()
            live.update(live_run.show(), refresh=True)
            if arguments.once or live_run.is_over:
                break
            time.sleep(arguments.every)
    return 0


def _read(home: Path, arguments: argparse.Namespace, mtbf_s: float | None) -> list[dict[str, Any]]:
    ledgers = read_ledgers(home, arguments.run_id)
    is_empty = not (ledgers.events or ledgers.windows or ledgers.verdicts or ledgers.strange)
    return [] if is_empty else describe_runs(ledgers, mtbf_s)


def _follow(home: Path, arguments: argparse.Namespace, mtbf_s: float | None) -> int:
    """Shows the run anew until nothing of it goes on, or until Ctrl-C."""
    with suppress(KeyboardInterrupt), Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            jobs = _read(home, arguments, mtbf_s)
            live.update(_shown(jobs), refresh=True)
            if arguments.html is not None:
                write_page(home, arguments.html, jobs)
            if all(job["state"] != "running" for job in jobs):
                break
            time.sleep(_EVERY_S)
    return 0


def _shown(jobs: Sequence[dict[str, Any]]) -> Group:
    titles = [f"run {', '.join(job['runs']) or '(without an id)'}:" if len(jobs) > 1 else "" for job in jobs]
    parts = [(title, show_job(job)) for title, job in zip(titles, jobs, strict=True)]
    return Group(*(part for title, shown in parts for part in ((title, shown) if title else (shown,))))


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
    parser.add_argument(
        "--json", action="store_true", help="print the data of the report; with --dumps all fields of the verdict"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as one page, which needs no network"
    )
    parser.add_argument("--follow", action="store_true", help="show it anew every 2 s while the run goes on")
    parser.add_argument(
        "--mtbf", metavar="DURATION", help="mean time between failures, such as 12h, for the advice on checkpoints"
    )
    parser.add_argument("--run-id", help="one run only, where several have written to that folder (default: all)")
    return parser


def _say_how_far(number: int, count: int) -> None:
    if count >= _MANY_FILES and (number % max(count // 10, 1) == 0 or number == count):
        print(f"distplus report: {number} of {count} dumps read", file=sys.stderr)
