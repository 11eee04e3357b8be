"""``distplus verify`` checks every checkpoint in a folder; ``distplus export`` writes one as one file."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from lightning_distplus.checkpoint import (
    CheckpointState,
    Report,
    gather_alone,
    info_like,
    state,
    verify,
    verify_or_raise,
)
from lightning_distplus.checkpoint.catalog import FileFinding, Mode, check_unmanifested, checkpoints_in
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.checkpoint.files import in_role
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe

__all__ = ["TRUST_BY_HAND", "print_rows", "run_export", "run_verify"]

# -- distplus verify ---------------------------------------------------------------------------------------------------

TRUST = "If you trust whoever wrote it, repeat this with --trust."
TRUST_BY_HAND = (
    "If you trust whoever wrote it, read it with torch.load(..., weights_only=False) and save its tensors alone."
)
TRUST_HELP = "read pickles that name more than tensors and plain data, and run whatever they name"


def run_verify(argv: Sequence[str]) -> int:
    """Exit code 0 where every checkpoint is committed and sound, 1 where one is not, or where there is none."""
    arguments = _parser().parse_args(argv)
    folder: Path = arguments.folder
    if not folder.exists():
        print(f"distplus verify: {folder} does not exist.", file=sys.stderr)
        return 1
    own = state(folder) in (CheckpointState.COMMITTED, CheckpointState.TORN) or folder.is_file()
    paths = [folder] if own else checkpoints_in(folder)
    if not paths:
        print(f"distplus verify: there is no checkpoint in {folder}.", file=sys.stderr)
        return 1
    reports = sorted(_verify(paths, "size" if arguments.quick else "full", arguments), key=_step)
    if arguments.json:
        print(json.dumps({"version": 1, "checkpoints": [_as_json(report) for report in reports]}, indent=2))
    else:
        _print(reports)
        _print_quarantine(folder)
    return 0 if all(report.ok for report in reports) else 1


def _verify(paths: Sequence[Path], mode: Mode, arguments: argparse.Namespace) -> list[Report]:
    """The reports, with a progress bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    reports = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for path in paths:
            manifest = verify(path, "size").manifest
            task = progress.add_task(path.name, total=0 if manifest is None else manifest.size_bytes)
            report = verify(path, mode, on_bytes=partial(progress.advance, task))
            if arguments.deep and report.state is CheckpointState.UNMANIFESTED:
                report = replace(report, findings=(*report.findings, *check_unmanifested(path)))
            elif arguments.deep and report.ok and report.manifest is not None and report.manifest.tensors:
                from lightning_distplus.checkpoint.tensors import is_current  # loads torch

                if not all(map(is_current, report.manifest.tensors.values())):
                    console.print(f"{path.name}: fingerprints of an older version; its tensors are not compared.")
                report = replace(report, findings=_tensor_findings(path, report.manifest.tensors, arguments.trust))
            reports.append(report)
    return reports


@dataclass(frozen=True)
class _Refusal(FileFinding):
    """Nothing is known to be wrong; it is not read."""

    def __str__(self) -> str:
        return self.found


def _tensor_findings(path: Path, tensors: Mapping[str, str], is_trusted: bool) -> tuple[FileFinding, ...]:
    from lightning_distplus import _compat  # loads torch
    from lightning_distplus.checkpoint.formats import tensor_findings

    if is_trusted:
        return tuple(tensor_findings(path, tensors, weights_only=False))
    try:
        with _compat.refusing_code(path, TRUST):
            return tuple(tensor_findings(path, tensors))
    except CheckpointUnsafe as error:
        return (_Refusal(str(path), "tensors and plain data", str(error)),)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distplus verify", description="Checks checkpoints against their manifests.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("--quick", action="store_true", help="compare sizes only, read nothing")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also compare every tensor with its fingerprint and, without a manifest, the CRC of every member",
    )
    parser.add_argument("--trust", action="store_true", help=f"with --deep: {TRUST_HELP}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _as_json(report: Report) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "path": str(report.path),
        "verdict": _verdict(report),
        "global_step": None if manifest is None else manifest.global_step,
        "world_size": None if manifest is None else manifest.world_size,
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "findings": [str(finding) for finding in report.findings],
    }


def _print_quarantine(folder: Path) -> None:
    kept = in_role(folder, "torn")
    if kept:
        print(f"{len(kept)} torn or damaged in quarantine; delete them when looked at:")
        for path in kept:
            print(f"  {path}")


_WIDTH_OF_A_FILE = 400  # a name stands in one line there


def _print(reports: Sequence[Report]) -> None:
    is_terminal = sys.stdout.isatty()
    columns = (Column("checkpoint", overflow="fold"), "verdict", "step", "ranks", "files", "MB", "committed (UTC)")
    table = Table(*columns, box=HEAVY_HEAD if is_terminal else None, pad_edge=is_terminal)
    for report in reports:
        verdict = _verdict(report)
        table.add_row(report.path.name, f"[{_COLOURS[verdict]}]{verdict}", *_facts(report))
    console = Console(soft_wrap=not is_terminal, width=None if is_terminal else _WIDTH_OF_A_FILE)
    console.print(table)
    for report in reports:
        for finding in report.findings:
            console.print(f"{report.path.name}: {finding}", markup=False, highlight=False, soft_wrap=True)
    counts = Counter(_verdict(report) for report in reports)
    size_mb = sum(report.manifest.size_bytes for report in reports if report.manifest is not None) / 1e6
    what = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{len(reports)} checkpoint{'s' * (len(reports) != 1)}, {size_mb:,.1f} MB: {what}", highlight=False)


def _step(report: Report) -> int:
    return -1 if report.manifest is None else report.manifest.global_step


_COLOURS = {"valid": "green", "refused": "yellow", "unverified": "yellow", "damaged": "red", "torn": "red"}


def _verdict(report: Report) -> str:
    if report.ok:
        return "valid"
    if any(isinstance(finding, _Refusal) for finding in report.findings):
        return "refused"
    if report.state is CheckpointState.COMMITTED:
        return "damaged"
    return "unverified" if report.state is CheckpointState.UNMANIFESTED else "torn"


def _facts(report: Report) -> list[str]:
    manifest = report.manifest
    if manifest is None:
        return [""] * 5
    committed = datetime.fromtimestamp(manifest.committed_at, tz=timezone.utc)
    return [
        str(manifest.global_step),
        str(manifest.world_size),
        str(len(manifest.files)),
        f"{manifest.size_bytes / 1e6:.1f}",
        f"{committed:%Y-%m-%d %H:%M:%S}",
    ]


# -- distplus export ---------------------------------------------------------------------------------------------------

_WEIGHTS = ".safetensors"
_EXPORT_EPILOG = """examples:
  distplus export step=10.ckpt whole.ckpt                shards as one file, moments and all
  distplus export step=10.ckpt weights.safetensors       the weights, by their names in the module
  distplus export --to hf step=10.ckpt tinyllama/        for transformers: config.json and model.safetensors
  distplus export --to litgpt step=10.ckpt tinyllama/    for litgpt: model_config.yaml and lit_model.pth
"""


def print_rows(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Says of each part of a checkpoint what is there and what becomes of it; a line each where nobody looks on."""
    if not sys.stdout.isatty():
        print(title, *(f"  {part}: {there}: {becomes}" for part, there, becomes in rows), sep="\n")
        return
    table = Table("part", "in the source", "what becomes of it", title=title)
    for part, there, becomes in rows:
        table.add_row(part, there, f"[yellow]{becomes}" if becomes.startswith("left out") else becomes)
    Console().print(table)


def run_export(argv: Sequence[str]) -> int:
    """Exit code 0 where the export is written, 1 where something is in its way.

    Raises:
        CheckpointUnsafe: A pickle in it might run code, and ``--trust`` is not given.
    """
    arguments = _exports_parser().parse_args(argv)
    source, target = arguments.checkpoint, arguments.target
    if target.exists():
        print(f"distplus export: {target} exists already. Give another name, or remove it first.", file=sys.stderr)
        return 1
    if arguments.universal and arguments.to:
        print("distplus export: --universal and --to name two forms. Leave one out.", file=sys.stderr)
        return 2
    _check(source)
    if arguments.trust:
        _export(arguments)
    else:
        from lightning_distplus import _compat  # loads torch

        with _compat.refusing_code(source, TRUST):
            _export(arguments)
    print(f"{source} -> {target}")
    return 0


def _export(arguments: argparse.Namespace) -> None:
    source, target, weights_only = arguments.checkpoint, arguments.target, not arguments.trust
    if arguments.universal:
        _export_universal(source, target)
    elif arguments.to in ("hf", "litgpt"):
        _export_for(arguments.to, source, target, weights_only, arguments.config)
    elif arguments.to == "safetensors" or target.suffix == _WEIGHTS:
        _export_weights(source, target, weights_only)
    else:
        _export_whole(source, target, weights_only)


def _exports_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus export",
        description="Writes a checkpoint as one file, the whole state (.ckpt) or the weights (.safetensors), or as the "
        "folder of another program.",
        epilog=_EXPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, file or folder; it is verified")
    parser.add_argument("target", type=Path, metavar="OUT", help="FILE.ckpt, FILE.safetensors, or a folder")
    parser.add_argument(
        "--to", choices=("hf", "litgpt", "safetensors"), help="for whom: OUT is a folder, of safetensors a file"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="with --to: the run's YAML file or recipe:NAME, where the checkpoint says less"
    )
    parser.add_argument(
        "--universal", action="store_true", help="of DeepSpeed: a folder that any number of ranks can resume from"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    return parser


def _check(source: Path) -> None:
    found = state(source)
    if found is not CheckpointState.UNMANIFESTED:
        verify_or_raise(source)
        return
    if findings := check_unmanifested(source):
        raise CheckpointCorrupt(f"{source} cannot be exported: {findings[0]}. Give another checkpoint.")
    print(f"{source} was not committed by lightning_distplus; it is exported unverified", file=sys.stderr)


def _export_universal(source: Path, target: Path) -> None:
    from lightning_distplus.checkpoint.formats import convert, is_universal, num_shards

    if not num_shards(source) or is_universal(source):
        raise CheckpointMismatch(
            f"{source} holds no shards of DeepSpeed's ZeRO, so that there is nothing to convert. Leave --universal out."
        )
    convert(source, target)


def _export_weights(source: Path, target: Path, weights_only: bool) -> None:
    from lightning_distplus.checkpoint.formats import write_safetensors

    write_safetensors(target, *_weights_of(source, weights_only))


def _weights_of(source: Path, weights_only: bool) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Names and shapes, and the same with content, some at a time."""
    from lightning_distplus.checkpoint import formats

    if not source.is_dir():
        return formats.weights_of_file(source, weights_only=weights_only)
    if formats.is_sharded(source):
        return formats.weights_of_shards(source)
    weights = formats.weights_of_zero(source)
    return weights, iter([weights])


def _export_for(program: str, source: Path, target: Path, weights_only: bool, named: str | None) -> None:
    """Writes the folder of another program; it is there whole or not at all.

    Raises:
        CheckpointMismatch: The model is no ``TinyLlama`` of the recipes, or nothing says how it is configured.
    """
    import torch
    import yaml

    from lightning_distplus.checkpoint import formats
    from lightning_distplus.cli.importing import configuration

    config = configuration(named).get("config") if named else formats.config_in(source, weights_only=weights_only)
    weights, parts = _weights_of(source, weights_only)
    if not config or not all(name.startswith(formats.PREFIX) for name in weights):
        raise CheckpointMismatch(
            f"{source} does not say how its model is configured, or it is not TinyLlama of the recipes. Name the run's "
            "configuration with --config, or export the weights alone: --to safetensors."
        )
    print_rows(
        f"{source} -> {target} ({program})",
        [
            ("weights", f"{len(weights)} tensors", "kept"),
            ("moments, step, schedule, position, random states", "of this run", f"left out: {program} has no place"),
            ("tokenizer", "in no checkpoint", "left out: copy tokenizer.json beside the weights"),
        ],
    )
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}."))
    try:
        fresh.chmod(0o755)
        if program == "hf":
            names = {name: name.removeprefix(formats.PREFIX) for name in weights}
            (fresh / "config.json").write_text(json.dumps(formats.hf_config(config), indent=2) + "\n")
            renamed = {names[name]: one for name, one in weights.items()}
            formats.write_in_files(fresh, renamed, parts)
        else:
            whole = {name: one for part in parts for name, one in part.items()}
            torch.save({"model": formats.to_litgpt(whole)}, fresh / "lit_model.pth")
            (fresh / "model_config.yaml").write_text(yaml.safe_dump(formats.litgpt_config(config, target.name)))
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _export_whole(source: Path, target: Path, weights_only: bool) -> None:
    import torch

    from lightning_distplus.checkpoint import formats

    if not source.is_dir():
        raise CheckpointMismatch(f"{source} is one file already. Export its weights to FILE{_WEIGHTS}, or copy it.")
    if formats.is_sharded(source):
        commit(
            target,
            lambda stage: torch.save(formats.read_sharded(source, weights_only=weights_only), stage),
            rank=0,
            gather=gather_alone,
            info=info_like(source),
        )
    else:
        from lightning_distplus.checkpoint.formats import write_whole

        commit(target, lambda stage: write_whole(source, stage), rank=0, gather=gather_alone, info=info_like(source))
