"""lit-gpt's and TinyLlama's packed token files: a folder of ``LITPKDS`` chunks, every header of it checked."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_distplus.data.stream import WHOLE, Part, Split, TokenStream, size_of

__all__ = ["LitPackedTokens", "is_lit_packed"]

_MAGIC = b"LITPKDS"
_HEADER = struct.Struct("<7sQBQ")  # magic, version, dtype code, tokens in the file
_VERSION = 1
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_FLOATS = {6: "float32", 7: "float64"}
_REMEDY = "Write it again with lit-gpt's PackedDatasetBuilder, or remove it from the folder."


class _Header(NamedTuple):
    dtype: type[np.integer[Any]]
    chunk_size: int


class LitPackedTokens(TokenStream):
    """Files that lit-gpt's ``PackedDatasetBuilder`` wrote, in the order of their names.

    Each file is blocks of ``seq_len + 1`` tokens that share none, as lit-gpt's ``PackedDataset`` reads them, and what
    remains at its end is left out. The files do not say where documents begin.

    Args:
        paths: The files.
        seq_len: Number of targets in a sample.
        name: For messages.
        split: The share of the blocks that is read, from and to.

    Raises:
        ValueError: A file is empty, truncated, too long or no such file; or differs from the first in token type or
            chunk size.
    """

    format = "litpkds"

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], seq_len: int, *, name: str, split: Split = WHOLE
    ) -> None:
        files = sorted(map(Path, paths), key=lambda path: path.name)
        if not files:
            raise ValueError(f"{name} holds no LITPKDS file (*.bin that begins with {_MAGIC!r}).")
        place = f"(file 1 of {len(files)}, {files[0].name})"
        headers = []
        for number, path in enumerate(files, start=1):
            header = _read_header(path, f"file {number} of {len(files)}")
            headers.append(header)
            if header != headers[0]:
                raise ValueError(
                    f"{path} (file {number} of {len(files)}) does not belong to the others: it holds "
                    f"{header.chunk_size} tokens of {header.dtype.__name__}, expected {headers[0].chunk_size} of "
                    f"{headers[0].dtype.__name__} {place}. Give each kind a folder, or a source, of its own."
                )
        super().__init__(
            [Part(path, _HEADER.size, headers[0].chunk_size) for path in files],
            name=name,
            dtype=np.dtype(headers[0].dtype).newbyteorder("<"),
            seq_len=seq_len,
            is_blocked=True,
            split=split,
        )


def is_lit_packed(path: Path) -> bool:
    """Whether a file begins like a packed file."""
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def _read_header(path: Path, place: str) -> _Header:
    size = size_of(path, f"It is {place}. {_REMEDY}")
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise ValueError(f"{path} ({place}) is truncated in its header: {len(head)} of {_HEADER.size} bytes. {_REMEDY}")
    magic, version, code, chunk_size = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise ValueError(f"{path} ({place}) begins with {magic!r}, expected {_MAGIC!r}. {_REMEDY}")
    if version != _VERSION:
        raise ValueError(f"{path} ({place}) has format version {version}, expected {_VERSION}. {_REMEDY}")
    if code not in _DTYPES:
        found = f"the token type code {code}" + (f" ({_FLOATS[code]})" if code in _FLOATS else "")
        known = ", ".join(f"{k} = {t.__name__}" for k, t in _DTYPES.items())
        raise ValueError(f"{path} ({place}) has {found}, expected one of {known}. {_REMEDY}")
    expected = _HEADER.size + chunk_size * np.dtype(_DTYPES[code]).itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(
            f"{path} ({place}) is {what}: it has {size} bytes, and its header describes {expected} "
            f"({chunk_size} tokens of {_DTYPES[code].__name__}). {_REMEDY}"
        )
    return _Header(_DTYPES[code], chunk_size)
