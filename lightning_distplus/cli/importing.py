"""``distplus import`` makes a checkpoint of another program one that a run resumes from."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_distplus import recipes
from lightning_distplus.checkpoint import SaveInfo, gather_alone
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.cli.checkpoints import TRUST_BY_HAND, print_rows
from lightning_distplus.errors import CheckpointMismatch

if TYPE_CHECKING:
    from lightning_distplus.checkpoint.formats import Foreign

__all__ = ["configuration", "run_import"]

_EPILOG = """examples:
  distplus import --from hf TinyLlama-1.1B/ --to tinyllama.ckpt
  distplus import --from litgpt out/tinyllama_1b/iter-100000-ckpt.pth --to tinyllama.ckpt --dry_run
  distplus import --from lightning lightning_logs/version_0/checkpoints/last.ckpt --to last.ckpt
"""
_Rows = list[tuple[str, str, str]]


def run_import(argv: Sequence[str]) -> int:
    """Exit code 0 where the checkpoint is committed, 1 where one is there already.

    Raises:
        DistplusError: The source cannot be read, or does not fit the configuration.
    """
    arguments = _parser().parse_args(argv)
    source, target = arguments.source, arguments.to
    if target.exists():
        print(f"distplus import: {target} exists already. Give another name, or remove it first.", file=sys.stderr)
        return 1
    if not source.exists():
        print(f"distplus import: {source} does not exist.", file=sys.stderr)
        return 1
    from lightning_distplus.checkpoint.formats import origin_of, read_foreign  # loads torch

    origin = arguments.origin or origin_of(source)
    if origin is None:
        raise CheckpointMismatch(f"{source}: it cannot be told which program has written it. Name it with --from.")
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
    import torch

    step = int(checkpoint["global_step"])
    info = SaveInfo(global_step=step, epoch=int(checkpoint.get("epoch", 0)), strategy="unknown")
    commit(target, lambda stage: torch.save(checkpoint, stage), rank=0, gather=gather_alone, info=info)
    print(f"{source} -> {target}")
    if config:
        print("model.init_args.config of the run:")
        print("\n".join(f"  {name}: {value}" for name, value in config.items()))
    print(f"next: distplus fit --config YOURS --ckpt_path {target} --data.start_sample 0")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus import",
        description="Makes a committed checkpoint, which ckpt_path takes, of one that another program has written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a file or a folder; nothing in it is changed, and none of it is run",
    )
    add(
        "--from",
        dest="origin",
        choices=("hf", "litgpt", "lightning", "deepspeed"),
        help="who has written it (default: what it looks like)",
    )
    add("--to", type=Path, required=True, metavar="CKPT", help="the checkpoint to write, one file")
    add(
        "--config",
        metavar="FILE",
        help="the run that it is for, a YAML file or recipe:NAME: what the source does not say comes from there "
        "(default: settings of the optimizer from recipe:tinyllama_1.1b)",
    )
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
    plain: Any = {} if arguments is None else OmegaConf.to_container(arguments, resolve=True)
    return dict(plain)


def _require_same_model(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    shared = given.keys() & found.keys() - {"max_position_embeddings"}  # no weight depends on it
    differing = [name for name in shared if given[name] != found[name]]
    if differing:
        sides = "; ".join(f"{name}: {given[name]} there, {found[name]} in the source" for name in sorted(differing))
        raise CheckpointMismatch(f"The configuration that --config names is of another model. {sides}.")


def _rows_of(found: Foreign, run: Mapping[str, Any]) -> _Rows:
    """What is kept of a source, and what is not."""
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
    settings = {
        "lr": lr,
        "betas": tuple(run.get("betas", (0.9, 0.95))),
        "weight_decay": run.get("weight_decay", 0.1),
        **found.settings,
    }
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
    return {
        "pytorch-lightning_version": __version__,
        "loops": {name: getattr(trainer, name).state_dict() for name in loops},
    }


def _of_lightning(source: Path) -> tuple[dict[str, Any], _Rows]:
    """The checkpoint as it is, in one file."""
    import torch

    from lightning_distplus import _compat
    from lightning_distplus.checkpoint.formats import is_sharded, read_sharded

    with _compat.refusing_code(source, TRUST_BY_HAND):
        if is_sharded(source):
            checkpoint = read_sharded(source)
        elif source.is_dir():
            raise CheckpointMismatch(f"{source} is no folder of FSDP's shards. Of DeepSpeed: --from deepspeed.")
        else:
            checkpoint = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
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
