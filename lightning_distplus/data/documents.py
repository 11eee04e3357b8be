"""The documents in text, JSONL and Parquet files, and folders of them: in sorted order, in bounded memory."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["SHARD_BYTES", "Corpus", "Extent", "Format", "Piece", "Shard", "read_shard"]

Format = Literal["auto", "text", "jsonl", "parquet"]

PIECE_BYTES = 2**20
SHARD_BYTES = 16 * 2**20
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_ROWS = 1024  # of Parquet, read at a time


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A document, or a part of a long one that was cut behind a line break."""

    text: str
    size_bytes: int
    document_bytes: int
    """Size of the whole document, the same in all its pieces."""
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Extent:
    """A part of one file that holds whole documents: bytes (text, jsonl: of the beginning of a line) or row groups."""

    path: str
    format: str
    start: int
    end: int


@dataclass(frozen=True)
class Shard:
    """Documents that follow one another, of one or more files.

    Attributes:
        extents: Where they are.
        size_bytes: About how much text it is.
        max_documents: How many of them count; None means all.
    """

    extents: tuple[Extent, ...]
    size_bytes: int
    max_documents: int | None = None


class Corpus:
    """The documents of some inputs; can be read more than once, always in the same order.

    Args:
        inputs: Files and folders. A folder stands for all files below it that are not hidden, sorted by path.
        format: ``"text"``: a file is a document. ``"jsonl"``: a line is one. ``"parquet"``: a row is one. ``"auto"``:
            by the file's suffix.
        text_key: The field of a JSON line, or the Parquet column, that holds its text.
        max_bytes: Ends before the document that would exceed so many bytes.
        shard_bytes: Size of a shard: the sources are cut here, so that it does not depend on who reads them.

    Raises:
        FileNotFoundError: An input does not exist.
        ModuleNotFoundError: There is Parquet, and pyarrow is not installed.
        ValueError: There is no file in the inputs, or a Parquet file is damaged or has no such column.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        format: Format = "auto",  # noqa: A002 - the name of the option
        text_key: str = "text",
        max_bytes: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.files = _list_files(inputs)
        self.text_key = text_key
        self._format = format
        self._max_bytes = max_bytes
        self._shard_bytes = shard_bytes
        self._cuts: list[tuple[Extent, int]] = [cut for path in self.files for cut in self._cut(path)]
        total = sum(size for _, size in self._cuts)
        self.size_bytes = total if max_bytes is None else min(total, max_bytes)

    def pieces(self) -> Iterator[Piece]:
        """All documents, piece by piece.

        Raises:
            ValueError: A file is not UTF-8, a line or row is not what the format asks for, or there is no text at all.
        """
        is_empty = True
        for shard in self.shards():
            for piece in read_shard(shard, self.text_key):
                is_empty = is_empty and not piece.text
                yield piece
        if is_empty:
            raise ValueError(self.no_text())

    def no_text(self) -> str:
        """The message for inputs without text."""
        limit = "" if self._max_bytes is None else f" within max_bytes={self._max_bytes}"
        return f"There is no text{limit} in the {len(self.files)} input file(s); the first is {self.files[0]}."

    def shards(self) -> list[Shard]:
        """The documents in shards of at least ``shard_bytes``; with ``max_bytes`` all up to the limit are read."""
        shards: list[Shard] = []
        extents: list[Extent] = []
        size_bytes = 0
        for extent, size in self._cuts:
            extents.append(extent)
            size_bytes += size
            if size_bytes >= self._shard_bytes:
                shards.append(Shard(tuple(extents), size_bytes))
                extents, size_bytes = [], 0
        if extents:
            shards.append(Shard(tuple(extents), size_bytes))
        return shards if self._max_bytes is None else self._limited(shards, self._max_bytes)

    def _limited(self, shards: list[Shard], max_bytes: int) -> list[Shard]:
        kept: list[Shard] = []
        taken_bytes = 0
        for shard in shards:
            before, num_documents = taken_bytes, 0
            for piece in read_shard(shard, self.text_key):
                if piece.begins:
                    taken_bytes += piece.document_bytes
                    if taken_bytes > max_bytes:
                        return [*kept, Shard(shard.extents, max_bytes - before, num_documents)]
                    num_documents += 1
            kept.append(shard)
        return kept

    def _cut(self, path: Path) -> Iterator[tuple[Extent, int]]:
        """The extents of a file, and their sizes."""
        format_ = _SUFFIXES.get(path.suffix, "text") if self._format == "auto" else self._format
        if format_ == "parquet":
            yield from _row_groups(path, self.text_key)
            return
        size = path.stat().st_size
        step = self._shard_bytes if format_ == "jsonl" else max(size, 1)
        for start in range(0, max(size, 1), step):
            end = min(start + step, size)
            yield Extent(str(path), format_, start, end), end - start


def read_shard(shard: Shard, text_key: str) -> Iterator[Piece]:
    """The documents of a shard, piece by piece; errors as in ``Corpus.pieces``."""
    num_documents = 0
    for extent in shard.extents:
        for piece in _read(extent, text_key):
            if piece.begins:
                num_documents += 1
                if shard.max_documents is not None and num_documents > shard.max_documents:
                    return
            yield piece


def _read(extent: Extent, text_key: str) -> Iterator[Piece]:
    if extent.format == "jsonl":
        return _read_jsonl(extent, text_key)
    if extent.format == "parquet":
        return _read_parquet(extent, text_key)
    return _read_text(Path(extent.path))


def _list_files(inputs: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for item in map(Path, inputs):
        if item.is_dir():
            below = (path.relative_to(item) for path in item.rglob("*") if path.is_file())
            visible = [path for path in below if not any(part.startswith(".") for part in path.parts)]
            files += [item / path for path in sorted(visible, key=Path.as_posix)]
        elif item.exists():
            files.append(item)
        else:
            raise FileNotFoundError(f"The input {item} does not exist.")
    if not files:
        raise ValueError(f"There is no file in {', '.join(map(str, inputs)) or 'an empty list of inputs'}.")
    return files


def _read_text(path: Path) -> Iterator[Piece]:
    offset = 0
    document_bytes = path.stat().st_size
    with path.open("rb") as file:
        while lines := file.readlines(PIECE_BYTES):
            data = b"".join(lines)
            end = offset + len(data)
            yield Piece(
                text=_decode(data, path, offset),
                size_bytes=len(data),
                document_bytes=document_bytes,
                begins=offset == 0,
                ends=end >= document_bytes,
            )
            offset = end


def _read_jsonl(extent: Extent, text_key: str) -> Iterator[Piece]:
    """The lines that begin in the extent."""
    path = Path(extent.path)
    with path.open("rb") as file:
        if extent.start:
            file.seek(extent.start - 1)
            file.readline()  # the rest of the line that begins before; just the line break where none does
        offset = file.tell()
        while offset < extent.end and (line := file.readline()):
            content = _decode(line, path, offset)
            if content.strip():
                text = _text_of(content, text_key, path, offset)
                yield Piece(text=text, size_bytes=len(line), document_bytes=len(line), begins=True, ends=True)
            offset += len(line)


def _row_groups(path: Path, column: str) -> Iterator[tuple[Extent, int]]:
    file = _open_parquet(path, column)
    place = file.schema_arrow.names.index(column)
    for number in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(number).column(place).total_uncompressed_size
        yield Extent(str(path), "parquet", number, number + 1), size


def _read_parquet(extent: Extent, column: str) -> Iterator[Piece]:
    """The rows of some row groups."""
    file = _open_parquet(Path(extent.path), column)
    row = sum(file.metadata.row_group(number).num_rows for number in range(extent.start))
    groups = list(range(extent.start, extent.end))
    try:
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    raise ValueError(f"{extent.path}, row {row}: column {column!r} holds null. Leave such rows out.")
                size = len(text.encode())
                yield Piece(text=text, size_bytes=size, document_bytes=size, begins=True, ends=True)
    except OSError as error:  # pyarrow: a damaged page
        raise ValueError(f"{extent.path} is damaged: {error}. Write it again, or leave it out.") from None


def _open_parquet(path: Path, column: str) -> Any:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is Parquet, and pyarrow is not installed. Run: pip install 'lightning-distplus[formats]'",
            name="pyarrow",
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path} is no Parquet file, or truncated: {error}. Write it again, or leave it out."
        ) from None
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}; found {', '.join(names)}. Name it with --text_key.")
    kind = file.schema_arrow.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise ValueError(f"{path}: column {column!r} holds {kind}, not strings. Name another with --text_key.")
    return file


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}, {error.reason}. "
            "Convert the file (for example with iconv), or leave it out."
        ) from None


def _text_of(line: str, text_key: str, path: Path, offset: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{_place(path, offset)} is not JSON: {error}.") from None
    if not isinstance(record, dict) or text_key not in record:
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
        where = _place(path, offset)
        raise ValueError(f"{where} has no field {text_key!r}; found {found}. Name the field with --text_key.")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{_place(path, offset)}: field {text_key!r} is a {type(text).__name__}, not a string.")
    return text


def _place(path: Path, offset: int) -> str:
    """The line that begins at ``offset``, for a message."""
    with path.open("rb") as file:
        number = sum(file.read(min(PIECE_BYTES, offset - at)).count(b"\n") for at in range(0, offset, PIECE_BYTES))
    return f"{path}, line {number + 1}"
