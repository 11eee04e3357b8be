"""Blocks cut out of token files: where sample i lies, in which document, and what the files' fingerprint is."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_distplus.data.inventory import digest_files, rows_of_files

__all__ = ["INTEGERS", "WHOLE", "Part", "Split", "TokenStream", "size_of"]

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
