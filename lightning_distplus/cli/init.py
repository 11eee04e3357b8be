"""``distplus init``: writes a starting point into the current folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_distplus import recipes

__all__ = ["main"]

_PREPARE_TINY = """python -m lightning_distplus.recipes.corpus data
distplus prepare data/code.jsonl --output data/code --vocab_size 4096 --append_eod
distplus prepare data/prose.jsonl --output data/prose --tokenizer data/code.tokenizer.json --append_eod"""
_PREPARE_1B = """distplus prepare slimpajama/ --output data/slimpajama --tokenizer llama2/ --append_eod
distplus prepare starcoder/ --output data/starcoder --tokenizer llama2/ --append_eod"""
_TWO_HOSTS = "--nnodes 2 --nproc 8 --rdzv HOST:29400 --job-id tinyllama"
_EPILOG = """examples:
  distplus init                                        train.py: 40 lines, stock Lightning, two CPU processes
  distplus init tinyllama                              a small Llama on two CPU processes, under FSDP
  distplus init tinyllama --size 1.1b --strategy ddp   TinyLlama 1.1B on 16 GPUs, under DDP
"""


def main(argv: Sequence[str]) -> int:
    """Exit code 0 where the files are written, 1 where one of them exists."""
    arguments = _parser().parse_args(argv)
    if arguments.what == "script":
        sources = [Path(recipes.__file__).with_name("train.py")]
        commands = ["python train.py"]
    else:
        model = f"tiny_{arguments.size}" if arguments.size == "cpu" else f"tinyllama_{arguments.size}"
        sources = recipes.files(f"{model}_{arguments.strategy}")
        configs = " ".join(f"--config {source.name}" for source in sources)
        is_tiny = arguments.size == "cpu"
        commands = [
            *(_PREPARE_TINY if is_tiny else _PREPARE_1B).splitlines(),
            f"distplus rehearse {configs}",
            f"distplus launch {'--nproc 2' if is_tiny else _TWO_HOSTS} -- fit {configs}",
        ]
    there = [source.name for source in sources if Path(source.name).exists()]
    if there and not arguments.overwrite:
        print(f"distplus init: {there[0]} exists here. Write over it with --overwrite.", file=sys.stderr)
        return 1
    for source in sources:
        shutil.copyfile(source, source.name)
        print(f"wrote {source.name}")
    print("next:")
    for command in commands:
        print(f"  {command}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus init",
        description="Writes a starting point into the current folder: a script, or the files of a recipe.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=("script", "tinyllama"), default="script", help="default: script")
    parser.add_argument("--size", choices=("cpu", "1.1b"), default="cpu", help="of tinyllama (default: cpu)")
    parser.add_argument(
        "--strategy", choices=recipes.strategies(), default="fsdp", help="of tinyllama (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="write over files of these names")
    return parser
