"""Preparation of token files: text, JSONL or folders of either become one Megatron ``.bin/.idx`` pair.

```text
documents (documents.py) -> tokens -> <output>.bin, <output>.idx, <output>.tokenizer.json
```

The same files give the same bytes: no clock, no random number, no order of a directory listing enters the result.
Everything is written into a folder beside the target and renamed at the end, the index last: a pair without an index
does not exist for any reader.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_distplus.data.documents import Corpus, Format, Piece
from lightning_distplus.data.tokens import MegatronWriter, dtype_for

__all__ = ["END_OF_DOCUMENT", "PreparedTokens", "Progress", "prepare"]

Stage = Literal["tokenizer", "tokens"]
TokenDtype = Literal["auto", "uint16", "int32"]

END_OF_DOCUMENT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 32_000

_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
_DTYPES: dict[str, type[np.integer[Any]]] = {"uint16": np.uint16, "int32": np.int32}
_BATCH = 64  # pieces that are encoded together, on all cores


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is."""

    stage: Stage
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
    text_key: str = "text",
    dtype: TokenDtype = "auto",
    append_eod: bool = False,
    max_bytes: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> PreparedTokens:
    """Turns text into ``<output>.bin`` and ``<output>.idx``.

    Args:
        inputs: Files and folders. A folder stands for all files below it that are not hidden, in sorted order.
        output: Path prefix of the pair.
        tokenizer: A ``tokenizer.json``, or a folder with one. Without it a byte-level BPE is trained on the inputs and
            saved as ``<output>.tokenizer.json``.
        vocab_size: Size of the vocabulary that is trained, by default 32,000.
        format: ``"text"``: a file is a document. ``"jsonl"``: a line is one. ``"auto"``: by the file's suffix.
        text_key: The field of a JSON line that holds its text.
        dtype: Type of a token on disk; ``"auto"`` takes uint16 where the vocabulary fits.
        append_eod: Ends every document with the tokenizer's end token.
        max_bytes: Stops before the document that would exceed so many bytes of text.
        overwrite: Replaces an existing pair.
        on_progress: Called with the progress, some times per second.

    Raises:
        FileExistsError: The pair exists and ``overwrite`` is not set.
        FileNotFoundError: An input does not exist.
        ValueError: The inputs are empty, badly encoded or malformed, or the vocabulary does not fit the type.
    """
    prefix = Path(output)
    if tokenizer is not None and vocab_size is not None:
        raise ValueError("Both tokenizer and vocab_size are given; a given tokenizer has its own vocabulary. Drop one.")
    targets = [prefix.with_name(prefix.name + suffix) for suffix in (".tokenizer.json", ".bin", ".idx")]
    _refuse_existing(targets if tokenizer is None else targets[1:], overwrite)
    corpus = Corpus(inputs, format=format, text_key=text_key, max_bytes=max_bytes)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.stage-", dir=prefix.parent))
    try:
        codec = _load_tokenizer(Path(tokenizer)) if tokenizer else _train(corpus, vocab_size, on_progress)
        chosen = _choose_dtype(codec.get_vocab_size(), dtype)
        end = [_end_id(codec)] if append_eod else []
        with MegatronWriter(stage / prefix.name, dtype=chosen) as writer:
            num_tokens, num_bytes = _write(corpus, codec, writer, end, on_progress)
        if tokenizer is None:
            codec.save(str(stage / targets[0].name))
        _publish(stage, targets)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return PreparedTokens(
        prefix=prefix,
        tokenizer=targets[0] if tokenizer is None else _tokenizer_file(Path(tokenizer)),
        vocab_size=codec.get_vocab_size(),
        dtype=chosen.__name__,
        num_documents=writer.num_documents,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
    )


def _refuse_existing(targets: Iterable[Path], overwrite: bool) -> None:
    existing = [str(path) for path in targets if path.exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{', '.join(existing)} exists already. Choose another --output, or pass --overwrite.")


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


def _train(corpus: Corpus, vocab_size: int | None, on_progress: Callable[[Progress], None]) -> Any:
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
    return codec


def _counted(corpus: Corpus, stage: Stage, report: Callable[[Progress], None]) -> Iterator[Piece]:
    done = 0
    for piece in corpus.pieces():
        yield piece
        done += piece.size_bytes
        report(Progress(stage=stage, done_bytes=done, total_bytes=max(done, corpus.size_bytes)))


def _choose_dtype(vocab_size: int, name: TokenDtype) -> type[np.integer[Any]]:
    if name == "auto":
        return dtype_for(vocab_size)
    largest = int(np.iinfo(_DTYPES[name]).max)
    if vocab_size - 1 > largest:
        raise ValueError(
            f"The tokenizer's largest id is {vocab_size - 1}; {name} holds at most {largest}. "
            "Use --dtype int32, or auto."
        )
    return _DTYPES[name]


def _end_id(codec: Any) -> int:
    for token in _END_TOKENS:
        if (found := codec.token_to_id(token)) is not None:
            return int(found)
    raise ValueError(f"The tokenizer has none of the end tokens {', '.join(_END_TOKENS)}. Leave out --append_eod.")


def _write(
    corpus: Corpus,
    codec: Any,
    writer: MegatronWriter,
    end: list[int],
    on_progress: Callable[[Progress], None],
) -> tuple[int, int]:
    """Returns the number of tokens and of bytes of text; an empty document leaves nothing, not even its end."""
    num_tokens = num_bytes = 0
    document: list[int] = []
    pieces = _counted(corpus, "tokens", on_progress)
    while batch := list(islice(pieces, _BATCH)):
        encodings = codec.encode_batch([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            document += encoding.ids
            num_bytes += piece.size_bytes
            if piece.ends and document:
                writer.add_document(document + end)
                num_tokens += len(document) + len(end)
                document = []
    return num_tokens, num_bytes


def _publish(stage: Path, targets: list[Path]) -> None:
    """Moves the finished files to their names; the old index goes first and the new one comes last."""
    for path in stage.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    targets[-1].unlink(missing_ok=True)
    for target in targets:
        if (stage / target.name).exists():
            (stage / target.name).replace(target)
    folder = os.open(targets[-1].parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
