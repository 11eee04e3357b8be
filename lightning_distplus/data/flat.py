"""Token files without a format of their own: raw ``.bin``, and numpy's ``.npy``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_distplus.data.stream import INTEGERS, WHOLE, Part, Split, TokenStream, size_of

__all__ = ["NpyTokens", "RawTokens"]

_REMEDY = "Write it again, or leave it out."


class RawTokens(TokenStream):
    """Files that hold nothing but tokens, as nanoGPT writes them; several are one stream, in the order of their names.

    Args:
        paths: The files.
        seq_len: Number of targets in a sample.
        dtype: Type of a token, for example ``"uint16"``: the files do not say it. Little-endian.
        name: For messages.
        split: The share of the tokens that is read, from and to.

    Raises:
        ValueError: A file is empty or not a whole number of tokens, or the type is missing or none of tokens.
    """

    format = "raw"

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        seq_len: int,
        *,
        dtype: str | None,
        name: str,
        split: Split = WHOLE,
    ) -> None:
        files = sorted(map(Path, paths), key=lambda path: path.name)
        if dtype is None:
            raise ValueError(f'{name} ({self.format}) does not say its token type; name it, as in dtype="uint16".')
        if dtype not in INTEGERS:
            raise ValueError(f"The dtype of {name} is {dtype!r}; tokens have one of {', '.join(INTEGERS)}.")
        stored = np.dtype(dtype).newbyteorder("<")
        parts = []
        for number, path in enumerate(files, start=1):
            size = size_of(path, f"It is file {number} of {len(files)} of {name}. {_REMEDY}")
            if size % stored.itemsize:
                raise ValueError(
                    f"{path} (file {number} of {len(files)}) is truncated, or its dtype is not {dtype}: it has {size} "
                    f"bytes, no multiple of {stored.itemsize}. {_REMEDY}"
                )
            parts.append(Part(path, 0, size // stored.itemsize))
        super().__init__(parts, name=name, dtype=stored, seq_len=seq_len, split=split)


class NpyTokens(TokenStream):
    """One-dimensional ``.npy`` arrays of integers; several are one stream, in the order of their names.

    Args:
        paths: The files.
        seq_len: Number of targets in a sample.
        name: For messages.
        split: The share of the tokens that is read, from and to.

    Raises:
        ValueError: A file is empty, truncated, no ``.npy`` file, no row of integers or of another type than the first.
    """

    format = "npy"

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], seq_len: int, *, name: str, split: Split = WHOLE
    ) -> None:
        files = sorted(map(Path, paths), key=lambda path: path.name)
        parts: list[Part] = []
        dtype: np.dtype[Any] | None = None
        for number, path in enumerate(files, start=1):
            part, found = _read_npy_header(path, f"file {number} of {len(files)}")
            dtype = found if dtype is None else dtype
            if found != dtype:
                raise ValueError(
                    f"{path} (file {number} of {len(files)}) holds {found}, expected {dtype} as in {files[0].name}. "
                    "Give each type a source of its own."
                )
            parts.append(part)
        assert dtype is not None
        super().__init__(parts, name=name, dtype=dtype, seq_len=seq_len, split=split)


def _read_npy_header(path: Path, place: str) -> tuple[Part, np.dtype[Any]]:
    size = size_of(path, f"It is {place}. {_REMEDY}")
    with path.open("rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
            shape, _, dtype = read(stream)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} ({place}) is no .npy file, or its header is torn: {error}. {_REMEDY}") from None
        offset = stream.tell()
    if len(shape) != 1 or dtype.name not in INTEGERS:
        raise ValueError(
            f"{path} ({place}) holds {dtype} of shape {shape}, expected one row of {', '.join(INTEGERS)}. {_REMEDY}"
        )
    expected = offset + shape[0] * dtype.itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(f"{path} ({place}) is {what}: it has {size} bytes, its header describes {expected}. {_REMEDY}")
    return Part(path, offset, shape[0]), dtype
