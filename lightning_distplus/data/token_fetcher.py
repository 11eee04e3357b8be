"""Token batches: blocks of several sources, gathered into one batch for a causal language model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_distplus.data.loader import Request
from lightning_distplus.data.order import derive_key, permute
from lightning_distplus.data.stream import TokenStream

__all__ = ["TokenFetcher"]

_CHECK = -4  # separates the key of the check from those of order and augmentation
_NUM_CHECKED = 64  # blocks of each source whose token ids are checked at setup


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

    def __getitems__(self, request: Request) -> dict[str, torch.Tensor]:
        """Tensors, all int64 of shape (num_samples, seq_len); request.ids: (num_samples, 2), source and index."""
        blocks = np.empty((len(request.ids), self._seq_len + 1), dtype=np.int64)
        for source in np.unique(request.ids[:, 0]).tolist():
            rows = request.ids[:, 0] == source
            blocks[rows] = self._gather(source, request.ids[rows, 1])
        tokens = torch.from_numpy(blocks)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}
        if self._position_ids or self._document_ids:
            documents = self._documents(request.ids)
            if self._document_ids:
                batch["document_ids"] = torch.from_numpy(documents)
            if self._position_ids:
                batch["position_ids"] = torch.from_numpy(_positions(documents))
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

    def _documents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        documents = np.empty((len(ids), self._seq_len), dtype=np.int64)
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


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places counted from the beginning of the document, or of the sample where that comes later."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.zeros_like(documents)
    np.copyto(begins[:, 1:], places[:, 1:], where=documents[:, 1:] != documents[:, :-1])
    result: NDArray[np.int64] = places - np.maximum.accumulate(begins, axis=1)
    return result
