"""The documents in text files, JSONL files and folders of them: in sorted order, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Corpus", "Format", "Piece"]

Format = Literal["auto", "text", "jsonl"]

PIECE_BYTES = 2**20
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A document, or a part of a long one that was cut behind a line break."""

    text: str
    size_bytes: int
    document_bytes: int
    """Size of the whole document, the same in all its pieces."""
    begins: bool
    ends: bool


class Corpus:
    """The documents of some inputs; can be read more than once, always in the same order.

    Args:
        inputs: Files and folders. A folder stands for all files below it that are not hidden, sorted by path.
        format: ``"text"``: a file is a document. ``"jsonl"``: a line is one. ``"auto"``: by the file's suffix.
        text_key: The field of a JSON line that holds its text.
        max_bytes: Ends before the document that would exceed so many bytes.

    Raises:
        FileNotFoundError: An input does not exist.
        ValueError: There is no file in the inputs.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        format: Format = "auto",  # noqa: A002 - the name of the option
        text_key: str = "text",
        max_bytes: int | None = None,
    ) -> None:
        self._files = _list_files(inputs)
        self._format = format
        self._text_key = text_key
        self._max_bytes = max_bytes
        on_disk = sum(path.stat().st_size for path in self._files)
        self.size_bytes = on_disk if max_bytes is None else min(on_disk, max_bytes)

    def pieces(self) -> Iterator[Piece]:
        """All documents, piece by piece.

        Raises:
            ValueError: A file is not UTF-8, a line is not what the format asks for, or there is no text at all.
        """
        taken_bytes = 0
        is_empty = True
        for piece in self._all_pieces():
            if piece.begins:
                taken_bytes += piece.document_bytes
                if self._max_bytes is not None and taken_bytes > self._max_bytes:
                    break
            is_empty = is_empty and not piece.text
            yield piece
        if is_empty:
            limit = "" if self._max_bytes is None else f" within max_bytes={self._max_bytes}"
            raise ValueError(
                f"There is no text{limit} in the {len(self._files)} input file(s); the first is {self._files[0]}."
            )

    def _all_pieces(self) -> Iterator[Piece]:
        for path in self._files:
            if self._format == "jsonl" or (self._format == "auto" and path.suffix in _JSONL_SUFFIXES):
                yield from _read_jsonl(path, self._text_key)
            else:
                yield from _read_text(path)


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


def _read_jsonl(path: Path, text_key: str) -> Iterator[Piece]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = _decode(line, path, offset)
            offset += len(line)
            if content.strip():
                text = _text_of(content, text_key, f"{path}, line {number}")
                yield Piece(text=text, size_bytes=len(line), document_bytes=len(line), begins=True, ends=True)


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}, {error.reason}. "
            "Convert the file (for example with iconv), or leave it out."
        ) from None


def _text_of(line: str, text_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    if not isinstance(record, dict) or text_key not in record:
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f"{where} has no field {text_key!r}; found {found}. Name the field with --text_key.")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {text_key!r} is a {type(text).__name__}, not a string.")
    return text
