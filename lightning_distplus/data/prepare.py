"""Preparation of token files: text, JSONL, Parquet or folders of them become one Megatron ``.bin/.idx`` pair.

Files may be compressed by gzip, zstd, bzip2 or xz; the content says so, and a name that says otherwise is an error.
The same files give the same bytes: no clock, no random number, no order of a directory listing enters the result.
Everything is written into a folder beside the target and renamed at the end, the index last: a pair without an index
does not exist for any reader.
"""

from __future__ import annotations

import fcntl
import importlib
import inspect
import io
import json
import lzma
import os
import random
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from lightning_distplus.checkpoint.files import sync_folder, write_file
from lightning_distplus.data.token_files import MegatronWriter, dtype_for
from lightning_distplus.errors import refuse_unknown_arguments

__all__ = ["END_OF_DOCUMENT", "PreparedTokens", "Progress", "prepare"]

Format = Literal["auto", "text", "jsonl", "parquet"]
StageName = Literal["tokenizer", "tokens", "shuffle"]
TokenDtype = Literal["auto", "uint16", "int32"]

END_OF_DOCUMENT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 32_000

_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_TEXT_KEYS = ("text", "content")  # of SlimPajama, and of Starcoder
_PIECE_BYTES = 2**20
_BATCH = 64  # pieces that are encoded together, on all cores
_ROWS = 1024  # of Parquet, read at a time
_PART_BYTES = 2**26  # of the inputs, whose tokens are shuffled in memory together
_MAX_PARTS = 512  # open files


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is."""

    stage: StageName
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class PreparedTokens:
    """What a preparation has written."""

    prefix: Path
    tokenizer: Path
    vocab_size: int
    dtype: str
    num_documents: int
    num_tokens: int
    num_bytes: int


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    format: Format = "auto",  # noqa: A002 - the name of the option
    text_key: str | None = None,
    dtype: TokenDtype = "auto",
    append_eod: bool = False,
    max_bytes: int | None = None,
    shuffle_seed: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
    **removed: Any,
) -> PreparedTokens:
    """Turns text into ``<output>.bin`` and ``<output>.idx``, in this process with the threads of ``tokenizers``.

    Args:
        inputs: Files and folders. A folder stands for all files below it that are not hidden, in sorted order.
        output: Path prefix of the pair.
        tokenizer: A ``tokenizer.json``, or a folder with one. Without it a byte-level BPE is trained on the inputs and
            saved as ``<output>.tokenizer.json``.
        vocab_size: Size of the vocabulary that is trained, by default 32,000.
        format: ``"text"``: a file is a document. ``"jsonl"``: a line is one. ``"parquet"``: a row is one. ``"auto"``:
            by the file's suffix.
        text_key: The field of a JSON line, or the Parquet column, that holds its text. None: ``text`` or ``content``,
            whichever the file has.
        dtype: Type of a token on disk; ``"auto"`` takes uint16 where the vocabulary fits.
        append_eod: Ends every document with the tokenizer's end token.
        max_bytes: Stops before the document that would exceed so many bytes of text.
        shuffle_seed: Shuffles the documents by this seed: each goes to one of some files by lot, and each of these is
            shuffled in memory (Rao and Sandelius). Every order is equally likely. Memory holds about 64 MB of tokens,
            or one part in 512 where that is more; the disk holds the tokens twice.
        overwrite: Replaces an existing pair.
        on_progress: Called with the progress, some times per second.
        removed: Arguments of earlier versions are refused by name.

    Raises:
        BlockingIOError: Another process prepares the same output.
        FileExistsError: The pair exists and ``overwrite`` is not set.
        FileNotFoundError: An input does not exist.
        ModuleNotFoundError: tokenizers, or for Parquet pyarrow, is not installed.
        ValueError: The inputs are empty, badly encoded or malformed, or the vocabulary does not fit the type.
    """
    refuse_unknown_arguments("prepare", removed, inspect.signature(prepare).parameters)
    prefix = Path(output)
    if tokenizer is not None and vocab_size is not None:
        raise ValueError("Both tokenizer and vocab_size are given; a given tokenizer has its own vocabulary. Drop one.")
    targets = [prefix.with_name(prefix.name + suffix) for suffix in (".tokenizer.json", ".bin", ".idx")]
    existing = [str(path) for path in (targets if tokenizer is None else targets[1:]) if path.exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{', '.join(existing)} exists already. Choose another --output, or pass --overwrite.")
    corpus = _Corpus(inputs, format=format, text_key=text_key, max_bytes=max_bytes)
    with _stage(prefix) as folder:
        codec = _load_tokenizer(Path(tokenizer)) if tokenizer else _train(corpus, vocab_size, on_progress)
        if tokenizer is None:
            write_file(folder / targets[0].name, codec.to_str().encode(), sync=os.fsync)
        chosen = _choose_dtype(codec.get_vocab_size(), dtype)
        end = [_end_id(codec)] if append_eod else []
        num_bytes = num_tokens = 0
        with MegatronWriter(folder / prefix.name, dtype=chosen) as writer:
            shuffle = None if shuffle_seed is None else _Shuffle(folder, shuffle_seed, chosen, corpus.size_bytes)
            for document, size_bytes in _documents(corpus, codec, on_progress):
                num_bytes += size_bytes
                if document:  # an empty one leaves nothing, not even its end
                    (writer if shuffle is None else shuffle).add_document(document + end)
                    num_tokens += len(document) + len(end)
            if not num_tokens:
                raise ValueError(corpus.no_text())
            if shuffle is not None:
                shuffle.write(writer, on_progress)
        _publish(folder, targets)
    return PreparedTokens(
        prefix=prefix,
        tokenizer=targets[0] if tokenizer is None else _tokenizer_file(Path(tokenizer)),
        vocab_size=codec.get_vocab_size(),
        dtype=chosen.__name__,
        num_documents=writer.num_documents,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
    )


# -- the target --------------------------------------------------------------------------------------------------------


@contextmanager
def _stage(prefix: Path) -> Iterator[Path]:
    """An empty folder beside the target, for one process at a time; removed at the end, or by the next one."""
    folder = prefix.with_name(f".{prefix.name}.prepare")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"Another preparation writes to the same target, in {folder}. Wait for it, or choose another --output."
            ) from None
        for left in folder.iterdir():
            if left.name != "lock":
                left.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, targets: list[Path]) -> None:
    """Moves the finished files to their names; the old index goes first and the new one comes last."""
    targets[-1].unlink(missing_ok=True)
    for target in targets:
        if (folder / target.name).exists():
            (folder / target.name).replace(target)
    sync_folder(targets[-1].parent, sync=os.fsync)


class _Shuffle:
    """Shuffles documents in files, as many as the size of the inputs asks for: to one by lot, then each in memory."""

    def __init__(self, folder: Path, seed: int, dtype: type[np.integer[Any]], size_bytes: int) -> None:
        self._lots, self._dtype = random.Random(seed), dtype
        num = min(_MAX_PARTS, 1 + size_bytes // _PART_BYTES)
        self._parts = [(folder / f"part-{number}").open("w+b") for number in range(num)]

    def add_document(self, tokens: list[int]) -> None:
        """Appends a document to a file, behind its length."""
        part = self._parts[self._lots.randrange(len(self._parts))]
        part.write(np.int64(len(tokens)).tobytes() + np.asarray(tokens, dtype=self._dtype).tobytes())

    def write(self, writer: MegatronWriter, report: Callable[[Progress], None]) -> None:
        """Writes all documents in their new order."""
        total = sum(part.tell() for part in self._parts)
        done = 0
        for part in self._parts:
            done += part.tell()
            part.seek(0)
            documents = []
            while head := part.read(8):
                num = int(np.frombuffer(head, dtype=np.int64)[0])
                documents.append(np.frombuffer(part.read(num * np.dtype(self._dtype).itemsize), dtype=self._dtype))
            self._lots.shuffle(documents)
            for document in documents:
                writer.add_document(document)
            part.close()
            Path(part.name).unlink()
            report(Progress(stage="shuffle", done_bytes=done, total_bytes=total))


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def _load_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    file = _tokenizer_file(path)
    if not file.is_file():
        raise FileNotFoundError(f"The tokenizer {file} does not exist. Give a tokenizer.json, or a folder with one.")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise ValueError(f"The tokenizer {file} cannot be read: {error}.") from error


def _tokenizer_file(path: Path) -> Path:
    return path / "tokenizer.json" if path.is_dir() else path


def _train(corpus: _Corpus, vocab_size: int | None, on_progress: Callable[[Progress], None]) -> Any:
    """Trains a byte-level BPE: every byte has a token, so that no text is ever unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size <= len(alphabet):
        raise ValueError(f"vocab_size is {size}; a byte-level vocabulary has at least {len(alphabet) + 1} entries.")
    codec = Tokenizer(models.BPE())
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    pieces = _counted(corpus, "tokenizer", on_progress)
    codec.train_from_iterator((piece.text for piece in pieces), trainer)
    return Tokenizer.from_str(codec.to_str())  # as whoever reads the file has it


def _choose_dtype(vocab_size: int, name: TokenDtype) -> type[np.integer[Any]]:
    if name == "auto":
        return dtype_for(vocab_size)
    dtype = np.uint16 if name == "uint16" else np.int32
    if vocab_size - 1 > np.iinfo(dtype).max:
        raise ValueError(
            f"The tokenizer's largest id is {vocab_size - 1}; {name} holds at most {np.iinfo(dtype).max}. "
            "Use --dtype int32, or auto."
        )
    return dtype


def _end_id(codec: Any) -> int:
    for token in _END_TOKENS:
        if (found := codec.token_to_id(token)) is not None:
            return int(found)
    raise ValueError(f"The tokenizer has none of the end tokens {', '.join(_END_TOKENS)}. Leave out --append_eod.")


# -- the documents -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A document, or a part of a long one that was cut behind a line break."""

    text: str
    size_bytes: int  # what was read of its file, which may be compressed
    document_bytes: int  # of the whole document, the same in all its pieces
    begins: bool = True
    ends: bool = True


class _Corpus:
    """The documents of some inputs, in bounded memory; can be read more than once, always in the same order.

    Arguments and errors are those of ``prepare``.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        format: Format,  # noqa: A002 - the name of the option
        text_key: str | None,
        max_bytes: int | None,
    ) -> None:
        self._files = _list_files(inputs)
        self._text_key = text_key
        self._format = format
        self._max_bytes = max_bytes
        total = sum(self._size_of(path) for path in self._files)
        self.size_bytes = total if max_bytes is None else min(total, max_bytes)

    def pieces(self) -> Iterator[_Piece]:
        """All documents, piece by piece.

        Raises:
            ValueError: A file is not UTF-8, a line or row is not what the format asks for, or there is no text at all.
        """
        is_empty, taken_bytes = True, 0
        for piece in chain.from_iterable(map(self._read, self._files)):
            taken_bytes += piece.document_bytes if piece.begins else 0
            if self._max_bytes is not None and taken_bytes > self._max_bytes:
                break
            is_empty = is_empty and not piece.text
            yield piece
        if is_empty:
            raise ValueError(self.no_text())

    def no_text(self) -> str:
        """The message for inputs without text."""
        limit = "" if self._max_bytes is None else f" within max_bytes={self._max_bytes}"
        return f"There is no text{limit} in the {len(self._files)} input file(s); the first is {self._files[0]}."

    def _format_of(self, path: Path) -> str:
        plain = path.with_suffix("") if path.suffix in _COMPRESSED else path
        return _SUFFIXES.get(plain.suffix, "text") if self._format == "auto" else self._format

    def _size_of(self, path: Path) -> int:
        if self._format_of(path) == "parquet":
            return _size_of_parquet(path, self._text_key)
        _require_honest_name(path)
        return path.stat().st_size

    def _read(self, path: Path) -> Iterator[_Piece]:
        readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text}
        return readers[self._format_of(path)](path, self._text_key)


def _documents(corpus: _Corpus, codec: Any, on_progress: Callable[[Progress], None]) -> Iterator[tuple[list[int], int]]:
    """The tokens of each document, and its size in bytes."""
    document: list[int] = []
    pieces = _counted(corpus, "tokens", on_progress)
    while batch := list(islice(pieces, _BATCH)):
        encodings = codec.encode_batch([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            document += encoding.ids
            if piece.ends:
                yield document, piece.document_bytes
                document = []


def _counted(corpus: _Corpus, stage: StageName, report: Callable[[Progress], None]) -> Iterator[_Piece]:
    done = 0
    for piece in corpus.pieces():
        yield piece
        done += piece.size_bytes
        report(Progress(stage=stage, done_bytes=done, total_bytes=max(done, corpus.size_bytes)))
    report(Progress(stage=stage, done_bytes=done, total_bytes=done))


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


def _read_text(path: Path, text_key: str | None) -> Iterator[_Piece]:
    offset = seen = 0
    document_bytes = path.stat().st_size
    if _compression_of(path) is not None:
        with _opened(path) as (file, _):
            document_bytes = sum(map(len, file))
    with _opened(path) as (file, num_read):
        while lines := file.readlines(_PIECE_BYTES):
            data = b"".join(lines)
            end = offset + len(data)
            yield _Piece(
                text=_decode(data, path, offset),
                size_bytes=num_read() - seen,
                document_bytes=document_bytes,
                begins=offset == 0,
                ends=end >= document_bytes,
            )
            offset, seen = end, num_read()


def _read_jsonl(path: Path, text_key: str | None) -> Iterator[_Piece]:
    offset = seen = 0
    with _opened(path) as (file, num_read):
        for number, line in enumerate(file, start=1):
            content = _decode(line, path, offset)
            if content.strip():
                text_key, text = _text_of(content, text_key, path, f"{path}, line {number}")
                size, seen = num_read() - seen, num_read()
                yield _Piece(text=text, size_bytes=size, document_bytes=len(line))
            offset += len(line)


def _size_of_parquet(path: Path, column: str | None) -> int:
    file, column = _open_parquet(path, column)
    place = file.schema_arrow.names.index(column)
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    return sum(group.column(place).total_uncompressed_size for group in groups)


def _read_parquet(path: Path, column: str | None) -> Iterator[_Piece]:
    (file, column), row = _open_parquet(path, column), 0
    try:
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    raise ValueError(f"{path}, row {row}: column {column!r} holds null. Leave such rows out.")
                size = len(text.encode())
                yield _Piece(text=text, size_bytes=size, document_bytes=size)
    except OSError as error:  # pyarrow: a damaged page
        raise ValueError(f"{path} is damaged: {error}. Write it again, or leave it out.") from None


def _open_parquet(path: Path, column: str | None) -> tuple[Any, str]:
    """The file, and the name of its column of texts."""
    arrow, parquet = _pyarrow(path, "Parquet"), _pyarrow(path, "Parquet", ".parquet")
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path} is no Parquet file, or truncated: {error}. Write it again, or leave it out."
        ) from None
    names = file.schema_arrow.names
    column = column or _text_key_in(names, path)
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}; found {', '.join(names)}. Name it with --text_key.")
    kind = file.schema_arrow.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise ValueError(f"{path}: column {column!r} holds {kind}, not strings. Name another with --text_key.")
    return file, column


def _pyarrow(path: Path, what: str, module: str = "") -> Any:
    try:
        return importlib.import_module(f"pyarrow{module}")
    except ModuleNotFoundError as error:
        text = f"{path} is {what}, and pyarrow, which reads it, is not installed. Run: pip install pyarrow"
        raise ModuleNotFoundError(text, name="pyarrow") from error


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}, {error.reason}. "
            "Convert the file (for example with iconv), or leave it out."
        ) from None


def _text_of(line: str, text_key: str | None, path: Path, place: str) -> tuple[str, str]:
    """The field that holds the text of a line, and that text."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}.") from None
    key = text_key or _text_key_in(record if isinstance(record, dict) else (), path)
    if not isinstance(record, dict) or key not in record:
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f"{place} has no field {key!r}; found {found}. Name the field with --text_key.")
    if not isinstance(record[key], str):
        raise ValueError(f"{place}: field {key!r} is a {type(record[key]).__name__}, not a string.")
    return key, record[key]


def _text_key_in(names: Collection[str], path: Path) -> str:
    """The one of the usual names that is there; the first of them where none is, for the message."""
    found = [name for name in _TEXT_KEYS if name in names]
    if len(found) > 1:
        raise ValueError(f"{path} has both {' and '.join(found)}. Name the one that holds the text with --text_key.")
    return found[0] if found else _TEXT_KEYS[0]


# -- compressed files --------------------------------------------------------------------------------------------------

_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"PAR1": "Parquet"}


def _compression_of(path: Path) -> str | None:
    """What the first bytes of a file say."""
    with path.open("rb") as file:
        head = file.read(8)
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def _require_honest_name(path: Path) -> None:
    found, named = _compression_of(path), _COMPRESSED.get(path.suffix)
    if found == named or (found is not None and found != "Parquet" and not path.suffix) or not path.stat().st_size:
        return
    says = f"its name says {named}" if named else "its name does not say so"
    raise ValueError(f"{path}: its content is {found or 'not compressed'}, and {says}. Rename it, or fetch it again.")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The content of a file, decompressed, and how many bytes of the file have been read for it."""
    kind = _compression_of(path)
    with path.open("rb") as raw:
        file: Any = raw
        if kind == "zstd":
            arrow = _pyarrow(path, "zstd")
            file = io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), "zstd"), _PIECE_BYTES)
        elif kind is not None:
            module = {"gzip": "gzip", "bzip2": "bz2", "xz": "lzma"}[kind]
            file = importlib.import_module(module).open(raw)
        try:
            yield file, raw.tell
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if kind is None:
                raise
            raise ValueError(f"{path} is damaged or cut off: {error}. Fetch it again, or leave it out.") from None
