"""A token attends to its own document alone."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from lightning_distplus.data import document_mask


def test_mask_is_causal_and_ends_with_the_document() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, 1]]))
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_attention_under_the_mask_is_that_of_each_document_by_itself() -> None:
    torch.manual_seed(0)
    lengths = (3, 4, 1)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].repeat(2, 1)
    query, key, value = (torch.randn(2, 4, 8, 5) for _ in range(3))
    together = scaled_dot_product_attention(query, key, value, attn_mask=document_mask(ids))
    parts = zip(*(one.split(lengths, dim=2) for one in (query, key, value)), strict=True)
    apart = [scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    assert torch.allclose(together, torch.cat(apart, dim=2), atol=1e-6)
