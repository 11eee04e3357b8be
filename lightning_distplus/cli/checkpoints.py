"""Commands on checkpoints: ``distplus verify`` checks a folder of them, ``export`` and ``import`` change their form."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from lightning_distplus import recipes
from lightning_distplus.checkpoint import (
    CheckpointState,
    Manifest,
    Report,
    info_like,
    state,
    verify,
    verify_or_raise,
)
from lightning_distplus.checkpoint.catalog import FileFinding, Mode, check_unmanifested, checkpoints_in
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.checkpoint.files import in_role
from lightning_distplus.cli import count, moment, print_json, stdout, table
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe

if TYPE_CHECKING:
    from lightning_distplus.checkpoint.formats import Foreign

__all__ = ["run_export", "run_import", "run_verify"]

# -- distplus verify ---------------------------------------------------------------------------------------------------

TRUST = "If you trust whoever wrote it, repeat this with --trust."
TRUST_BY_HAND = (
    "If you trust whoever wrote it, read it with torch.load(..., weights_only=False) and save its tensors alone."
)
TRUST_HELP = "read pickles that name more than tensors and plain data, and run whatever they name"


def run_verify(argv: Sequence[str]) -> int:
    """Exit code 0 where every checkpoint is committed and sound, 1 where one is not.

    Raises:
        FileNotFoundError: There is none.
    """
    parser = argparse.ArgumentParser(prog="distplus verify", description="Checks checkpoints against their manifests.")
    deep = "also compare every tensor with its fingerprint and, without a manifest, the CRC of every member"
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a folder of checkpoints, or one checkpoint")
    add("--quick", action="store_true", help="compare sizes only, read nothing")
    add("--deep", action="store_true", help=deep)
    add("--trust", action="store_true", help=f"with --deep: {TRUST_HELP}")
    add("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist.")
    own = state(folder) in (CheckpointState.COMMITTED, CheckpointState.TORN) or folder.is_file()
    paths = [folder] if own else checkpoints_in(folder)
    if not paths:
        below = [str(path) for path in sorted(folder.iterdir()) if path.is_dir() and checkpoints_in(path)]
        hint = f" There are some in {', '.join(below)}." if below else ""
        raise FileNotFoundError(f"there is no checkpoint in {folder.absolute()}.{hint}")
    reports = sorted(_verify(paths, arguments), key=lambda one: getattr(one.manifest, "global_step", -1))
    if arguments.json:
        print_json({"version": 1, "checkpoints": [_as_json(report) for report in reports]})
    else:
        _print(reports)
        if kept := in_role(folder, "torn"):
            print(f"{len(kept)} torn or damaged in quarantine; delete them when looked at:")
            print(*(f"  {path}" for path in kept), sep="\n")
    return 0 if all(report.ok for report in reports) else 1


def _verify(paths: Sequence[Path], arguments: argparse.Namespace) -> list[Report]:
    """The reports, with a progress bar on standard error where that is a terminal."""
    mode: Mode = "size" if arguments.quick else "full"
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


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "verdict": _verdict(report),
        **{name: getattr(report.manifest, name, None) for name in ("global_step", "world_size", "size_bytes")},
        "findings": [str(finding) for finding in report.findings],
    }


def _print(reports: Sequence[Report]) -> None:
    shown = table("checkpoint", "verdict", "step", "ranks", "files", "MB", "committed (UTC)")
    for report in reports:
        verdict = _verdict(report)
        shown.add_row(Text(report.path.name), Text(verdict, style=_COLOURS[verdict]), *_facts(report))
    stdout().print(shown)
    for report in reports:
        for finding in report.findings:
            print(f"{report.path.name}: {finding}")
    size_mb = sum(report.manifest.size_bytes for report in reports if report.manifest is not None) / 1e6
    verdicts = Counter(map(_verdict, reports))
    what = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    print(f"{count(len(reports), 'checkpoint')}, {size_mb:,.1f} MB: {what}")


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
    numbers = [str(manifest.global_step), str(manifest.world_size), str(len(manifest.files))]
    return [*numbers, f"{manifest.size_bytes / 1e6:.1f}", moment(manifest.committed_at)]


# -- distplus export ---------------------------------------------------------------------------------------------------

_WEIGHTS = ".safetensors"


_Rows = list[tuple[str, str, str]]


def print_rows(title: str, rows: _Rows) -> None:
    """Says of each part of a checkpoint what is there and what becomes of it; a line each where nobody looks on."""
    print(title)
    if not sys.stdout.isatty():
        print(*(f"  {part}: {there}: {becomes}" for part, there, becomes in rows), sep="\n")
        return
    shown = table("part", "in the source", "what becomes of it")
    for part, there, becomes in rows:
        shown.add_row(part, there, Text(becomes, style="yellow" if becomes.startswith("left out") else ""))
    stdout().print(shown)


def run_export(argv: Sequence[str]) -> int:
    """Exit code 0.

    Raises:
        FileNotFoundError, FileExistsError: There is no such checkpoint, or something of the target's name.
        CheckpointUnsafe: A pickle in it might run code, and ``--trust`` is not given.
    """
    parser = argparse.ArgumentParser(
        prog="distplus export",
        description="Writes a checkpoint as one file, the whole state (.ckpt) or the weights (.safetensors), or as the "
        "folder of another program.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, file or folder; it is verified")
    add("target", type=Path, metavar="OUT", help="FILE.ckpt, FILE.safetensors, or a folder")
    form = parser.add_mutually_exclusive_group().add_argument
    form("--to", choices=("hf", "litgpt", "safetensors"), help="for whom: OUT is a folder, of safetensors a file")
    form("--universal", action="store_true", help="of DeepSpeed: a folder that any number of ranks can resume from")
    add("--config", metavar="FILE", help="with --to: YAML file or recipe:NAME of the run, if the checkpoint says less")
    add("--trust", action="store_true", help=TRUST_HELP)
    arguments = parser.parse_args(argv)
    source, target = arguments.checkpoint, arguments.target
    _require_paths(source, target)
    _check(source)
    if arguments.trust:
        _export(arguments)
    else:
        from lightning_distplus import _compat  # loads torch

        with _compat.refusing_code(source, TRUST):
            _export(arguments)
    print(f"{source} -> {target}")
    return 0


def _require_paths(source: Path, target: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist.")
    if target.exists():
        raise FileExistsError(f"{target} exists already. Give another name, or remove it first.")


def _export(arguments: argparse.Namespace) -> None:
    import torch

    from lightning_distplus.checkpoint import formats

    source, target, weights_only = arguments.checkpoint, arguments.target, not arguments.trust
    if arguments.universal:
        if not formats.num_shards(source) or formats.is_universal(source):
            raise CheckpointMismatch(
                f"{source} holds no shards of DeepSpeed's ZeRO, so that there is nothing to convert. Leave --universal "
                "out."
            )
        formats.convert(source, target)
    elif arguments.to in ("hf", "litgpt"):
        _export_for(arguments.to, source, target, weights_only, arguments.config)
    elif arguments.to == "safetensors" or target.suffix == _WEIGHTS:
        formats.write_safetensors(target, *formats.weights_of(source, weights_only=weights_only))
    elif not source.is_dir():
        raise CheckpointMismatch(f"{source} is one file already. Export its weights to FILE{_WEIGHTS}, or copy it.")
    else:

        def write(stage: Path) -> None:
            if formats.is_sharded(source):
                torch.save(formats.read_sharded(source, weights_only=weights_only), stage)
            else:
                formats.write_whole(source, stage)

        commit(target, write, info_like(source))


def _check(source: Path) -> None:
    found = state(source)
    if found is not CheckpointState.UNMANIFESTED:
        verify_or_raise(source)
        return
    if findings := check_unmanifested(source):
        raise CheckpointCorrupt(f"{source} cannot be exported: {findings[0]}. Give another checkpoint.")
    print(f"{source} was not committed by lightning_distplus; it is exported unverified", file=sys.stderr)


def _export_for(program: str, source: Path, target: Path, weights_only: bool, named: str | None) -> None:
    """Writes the folder of another program; it is there whole or not at all.

    Raises:
        CheckpointMismatch: The model is no ``TinyLlama`` of the recipes, or nothing says how it is configured.
    """
    import torch
    import yaml

    from lightning_distplus.checkpoint import formats

    config = configuration(named).get("config") if named else formats.config_in(source, weights_only=weights_only)
    weights, parts = formats.weights_of(source, weights_only=weights_only)
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
            formats.write_safetensors(fresh / "model.safetensors", renamed, parts)
        else:
            whole = {name: one for part in parts for name, one in part.items()}
            torch.save({"model": formats.to_litgpt(whole)}, fresh / "lit_model.pth")
            (fresh / "model_config.yaml").write_text(yaml.safe_dump(formats.litgpt_config(config, target.name)))
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


# -- distplus import ---------------------------------------------------------------------------------------------------


def run_import(argv: Sequence[str]) -> int:
    """Exit code 0.

    Raises:
        OSError: The source is not there, or something has the name of the checkpoint.
        DistplusError: The source cannot be read, or does not fit the configuration.
    """
    arguments = _imports_parser().parse_args(argv)
    source, target = arguments.source, arguments.to
    _require_paths(source, target)
    import torch

    from lightning_distplus.checkpoint.formats import origin_of, read_foreign

    origin = arguments.origin or origin_of(source)
    if origin is None:
        raise CheckpointMismatch(f"{source}: it cannot be told which program has written it. Name it with --from.")
    if origin == "lightning" and state(source) is CheckpointState.COMMITTED:  # it has a position, which would be lost
        raise CheckpointMismatch(f"{source} is committed: ckpt_path takes it, export changes its form.")
    run = configuration(arguments.config or "recipe:tinyllama_1.1b")
    if origin == "lightning":
        checkpoint, rows = _of_lightning(source)
        config: dict[str, Any] = {}
    else:
        given = run.get("config", {}) if arguments.config else {}
        found = read_foreign(source, origin, config=given, remedy=TRUST_BY_HAND)
        _require_same_model(found.config, given)
        config = {**given, **found.config}
        checkpoint, rows = _of_llama(found, config, run), _rows_of(found, run)
    print_rows(f"{source} ({origin})", rows)
    if arguments.dry_run:
        return 0
    step = int(checkpoint["global_step"])
    info = Manifest(global_step=step, epoch=int(checkpoint.get("epoch", 0)), strategy="unknown")
    commit(target, lambda stage: torch.save(checkpoint, stage), info)
    print(f"{source} -> {target}")
    if config:
        print("model.init_args.config of the run:")
        print(*(f"  {name}: {value}" for name, value in config.items()), sep="\n")
    print(f"next: distplus fit --config YOURS --ckpt_path {target} --data.start_sample 0")
    return 0


def _imports_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus import",
        description="Makes a committed checkpoint, which ckpt_path takes, of one that another program has written.",
    )
    of_run = "the run that it is for, a YAML file or recipe:NAME: what the source does not say comes from there "
    untouched = "a file or a folder; nothing in it is changed, and none of it is run"
    origins = ("hf", "litgpt", "lightning", "deepspeed")
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help=untouched)
    add("--from", dest="origin", choices=origins, help="who has written it (default: what it looks like)")
    add("--to", type=Path, required=True, metavar="CKPT", help="the checkpoint to write, one file")
    add("--config", metavar="FILE", help=f"{of_run}(default: settings of the optimizer from recipe:tinyllama_1.1b)")
    add("--dry_run", action="store_true", help="say what would be kept, and write nothing")
    return parser


def configuration(name: str) -> dict[str, Any]:
    """The arguments of the model in a configuration."""
    from omegaconf import OmegaConf

    try:
        files = recipes.files(name.removeprefix(recipes.PREFIX)) if name.startswith(recipes.PREFIX) else [Path(name)]
    except ValueError as error:
        raise CheckpointMismatch(str(error)) from None
    document = OmegaConf.load(files[0])  # which reads 1e-5 as the number that it is
    arguments = OmegaConf.select(document, "fit.model.init_args") or OmegaConf.select(document, "model.init_args")
    plain: Any = OmegaConf.to_container(arguments, resolve=True) if arguments else {}
    return dict(plain)


def _require_same_model(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    shared = given.keys() & found.keys() - {"max_position_embeddings"}  # no weight depends on it
    differing = [name for name in shared if given[name] != found[name]]
    if differing:
        sides = "; ".join(f"{name}: {given[name]} there, {found[name]} in the source" for name in sorted(differing))
        raise CheckpointMismatch(f"The configuration that --config names is of another model. {sides}.")


def _rows_of(found: Foreign, run: Mapping[str, Any]) -> _Rows:
    num = sum(one.numel() for one in found.weights.values())
    rows = [("weights", f"{len(found.weights)} tensors, {num:,} numbers", "kept, float32")]
    if found.moments:
        rows.append(("moments of AdamW", f"of {len(found.moments)} tensors", "kept, float32"))
        kept = ", ".join(f"{name} {value}" for name, value in found.settings.items())
        rows.append(("settings of AdamW", kept or "not said", "kept" if kept else "those of the configuration"))
    else:
        lr, warmup = run.get("lr", 4e-4), run.get("warmup_steps", 2000)
        start = f"begin anew, lr {lr:g} after {warmup} steps, from the configuration"
        rows.append(("moments of AdamW", found.left_out.get("moments", "the source has none"), start))
    rows.append(("step", str(found.step), "kept; the learning rate follows the run's own schedule from there"))
    unsaid = {name: why for name, why in found.left_out.items() if name != "moments"}
    if "position" not in "".join(unsaid):
        unsaid["position in the data"] = "the source has none"
    rows += [(name, why, "left out") for name, why in unsaid.items()]
    rows.append(("random states, callbacks", "of another program", "left out: they begin anew"))
    return rows


def _of_llama(found: Foreign, config: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of Lightning for ``recipes.model.TinyLlama``."""
    import torch

    from lightning_distplus.checkpoint.formats import CONFIG, parameter_order

    num_layers = sum(name.endswith("input_layernorm.weight") for name in found.weights)
    order = parameter_order(num_layers, found.weights)
    if config.get("tie_word_embeddings"):
        order = [name for name in order if "lm_head" not in name]  # it is the embedding, under a second name
    lr = run.get("lr", 4e-4) / max(run.get("warmup_steps", 2000), 1)
    betas, weight_decay = tuple(run.get("betas", (0.9, 0.95))), run.get("weight_decay", 0.1)
    settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, **found.settings}
    decay_of_norms = settings.pop("weight_decay_of_norms", 0.0)  # the recipe leaves norms out; TinyLlama did not
    group = torch.optim.AdamW([torch.zeros(1)], **settings).state_dict()["param_groups"][0]
    groups = [
        {**group, "params": [name for name in order if "norm" not in name]},
        {**group, "params": [name for name in order if "norm" in name], "weight_decay": decay_of_norms},
    ]
    numbered = order if found.moments else []
    return {
        "epoch": 0,
        "global_step": found.step,
        **_loops_after(found.step),
        "state_dict": found.weights,
        CONFIG: dict(config),
        # By name, which FSDP and FSDP2 read in any order, and torch's optimizers by the order of the groups.
        "optimizer_states": [{"state": {name: found.moments[name] for name in numbered}, "param_groups": groups}],
        "lr_schedulers": [{"last_epoch": found.step, "_step_count": found.step + 1, "lr_lambdas": []}],
        "callbacks": {},
    }


def _loops_after(step: int) -> dict[str, Any]:
    """The state of Lightning's loops after so many optimizer steps, and Lightning's version."""
    from lightning import __version__
    from lightning.pytorch import Trainer

    logging.disable(logging.WARNING)  # it tells of GPUs, Slurm and tips
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    finally:
        logging.disable(logging.NOTSET)
    epoch_loop = trainer.fit_loop.epoch_loop
    steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    steps.ready = steps.completed = step
    epoch_loop.on_load_checkpoint({"_batches_that_stepped": step})
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    states = {name: getattr(trainer, name).state_dict() for name in loops}
    return {"pytorch-lightning_version": __version__, "loops": states}


def _of_lightning(source: Path) -> tuple[dict[str, Any], _Rows]:
    import torch

    from lightning_distplus import _compat
    from lightning_distplus.checkpoint.formats import is_sharded, read_sharded

    with _compat.refusing_code(source, TRUST_BY_HAND):
        if is_sharded(source):
            checkpoint = read_sharded(source)
        elif source.is_dir():
            raise CheckpointMismatch(f"{source} is no folder of FSDP's shards. Of DeepSpeed: --from deepspeed.")
        elif findings := check_unmanifested(source):
            raise CheckpointCorrupt(f"{source} cannot be imported: {findings[0]}. Give another checkpoint.")
        else:
            checkpoint = torch.load(source, map_location="cpu", mmap=is_zipfile(source), weights_only=True)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint or "global_step" not in checkpoint:
        raise CheckpointMismatch(f"{source} is no checkpoint of Lightning: it lacks state_dict or global_step.")
    num = len(checkpoint.get("optimizer_states") or [])
    rows = [
        ("weights", f"{len(checkpoint['state_dict'])} tensors", "kept"),
        ("moments", f"of {num} optimizers", "kept" if num else "none: name it as model.init_from, or as weights"),
        ("step", str(checkpoint["global_step"]), "kept"),
        ("loops, schedulers, callbacks", "Lightning's", "kept"),
        ("position in the data", "Lightning saves none", "left out: say it with start_sample of the data module"),
        ("random states", "Lightning saves none", "left out: they begin anew"),
    ]
    if not num:
        checkpoint.setdefault("optimizer_states", [])
        checkpoint.setdefault("lr_schedulers", [])
    return checkpoint, rows
