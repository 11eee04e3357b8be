"""Sharded checkpoints as one file: the whole state, or the weights alone, written tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_distplus.checkpoint.files import discard
from lightning_distplus.checkpoint.layout import new_nonce

__all__ = [
    "is_sharded",
    "read_sharded",
    "tensors_of_shards",
    "weights_of_file",
    "weights_of_shards",
    "write_safetensors",
]

_META = "meta.pt"  # where Lightning puts everything but weights and moments
_WEIGHTS = ("model", "state_dict")  # what FSDPStrategy and ModelParallelStrategy call them
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
    """Whether Lightning's FSDP or FSDP2 has saved this folder."""
    return (path / _META).is_file() and (path / ".metadata").is_file()


def read_sharded(path: Path) -> dict[str, Any]:
    """A folder of FSDP or FSDP2 as the dictionary that a single-file checkpoint holds, all of it in memory."""
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
    checkpoint: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=False)
    checkpoint["state_dict"] = next(tree[name] for name in _WEIGHTS if name in tree)
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


def weights_of_file(path: Path) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
    """The weights of a single-file checkpoint, mapped into memory, as `weights_of_shards` gives them."""
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["state_dict"]
    return weights, ({name: tensor} for name, tensor in weights.items())


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
