"""Token files read as blocks: Megatron-LM's .bin/.idx (also written), raw, .npy, and lit-gpt's packed files."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import array
import glob
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = [
    "MegatronTokens",
    "MegatronWriter",
    "Source",
    "TokenSource",
    "TokenStream",
    "detect",
    "digest_file",
    "digest_files",
    "dtype_for",
    "first_difference",
    "inventory",
    "open_source",
    "rewritten",
    "rows_of_files",
    "size_of",
]


# -- blocks cut out of files -------------------------------------------------------------------------------------------

Split = tuple[float, float]
WHOLE: Split = (0.0, 1.0)
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")

_MAX_MAPS = 4096  # files mapped at a time; Linux allows a process 65530 maps


@dataclass(frozen=True)
class Part:
    """Consecutive tokens in one file."""

    path: Path
    offset_bytes: int
    num_tokens: int


class TokenStream:
    """Samples of ``seq_len + 1`` tokens, cut out of some parts.

    Either the parts are one stream, in which sample i is tokens[i * seq_len : i * seq_len + seq_len + 1]: neighbours
    share one token, so that every token but the first is a target once. Or each part is blocks of ``seq_len + 1``
    tokens that share none (``is_blocked``), as lit-gpt reads them; what remains of a part is left out.

    Args:
        parts: Where the tokens are.
        name: For messages.
        dtype: Stored token type.
        seq_len: Number of targets in a sample.
        is_blocked: See above.
        split: The share of the data that is read, from and to. It begins and ends with a block where there are blocks,
            else with a document where these are known, else with a token. Shares that meet have no token in common.

    Raises:
        ValueError: ``seq_len`` or ``split`` is senseless, or the share holds no whole sample.
    """

    format = "tokens"
    is_each_file_alone = False  # in the fingerprint

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        name: str,
        dtype: np.dtype[Any],
        seq_len: int,
        is_blocked: bool = False,
        split: Split = WHOLE,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; a sample has at least 1 token.")
        self.name = name
        self.seq_len = seq_len
        self._dtype = dtype
        self._parts = list(parts)
        self._split = split
        self._is_blocked = is_blocked
        lengths = np.array([part.num_tokens for part in parts], dtype=np.int64)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._maps: OrderedDict[int, NDArray[np.integer[Any]]] = OrderedDict()
        self._mapped: dict[int, os.stat_result] = {}  # the file of each map, as it was then
        self._documents: NDArray[np.int64] | None = None
        if is_blocked:
            counts = lengths // (seq_len + 1)
            self._block_ends = np.cumsum(counts)
            self._block_starts = self._block_ends - counts
        self._first, self._num_samples = self._share()

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the files."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """The stored token type."""
        return self._dtype.type

    @property
    def num_samples(self) -> int:
        """Number of samples in the share that is read."""
        return self._num_samples

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """The samples at ``indices``, in the stored dtype: shape (len(indices), seq_len + 1)."""
        width = self.seq_len + 1
        blocks = np.empty((len(indices), width), dtype=self.dtype)
        if len(self._parts) == 1 and not self._is_blocked:  # nothing to look up: half the time of the general case
            tokens = self._tokens(0)
            self._require_whole(0)
            for row, index in enumerate(indices.tolist()):
                start = self._first + index * self.seq_len
                blocks[row] = tokens[start : start + width]
            return blocks
        parts, starts = self._locate(indices)
        for part in np.unique(parts).tolist():
            self._require_whole(part)
        places = zip(parts.tolist(), (starts - self._starts[parts]).tolist(), strict=True)
        for row, (part, start) in enumerate(places):
            tokens = self._tokens(part)[start : start + width]
            blocks[row] = tokens if len(tokens) == width else self._across(part, start)
        return blocks

    def documents(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The document of each input token, counted from 0 in each sample: shape (len(indices), seq_len).

        Raises:
            ValueError: The source does not say where documents begin.
        """
        begins = self._document_starts()
        if begins is None:
            raise ValueError(
                f"{self.name} ({self.format}) does not say where documents begin, so that there are no document or "
                "position ids. Prepare it as a Megatron pair, or leave position_ids and document_ids out."
            )
        ids = np.zeros((len(indices), self.seq_len), dtype=np.int64)
        _, starts = self._locate(indices)
        for row, start in enumerate(starts.tolist()):
            inside = slice(np.searchsorted(begins, start, "right"), np.searchsorted(begins, start + self.seq_len))
            ids[row, begins[inside] - start] = 1
        return np.cumsum(ids, axis=1)

    def fingerprint(self) -> str:
        """16 hex digits over format, type, share and content (of much data: some spread samples of 4 KiB)."""
        digest = xxhash.xxh3_64(f"{self.format} {np.dtype(self.dtype).name}".encode())
        digest_files(digest, self._paths())
        return self._sealed(digest)

    def contents(self) -> dict[str, Any]:
        """What the fingerprint is made of, file by file: a record of ``inventory``."""
        paths = self._paths()
        facts = {"format": self.format, "dtype": np.dtype(self.dtype).name, **self._facts()}
        rows = rows_of_files(paths, each_alone=self.is_each_file_alone)
        return {"facts": facts, "num_files": len(set(paths)), "files": rows}

    def _facts(self) -> dict[str, Any]:
        """What else the fingerprint depends on."""
        return {} if self._split == WHOLE else {"split": list(self._split)}

    def _sealed(self, digest: xxhash.xxh3_64) -> str:
        if self._split != WHOLE:
            digest.update(f"split {self._split[0]!r} {self._split[1]!r}".encode())
        return digest.hexdigest()

    def _share(self) -> tuple[int, int]:
        """The first token (or block) of the share, and the number of its samples."""
        begin, end = self._split
        if not 0 <= begin < end <= 1:
            raise ValueError(f"split of {self.name} is {list(self._split)}; it is [from, to] with 0 <= from < to <= 1.")
        if self._is_blocked:
            num_blocks = int(self._block_ends[-1]) if len(self._block_ends) else 0
            first, last = round(begin * num_blocks), round(end * num_blocks)
            num_samples = last - first
        else:
            first, last = self._token_at(begin), self._token_at(end)
            num_samples = (last - first - 1) // self.seq_len
        if num_samples < 1:
            share = "" if self._split == WHOLE else f" in the share {list(self._split)}"
            number = f"{self.num_tokens if self._is_blocked else last - first} tokens"
            raise ValueError(
                f"{self.name} holds {number}{share}, and one sample of seq_len {self.seq_len} takes "
                f"{self.seq_len + 1}{' in one file' if self._is_blocked else ''}. Use a smaller seq_len or more text."
            )
        return first, num_samples

    def _token_at(self, fraction: float) -> int:
        if fraction in WHOLE:
            return round(fraction * self.num_tokens)
        begins = self._document_starts()
        if begins is None:
            return round(fraction * self.num_tokens)
        number = round(fraction * len(begins))
        return int(begins[number]) if number < len(begins) else self.num_tokens

    def _document_starts(self) -> NDArray[np.int64] | None:
        """The token with which each document begins, ascending; None where that is unknown."""
        if self._documents is None:
            self._documents = self._read_document_starts()
        return self._documents

    def _read_document_starts(self) -> NDArray[np.int64] | None:
        return None

    def _paths(self) -> list[Path]:
        """The files whose content is that of the source."""
        return list(dict.fromkeys(part.path for part in self._parts))

    def _locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part in which each sample begins, and its first token, counted over all parts."""
        if self._is_blocked:
            blocks = indices + self._first
            parts = np.searchsorted(self._block_ends, blocks, side="right")
            return parts, self._starts[parts] + (blocks - self._block_starts[parts]) * (self.seq_len + 1)
        starts = self._first + indices * self.seq_len
        return np.searchsorted(self._ends, starts, side="right"), starts

    def _across(self, part: int, start: int) -> NDArray[np.integer[Any]]:
        """A sample that continues in the next parts."""
        pieces, missing = [], self.seq_len + 1
        while missing:
            self._require_whole(part)
            pieces.append(self._tokens(part)[start : start + missing])
            missing -= len(pieces[-1])
            part, start = part + 1, 0
        return np.concatenate(pieces)

    def _tokens(self, part: int) -> NDArray[np.integer[Any]]:
        if part not in self._maps:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.popitem(last=False)
            self._maps[part] = self._open(self._parts[part])
            self._mapped[part] = self._parts[part].path.stat()
        return self._maps[part]

    def _require_whole(self, part: int) -> None:
        """Looks at the size before the map is read: a read past the end of a file ends the process by SIGBUS.

        Raises:
            ValueError: The file has become shorter since it was opened.
        """
        path, before = self._parts[part].path, self._mapped.get(part)
        try:
            now = path.stat()
        except OSError:
            return  # removed, and still there for those who have it open
        if before is not None and now.st_size < before.st_size and os.path.samestat(now, before):
            raise ValueError(
                f"{path} was cut short while it is read: it has {now.st_size} bytes, and had {before.st_size} when "
                "this run opened it. Restore the file and resume; write new data under a new name."
            )

    def _open(self, part: Part) -> NDArray[np.integer[Any]]:
        if not part.num_tokens:
            return np.empty(0, dtype=self._dtype)
        # A plain array over the map: slices of a np.memmap cost 5 microseconds more each.
        shape = (part.num_tokens,)
        return np.asarray(np.memmap(part.path, dtype=self._dtype, mode="r", offset=part.offset_bytes, shape=shape))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_maps": OrderedDict(),
            "_mapped": {},
            "_documents": None,
        }  # a worker process opens files by itself


def size_of(path: Path, remedy: str) -> int:
    """Bytes of a file.

    Raises:
        ValueError: It is missing or empty.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing. {remedy}")
    if size := path.stat().st_size:
        return size
    raise ValueError(f"{path} is empty (0 bytes). {remedy}")


# -- Megatron-LM -------------------------------------------------------------------------------------------------------

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document marks
_MEGATRON_VERSION = 1
_MEGATRON_DTYPES: dict[int, type[np.integer[Any]]] = {
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
        digest = xxhash.xxh3_64(f"megatron {_MEGATRON_VERSION} {self.dtype.__name__}".encode())
        for path in self._paths():
            digest_file(digest, path)
        return self._sealed(digest)

    def _paths(self) -> list[Path]:
        return [self._idx, self._bin]

    def _read_document_starts(self) -> NDArray[np.int64]:
        """Mark k is the first sequence of document k, and pointers say where sequences begin."""
        num_sequences = self._index.num_sequences
        with self._idx.open("rb") as stream:
            stream.seek(_MEGATRON_HEADER.size + 4 * num_sequences)
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
        codes = {stored: code for code, stored in _MEGATRON_DTYPES.items()}
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
        stream.write(_MEGATRON_HEADER.pack(_MEGATRON_MAGIC, _MEGATRON_VERSION, self._code, len(lengths), len(marks)))
        for part in (lengths, pointers, marks):
            stream.write(part.tobytes())

    def __enter__(self) -> "MegatronWriter":
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
        head = stream.read(_MEGATRON_HEADER.size)
        if len(head) < _MEGATRON_HEADER.size:
            raise ValueError(f"{idx} is truncated: its header has {len(head)} of {_MEGATRON_HEADER.size} bytes.")
        magic, version, code, num_sequences, num_marks = _MEGATRON_HEADER.unpack(head)
        if magic != _MEGATRON_MAGIC:
            raise ValueError(f"{idx} is no Megatron index: it begins with {magic!r}, expected {_MEGATRON_MAGIC!r}.")
        if version != _MEGATRON_VERSION:
            raise ValueError(f"{idx} has format version {version}; only version {_MEGATRON_VERSION} can be read.")
        if code not in _MEGATRON_DTYPES:
            known = ", ".join(f"{k} = {t.__name__}" for k, t in _MEGATRON_DTYPES.items())
            raise ValueError(f"{idx} has the token type code {code}; token files have one of: {known}.")
        _check_index_size(idx, size, num_sequences, num_marks)
        dtype = _MEGATRON_DTYPES[code]
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
    expected = _MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_marks
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
    stream.seek(_MEGATRON_HEADER.size + 4 * (num_sequences - 1))
    (length,) = struct.unpack("<i", stream.read(4))
    stream.seek(_MEGATRON_HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
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


# -- raw and .npy ------------------------------------------------------------------------------------------------------

_AGAIN = "Write it again, or leave it out."


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
            size = size_of(path, f"It is file {number} of {len(files)} of {name}. {_AGAIN}")
            if size % stored.itemsize:
                raise ValueError(
                    f"{path} (file {number} of {len(files)}) is truncated, or its dtype is not {dtype}: it has {size} "
                    f"bytes, no multiple of {stored.itemsize}. {_AGAIN}"
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
    size = size_of(path, f"It is {place}. {_AGAIN}")
    with path.open("rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
            shape, _, dtype = read(stream)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} ({place}) is no .npy file, or its header is torn: {error}. {_AGAIN}") from None
        offset = stream.tell()
    if len(shape) != 1 or dtype.name not in INTEGERS:
        raise ValueError(
            f"{path} ({place}) holds {dtype} of shape {shape}, expected one row of {', '.join(INTEGERS)}. {_AGAIN}"
        )
    expected = offset + shape[0] * dtype.itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(f"{path} ({place}) is {what}: it has {size} bytes, its header describes {expected}. {_AGAIN}")
    return Part(path, offset, shape[0]), dtype


# -- lit-gpt -----------------------------------------------------------------------------------------------------------

_PKDS_MAGIC = b"LITPKDS"
_PKDS_HEADER = struct.Struct("<7sQBQ")  # magic, version, dtype code, tokens in the file
_PKDS_VERSION = 1
_PKDS_DTYPES = _MEGATRON_DTYPES  # lit-gpt has taken Megatron's codes
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
            raise ValueError(f"{name} holds no LITPKDS file (*.bin that begins with {_PKDS_MAGIC!r}).")
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
            [Part(path, _PKDS_HEADER.size, headers[0].chunk_size) for path in files],
            name=name,
            dtype=np.dtype(headers[0].dtype).newbyteorder("<"),
            seq_len=seq_len,
            is_blocked=True,
            split=split,
        )


def is_lit_packed(path: Path) -> bool:
    """Whether a file begins like a packed file."""
    with path.open("rb") as stream:
        return stream.read(len(_PKDS_MAGIC)) == _PKDS_MAGIC


def _read_header(path: Path, place: str) -> _Header:
    size = size_of(path, f"It is {place}. {_REMEDY}")
    with path.open("rb") as stream:
        head = stream.read(_PKDS_HEADER.size)
    if len(head) < _PKDS_HEADER.size:
        raise ValueError(
            f"{path} ({place}) is truncated in its header: {len(head)} of {_PKDS_HEADER.size} bytes. {_REMEDY}"
        )
    magic, version, code, chunk_size = _PKDS_HEADER.unpack(head)
    if magic != _PKDS_MAGIC:
        raise ValueError(f"{path} ({place}) begins with {magic!r}, expected {_PKDS_MAGIC!r}. {_REMEDY}")
    if version != _PKDS_VERSION:
        raise ValueError(f"{path} ({place}) has format version {version}, expected {_PKDS_VERSION}. {_REMEDY}")
    if code not in _PKDS_DTYPES:
        found = f"the token type code {code}" + (f" ({_FLOATS[code]})" if code in _FLOATS else "")
        known = ", ".join(f"{k} = {t.__name__}" for k, t in _PKDS_DTYPES.items())
        raise ValueError(f"{path} ({place}) has {found}, expected one of {known}. {_REMEDY}")
    expected = _PKDS_HEADER.size + chunk_size * np.dtype(_PKDS_DTYPES[code]).itemsize
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(
            f"{path} ({place}) is {what}: it has {size} bytes, and its header describes {expected} "
            f"({chunk_size} tokens of {_PKDS_DTYPES[code].__name__}). {_REMEDY}"
        )
    return _Header(_PKDS_DTYPES[code], chunk_size)


# -- which format it is ------------------------------------------------------------------------------------------------


_MAX_LOOKED_AT = 64  # files of a folder
_REMOVED = ("ds", "litdata", "arrow", "parquet")
_INSTEAD = (
    "read it by its own library, as a data set or iterable of ResumableDataModule, or write a Megatron pair of its "
    "text by `distplus prepare`"
)
SourceFormat = Literal["auto", "megatron", "litpkds", "raw", "npy"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of a mixture."""

    path: str
    """A file, a folder, or the beginning of file names, as the format has it."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""
    name: str | None = None
    """Shown in messages; the path by default."""
    format: SourceFormat = "auto"
    """What is at the path; "auto" looks."""
    dtype: str | None = None
    """Type of a token where the files do not say it (raw), for example "uint16"."""
    split: tuple[float, float] = (0.0, 1.0)
    """The share that is read, from and to: (0.0, 0.99) to train and (0.99, 1.0) to validate have no token in common."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", tuple(self.split))
        if self.format in _REMOVED:
            what = f"format of source {self.path} is {self.format!r}"
            raise ValueError(f"{what}, which is not read in place: {_INSTEAD}.")
        if self.format not in _OPENERS and self.format != "auto":
            raise ValueError(f"format of source {self.path} is {self.format!r}; it is auto, {', '.join(_OPENERS)}.")
        if self.dtype is not None and self.dtype not in INTEGERS:
            raise ValueError(f"dtype of source {self.path} is {self.dtype!r}; it is one of {', '.join(INTEGERS)}.")

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or self.path


def open_source(source: Source, seq_len: int) -> TokenStream:
    """Opens and checks a source.

    Raises:
        ValueError: It is missing, damaged or ambiguous, or is not what ``format`` and ``dtype`` say.
    """
    format_ = detect(source.path) if source.format == "auto" else source.format
    stream = _OPENERS[format_](source, seq_len)
    if source.dtype is not None and np.dtype(source.dtype).type is not stream.dtype:
        raise ValueError(
            f"{source.path} ({format_}) holds {np.dtype(stream.dtype).name}, and the source says dtype="
            f"{source.dtype!r}. Leave dtype out: this format says it by itself."
        )
    return stream


def detect(path: str) -> str:
    """The format of what is at ``path``.

    Raises:
        ValueError: It could be more than one, or nothing that is known.
    """
    found = {name for name, looks in _LOOKS.items() if looks(Path(path))}
    if "megatron" in found and Path(path).suffix in (".bin", ".idx"):
        return "megatron"  # the pair is named by one of its files
    if len(found) > 1:
        raise ValueError(
            f"{path} is ambiguous: it could be {' or '.join(sorted(found))}. Say format=..., or name a narrower path."
        )
    if found:
        return found.pop()
    if Path(path).exists():
        inside = sorted(one.name for one in Path(path).iterdir())[:3] if Path(path).is_dir() else []
        holds = f" (it holds {', '.join(inside) or 'nothing'})" if Path(path).is_dir() else ""
        raise ValueError(
            f"{path}{holds} is in no format that is known by its look: {', '.join(_OPENERS)}. Name it "
            f"with format=..., or {_INSTEAD}."
        )
    return "megatron"  # and its reader names the file that is missing


def _files(path: Path, suffix: str) -> list[Path]:
    """The file itself, or the visible files of a folder with that suffix."""
    if path.is_file():
        return [path]
    return _visible(path, f"*{suffix}") if path.is_dir() else []


def _packed_files(path: Path) -> list[Path]:
    """A folder's files, or those whose names begin with the last part of the path, as in TinyLlama's train_slim*."""
    if path.is_file() or path.is_dir():
        return _files(path, ".bin")
    return _visible(path.parent, f"{glob.escape(path.name)}*.bin") if path.parent.is_dir() else []


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(one for one in folder.glob(pattern) if one.is_file() and not one.name.startswith("."))


def _required(source: Source, suffix: str) -> list[Path]:
    if files := _files(Path(source.path), suffix):
        return files
    raise ValueError(f"{source.path} is no file, and no folder with files *{suffix} (format {source.format}).")


def _looks_megatron(path: Path) -> bool:
    return megatron_pair(path)[1].is_file()


def _looks_packed(path: Path) -> bool:
    return any(map(is_lit_packed, _packed_files(path)[:_MAX_LOOKED_AT]))


def _looks_raw(path: Path) -> bool:
    alone = [one for one in _files(path, ".bin") if one.suffix == ".bin" and not one.with_suffix(".idx").exists()]
    return bool(alone) and not _looks_packed(path) and not _is_litdata(path)


def _looks_like(suffix: str) -> Callable[[Path], bool]:
    return lambda path: any(one.suffix == suffix for one in _files(path, suffix))


def _is_litdata(path: Path) -> bool:
    """Whether a folder has an index like litdata's: its chunks end in .bin, and are not raw."""
    index = path / "index.json"
    return index.is_file() and b'"chunks"' in index.read_bytes()[:4096]


def _open_packed(source: Source, seq_len: int) -> TokenStream:
    return LitPackedTokens(_packed_files(Path(source.path)), seq_len, name=source.path, split=source.split)


def _open_raw(source: Source, seq_len: int) -> TokenStream:
    files = _required(source, ".bin")
    return RawTokens(files, seq_len, dtype=source.dtype, name=source.path, split=source.split)


_LOOKS: dict[str, Callable[[Path], bool]] = {
    "megatron": _looks_megatron,
    "litpkds": _looks_packed,
    "raw": _looks_raw,
    "npy": _looks_like(".npy"),
}

_OPENERS: dict[str, Callable[[Source, int], TokenStream]] = {
    "megatron": lambda source, seq_len: MegatronTokens(source.path, seq_len, split=source.split),
    "litpkds": _open_packed,
    "raw": _open_raw,
    "npy": lambda source, seq_len: NpyTokens(_required(source, ".npy"), seq_len, name=source.path, split=source.split),
}


# -- the files of a source ---------------------------------------------------------------------------------------------

INVENTORY_VERSION = 2
_READABLE_INVENTORIES = (1, INVENTORY_VERSION)

_WHOLE_BELOW = 16 * 2**20  # bytes; files up to this size enter the fingerprint as a whole, larger ones by samples
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64
_MAX_ROWS = 1024  # of a source
_MAX_NAME = 64  # characters, from the end
_SEVERAL = " .. "

Row = list[Any]


def digest_files(digest: xxhash.xxh3_64, paths: Sequence[Path]) -> None:
    """All sizes; all content of a little data; of much data samples, from at most 64 files."""
    paths = list(dict.fromkeys(paths))
    sizes = [path.stat().st_size for path in paths]
    if _is_each_alone(sizes):
        for path in paths:
            digest_file(digest, path)
        return
    digest.update(np.array(sizes, dtype="<i8").tobytes())
    for number, count in _samples_of_files(len(paths)).items():
        _digest_samples(digest, paths[number], sizes[number], count)


def digest_file(digest: xxhash.xxh3_64, path: Path) -> None:
    """Size and content of one file (of a large one: 64 samples)."""
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    if size <= _WHOLE_BELOW:
        digest.update(path.read_bytes())
    else:
        _digest_samples(digest, path, size, _NUM_SAMPLES)


def rows_of_files(paths: Sequence[Path], *, each_alone: bool) -> list[Row]:
    """Name, size, digest and time of each file; the digest is over the bytes that its source's fingerprint covers.

    Args:
        paths: In the order of the fingerprint.
        each_alone: Whether that is ``digest_file`` of each, and not ``digest_files`` of all.
    """
    paths = list(dict.fromkeys(paths))
    stats = [path.stat() for path in paths]
    sizes = [one.st_size for one in stats]
    samples = {} if each_alone or _is_each_alone(sizes) else _samples_of_files(len(paths))
    rows = []
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        digest, is_read = xxhash.xxh3_64(), not samples or number in samples
        is_whole = not samples and size <= _WHOLE_BELOW
        if not samples:
            digest_file(digest, path)
        elif is_read:
            _digest_samples(digest, path, size, samples[number])
        modified = 0 if is_whole else stats[number].st_mtime_ns
        rows.append([path.name[-_MAX_NAME:], size, digest.hexdigest() if is_read else "", modified])
    return _grouped(rows)


def inventory(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of a checkpoint, from one of each source."""
    return {"version": INVENTORY_VERSION, "sources": [dict(source) for source in sources]}


def first_difference(record: Any, place: int, now: Mapping[str, Any]) -> str:
    """The first thing in which a source differs from that of a checkpoint, with both sides.

    Args:
        record: The checkpoint's, of any version, or None.
        place: Number of the source.
        now: This run's record of that source.

    Returns:
        One line; empty where the record is not there, is newer, or holds nothing that differs.
    """
    before = _source_of(record, place)
    old, new = before.get("facts", {}), now["facts"]
    for name in [*new, *(name for name in old if name not in new)]:
        if before and old.get(name) != new.get(name):
            return f"{name}: {old.get(name)!r} in the checkpoint, {new.get(name)!r} in this run"
    return _first_file(before, now) if before else ""


def rewritten(record: Any, place: int, now: Mapping[str, Any]) -> str:
    """The first file that was written to since a checkpoint, and in which nothing that is compared has changed.

    Args:
        record: As for ``first_difference``.
        place: Number of the source.
        now: This run's record of that source, whose fingerprint is that of the checkpoint.

    Returns:
        One line that says what was compared and what was not; empty where there is no such file.
    """
    before = _source_of(record, place)
    old, new = before.get("files", []), now["files"]
    if not old or before["facts"] != now["facts"] or [row[1:3] for row in old] != [row[1:3] for row in new]:
        return ""
    pairs = enumerate(zip(old, new, strict=True), 1)
    found = [(number, was, here) for number, (was, here) in pairs if was[3:] and was[3] != here[3]]
    if not found:
        return ""
    number, was, (name, size, digest, modified) = found[0]
    what = f"row {number}, files" if _SEVERAL in name else f"file {number},"
    more = f" (and {len(found) - 1} more of {len(new)} {'rows' if _SEVERAL in name else 'files'})" if found[1:] else ""
    compared = (
        f"its size ({size} bytes) and the samples of its content have not changed; what lies between the samples was "
        "not compared"
        if digest
        else f"its size ({size} bytes) has not changed; its content was not compared"
    )
    times = f"was modified at {_time(modified)}, and at {_time(was[3])} when the checkpoint was written"
    return f"{what} {name} {times}{more}: {compared}"


def _time(modified_ns: int) -> str:
    return f"{datetime.fromtimestamp(modified_ns / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _source_of(record: Any, place: int) -> Mapping[str, Any]:
    """One source of a record; empty where there is none, or the record is not there or newer."""
    if not isinstance(record, Mapping) or record.get("version") not in _READABLE_INVENTORIES:
        return {}
    sources: Sequence[Mapping[str, Any]] = record["sources"]
    return sources[place] if place < len(sources) else {}


def _first_file(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = before["files"], now["files"]
    text = ""
    if before["num_files"] != now["num_files"]:
        text = f"number of files: {before['num_files']} in the checkpoint, {now['num_files']} in this run"
        known, present = ({row[0] for row in rows if _SEVERAL not in row[0]} for rows in (old, new))
        if known & present:  # the files have kept their names, which say which is which
            lost = [f"; {name} ({size} bytes) is missing in this run" for name, size, *_ in old if name not in present]
            found = [f"; {name} ({size} bytes) is not in the checkpoint" for name, size, *_ in new if name not in known]
            return text + "".join([*lost, *found][:1])
    pairs = list(zip_longest(old, new, fillvalue=["no file", 0, ""]))
    places = [place for place, (was, here) in enumerate(pairs) if was[1:3] != here[1:3]]
    if not places:
        return text
    first = _difference(places[0], *pairs[places[0]])
    also = f" ({len(places)} of {len(pairs)} differ)" if len(places) > 1 else ""
    return f"{text}; {first}{also}" if text else first + also


def _difference(place: int, before: Row, now: Row) -> str:
    """How one file differs, or one row of several."""
    what = f"row {place + 1}, files" if _SEVERAL in now[0] else f"file {place + 1},"
    name = now[0] if before[0] == now[0] else f"{before[0]} in the checkpoint and {now[0]} in this run"
    if before[1] != now[1]:
        return f"{what} {name}: {before[1]} bytes in the checkpoint, {now[1]} in this run"
    return f"{what} {name}: content {before[2]} in the checkpoint, {now[2]} in this run, {now[1]} bytes each"


def _grouped(rows: list[Row]) -> list[Row]:
    """At most ``_MAX_ROWS`` rows."""
    if len(rows) <= _MAX_ROWS:
        return rows
    size = -(-len(rows) // _MAX_ROWS)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [_summary(group) for group in groups]


def _summary(group: list[Row]) -> Row:
    """One row for several."""
    digest = xxhash.xxh3_64(repr([row[1:3] for row in group]).encode()).hexdigest()
    modified = max(row[3] for row in group)
    return [f"{group[0][0]}{_SEVERAL}{group[-1][0]}", sum(row[1] for row in group), digest, modified]


def _is_each_alone(sizes: Sequence[int]) -> bool:
    """Whether ``digest_files`` reads each file as ``digest_file`` does."""
    return len(sizes) == 1 or sum(sizes) <= _WHOLE_BELOW


def _samples_of_files(num_files: int) -> dict[int, int]:
    """Of the files that are looked into, the number of samples."""
    chosen = np.linspace(0, num_files - 1, min(num_files, _NUM_SAMPLES)).astype(int).tolist()
    return dict.fromkeys(chosen, max(2, _NUM_SAMPLES // len(chosen)))


def _digest_samples(digest: xxhash.xxh3_64, path: Path, size: int, count: int) -> None:
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as stream:
        for sample in range(count):
            stream.seek(last * sample // (count - 1), os.SEEK_SET)
            digest.update(stream.read(_SAMPLE_BYTES))
