"""Attention masks from document ids."""

from __future__ import annotations

import torch

__all__ = ["document_mask"]


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens each token attends to: those before it in its own document, and itself.

    Make it on the device, in ``training_step``: it is seq_len times as large as the batch. For ``attn_mask`` of
    ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        document_ids: Integers of shape (num_samples, seq_len), as ``TokenDataModule(document_ids=True)`` adds them.

    Returns:
        bool of shape (num_samples, 1, seq_len, seq_len): [sample, head, token, attended token].
    """
    is_same: torch.Tensor = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return is_same.tril()
