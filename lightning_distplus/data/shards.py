"""Shards of a preparation: the tokens of some documents in files of their own, complete or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.data.documents import Shard, read_shard

__all__ = ["Encoder", "ShardFiles", "write_durably"]

_BATCH = 64  # pieces that are encoded together, on all cores


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How documents become tokens.

    Attributes:
        codec: A tokenizer of ``tokenizers``.
        end: Tokens after each document.
        dtype: Of a token on disk.
        text_key: As in ``Corpus``.
    """

    codec: Any
    end: list[int]
    dtype: Any
    text_key: str

    def documents(self, shard: Shard, on_bytes: Callable[[int], None]) -> Iterator[list[int]]:
        """The tokens of each document; an empty document leaves nothing, not even its end."""
        document: list[int] = []
        pieces = read_shard(shard, self.text_key)
        while batch := list(islice(pieces, _BATCH)):
            encodings = self.codec.encode_batch([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                document += encoding.ids
                if piece.ends and document:
                    yield document + self.end
                    document = []
            on_bytes(sum(piece.size_bytes for piece in batch))


@dataclass(frozen=True)
class ShardFiles:
    """The files of one shard: tokens, lengths, and a mark with their digest that is written last."""

    folder: Path
    number: int

    @property
    def tokens(self) -> Path:
        """The tokens of all its documents."""
        return self.folder / f"{self.number:06d}.tokens"

    @property
    def lengths(self) -> Path:
        """int32, the length of each document."""
        return self.folder / f"{self.number:06d}.lengths"

    @property
    def mark(self) -> Path:
        """JSON: what the other two hold."""
        return self.folder / f"{self.number:06d}.done"

    def write(self, shard: Shard, encoder: Encoder, on_bytes: Callable[[int], None]) -> None:
        """Writes the shard; ``on_bytes`` hears how much text was encoded since it was called last."""
        lengths, num_bytes = [], 0

        def count(size: int) -> None:
            nonlocal num_bytes
            num_bytes += size
            on_bytes(size)

        # Another process may write the same shard when its parent was killed a moment ago: each has names of its own.
        aside = self.tokens.with_suffix(f".{os.getpid()}.part")
        with aside.open("wb") as stream:
            for document in encoder.documents(shard, count):
                stream.write(np.asarray(document, dtype=encoder.dtype).tobytes())
                lengths.append(len(document))
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(self.tokens)
        write_durably(self.lengths, np.asarray(lengths, dtype=np.int32).tobytes())
        facts = {"num_documents": len(lengths), "num_bytes": num_bytes, "digest": self._digest(), **asdict(shard)}
        write_durably(self.mark, json.dumps(facts).encode())

    def read_mark(self, shard: Shard) -> dict[str, Any] | None:
        """What a complete shard holds; None where anything is missing, torn, or of another shard."""
        try:
            facts: dict[str, Any] = json.loads(self.mark.read_bytes())
            expected = json.loads(json.dumps(asdict(shard)))
            is_whole = facts["digest"] == self._digest() and all(facts[name] == expected[name] for name in expected)
        except (OSError, ValueError, KeyError):
            return None
        return facts if is_whole else None

    def read_lengths(self) -> NDArray[np.int32]:
        """The length of each document."""
        return np.fromfile(self.lengths, dtype=np.int32)

    def _digest(self) -> str:
        digest = xxhash.xxh3_64()
        for path in (self.tokens, self.lengths):
            with path.open("rb") as stream:
                while part := stream.read(2**22):
                    digest.update(part)
            digest.update(path.stat().st_size.to_bytes(8, "little"))
        return digest.hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole or not at all, also after a crash of the host."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with aside.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)
