"""DeepSpeed's universal checkpoints, which any number of ranks can read: what is one, and how one is made."""

from __future__ import annotations

import io
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from torch import Tensor

from lightning_distplus.checkpoint.catalog import verify
from lightning_distplus.checkpoint.info import info_like
from lightning_distplus.checkpoint.layout import leftovers_of, universal_for
from lightning_distplus.checkpoint.protocol import commit
from lightning_distplus.checkpoint.voting import gather_alone

__all__ = ["convert", "converted_beside", "is_universal", "num_shards", "weights_of_zero", "write_whole"]

_TAG = "checkpoint"  # the name of Lightning's only tag


def is_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint."""
    return (path / "latest_universal").is_file()


def num_shards(path: Path) -> int:
    """For how many ranks a folder holds optimizer states; 0 where it holds none."""
    return len(list((path / _TAG).glob("*_optim_states.pt")))


def convert(source: Path, target: Path) -> None:
    """Makes a committed universal checkpoint of what ZeRO 1, 2 or 3 has saved. One process calls it.

    Raises:
        SaveFailed: It cannot be converted, or not be written; the cause says why.
    """
    info = replace(info_like(source), strategy="ResilientDeepSpeed")
    commit(target, lambda stage: _write(source, stage), rank=0, gather=gather_alone, info=info)


def converted_beside(source: Path) -> Path:
    """The universal form of a checkpoint, made where it is not there yet; it goes when the checkpoint is removed."""
    for folder in leftovers_of(source, "universal"):
        if verify(folder / source.name).ok:
            return folder / source.name
    target = universal_for(source) / source.name
    convert(source, target)
    return target


def write_whole(source: Path, file: Path) -> None:
    """Writes what ZeRO has sharded as a single-file checkpoint of Lightning, weights in 32 bits, without moments."""
    converter = import_module("lightning.pytorch.utilities.deepspeed")
    with redirect_stdout(io.StringIO()):
        converter.convert_zero_checkpoint_to_fp32_state_dict(source, file, tag=_TAG)


def weights_of_zero(source: Path) -> dict[str, Tensor]:
    """The weights that ZeRO has sharded, in 32 bits."""
    converter = import_module("deepspeed.utils.zero_to_fp32")
    with redirect_stdout(io.StringIO()):
        weights: dict[str, Tensor] = converter.get_fp32_state_dict_from_zero_checkpoint(source, _TAG)
    return weights


def _write(source: Path, stage: Path) -> None:
    converter = import_module("deepspeed.checkpoint.ds_to_universal")
    stage.mkdir()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints its progress
        converter.main(
            Namespace(
                input_folder=str(source / _TAG),
                output_folder=str(stage / _TAG),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    (stage / "latest").write_text(_TAG)  # Lightning's sign of a DeepSpeed folder
