"""Preparation of token files: text, JSONL, Parquet or folders of them become one Megatron ``.bin/.idx`` pair.

```text
documents (documents.py) -> shards (shards.py), in worker processes (prepare_workers.py)
                         -> <output>.bin, <output>.idx, <output>.tokenizer.json
```

The same files give the same bytes: no clock, no random number, no order of a directory listing, no number of processes
enters the result. Everything is written into a folder beside the target (prepare_stage.py) and renamed at the end, the
index last: a pair without an index does not exist for any reader.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from lightning_distplus.data.documents import SHARD_BYTES, Corpus, Format, Piece, Shard
from lightning_distplus.data.prepare_stage import Stage, load_plan
from lightning_distplus.data.prepare_workers import load_encoder, write_shards
from lightning_distplus.data.shards import write_durably
from lightning_distplus.data.tokens import MegatronWriter, dtype_for, megatron_pair

__all__ = ["END_OF_DOCUMENT", "PreparedTokens", "Progress", "prepare"]

StageName = Literal["tokenizer", "tokens"]
TokenDtype = Literal["auto", "uint16", "int32"]

END_OF_DOCUMENT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 32_000

_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
_DTYPES: dict[str, type[np.integer[Any]]] = {"uint16": np.uint16, "int32": np.int32}


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
    num_shards: int
    num_reused: int
    """Shards that an interrupted preparation had completed."""


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
    num_workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> PreparedTokens:
    """Turns text into ``<output>.bin`` and ``<output>.idx``.

    The result does not depend on ``num_workers``, nor on whether the preparation was interrupted: the same call goes on
    from the shards that are complete.

    Args:
        inputs: Files and folders. A folder stands for all files below it that are not hidden, in sorted order.
        output: Path prefix of the pair.
        tokenizer: A ``tokenizer.json``, or a folder with one. Without it a byte-level BPE is trained on the inputs and
            saved as ``<output>.tokenizer.json``.
        vocab_size: Size of the vocabulary that is trained, by default 32,000.
        format: ``"text"``: a file is a document. ``"jsonl"``: a line is one. ``"parquet"``: a row is one. ``"auto"``:
            by the file's suffix.
        text_key: The field of a JSON line, or the Parquet column, that holds its text.
        dtype: Type of a token on disk; ``"auto"`` takes uint16 where the vocabulary fits.
        append_eod: Ends every document with the tokenizer's end token.
        max_bytes: Stops before the document that would exceed so many bytes of text.
        num_workers: Processes that write tokens; 0 is this one, with the threads of ``tokenizers``.
        shard_bytes: Text between two points from which an interrupted preparation can go on.
        overwrite: Replaces an existing pair.
        on_progress: Called with the progress, some times per second.

    Raises:
        BlockingIOError: Another process prepares the same output.
        ChildProcessError: A worker process died.
        FileExistsError: The pair exists and ``overwrite`` is not set.
        FileNotFoundError: An input does not exist.
        ModuleNotFoundError: tokenizers, or for Parquet pyarrow, is not installed.
        ValueError: The inputs are empty, badly encoded or malformed, or the vocabulary does not fit the type.
    """
    prefix = Path(output)
    if tokenizer is not None and vocab_size is not None:
        raise ValueError("Both tokenizer and vocab_size are given; a given tokenizer has its own vocabulary. Drop one.")
    if num_workers < 0 or shard_bytes < 1:
        raise ValueError(f"num_workers={num_workers} is at least 0, and shard_bytes={shard_bytes} at least 1.")
    targets = [prefix.with_name(prefix.name + suffix) for suffix in (".tokenizer.json", ".bin", ".idx")]
    _refuse_existing(targets if tokenizer is None else targets[1:], overwrite)
    corpus = Corpus(inputs, format=format, text_key=text_key, max_bytes=max_bytes, shard_bytes=shard_bytes)
    settings = [vocab_size, format, text_key, dtype, append_eod, max_bytes, shard_bytes]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with Stage(prefix, _identity(corpus, tokenizer, settings)) as stage:
        codec = _codec(stage, corpus, tokenizer, vocab_size, on_progress)
        chosen = _choose_dtype(codec.get_vocab_size(), dtype)
        end = [_end_id(codec)] if append_eod else []
        shards = corpus.shards()
        stage.save_plan(shards, {"end": end, "dtype": chosen.__name__, "text_key": text_key})
        num_reused = _write(stage, shards, num_workers, on_progress)
        facts, num_tokens = _merge(stage, shards, stage.folder / prefix.name, chosen, corpus)
        if tokenizer is None:
            shutil.copyfile(stage.tokenizer, stage.folder / targets[0].name)
        _publish(stage.folder, targets)
        stage.is_published = True
    return PreparedTokens(
        prefix=prefix,
        tokenizer=targets[0] if tokenizer is None else _tokenizer_file(Path(tokenizer)),
        vocab_size=codec.get_vocab_size(),
        dtype=chosen.__name__,
        num_documents=sum(fact["num_documents"] for fact in facts),
        num_tokens=num_tokens,
        num_bytes=sum(fact["num_bytes"] for fact in facts),
        num_shards=len(shards),
        num_reused=num_reused,
    )


def _identity(corpus: Corpus, tokenizer: str | Path | None, settings: list[Any]) -> dict[str, Any]:
    """Everything that decides about the result; a file counts by name, size and time."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in corpus.files]
    given = None
    if tokenizer is not None:
        file = _tokenizer_file(Path(tokenizer))
        given = xxhash.xxh3_64(file.read_bytes()).hexdigest() if file.is_file() else None
    return {"files": files, "tokenizer": given, "settings": settings, "library": metadata.version("tokenizers")}


def _codec(
    stage: Stage,
    corpus: Corpus,
    tokenizer: str | Path | None,
    vocab_size: int | None,
    on_progress: Callable[[Progress], None],
) -> Any:
    """The tokenizer as all workers read it; trained once."""
    if not stage.tokenizer.exists():
        codec = _load_tokenizer(Path(tokenizer)) if tokenizer else _train(corpus, vocab_size, on_progress)
        write_durably(stage.tokenizer, codec.to_str().encode())
    stage.is_worth_keeping = tokenizer is None
    return _load_tokenizer(stage.tokenizer)


def _write(stage: Stage, shards: list[Shard], num_workers: int, report: Callable[[Progress], None]) -> int:
    """Writes the shards that are not complete; returns how many were."""
    todo = [number for number, shard in enumerate(shards) if stage.files(number).read_mark(shard) is None]
    total = sum(shard.size_bytes for shard in shards)
    done = total - sum(shards[number].size_bytes for number in todo)

    def count(size: int) -> None:
        nonlocal done
        done += size
        report(Progress(stage="tokens", done_bytes=done, total_bytes=max(done, total)))

    count(0)
    if num_workers > 1 and len(todo) > 1:
        write_shards(stage, shards, todo, num_workers, count)
    else:
        encoder = load_encoder(*_encoding(stage))
        for number in todo:
            stage.files(number).write(shards[number], encoder, count)
    report(Progress(stage="tokens", done_bytes=max(done, total), total_bytes=max(done, total)))
    return len(shards) - len(todo)


def _encoding(stage: Stage) -> tuple[Path, dict[str, Any]]:
    return stage.folder, load_plan(stage.folder)[1]


def _merge(
    stage: Stage, shards: list[Shard], prefix: Path, dtype: type[np.integer[Any]], corpus: Corpus
) -> tuple[list[dict[str, Any]], int]:
    """One pair from all shards; returns what each holds, and the number of tokens."""
    facts, num_tokens = [], 0
    for leftover in megatron_pair(prefix):
        leftover.unlink(missing_ok=True)  # of a run that was killed while it merged
    with MegatronWriter(prefix, dtype=dtype) as writer:
        for number, shard in enumerate(shards):
            files = stage.files(number)
            fact = files.read_mark(shard)
            assert fact is not None, f"shard {number} was written"
            facts.append(fact)
            lengths = files.read_lengths()
            num_tokens += int(lengths.sum())
            with files.tokens.open("rb") as tokens:
                writer.add_written(tokens, lengths)
        if not num_tokens:
            raise ValueError(corpus.no_text())
    return facts, num_tokens


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


def _counted(corpus: Corpus, stage: StageName, report: Callable[[Progress], None]) -> Iterator[Piece]:
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


def _publish(stage: Path, targets: list[Path]) -> None:
    """Moves the finished files to their names; the old index goes first and the new one comes last."""
    for target in targets:
        if (stage / target.name).exists():
            with (stage / target.name).open("rb") as file:
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
