"""Token batches: blocks of several sources, gathered into one batch for a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_distplus.data.order import derive_key, permute
from lightning_distplus.data.request import Request
from lightning_distplus.data.stream import TokenStream

__all__ = ["TokenBlocks", "TokenFetcher"]

_CHECK = -4  # separates the key of the check from those of order and augmentation
_NUM_CHECKED = 64  # blocks of each source whose token ids are checked at setup


class TokenBlocks(NamedTuple):
    """The samples of one batch as they are stored.

    Attributes:
        tokens: Integers of shape (num_samples, seq_len + 1).
        documents: int32 of shape (num_samples, seq_len): the document of each token, counted from 0 in each sample.
    """

    tokens: NDArray[np.integer[Any]]
    documents: NDArray[np.int32] | None


class TokenFetcher:
    """Fetches one batch of token blocks.

    Args:
        sources: Where the blocks are.
        names: Of the sources, for messages.
        seq_len: Targets per block.
        vocab_size: Token ids below this are legal; None means unchecked.
        position_ids: Add the place of each token in its document.
        document_ids: Add the number of each token's document.
    """

    def __init__(
        self,
        sources: Sequence[TokenStream],
        *,
        names: Sequence[str],
        seq_len: int,
        vocab_size: int | None,
        position_ids: bool = False,
        document_ids: bool = False,
    ) -> None:
        self._sources = list(sources)
        self._names = list(names)
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._position_ids = position_ids
        self._document_ids = document_ids
        types = {np.dtype(source.dtype) for source in sources}
        self._dtype = types.pop() if len(types) == 1 else np.dtype(np.int64)

    def __getitems__(self, request: Request) -> TokenBlocks:
        """The samples as they are stored.

        request.ids: (num_samples, 2), source and index.
        """
        ids = request.ids
        sources = sorted(set(ids[:, 0].tolist()))
        if len(sources) == 1:
            return TokenBlocks(self._gather(sources[0], ids[:, 1]), self._documents(ids))
        blocks = np.empty((len(ids), self._seq_len + 1), dtype=self._dtype)
        for source in sources:
            rows = np.flatnonzero(ids[:, 0] == source)
            blocks[rows] = self._gather(source, ids[rows, 1])
        return TokenBlocks(blocks, self._documents(ids))

    def finish(self, taken: TokenBlocks, *, pin_memory: bool) -> dict[str, torch.Tensor]:
        """The batch, in the training process: tensors, all int64 of shape (num_samples, seq_len)."""
        tokens, documents = taken
        inputs_and_labels = _as_int64((tokens[:, :-1], tokens[:, 1:]), pin_memory)
        batch = dict(zip(("input_ids", "shift_labels"), inputs_and_labels, strict=True))
        if self._document_ids and documents is not None:
            batch["document_ids"] = _as_int64((documents,), pin_memory)[0]
        if self._position_ids and documents is not None:
            batch["position_ids"] = _as_int64((_positions(documents),), pin_memory)[0]
        return batch

    def check_documents(self) -> None:
        """Reads where documents begin, if the batches need it.

        Raises:
            ValueError: A source does not say it.
        """
        if self._position_ids or self._document_ids:
            for source in self._sources:
                source.documents(np.zeros(1, dtype=np.int64))

    def check_vocabulary(self) -> None:
        """Checks 64 blocks of each source that are evenly spread, and 64 that a key chooses.

        Raises:
            ValueError: A token id is not in the vocabulary.
        """
        if self._vocab_size is None:
            return
        for place, source in enumerate(self._sources):
            size = source.num_samples
            count = min(_NUM_CHECKED, size)
            self._gather(place, np.linspace(0, size - 1, count).astype(np.int64))
            self._gather(place, np.sort(permute(np.arange(count), size, derive_key(_CHECK, place))))

    def _documents(self, ids: NDArray[np.int64]) -> NDArray[np.int32] | None:
        if not (self._position_ids or self._document_ids):
            return None
        documents = np.empty((len(ids), self._seq_len), dtype=np.int32)
        for source in np.unique(ids[:, 0]).tolist():
            rows = ids[:, 0] == source
            documents[rows] = self._sources[source].documents(ids[rows, 1])
        return documents

    def _gather(self, source: int, indices: NDArray[np.int64]) -> NDArray[np.integer]:
        blocks = self._sources[source].gather(indices)
        if self._vocab_size is not None and (blocks.max() >= self._vocab_size or blocks.min() < 0):
            row, column = np.argwhere((blocks >= self._vocab_size) | (blocks < 0))[0].tolist()
            raise ValueError(
                f"Source {self._names[source]} holds the token id {blocks[row, column]} (sample {indices[row]}), and "
                f"vocab_size is {self._vocab_size}. Prepare the source with the model's tokenizer."
            )
        return blocks


def _as_int64(arrays: Sequence[NDArray[np.integer[Any]]], pin_memory: bool) -> torch.Tensor:
    """Arrays of one shape as one tensor: an allocation costs 5 microseconds."""
    result = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.int64, pin_memory=pin_memory)
    for target, values in zip(result.numpy(), arrays, strict=True):
        np.copyto(target, values)  # torch converts uint16 in half the speed
    return result


def _positions(documents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Places counted from the beginning of the document, or of the sample where that comes later."""
    places = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int32), documents.shape)
    begins = np.zeros_like(documents)
    np.copyto(begins[:, 1:], places[:, 1:], where=documents[:, 1:] != documents[:, :-1])
    result: NDArray[np.int32] = places - np.maximum.accumulate(begins, axis=1)
    return result
