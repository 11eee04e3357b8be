"""Packed token files: what a source of token blocks offers, and Megatron-LM's .bin/.idx pair, read and written."""

from __future__ import annotations

import array
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.data.inventory import digest_file
from lightning_distplus.data.stream import WHOLE, Part, Split, TokenStream, size_of

__all__ = ["MegatronTokens", "MegatronWriter", "TokenSource", "dtype_for", "megatron_pair"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document marks
_VERSION = 1
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


class TokenSource(Protocol):
    """Blocks of ``seq_len + 1`` tokens that can be read in any order."""

    @property
    def num_samples(self) -> int:
        """Number of blocks."""

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """The blocks at ``indices``: integers of shape (len(indices), seq_len + 1)."""

    def fingerprint(self) -> str:
        """16 hex digits that change with the tokens, and not with where they are stored."""


def dtype_for(vocab_size: int) -> type[np.integer[Any]]:
    """The token type that Megatron-LM chooses: uint16 below 65500 tokens, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class MegatronTokens(TokenStream):
    """Megatron-LM's indexed dataset ``<prefix>.bin`` and ``<prefix>.idx``, read as one stream of tokens.

    Sample i is tokens[i * seq_len : i * seq_len + seq_len + 1]: neighbours share one token, so that every token but
    the first is a target once. Blocks run across documents; documents keep the order in which they were written.
    Header and sizes of both files are checked here, so that a damaged file never shows up in the middle of a run.

    Args:
        prefix: Path of the pair, with or without ``.bin`` or ``.idx``.
        seq_len: Number of targets in a sample.
        split: The share of the documents that is read, from and to.

    Raises:
        ValueError: A file is missing, empty, truncated, too long or of another format; or holds no whole sample.
    """

    format = "megatron"
    is_each_file_alone = True

    def __init__(self, prefix: str | os.PathLike[str], seq_len: int, *, split: Split = WHOLE) -> None:
        self._bin, self._idx = megatron_pair(prefix)
        self._index = _read_index(self._idx, self._bin)
        super().__init__(
            [Part(self._bin, 0, self._index.num_tokens)],
            name=str(self._bin),
            dtype=np.dtype(self._index.dtype),
            seq_len=seq_len,
            split=split,
        )

    @property
    def num_documents(self) -> int:
        """Number of documents in the file."""
        return self._index.num_documents

    def fingerprint(self) -> str:
        """16 hex digits over format, sizes and content (of large files: 64 spread samples of 4 KiB each)."""
        digest = xxhash.xxh3_64(f"megatron {_VERSION} {self.dtype.__name__}".encode())
        for path in self._paths():
            digest_file(digest, path)
        return self._sealed(digest)

    def _paths(self) -> list[Path]:
        return [self._idx, self._bin]

    def _read_document_starts(self) -> NDArray[np.int64]:
        """Mark k is the first sequence of document k, and pointers say where sequences begin."""
        num_sequences = self._index.num_sequences
        with self._idx.open("rb") as stream:
            stream.seek(_HEADER.size + 4 * num_sequences)
            pointers = np.fromfile(stream, dtype="<i8", count=num_sequences)
            marks = np.fromfile(stream, dtype="<i8", count=self._index.num_documents)
        if len(marks) and (marks.min() < 0 or marks.max() > num_sequences):
            raise ValueError(f"{self._idx} is damaged: a document begins past its {num_sequences} sequences.")
        # Empty documents at the end begin where the data ends.
        starts: NDArray[np.int64] = np.append(pointers // self._dtype.itemsize, self.num_tokens)[marks]
        if (np.diff(starts) < 0).any() or (len(starts) and (starts[0] or starts[-1] > self.num_tokens)):
            raise ValueError(f"{self._idx} is damaged: its documents do not follow one another from token 0 on.")
        return starts


class MegatronWriter:
    """Writes ``<prefix>.bin`` and ``<prefix>.idx`` as documents arrive; they appear when the block ends well.

    The ``.idx`` appears last, so that a pair with an index is complete. An error inside the block leaves nothing.

    Args:
        prefix: Path of the pair, without suffix.
        dtype: Stored token type, see ``dtype_for``.

    Raises:
        FileExistsError: One of the two files exists.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: type[np.integer[Any]] = np.uint16) -> None:
        codes = {stored: code for code, stored in _DTYPES.items()}
        if dtype not in codes:
            raise ValueError(f"Tokens are stored as one of {', '.join(t.__name__ for t in codes)}; not as {dtype}.")
        self._code = codes[dtype]
        self._dtype = dtype
        self._limits = (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        self._bin, self._idx = megatron_pair(prefix)
        self._refuse_existing()
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._lengths = array.array("i")
        self._stream: IO[bytes] = _aside(self._bin).open("wb")

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return len(self._lengths)

    def add_document(self, tokens: Iterable[int] | NDArray[np.integer[Any]]) -> None:
        """Appends one document.

        Raises:
            ValueError: It is empty, or a token id does not fit the stored type.
        """
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        if ids.size == 0:
            raise ValueError(f"Document {self.num_documents} is empty.")
        lowest, highest = self._limits
        if ids.min() < lowest or ids.max() > highest:
            wrong = int(ids.min()) if ids.min() < lowest else int(ids.max())
            raise ValueError(
                f"Document {self.num_documents} has the token id {wrong}, and {self._dtype.__name__} holds "
                f"{lowest}..{highest}. Write with a wider dtype (see dtype_for)."
            )
        self._stream.write(np.ascontiguousarray(ids, dtype=self._dtype).tobytes())
        self._lengths.append(ids.size)

    def close(self) -> None:
        """Makes both files visible. Without any document this is an error and nothing is left."""
        if not self._lengths:
            self.discard()
            raise ValueError(f"No document was written to {self._bin}; the input is empty.")
        _sync(self._stream)
        with _aside(self._idx).open("wb") as stream:
            self._write_index(stream)
            _sync(stream)
        self._refuse_existing()
        _aside(self._bin).replace(self._bin)
        _aside(self._idx).replace(self._idx)
        _sync_directory(self._bin.parent)

    def discard(self) -> None:
        """Removes what was written."""
        self._stream.close()
        for path in (self._bin, self._idx):
            _aside(path).unlink(missing_ok=True)

    def _refuse_existing(self) -> None:
        for path in (self._bin, self._idx):
            if path.exists():
                raise FileExistsError(f"{path} exists. Remove it, or write to another prefix.")

    def _write_index(self, stream: IO[bytes]) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= np.dtype(self._dtype).itemsize
        # Every sequence is a document: mark k is the first sequence of document k, and the last mark ends the file.
        marks = np.arange(len(lengths) + 1, dtype=np.int64)
        stream.write(_HEADER.pack(_MAGIC, _VERSION, self._code, len(lengths), len(marks)))
        for part in (lengths, pointers, marks):
            stream.write(part.tobytes())

    def __enter__(self) -> MegatronWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


@dataclass(frozen=True, kw_only=True)
class _Index:
    dtype: type[np.integer[Any]]
    num_tokens: int
    num_sequences: int
    num_documents: int


def megatron_pair(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The paths of ``.bin`` and ``.idx``; the prefix may end in either."""
    text = os.fspath(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(text + ".bin"), Path(text + ".idx")


def _read_index(idx: Path, bin_: Path) -> _Index:
    """Checks header and sizes in constant time: the whole index is never read."""
    remedy = f"A Megatron source is the pair {bin_.name} and {idx.name}; `distplus prepare` writes one."
    size, found = size_of(idx, remedy), size_of(bin_, remedy)
    with idx.open("rb") as stream:
        head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError(f"{idx} is truncated: its header has {len(head)} of {_HEADER.size} bytes.")
        magic, version, code, num_sequences, num_marks = _HEADER.unpack(head)
        if magic != _MAGIC:
            raise ValueError(f"{idx} is no Megatron index: it begins with {magic!r}, expected {_MAGIC!r}.")
        if version != _VERSION:
            raise ValueError(f"{idx} has format version {version}; only version {_VERSION} can be read.")
        if code not in _DTYPES:
            known = ", ".join(f"{k} = {t.__name__}" for k, t in _DTYPES.items())
            raise ValueError(f"{idx} has the token type code {code}; token files have one of: {known}.")
        _check_index_size(idx, size, num_sequences, num_marks)
        dtype = _DTYPES[code]
        num_bytes = _end_of_data(stream, num_sequences, np.dtype(dtype).itemsize)
    if found != num_bytes:
        what = "truncated" if found < num_bytes else "too long"
        raise ValueError(f"{bin_} is {what}: it has {found} bytes, and {idx.name} describes {num_bytes}.")
    return _Index(
        dtype=dtype,
        num_tokens=num_bytes // np.dtype(dtype).itemsize,
        num_sequences=num_sequences,
        num_documents=num_marks - 1,
    )


def _check_index_size(idx: Path, size: int, num_sequences: int, num_marks: int) -> None:
    expected = _HEADER.size + 12 * num_sequences + 8 * num_marks
    if size == expected + num_sequences and num_sequences:
        raise ValueError(f"{idx} is a multimodal index (it holds sequence modes); only text can be read.")
    if size != expected or not num_sequences or not num_marks:
        what = "truncated" if size < expected else "damaged"
        raise ValueError(
            f"{idx} is {what}: {num_sequences} sequences and {num_marks} document marks take {expected} bytes, "
            f"and the file has {size}."
        )


def _end_of_data(stream: IO[bytes], num_sequences: int, item_bytes: int) -> int:
    """Byte at which the last sequence ends."""
    stream.seek(_HEADER.size + 4 * (num_sequences - 1))
    (length,) = struct.unpack("<i", stream.read(4))
    stream.seek(_HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
    (pointer,) = struct.unpack("<q", stream.read(8))
    return int(pointer) + int(length) * item_bytes


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _sync_directory(path: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
