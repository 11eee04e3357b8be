"""Token files read as blocks: Megatron-LM's .bin/.idx (also written), raw, .npy, and lit-gpt's packed files."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import array
import glob
import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.checkpoint.files import sync_folder, write_file

__all__ = [
    "MegatronTokens",
    "MegatronWriter",
    "Source",
    "TokenSource",
    "detect",
    "dtype_for",
    "open_source",
]

Tokens = NDArray[np.integer[Any]]
Split = tuple[float, float]

_WHOLE: Split = (0.0, 1.0)
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
_MAX_MAPS = 4096  # files mapped at a time; Linux allows a process 65530 maps

# -- what is at a path -------------------------------------------------------------------------------------------------

SourceFormat = Literal["auto", "megatron", "litpkds", "raw", "npy"]
_FORMATS = SourceFormat.__args__[1:]  # type: ignore[attr-defined]

_MAX_LOOKED_AT = 64  # files of a folder
_REMOVED = ("ds", "litdata", "arrow", "parquet")
_INSTEAD = (
    "read it by its own library, as a data set or iterable of ResumableDataModule, or write a Megatron pair of its "
    "text by `distplus prepare`"
)


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
        what = f"format of source {self.path} is {self.format!r}"
        if self.format in _REMOVED:
            raise ValueError(f"{what}, which is not read in place: {_INSTEAD}.")
        if self.format not in ("auto", *_FORMATS):
            raise ValueError(f"{what}; it is auto, {', '.join(_FORMATS)}.")
        if self.dtype is not None and self.dtype not in _INTEGERS:
            raise ValueError(f"dtype of source {self.path} is {self.dtype!r}; it is one of {', '.join(_INTEGERS)}.")

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or self.path


def open_source(source: Source, seq_len: int) -> "TokenSource":
    """Opens and checks a source.

    Raises:
        ValueError: It is missing, empty, damaged or ambiguous; or is not what ``format`` and ``dtype`` say; or the
            share holds no whole sample.
    """
    format_ = detect(source.path) if source.format == "auto" else source.format
    stream: TokenSource
    if format_ == "megatron":
        stream = MegatronTokens(source.path, seq_len, split=source.split)
    else:
        stream = _read_flat(source, seq_len, format_)
    if source.dtype is not None and np.dtype(source.dtype).type is not stream.dtype:
        raise ValueError(
            f"{source.path} ({format_}) holds {np.dtype(stream.dtype).name}, and the source says dtype="
            f"{source.dtype!r}. Leave dtype out: this format says it by itself."
        )
    return stream


def detect(path: str) -> str:
    """The format of what is at ``path``; a ValueError where it could be more than one, or none that is known."""
    place = Path(path)
    is_pair = _pair(place)[1].is_file()
    if is_pair and place.suffix in (".bin", ".idx"):
        return "megatron"  # the pair is named by one of its files
    is_packed = any(map(_is_packed, _packed_files(place)[:_MAX_LOOKED_AT]))
    alone = [one for one in _files(place, ".bin") if one.suffix == ".bin" and not one.with_suffix(".idx").exists()]
    looks = {
        "litpkds": is_packed,
        "megatron": is_pair,
        "npy": any(one.suffix == ".npy" for one in _files(place, ".npy")),
        "raw": bool(alone) and not is_packed and not _is_litdata(place),
    }
    found = [name for name, is_so in looks.items() if is_so]
    if len(found) > 1:
        raise ValueError(
            f"{path} is ambiguous: it could be {' or '.join(found)}. Say format=..., or name a narrower path."
        )
    if found:
        return found[0]
    if not place.exists():
        return "megatron"  # and its reader names the file that is missing
    inside = sorted(one.name for one in place.iterdir())[:3] if place.is_dir() else []
    holds = f" (it holds {', '.join(inside) or 'nothing'})" if place.is_dir() else ""
    raise ValueError(
        f"{path}{holds} is in no format that is known by its look: {', '.join(_FORMATS)}. Name it with format=..., or "
        f"{_INSTEAD}."
    )


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


def _is_packed(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_PACKED_MAGIC)) == _PACKED_MAGIC


def _is_litdata(path: Path) -> bool:
    """Whether a folder has an index like litdata's: its chunks end in .bin, and are not raw."""
    index = path / "index.json"
    return index.is_file() and b'"chunks"' in index.read_bytes()[:4096]


# -- blocks cut out of files -------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Consecutive tokens in one file."""

    path: Path
    offset_bytes: int
    num_tokens: int


class TokenSource:
    """Samples of ``seq_len + 1`` tokens, cut out of some parts.

    Either the parts are one stream, in which sample i is tokens[i * seq_len : i * seq_len + seq_len + 1]: neighbours
    share one token, so that every token but the first is a target once. Or each part is blocks of ``seq_len + 1``
    tokens that share none (``is_blocked``), as lit-gpt reads them; what remains of a part is left out.

    Args:
        parts: Where the tokens are.
        name: For messages.
        format: Of the files.
        dtype: Stored token type.
        seq_len: Number of targets in a sample.
        is_blocked: See above.
        split: The share of the data that is read, from and to. It begins and ends with a block where there are blocks,
            else with a document where these are known, else with a token. Shares that meet have no token in common.

    Raises:
        ValueError: ``seq_len`` or ``split`` is senseless, or the share holds no whole sample.
    """

    _version = ""  # in the fingerprint, behind the format

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        name: str,
        format: str,  # noqa: A002 - the word of the sources
        dtype: np.dtype[Any],
        seq_len: int,
        is_blocked: bool = False,
        split: Split = _WHOLE,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; a sample has at least 1 token.")
        self.name = name
        self.format = format
        self.seq_len = seq_len
        self._dtype = dtype
        self._parts = list(parts)
        self._split = split
        self._is_blocked = is_blocked
        lengths = np.array([part.num_tokens for part in parts], dtype=np.int64)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self.num_tokens = int(lengths.sum())
        self._maps: OrderedDict[int, Tokens] = OrderedDict()
        self._mapped: dict[int, os.stat_result] = {}  # the file of each map, as it was then
        self._documents: NDArray[np.int64] | None = None
        if is_blocked:
            counts = lengths // (seq_len + 1)
            self._block_ends = np.cumsum(counts)
            self._block_starts = self._block_ends - counts
        self._first, self.num_samples = self._share()

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """The stored token type."""
        return self._dtype.type

    def gather(self, indices: NDArray[np.int64]) -> Tokens:
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
        digest, paths = xxhash.xxh3_64(f"{self.format}{self._version} {self.dtype.__name__}".encode()), self._paths()
        counts = self._num_samples_of(paths)
        if None not in counts:
            digest.update(np.array([path.stat().st_size for path in paths], dtype="<i8").tobytes())
        for piece in chain.from_iterable(map(_compared, paths, counts)):
            digest.update(piece)
        if self._split != _WHOLE:
            digest.update(f"split {self._split[0]!r} {self._split[1]!r}".encode())
        return digest.hexdigest()

    def contents(self) -> dict[str, Any]:
        """What the fingerprint is made of, file by file: a record of ``inventory``."""
        paths = self._paths()
        facts: dict[str, Any] = {"format": self.format, "dtype": self.dtype.__name__}
        if self._split != _WHOLE:
            facts["split"] = list(self._split)
        rows = [] if len(paths) > _MAX_ROWS else list(map(_row_of, paths, self._num_samples_of(paths)))
        return {"facts": facts, "num_files": len(paths), "files": rows}

    def _num_samples_of(self, paths: list[Path]) -> list[int | None]:
        """Of each file: None where it is read by itself, else how many samples of it are compared, from 64 files."""
        if len(paths) == 1 or sum(path.stat().st_size for path in paths) <= _WHOLE_BELOW:
            return [None] * len(paths)
        chosen = set(np.linspace(0, len(paths) - 1, min(len(paths), _NUM_SAMPLES)).astype(int).tolist())
        return [max(2, _NUM_SAMPLES // len(chosen)) if number in chosen else 0 for number in range(len(paths))]

    def _share(self) -> tuple[int, int]:
        """The first token (or block) of the share, and the number of its samples."""
        begin, end = self._split
        if not 0 <= begin < end <= 1:
            raise ValueError(f"split of {self.name} is {list(self._split)}; it is [from, to] with 0 <= from < to <= 1.")
        if self._is_blocked:
            num_blocks = int(self._block_ends[-1])
            first, last = round(begin * num_blocks), round(end * num_blocks)
            num_samples = last - first
        else:
            first, last = self._token_at(begin), self._token_at(end)
            num_samples = (last - first - 1) // self.seq_len
        if num_samples < 1:
            share = "" if self._split == _WHOLE else f" in the share {list(self._split)}"
            number = f"{self.num_tokens if self._is_blocked else last - first} tokens"
            raise ValueError(
                f"{self.name} holds {number}{share}, and one sample of seq_len {self.seq_len} takes "
                f"{self.seq_len + 1}{' in one file' if self._is_blocked else ''}. Use a smaller seq_len or more text."
            )
        return first, num_samples

    def _token_at(self, fraction: float) -> int:
        begins = None if fraction in _WHOLE else self._document_starts()
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
        return [part.path for part in self._parts]

    def _locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part in which each sample begins, and its first token, counted over all parts."""
        if self._is_blocked:
            blocks = indices + self._first
            parts = np.searchsorted(self._block_ends, blocks, side="right")
            return parts, self._starts[parts] + (blocks - self._block_starts[parts]) * (self.seq_len + 1)
        starts = self._first + indices * self.seq_len
        return np.searchsorted(self._ends, starts, side="right"), starts

    def _across(self, part: int, start: int) -> Tokens:
        """A sample that continues in the next parts."""
        pieces, missing = [], self.seq_len + 1
        while missing:
            self._require_whole(part)
            pieces.append(self._tokens(part)[start : start + missing])
            missing -= len(pieces[-1])
            part, start = part + 1, 0
        return np.concatenate(pieces)

    def _tokens(self, part: int) -> Tokens:
        if part not in self._maps:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.popitem(last=False)
            path, offset, num_tokens = self._parts[part]
            # A plain array over the map: slices of a np.memmap cost 5 microseconds more each.
            self._maps[part] = (
                np.asarray(np.memmap(path, dtype=self._dtype, mode="r", offset=offset, shape=(num_tokens,)))
                if num_tokens
                else np.empty(0, dtype=self._dtype)
            )
            self._mapped[part] = path.stat()
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

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens files by itself.
        return self.__dict__ | {"_maps": OrderedDict(), "_mapped": {}, "_documents": None}


def _size_of(path: Path, remedy: str) -> int:
    """Bytes of a file that must be there and not be empty."""
    if not path.is_file():
        raise ValueError(f"{path} is missing. {remedy}")
    if size := path.stat().st_size:
        return size
    raise ValueError(f"{path} is empty (0 bytes). {remedy}")


def _require_size(path: str, found: int, expected: int, described_by: str, remedy: str = "") -> None:
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise ValueError(f"{path} is {what}: it has {found} bytes, and {described_by} describes {expected}.{remedy}")


def _known_types() -> str:
    return ", ".join(f"{code} = {stored.__name__}" for code, stored in _TYPE_CODES.items())


# -- Megatron-LM -------------------------------------------------------------------------------------------------------

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document marks
_MEGATRON_VERSION = 1
_TYPE_CODES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def dtype_for(vocab_size: int) -> type[np.integer[Any]]:
    """The token type that Megatron-LM chooses: uint16 below 65500 tokens, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class MegatronTokens(TokenSource):
    """Megatron-LM's indexed dataset ``<prefix>.bin`` and ``<prefix>.idx``, read as one stream of tokens.

    Blocks run across documents; documents keep the order in which they were written. Header and sizes of both files are
    checked here, so that a damaged file never shows up in the middle of a run.

    Args:
        prefix: Path of the pair, with or without ``.bin`` or ``.idx``.
        seq_len: Number of targets in a sample.
        split: The share of the documents that is read, from and to.

    Raises:
        ValueError: A file is missing, empty, truncated, too long or of another format; or holds no whole sample.
    """

    _version = f" {_MEGATRON_VERSION}"

    def __init__(self, prefix: str | os.PathLike[str], seq_len: int, *, split: Split = _WHOLE) -> None:
        self._bin, self._idx = _pair(prefix)
        dtype, num_tokens, self._num_sequences, self.num_documents = _read_index(self._idx, self._bin)
        parts = [Part(self._bin, 0, num_tokens)]
        super().__init__(parts, name=str(self._bin), format="megatron", dtype=dtype, seq_len=seq_len, split=split)

    def _num_samples_of(self, paths: list[Path]) -> list[int | None]:
        return [None] * len(paths)

    def _paths(self) -> list[Path]:
        return [self._idx, self._bin]

    def _read_document_starts(self) -> NDArray[np.int64]:
        """Mark k is the first sequence of document k, and pointers say where sequences begin."""
        num_sequences = self._num_sequences
        with self._idx.open("rb") as stream:
            stream.seek(_MEGATRON_HEADER.size + 4 * num_sequences)
            pointers = np.fromfile(stream, dtype="<i8", count=num_sequences)
            marks = np.fromfile(stream, dtype="<i8", count=self.num_documents)
        if len(marks) and (marks.min() < 0 or marks.max() > num_sequences):
            raise ValueError(f"{self._idx} is damaged: a document begins past its {num_sequences} sequences.")
        # Empty documents at the end begin where the data ends.
        starts: NDArray[np.int64] = np.append(pointers // self._dtype.itemsize, self.num_tokens)[marks]
        if (np.diff(starts) < 0).any() or (len(starts) and (starts[0] or starts[-1] > self.num_tokens)):
            raise ValueError(f"{self._idx} is damaged: its documents do not follow one another from token 0 on.")
        return starts


def _pair(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The paths of ``.bin`` and ``.idx``; the prefix may end in either."""
    text = os.fspath(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(text + ".bin"), Path(text + ".idx")


def _read_index(idx: Path, bin_: Path) -> tuple[np.dtype[Any], int, int, int]:
    """Token type, tokens, sequences and documents of a pair, checked in constant time: the index is not read whole."""
    remedy = f"A Megatron source is the pair {bin_.name} and {idx.name}; `distplus prepare` writes one."
    size, found = _size_of(idx, remedy), _size_of(bin_, remedy)
    with idx.open("rb") as stream:
        head = stream.read(_MEGATRON_HEADER.size)
        if len(head) < _MEGATRON_HEADER.size:
            raise ValueError(f"{idx} is truncated: its header has {len(head)} of {_MEGATRON_HEADER.size} bytes.")
        magic, version, code, num_sequences, num_marks = _MEGATRON_HEADER.unpack(head)
        if magic != _MEGATRON_MAGIC:
            raise ValueError(f"{idx} is no Megatron index: it begins with {magic!r}, expected {_MEGATRON_MAGIC!r}.")
        if version != _MEGATRON_VERSION:
            raise ValueError(f"{idx} has format version {version}; only version {_MEGATRON_VERSION} can be read.")
        if code not in _TYPE_CODES:
            raise ValueError(f"{idx} has the token type code {code}; token files have one of: {_known_types()}.")
        _check_index_size(idx, size, num_sequences, num_marks)
        # The last sequence says where the data ends: its length in tokens, and the byte where it begins.
        stream.seek(_MEGATRON_HEADER.size + 4 * (num_sequences - 1))
        (length,) = struct.unpack("<i", stream.read(4))
        stream.seek(8 * (num_sequences - 1), os.SEEK_CUR)
        (pointer,) = struct.unpack("<q", stream.read(8))
    dtype = np.dtype(_TYPE_CODES[code])
    num_bytes = pointer + length * dtype.itemsize
    _require_size(str(bin_), found, num_bytes, idx.name)
    return dtype, num_bytes // dtype.itemsize, num_sequences, num_marks - 1


def _check_index_size(idx: Path, size: int, num_sequences: int, num_marks: int) -> None:
    expected = _MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_marks
    if size == expected + num_sequences and num_sequences:
        raise ValueError(f"{idx} is a multimodal index (it holds sequence modes); only text can be read.")
    if size != expected or not num_sequences or not num_marks:
        what = f"{num_sequences} sequences and {num_marks} document marks take {expected} bytes"
        state = "truncated" if size < expected else "damaged"
        raise ValueError(f"{idx} is {state}: {what}, and the file has {size}.")


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
        codes = {stored: code for code, stored in _TYPE_CODES.items()}
        if dtype not in codes:
            raise ValueError(f"Tokens are stored as one of {', '.join(t.__name__ for t in codes)}; not as {dtype}.")
        self._code = codes[dtype]
        self._dtype = dtype
        self._limits = (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        self._bin, self._idx = _pair(prefix)
        self._refuse_existing()
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._lengths = array.array("i")
        self._stream: IO[bytes] = _aside(self._bin).open("wb")

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return len(self._lengths)

    def add_document(self, tokens: Iterable[int] | Tokens) -> None:
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
        with self._stream as stream:
            stream.flush()
            os.fsync(stream.fileno())
        write_file(_aside(self._idx), self._index(), sync=os.fsync)
        self._refuse_existing()
        for path in (self._bin, self._idx):
            _aside(path).replace(path)
        sync_folder(self._bin.parent, sync=os.fsync)

    def discard(self) -> None:
        """Removes what was written."""
        self._stream.close()
        for path in (self._bin, self._idx):
            _aside(path).unlink(missing_ok=True)

    def _refuse_existing(self) -> None:
        for path in (self._bin, self._idx):
            if path.exists():
                raise FileExistsError(f"{path} exists. Remove it, or write to another prefix.")

    def _index(self) -> bytes:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
        pointers *= np.dtype(self._dtype).itemsize
        # Every sequence is a document: mark k is the first sequence of document k, and the last mark ends the file.
        marks = np.arange(len(lengths) + 1, dtype=np.int64)
        head = _MEGATRON_HEADER.pack(_MEGATRON_MAGIC, _MEGATRON_VERSION, self._code, len(lengths), len(marks))
        return head + lengths.tobytes() + pointers.tobytes() + marks.tobytes()

    def __enter__(self) -> "MegatronWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


# -- raw, .npy, and lit-gpt's ------------------------------------------------------------------------------------------

_AGAIN = "Write it again, or leave it out."
_PACKED_MAGIC = b"LITPKDS"
_PACKED_HEADER = struct.Struct("<7sQBQ")  # magic, version, dtype code (Megatron's), tokens in the file
_PACKED_VERSION = 1
_FLOATS = {6: " (float32)", 7: " (float64)"}


def _read_flat(source: Source, seq_len: int, format_: str) -> TokenSource:
    """Files of tokens behind a header, by the order of names: one stream, or each of them blocks, as lit-gpt reads."""
    is_packed, path, suffix = format_ == "litpkds", Path(source.path), ".npy" if format_ == "npy" else ".bin"
    files = sorted(_packed_files(path) if is_packed else _files(path, suffix), key=lambda file: file.name)
    if not files and is_packed:
        raise ValueError(f"{path} holds no LITPKDS file (*.bin that begins with {_PACKED_MAGIC!r}).")
    if not files:
        raise ValueError(f"{path} is no file, and no folder with files *{suffix} (format {format_}).")
    parts: list[Part] = []
    kinds: list[str] = []
    for number, file in enumerate(files, start=1):
        place = f"file {number} of {len(files)}"
        where, size = f"{file} ({place})", _size_of(file, f"It is {place}. {_AGAIN}")
        with file.open("rb") as stream:
            num_tokens, dtype = _HEADERS[format_](stream, where, size, source)
            parts.append(Part(file, stream.tell(), num_tokens))
        expected = parts[-1].offset_bytes + num_tokens * dtype.itemsize
        _require_size(where, size, expected, "its header", f" {_AGAIN}")
        kinds.append(f"{num_tokens} tokens of {dtype.name}" if is_packed else str(dtype))  # with the order of its bytes
        if kinds[-1] != kinds[0]:
            raise ValueError(
                f"{where} does not belong to the others: it holds {kinds[-1]}, expected {kinds[0]} as in "
                f"{files[0].name}. Give each kind a source of its own."
            )
    return TokenSource(
        parts,
        name=source.path,
        format=format_,
        dtype=dtype,
        seq_len=seq_len,
        is_blocked=is_packed,
        split=source.split,
    )


def _raw_header(stream: IO[bytes], where: str, size: int, source: Source) -> tuple[int, np.dtype[Any]]:
    """Nothing but little-endian tokens, as nanoGPT writes them."""
    if source.dtype is None:
        raise ValueError(f'{source.path} (raw) does not say its token type; name it, as in dtype="uint16".')
    dtype = np.dtype(source.dtype).newbyteorder("<")
    if size % dtype.itemsize:
        raise ValueError(
            f"{where} is truncated, or its dtype is not {source.dtype}: it has {size} bytes, no multiple of "
            f"{dtype.itemsize}. {_AGAIN}"
        )
    return size // dtype.itemsize, dtype


def _npy_header(stream: IO[bytes], where: str, size: int, source: Source) -> tuple[int, np.dtype[Any]]:
    """A one-dimensional array of integers."""
    try:
        version = np.lib.format.read_magic(stream)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
        shape, _, dtype = read(stream)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where} is no .npy file, or its header is torn: {error}. {_AGAIN}") from None
    if len(shape) != 1 or dtype.name not in _INTEGERS:
        known = ", ".join(_INTEGERS)
        raise ValueError(f"{where} holds {dtype} of shape {shape}, expected one row of {known}. {_AGAIN}")
    return shape[0], dtype


def _packed_header(stream: IO[bytes], where: str, size: int, source: Source) -> tuple[int, np.dtype[Any]]:
    """What lit-gpt's ``PackedDatasetBuilder`` wrote."""
    head = stream.read(_PACKED_HEADER.size)
    if len(head) < _PACKED_HEADER.size:
        raise ValueError(f"{where} is truncated in its header: {len(head)} of {_PACKED_HEADER.size} bytes. {_AGAIN}")
    magic, version, code, num_tokens = _PACKED_HEADER.unpack(head)
    if magic != _PACKED_MAGIC:
        raise ValueError(f"{where} begins with {magic!r}, expected {_PACKED_MAGIC!r}. {_AGAIN}")
    if version != _PACKED_VERSION:
        raise ValueError(f"{where} has format version {version}, expected {_PACKED_VERSION}. {_AGAIN}")
    if code not in _TYPE_CODES:
        what = f"the token type code {code}{_FLOATS.get(code, '')}"
        raise ValueError(f"{where} has {what}, expected one of {_known_types()}. {_AGAIN}")
    return num_tokens, np.dtype(_TYPE_CODES[code]).newbyteorder("<")


_HEADERS = {"raw": _raw_header, "npy": _npy_header, "litpkds": _packed_header}

# -- fingerprints of files ---------------------------------------------------------------------------------------------

_WHOLE_BELOW = 16 * 2**20  # bytes; files up to this size enter the fingerprint as a whole, larger ones by samples
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64
_MAX_ROWS = 4096  # of a source
_MAX_NAME = 64  # characters, from the end


def _compared(path: Path, num_samples: int | None) -> Iterator[bytes]:
    """What of a file is compared: so many samples, or, of a file by itself, its size and all of it, or 64 samples."""
    size = path.stat().st_size
    if num_samples is None:
        yield size.to_bytes(8, "little")
        if size <= _WHOLE_BELOW:
            yield path.read_bytes()
            return
        num_samples = _NUM_SAMPLES
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as stream:
        for sample in range(num_samples):
            stream.seek(last * sample // (num_samples - 1))
            yield stream.read(_SAMPLE_BYTES)


def _row_of(path: Path, num_samples: int | None) -> list[Any]:
    """Name, size, digest of what is compared ("": nothing) and time (0: all of it is) of a file."""
    stat, digest = path.stat(), xxhash.xxh3_64()
    for piece in _compared(path, num_samples):
        digest.update(piece)
    is_whole = num_samples is None and stat.st_size <= _WHOLE_BELOW
    text = "" if num_samples == 0 else digest.hexdigest()
    return [path.name[-_MAX_NAME:], stat.st_size, text, 0 if is_whole else stat.st_mtime_ns]
