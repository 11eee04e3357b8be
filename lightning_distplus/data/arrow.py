"""Hugging Face data sets of token lists: Arrow files, mapped where they lie, and Parquet, by way of its Arrow cache."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.data.inventory import digest_files
from lightning_distplus.data.stream import INTEGERS, WHOLE, Part, Split, TokenStream, size_of

__all__ = ["ArrowTokens", "ParquetTokens"]

# The end of an Arrow stream. pyarrow reads a file without a word that is cut between two batches.
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_REMEDY = "Write it again, or leave it out."


class ArrowTokens(TokenStream):
    """The folder of ``Dataset.save_to_disk``, or Arrow stream files, with a column of lists of token ids.

    Where every row has ``seq_len + 1`` tokens a row is a sample. Else the rows are documents of one stream, in their
    order.

    Args:
        path: The folder or file.
        seq_len: Number of targets in a sample.
        column: The column that holds the tokens.
        split: The share of the rows that is read, from and to.

    Raises:
        ModuleNotFoundError: pyarrow (for Parquet also datasets) is not installed; the message has the pip command.
        ValueError: A file is missing, empty, truncated or has no such column; or there is no whole sample.
    """

    format = "arrow"
    suffix = ".arrow"

    def __init__(
        self, path: str | os.PathLike[str], seq_len: int, *, column: str = "input_ids", split: Split = WHOLE
    ) -> None:
        self._column = column
        self._files = self._list(Path(path))
        if not self._files:
            raise ValueError(f"{path} is no file, and no folder with files *{self.suffix} (format {self.format}).")
        self._chunks: list[Any] | None = None
        chunks = self._read()
        starts = [_row_starts(chunk) for chunk in chunks]
        lengths = [len(_values(chunk)) for chunk in chunks]
        rows = [np.diff(begins, append=length) for begins, length in zip(starts, lengths, strict=True)]
        is_row_a_sample = sum(lengths) > 0 and all((row == seq_len + 1).all() for row in rows)
        super().__init__(
            [Part(self._files[0], 0, length) for length in lengths],
            name=str(path),
            dtype=_values(chunks[0]).dtype if chunks else np.dtype(np.int64),
            seq_len=seq_len,
            is_blocked=is_row_a_sample,
            split=split,
        )

    def fingerprint(self) -> str:
        """16 hex digits over format, column, type, share and the files."""
        digest = xxhash.xxh3_64(f"{self.format} {np.dtype(self.dtype).name} {self._column}".encode())
        digest_files(digest, self._files)
        return self._sealed(digest)

    def _facts(self) -> dict[str, Any]:
        return {"column": self._column, **super()._facts()}

    def _paths(self) -> list[Path]:
        return self._files

    def _num_documents(self) -> int:
        return sum(map(len, self._read()))

    def _list(self, path: Path) -> list[Path]:
        state = path / "state.json"
        if state.is_file():
            return [path / one["filename"] for one in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        inner = path / "dataset_dict.json"
        if inner.is_file():
            names = ", ".join(json.loads(inner.read_text(encoding="utf-8"))["splits"])
            raise ValueError(f"{path} holds several data sets: {names}. Name the folder of one of them.")
        files = [path] if path.is_file() else sorted(path.glob(f"*{self.suffix}"))
        return [one for one in files if one.is_file() and not one.name.startswith(".")]

    def _read(self) -> list[Any]:
        """The column's chunks, in the order of the files."""
        if self._chunks is None:
            self._chunks = self._read_chunks(_library("pyarrow", "arrow"))
        return self._chunks

    def _read_chunks(self, arrow: Any) -> list[Any]:
        chunks: list[Any] = []
        for number, path in enumerate(self._files, start=1):
            place = f"file {number} of {len(self._files)}"
            size_of(path, f"It is {place}. {_REMEDY}")
            with path.open("rb") as stream:
                stream.seek(-min(len(_END), path.stat().st_size), os.SEEK_END)
                end = stream.read()
            if end != _END:
                raise ValueError(f"{path} ({place}) is truncated: it ends with {end!r}, expected {_END!r}. {_REMEDY}")
            try:
                table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
            except (arrow.ArrowInvalid, OSError) as error:
                raise ValueError(f"{path} ({place}) is no Arrow stream, or torn: {error}. {_REMEDY}") from None
            found = self._check_column(table.schema, path, place)
            if chunks and found != chunks[0].type:
                raise ValueError(
                    f"{path} ({place}) holds {found}, expected {chunks[0].type} as in {self._files[0].name}."
                )
            chunks += table.column(self._column).chunks
        self._check_nulls(chunks)
        return chunks

    def _check_column(self, schema: Any, path: Path, place: str) -> Any:
        if self._column not in schema.names:
            raise ValueError(
                f"{path} ({place}) has no column {self._column!r}; it has {', '.join(schema.names)}. Name one of lists "
                "of token ids with column=..."
            )
        found = schema.field(self._column).type
        if str(getattr(found, "value_type", None)) not in INTEGERS:
            raise ValueError(
                f"{path} ({place}): column {self._column!r} holds {found}, expected lists of integers. Name another "
                "with column=..., or tokenize the text first."
            )
        return found

    def _check_nulls(self, chunks: Sequence[Any]) -> None:
        nulls = sum(chunk.null_count + chunk.flatten().null_count for chunk in chunks)
        if nulls:
            raise ValueError(
                f"Column {self._column!r} of {self._files[0].parent} holds {nulls} null values. Remove them."
            )

    def _read_document_starts(self) -> NDArray[np.int64]:
        chunks = zip(self._starts.tolist(), self._read(), strict=True)
        return np.concatenate([first + _row_starts(chunk) for first, chunk in chunks])

    def _tokens(self, part: int) -> NDArray[np.integer[Any]]:
        return _values(self._read()[part])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_chunks": None}


class ParquetTokens(ArrowTokens):
    """Parquet files with a column of lists of token ids.

    Rows of a Parquet file cannot be read one by one, so that ``datasets`` converts the column into its Arrow cache
    once, under a lock; later runs and other ranks map that. Arguments and errors are those of ``ArrowTokens``.
    """

    format = "parquet"
    suffix = ".parquet"

    def _read_chunks(self, arrow: Any) -> list[Any]:
        parquet = _library("pyarrow.parquet", "parquet")
        kinds = []
        for number, path in enumerate(self._files, start=1):
            place = f"file {number} of {len(self._files)}"
            size_of(path, f"It is {place}. {_REMEDY}")
            try:
                schema = parquet.read_schema(path)
            except (arrow.ArrowInvalid, OSError) as error:
                raise ValueError(f"{path} ({place}) is no Parquet file, or truncated: {error}. {_REMEDY}") from None
            kinds.append(self._check_column(schema, path, place))
            if kinds[-1] != kinds[0]:
                raise ValueError(
                    f"{path} ({place}) holds {kinds[-1]}, expected {kinds[0]} as in {self._files[0].name}."
                )
        datasets = _library("datasets", "parquet")
        try:
            rows = datasets.Dataset.from_parquet([str(path) for path in self._files], columns=[self._column])
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(
                f"{self._files[0].parent} cannot be read: {error.__cause__ or error}. {_REMEDY}"
            ) from error
        chunks: list[Any] = rows.data.column(self._column).chunks
        self._check_nulls(chunks)
        return chunks


def _library(name: str, format_: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Sources of format {format_} need {name.partition('.')[0]}, which is not installed. Run: "
            'pip install "lightning-distplus[formats]"'
        ) from error


def _values(chunk: Any) -> NDArray[np.integer[Any]]:
    """All tokens of a chunk, where they lie."""
    values: NDArray[np.integer[Any]] = chunk.flatten().to_numpy(zero_copy_only=True)
    return values


def _row_starts(chunk: Any) -> NDArray[np.int64]:
    """The token with which each row begins."""
    if not hasattr(chunk, "offsets"):  # a list of fixed size
        return np.arange(len(chunk), dtype=np.int64) * int(chunk.type.list_size)
    offsets = chunk.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    starts: NDArray[np.int64] = offsets[:-1] - offsets[0]
    return starts
