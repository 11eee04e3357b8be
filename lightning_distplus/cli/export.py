"""``distplus export``: a checkpoint as one file, or in the layout of DeepSpeed that any number of ranks can read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_distplus.checkpoint import CheckpointState, gather_alone, info_like, state, verify_or_raise
from lightning_distplus.checkpoint.catalog import check_unmanifested
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.cli.verify import TRUST, TRUST_HELP
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch

__all__ = ["main"]

_WEIGHTS = ".safetensors"


def main(argv: Sequence[str]) -> int:
    """Exit code 0 where the export is written, 1 where something is in its way.

    Raises:
        CheckpointUnsafe: A pickle in it might run code, and ``--trust`` is not given.
    """
    arguments = _parser().parse_args(argv)
    source, target = arguments.checkpoint, arguments.target
    if target.exists():
        print(f"distplus export: {target} exists already. Give another name, or remove it first.", file=sys.stderr)
        return 1
    _verify(source)
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
    elif target.suffix == _WEIGHTS:
        _export_weights(source, target, weights_only)
    else:
        _export_whole(source, target, weights_only)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus export",
        description="Writes a sharded checkpoint as one file: the whole state (.ckpt) or the weights (.safetensors).",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, file or folder; it is verified")
    parser.add_argument("target", type=Path, metavar="OUT", help="FILE.ckpt, FILE.safetensors, or a folder")
    parser.add_argument(
        "--universal", action="store_true", help="of DeepSpeed: a folder that any number of ranks can resume from"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    return parser


def _verify(source: Path) -> None:
    found = state(source)
    if found is not CheckpointState.UNMANIFESTED:
        verify_or_raise(source)
        return
    if findings := check_unmanifested(source):
        raise CheckpointCorrupt(f"{source} cannot be exported: {findings[0]}. Give another checkpoint.")
    print(f"{source} was not committed by lightning_distplus; it is exported unverified", file=sys.stderr)


def _export_universal(source: Path, target: Path) -> None:
    from lightning_distplus.checkpoint.export import convert, is_universal, num_shards

    if not num_shards(source) or is_universal(source):
        raise CheckpointMismatch(
            f"{source} holds no shards of DeepSpeed's ZeRO, so that there is nothing to convert. Leave --universal out."
        )
    convert(source, target)


def _export_weights(source: Path, target: Path, weights_only: bool) -> None:
    from lightning_distplus.checkpoint import export as consolidating

    if not source.is_dir():
        weights, parts = consolidating.weights_of_file(source, weights_only=weights_only)
    elif consolidating.is_sharded(source):
        weights, parts = consolidating.weights_of_shards(source)
    else:
        from lightning_distplus.checkpoint.export import weights_of_zero

        weights = weights_of_zero(source)
        parts = iter([weights])
    consolidating.write_safetensors(target, weights, parts)


def _export_whole(source: Path, target: Path, weights_only: bool) -> None:
    import torch

    from lightning_distplus.checkpoint import export as consolidating

    if not source.is_dir():
        raise CheckpointMismatch(f"{source} is one file already. Export its weights to FILE{_WEIGHTS}, or copy it.")
    if consolidating.is_sharded(source):
        commit(
            target,
            lambda stage: torch.save(consolidating.read_sharded(source, weights_only=weights_only), stage),
            rank=0,
            gather=gather_alone,
            info=info_like(source),
        )
    else:
        from lightning_distplus.checkpoint.export import write_whole

        commit(target, lambda stage: write_whole(source, stage), rank=0, gather=gather_alone, info=info_like(source))
