"""Sharded checkpoints in another form: one file, safetensors, or DeepSpeed's universal layout."""

from __future__ import annotations

import io
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_distplus import _compat
from lightning_distplus.checkpoint.catalog import FileFinding, verify
from lightning_distplus.checkpoint.commit import commit, gather_alone, info_like
from lightning_distplus.checkpoint.files import discard, leftovers_of, new_nonce, universal_for
from lightning_distplus.checkpoint.tensors import Piece, Sums, differing, named_tensors, sums_of_pieces

__all__ = [
    "CONFIG",
    "FILE_BYTES",
    "META",
    "config_in",
    "convert",
    "converted_beside",
    "is_sharded",
    "is_universal",
    "num_shards",
    "read_sharded",
    "read_shards",
    "tensor_findings",
    "to_universal",
    "weights_of_file",
    "weights_of_shards",
    "weights_of_zero",
    "write_in_files",
    "write_safetensors",
    "write_whole",
]

META = "meta.pt"
"""Where Lightning and Fabric put everything but weights and moments."""
_WEIGHTS = ("model", "state_dict")  # what FSDPStrategy and ModelParallelStrategy call them
CONFIG = "llama_config"
"""Where a checkpoint of ``recipes.model.TinyLlama`` says how that is configured."""
FILE_BYTES = 5 * 10**9
"""The most that one of several files of safetensors holds, unless a tensor is larger; as in transformers."""
_FILE = "model.safetensors"
_BATCH_BYTES = 256 << 20
_ALIGNMENT_BYTES = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def is_sharded(path: Path) -> bool:
    """Whether FSDP or FSDP2 of Lightning, or of Fabric, has saved this folder."""
    return (path / META).is_file() and (path / ".metadata").is_file()


def read_shards(path: Path, *, weights_only: bool = True) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Everything in a folder of FSDP or FSDP2, all of it in memory: what is in its shards, and what is beside them.

    Args:
        path: The folder.
        weights_only: As ``torch.load`` has it; the other files have no such argument (`_compat.refusing_code`).
    """
    metadata = FileSystemReader(path).read_metadata()
    flat: dict[str, Any] = {
        name: _empty(entry) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    load(flat, storage_reader=FileSystemReader(path), no_dist=True)
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *folders, last = metadata.planner_data[name]
        place = tree
        for key in folders:
            place = place.setdefault(key, {})
        place[last] = value
    return tree, torch.load(path / META, map_location="cpu", weights_only=weights_only)


def read_sharded(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """A folder of Lightning's FSDP or FSDP2 as the dictionary that a single-file checkpoint holds (`read_shards`)."""
    tree, checkpoint = read_shards(path, weights_only=weights_only)
    checkpoint["state_dict"] = next((tree[name] for name in _WEIGHTS if name in tree), {})
    numbers = sorted(int(name.removeprefix("optimizer_")) for name in tree if str(name).startswith("optimizer_"))
    checkpoint["optimizer_states"] = [_by_index(tree[f"optimizer_{number}"]) for number in numbers]
    return checkpoint


def _empty(entry: Any, device: str = "cpu") -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _by_index(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer keyed by the parameter's index, as torch does it, instead of its name."""
    by_number = optimizer["param_groups"]
    groups = [dict(by_number[number]) for number in sorted(by_number)]
    index = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    for group in groups:
        group["params"] = [index[name] for name in group["params"]]
    return {"state": {index[name]: state for name, state in optimizer.get("state", {}).items()}, "param_groups": groups}


def weights_of_shards(path: Path) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
    """The weights of such a folder: all of them on the meta device, and the same with content, some at a time.

    At most 256 MB, or the largest tensor, are in memory at once.
    """
    metadata = FileSystemReader(path).read_metadata()
    keys = {
        key: ".".join(map(str, metadata.planner_data[key][1:]))
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and metadata.planner_data[key][0] in _WEIGHTS
    }
    empty = {name: _empty(metadata.state_dict_metadata[key], "meta") for key, name in keys.items()}
    parts = _read_in_parts(path, metadata, list(keys))
    return empty, ({keys[key]: tensor for key, tensor in part.items()} for part in parts)


def tensors_of_shards(path: Path) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor of such a folder, whole, by its place in the state; as much in memory as for the weights."""
    metadata = FileSystemReader(path).read_metadata()
    entries = metadata.state_dict_metadata
    keys = [key for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]
    for part in _read_in_parts(path, metadata, keys):
        for key, tensor in part.items():
            yield metadata.planner_data[key], tensor


def _read_in_parts(path: Path, metadata: Metadata, keys: list[str]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Any] = {}
    for number, key in enumerate(keys, start=1):
        batch[key] = _empty(metadata.state_dict_metadata[key])
        if number == len(keys) or sum(tensor.nbytes for tensor in batch.values()) >= _BATCH_BYTES:
            load(batch, storage_reader=FileSystemReader(path), no_dist=True)
            yield batch
            batch = {}


def weights_of_file(path: Path, *, weights_only: bool = True) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
    """The weights of a single-file checkpoint, mapped into memory, as `weights_of_shards` gives them."""
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    weights: dict[str, Tensor] = checkpoint["state_dict"]
    return weights, ({name: tensor} for name, tensor in weights.items())


def config_in(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """How the model of a recipe is configured, as its checkpoint says; empty where it does not."""
    states = sorted((path / _TAG).glob("*model_states.pt"))
    file = path if not path.is_dir() else path / META if is_sharded(path) else next(iter(states), None)
    if file is None:
        return {}
    config: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only).get(CONFIG, {})
    return config


def write_safetensors(target: Path, weights: Mapping[str, Tensor], parts: Iterator[dict[str, Tensor]]) -> None:
    """Writes a safetensors file that is there whole or not at all.

    Args:
        target: The file.
        weights: Names, shapes and dtypes, in the order in which they come.
        parts: The same with content.

    Raises:
        ValueError: The format has no such dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"safetensors has no {tensor.dtype}, the dtype of {name}. Export to a .ckpt file instead.")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    fresh = target.with_name(f".{target.name}.{new_nonce()}")
    try:
        with fresh.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                for tensor in part.values():
                    # numpy knows no bfloat16: the bytes go as they are
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    finally:
        discard(fresh)


def write_in_files(folder: Path, weights: Mapping[str, Tensor], parts: Iterator[dict[str, Tensor]]) -> None:
    """Writes model.safetensors, or where there is more than `FILE_BYTES`, several files and their index."""
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if groups[-1] and sum(one.nbytes for one in groups[-1].values()) + tensor.nbytes > FILE_BYTES:
            groups.append({})
        groups[-1][name] = tensor
    one_by_one = ({name: tensor} for part in parts for name, tensor in part.items())
    of = f"-of-{len(groups):05}"
    files = [f"model-{number:05}{of}.safetensors" if len(groups) > 1 else _FILE for number in range(1, len(groups) + 1)]
    for file, group in zip(files, groups, strict=True):
        write_safetensors(folder / file, group, islice(one_by_one, len(group)))
    if len(groups) > 1:
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        size_bytes = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": size_bytes}, "weight_map": places}
        (folder / f"{_FILE}.index.json").write_text(json.dumps(index, indent=2) + "\n")


# -- tensors beside those of a manifest --------------------------------------------------------------------------------


def tensor_findings(path: Path, expected: Mapping[str, str], *, weights_only: bool = True) -> list[FileFinding]:
    """Tensors that are not what they should be; DeepSpeed's folders hold none by name, and are not read.

    At most 256 MB, or the largest tensor, are in memory at once.
    """
    if not (path.is_file() or is_sharded(path)):
        return []
    total: Sums = {}
    for name, tensor in _named(path, weights_only):
        total.update(sums_of_pieces([Piece.whole(name, tensor)]))
    odd = differing(expected, total)
    missing = [name for name in expected if name not in total]
    return [
        *(FileFinding(f"{path}: {name}", f"fingerprint {want}", found) for name, (want, found) in odd.items()),
        *(FileFinding(f"{path}: {name}", expected[name], "no such tensor") for name in missing),
    ]


def _named(path: Path, weights_only: bool) -> Iterator[tuple[str, Tensor]]:
    if path.is_file():
        yield from named_tensors(torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))
        return
    for (first, *inner), tensor in tensors_of_shards(path):
        number = str(first).removeprefix("optimizer_")
        if number == first:
            yield f"weights/{'.'.join(map(str, inner))}", tensor
        elif inner[0] == "state":
            yield f"optimizer {number}/{'/'.join(map(str, inner[1:]))}", tensor


# -- DeepSpeed's universal checkpoints ---------------------------------------------------------------------------------

_TAG = "checkpoint"  # the name of Lightning's only tag


def is_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint."""
    return (path / "latest_universal").is_file()


def num_shards(path: Path) -> int:
    """For how many ranks a folder holds optimizer states; 0 where it holds none."""
    return len(list((path / _TAG).glob("*_optim_states.pt")))


def convert(source: Path, target: Path) -> None:
    """Makes a committed universal checkpoint of what ZeRO 1, 2 or 3 has saved. One process calls it.

    DeepSpeed's converters run what a pickle names, but within `_compat.refusing_code`.

    Raises:
        SaveFailed: It cannot be converted, or not be written; the cause says why.
    """
    info = replace(info_like(source, is_successor=True), strategy="ResilientDeepSpeed")
    commit(target, lambda stage: _write(source, stage), rank=0, gather=gather_alone, info=info)


def converted_beside(source: Path) -> Path:
    """The universal form of a checkpoint, made where it is not there yet; it goes when the checkpoint is removed.

    Raises:
        CheckpointUnsafe: A pickle in it might run code.
        SaveFailed: As `convert` does.
    """
    for folder in leftovers_of(source, "universal"):
        if verify(folder / source.name).ok:
            return folder / source.name
    target = universal_for(source) / source.name
    with _compat.refusing_code(
        source, f"If you trust whoever wrote it: distplus export --universal --trust {source} OUT"
    ):
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
    stage.mkdir()
    to_universal(source / _TAG, stage / _TAG)
    (stage / "latest").write_text(_TAG)  # Lightning's sign of a DeepSpeed folder


def to_universal(shards: Path, target: Path) -> None:
    """Has DeepSpeed put its shards together: a folder for each parameter, with weight and moments."""
    converter = import_module("deepspeed.checkpoint.ds_to_universal")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints its progress
        converter.main(
            Namespace(
                input_folder=str(shards),
                output_folder=str(target),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
