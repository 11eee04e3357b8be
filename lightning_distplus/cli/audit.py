"""``distplus audit``: whether every sample of a job went through training once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from lightning_distplus.data.audit import AuditReport, Sighting, audit_folder

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Exit code 0 where nothing was repeated and nothing missed, 1 otherwise, and where there are no records."""
    arguments = _parser().parse_args(argv)
    folder = _records_in(arguments.run)
    if folder is None:
        print(
            f"distplus audit: there are no records in {arguments.run}. They are written by "
            "Trainer(callbacks=[SampleAudit()]).",
            file=sys.stderr,
        )
        return 1
    try:
        report = audit_folder(folder)
    except ValueError as error:
        print(f"distplus audit: {error}", file=sys.stderr)
        return 1
    for line in _lines(report, arguments.limit):
        print(line)
    return 0 if report.ok else 1


def _records_in(run: Path) -> Path | None:
    candidates = (run, run / "distplus" / "audit", run / "audit")
    return next((folder for folder in candidates if any(folder.glob("*.audit"))), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus audit", description="Merges what SampleAudit wrote in all runs and on all ranks of a job."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="default_root_dir of the job, or the folder of records")
    parser.add_argument("--limit", type=int, default=20, help="findings to print of each kind (default: %(default)s)")
    return parser


def _lines(report: AuditReport, limit: int) -> Iterator[str]:
    yield (
        f"{report.num_samples} samples in {report.num_steps} steps of {report.num_runs} runs; {report.num_undone} "
        "samples of steps that were done again or not finished do not count"
    )
    yield f"repeated {len(report.repeated)}, missed {len(report.missed)}"
    if report.num_apart:
        yield f"in quarantine {report.num_apart}: others stood in at their places"
    if report.num_arrived == report.num_samples:
        yield "ids: as the batches carried them into training_step"
    else:
        num_asked = report.num_samples - report.num_arrived
        yield (
            f"ids: as the data set was asked for them, of {num_asked} samples; what it returned is not known "
            "(SampleAudit(ids=...) reads them from the batch)"
        )
    for sightings in report.repeated[:limit]:
        first = sightings[0]
        places = "; ".join(map(_place, sightings))
        yield f"repeated: sample {_name(first.sample_id)} (position {first.position} of epoch {first.epoch}): {places}"
    for epoch, position, sample_id in report.missed[:limit]:
        yield f"missed: sample {_name(sample_id)} (position {position} of epoch {epoch})"
    for problem in report.problems[:limit]:
        yield f"problem: {problem}"


def _place(sighting: Sighting) -> str:
    at = datetime.fromtimestamp(sighting.at, tz=timezone.utc)
    return f"step {sighting.step} on rank {sighting.rank} in run {sighting.run} at {at:%Y-%m-%d %H:%M:%S} UTC"


def _name(sample_id: tuple[int, ...]) -> str:
    return str(sample_id[0]) if len(sample_id) == 1 else str(sample_id) if sample_id else "of unknown id"
