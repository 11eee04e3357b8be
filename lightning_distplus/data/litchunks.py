"""litdata's optimized chunks, written with its ``TokensLoader``: read through our own index, without litdata."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.data.stream import WHOLE, Part, Split, TokenStream, size_of

__all__ = ["LitdataTokens", "is_litdata"]

_INDEX = "index.json"
_WORD = 4  # a chunk begins with uint32: number of items, where each item begins, where the last one ends
# litdata's constants._TORCH_DTYPES_MAPPING and _NUMPY_SCTYPES: positions in a list, of which these are integers.
_DTYPES: dict[str, dict[int, type[np.integer[Any]]]] = {
    "no_header_tensor": {
        11: np.uint8,
        12: np.int8,
        13: np.int16,
        14: np.int16,
        15: np.int32,
        16: np.int32,
        17: np.int64,
        18: np.int64,
        20: np.uint16,
    },
    "no_header_numpy": {
        0: np.int8,
        1: np.int16,
        2: np.int32,
        3: np.int64,
        4: np.uint8,
        5: np.uint16,
        6: np.uint32,
    },
}
_REMEDY = "Write the folder again with litdata.optimize(..., item_loader=TokensLoader()), or fetch it again."


class LitdataTokens(TokenStream):
    """A local folder that ``litdata.optimize(..., item_loader=TokensLoader())`` wrote, in the order of its index.

    Each chunk is blocks of ``seq_len + 1`` tokens that share none, as ``TokensLoader(block_size=seq_len + 1)`` reads
    them, and what remains at its end is left out. The items that were written are the documents.

    Args:
        folder: With ``index.json`` and the chunks.
        seq_len: Number of targets in a sample.
        split: The share of the blocks that is read, from and to.

    Raises:
        ValueError: The folder holds something else than tokens, is compressed or encrypted, or a chunk is missing,
            empty, truncated or not what the index says.
    """

    format = "litdata"

    def __init__(self, folder: str | os.PathLike[str], seq_len: int, *, split: Split = WHOLE) -> None:
        index = Path(folder) / _INDEX
        size_of(index, _REMEDY)
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            config, chunks = content["config"], content["chunks"]
            dtype = _read_config(index, config)
            rows = [(str(one["filename"]), one["dim"], int(one["chunk_size"])) for one in chunks]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no index of litdata, or torn: {error!r}. {_REMEDY}") from None
        if not rows:
            raise ValueError(f"{index} names no chunk; the source is empty. {_REMEDY}")
        self._num_items = [num_items for _, _, num_items in rows]
        parts = []
        for number, (name, num_tokens, num_items) in enumerate(rows, start=1):
            place = f"chunk {number} of {len(rows)}"
            if num_tokens is None:
                raise ValueError(f"{index} does not say how many tokens {name} ({place}) holds. {_REMEDY}")
            part = Part(Path(folder) / name, _WORD * (num_items + 2), int(num_tokens))
            _check_chunk(part, num_items, dtype, place)
            parts.append(part)
        super().__init__(parts, name=str(folder), dtype=dtype, seq_len=seq_len, is_blocked=True, split=split)

    def _num_documents(self) -> int:
        return sum(self._num_items)

    def _read_document_starts(self) -> NDArray[np.int64]:
        starts = []
        for part, num_items, first in zip(self._parts, self._num_items, self._starts.tolist(), strict=True):
            bytes_ = np.fromfile(part.path, dtype="<u4", count=num_items, offset=_WORD).astype(np.int64)
            starts.append(first + (bytes_ - part.offset_bytes) // self._dtype.itemsize)
        return np.concatenate(starts)


def is_litdata(path: Path) -> bool:
    """Whether a folder holds an index like litdata's."""
    index = path / _INDEX
    return index.is_file() and b'"chunks"' in index.read_bytes()[:4096]


def _read_config(index: Path, config: dict[str, Any]) -> np.dtype[Any]:
    for obstacle in ("compression", "encryption"):
        if config.get(obstacle):
            raise ValueError(
                f"{index}: the chunks have {obstacle} {config[obstacle]!r}, and blocks of tokens are read in place. "
                f"Write them without {obstacle}."
            )
    formats = config["data_format"]
    serializer, _, code = str(formats[0]).partition(":")
    dtype = _DTYPES.get(serializer, {}).get(int(code) if code.isdigit() else -1)
    if len(formats) != 1 or dtype is None:
        raise ValueError(f"{index}: an item is {formats}, expected one tensor or array of integers per item. {_REMEDY}")
    stored: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
    return stored


def _check_chunk(part: Part, num_items: int, dtype: np.dtype[Any], place: str) -> None:
    size = size_of(part.path, f"It is {place}. {_REMEDY}")
    expected = part.offset_bytes + part.num_tokens * dtype.itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(
            f"{part.path} ({place}) is {what}: it has {size} bytes, and {_INDEX} describes {expected} "
            f"({num_items} items, {part.num_tokens} tokens of {dtype.name}). {_REMEDY}"
        )
    with part.path.open("rb") as stream:
        count, first = struct.unpack("<2I", stream.read(2 * _WORD))
        stream.seek(part.offset_bytes - _WORD)
        (end,) = struct.unpack("<I", stream.read(_WORD))
    found, wanted = (count, first, end), (num_items, part.offset_bytes, size)
    if found != wanted:
        raise ValueError(
            f"{part.path} ({place}) is damaged: (items, first byte, last byte) in its header are {found}, expected "
            f"{wanted}. {_REMEDY}"
        )
