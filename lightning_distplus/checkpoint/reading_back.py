"""What lies on the disk, compared with fingerprints of tensors, and digests of bytes, that were saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distplus.checkpoint.catalog import FileFinding
from lightning_distplus.checkpoint.consolidating import is_sharded, tensors_of_shards
from lightning_distplus.checkpoint.digests import digest_file
from lightning_distplus.checkpoint.fingerprints import Piece, Sums, differing, sums_of_pieces

__all__ = ["byte_findings", "named_tensors", "tensor_findings"]

_OURS = "lightning_distplus"  # where a checkpoint holds what we add, the names of the parameters among it
_IS_OPTIMIZER = re.compile(r"optimizer_\d+")


def tensor_findings(path: Path, expected: Mapping[str, str]) -> list[FileFinding]:
    """Tensors that are not what they should be; DeepSpeed's folders hold none by name, and are not read.

    At most 256 MB, or the largest tensor, are in memory at once.
    """
    if not (path.is_file() or is_sharded(path)):
        return []
    total: Sums = {}
    for name, tensor in _read(path):
        total.update(sums_of_pieces([Piece.whole(name, tensor)]))
    odd = differing(expected, total)
    missing = [name for name in expected if name not in total]
    return [
        *(FileFinding(f"{path}: {name}", f"fingerprint {want}", found) for name, (want, found) in odd.items()),
        *(FileFinding(f"{path}: {name}", expected[name], "no such tensor") for name in missing),
    ]


def byte_findings(digests: Mapping[Path, str]) -> list[FileFinding]:
    """Files whose bytes are not those whose XXH3 digests are given."""
    found = {file: digest_file(file).xxh3_128 for file in digests}
    return [
        FileFinding(str(file), f"XXH3 digest {digest} of what was written", found[file])
        for file, digest in digests.items()
        if found[file] != digest
    ]


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.is_file():
        # What this package has saved holds more than weights: it is read as Lightning reads it.
        yield from named_tensors(torch.load(path, map_location="cpu", mmap=True, weights_only=False))
        return
    for (first, *inner), tensor in tensors_of_shards(path):
        number = str(first).removeprefix("optimizer_")
        if number == first:
            yield f"weights/{'.'.join(map(str, inner))}", tensor
        elif inner[0] == "state":
            yield f"optimizer {number}/{'/'.join(map(str, inner[1:]))}", tensor


def named_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a single-file checkpoint, or of what FSDP and FSDP2 write, by the names that a manifest has."""
    parameters = (state.get(_OURS) or {}).get("parameters", [])
    for key in ("state_dict", "model"):
        for name, value in (state.get(key) or {}).items():
            if isinstance(value, Tensor):
                yield f"weights/{name}", value
    optimizers = dict(enumerate(state.get("optimizer_states") or []))
    optimizers |= {int(key[10:]): value for key, value in state.items() if _IS_OPTIMIZER.fullmatch(key)}
    for number, optimizer in optimizers.items():
        for parameter, values in optimizer.get("state", {}).items():
            by_number = parameters[number] if isinstance(parameter, int) and number < len(parameters) else {}
            name = by_number[parameter] if by_number else parameter
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield f"optimizer {number}/{name}/{key}", value
