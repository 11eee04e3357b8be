"""``distplus prepare`` turns text into token files; ``distplus audit`` checks that each sample was trained on once."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from lightning_distplus.cli import moment, print_json
from lightning_distplus.data.audit import AuditReport, Sighting, audit_folder
from lightning_distplus.data.prepare import Progress, prepare
from lightning_distplus.errors import DistplusError, refuse_unknown_arguments
from lightning_distplus.report import artefacts_of

__all__ = ["run_audit", "run_prepare"]

# -- distplus prepare --------------------------------------------------------------------------------------------------

_LABELS = {"tokenizer": "training the tokenizer", "tokens": "writing tokens", "shuffle": "shuffling"}
_LINE_EVERY_S = 5.0


def run_prepare(argv: Sequence[str]) -> int:
    """Exit code 0.

    Raises:
        DistplusError: The input cannot be read, or a package is missing.
    """
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        given = [one.lstrip("-").partition("=")[0] for one in unknown if one.startswith("--")]
        try:
            refuse_unknown_arguments("distplus prepare", given, vars(arguments))
        except TypeError as error:
            parser.error(str(error))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with _bars() if sys.stderr.isatty() else _lines_of_progress() as on_progress:
            result = prepare(**vars(arguments), on_progress=on_progress)
    except ImportError as error:
        if error.name not in ("tokenizers", "pyarrow"):
            raise
        needs = "needs tokenizers. Run: pip install 'lightning-distplus[data]'"
        raise DistplusError(str(error) if error.name == "pyarrow" else needs) from error
    except ValueError as error:
        raise DistplusError(str(error)) from error
    print(
        f"{result.prefix}.bin: {result.num_tokens:,} tokens ({result.dtype}) in {result.num_documents:,} documents, "
        f"from {result.num_bytes:,} bytes of text; vocabulary {result.vocab_size:,}: {result.tokenizer}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distplus prepare", description="Turns text into a Megatron .bin/.idx pair.")
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, JSONL (both also .gz, .zst, .bz2, .xz) or Parquet files, or folders of them (read in sorted order)",
    )
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder with one; default: train one")
    add("--vocab_size", type=int, metavar="N", help="size of the vocabulary to train; default: 32000")
    add("--format", choices=("auto", "text", "jsonl", "parquet"), default="auto", help="auto: by suffix")
    add("--text_key", metavar="NAME", help="field of a JSON line, or Parquet column; default: text, or content")
    add("--dtype", choices=("auto", "uint16", "int32"), default="auto", help="auto: uint16 where the ids fit")
    add("--append_eod", action="store_true", help="end every document with the tokenizer's end token")
    add("--max_bytes", type=int, metavar="N", help="stop before the document that would exceed N bytes of text")
    add(
        "--shuffle_seed",
        type=int,
        metavar="N",
        help="shuffle the documents, in files beside the output: every order is equally likely (default: as they come)",
    )
    add("--overwrite", action="store_true", help="replace an existing pair")
    return parser


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(TextColumn("{task.description}"), BarColumn(), *rate, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(_LABELS[progress.stage])
            bars.update(tasks[progress.stage], completed=progress.done_bytes, total=progress.total_bytes)

        yield show


@contextmanager
def _lines_of_progress() -> Iterator[Callable[[Progress], None]]:
    """One line per stage and every few seconds, for logs."""
    began: dict[str, tuple[float, int]] = {}
    due: dict[str, float] = {}

    def show(progress: Progress) -> None:
        now = time.monotonic()
        start, first_bytes = began.setdefault(progress.stage, (now, progress.done_bytes))
        if now < due.get(progress.stage, start):
            return
        due[progress.stage] = now + _LINE_EVERY_S
        rate = (progress.done_bytes - first_bytes) / max(now - start, 1e-9)
        share = 100 * progress.done_bytes / max(progress.total_bytes, 1)
        left_s = (progress.total_bytes - progress.done_bytes) / max(rate, 1e-9)
        estimate = f", {rate / 1e6:.1f} MB/s, {left_s:.0f} s left" if rate > 0 else ""
        print(f"{_LABELS[progress.stage]}: {share:.0f} %{estimate}", file=sys.stderr, flush=True)

    yield show


# -- distplus audit ----------------------------------------------------------------------------------------------------


def run_audit(argv: Sequence[str]) -> int:
    """Exit code 0 where nothing was repeated and nothing missed, 1 otherwise.

    Raises:
        FileNotFoundError: There are no records.
        DistplusError: They cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="distplus audit", description="Merges what SampleAudit wrote in all runs and on all ranks of a job."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="default_root_dir of the job, or the folder of records")
    parser.add_argument("--limit", type=int, default=20, help="findings to print of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the whole report for a machine")
    arguments = parser.parse_args(argv)
    run: Path = arguments.run
    folder = next((one for one in (run, artefacts_of(run) / "audit") if any(one.glob("*.audit"))), None)
    if folder is None:
        written = "They are written by Trainer(callbacks=[SampleAudit()])."
        raise FileNotFoundError(f"there are no records in {run.absolute()}. {written}")
    try:
        report = audit_folder(folder)
    except ValueError as error:
        raise DistplusError(str(error)) from error
    if arguments.json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        print(*_lines(report, arguments.limit), sep="\n")
    return 0 if report.ok else 1


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
        place = f"position {position} of epoch {epoch}" if position >= 0 else f"epoch {epoch}"
        yield f"missed: sample {_name(sample_id)} ({place})"
    for problem in report.problems[:limit]:
        yield f"problem: {problem}"


def _place(sighting: Sighting) -> str:
    return f"step {sighting.step} on rank {sighting.rank} in run {sighting.run} at {moment(sighting.at)} UTC"


def _name(sample_id: tuple[int, ...]) -> str:
    return str(sample_id[0]) if len(sample_id) == 1 else str(sample_id) if sample_id else "of unknown id"
