"""A fingerprint is the same however the tensor is cut up, and another one for other bytes."""

from __future__ import annotations

import pytest
import torch

from lightning_distplus.checkpoint import fingerprints
from lightning_distplus.checkpoint.fingerprints import Piece, add_up, describe, differing, sums_of_pieces

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def fingerprint(tensor: torch.Tensor) -> str:
    return describe(sums_of_pieces([Piece.whole("t", tensor)]))["t"]


def by_hand(tensor: torch.Tensor) -> str:
    """The definition, word by word."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    first = sum(words) % 2**64
    second = sum(place * word for place, word in enumerate(words)) % 2**64
    return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.numel()} {first:016x}{second:016x}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = torch.randn(37, 613, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    expected = {"t": by_hand(whole)}
    assert fingerprint(whole) == expected["t"]
    cuts = {
        "rows": [Piece("t", whole[a:b], (a, 0), (37, 613)) for a, b in ((0, 5), (5, 20), (20, 20), (20, 37))],
        "columns": [Piece("t", whole[:, a:b], (0, a), (37, 613)) for a, b in ((0, 1), (1, 300), (300, 613))],
        "flat": [
            Piece.of_flat("t", whole.view(-1)[a:b], a, whole.numel())
            for a, b in ((0, 3), (3, 10), (10, 20_001), (20_001, 37 * 613))
        ],
    }
    for pieces in cuts.values():
        assert describe(add_up(sums_of_pieces([piece]) for piece in pieces)) == expected
        assert describe(add_up(sums_of_pieces([piece]) for piece in pieces[1:])) == {}, "a shard is missing"


def test_a_change_of_any_kind_is_found_also_in_one_of_several_copies() -> None:
    whole = torch.randn(300, 300, generator=torch.Generator().manual_seed(2))
    expected = {"t": fingerprint(whole)}
    flipped, swapped, constant = whole.clone(), whole.clone(), whole.clone()
    flipped.view(torch.int32).view(-1)[77_777] ^= 1
    swapped.view(-1)[[100, 70_000]] = swapped.view(-1)[[70_000, 100]]
    constant[:] = 0.0
    for changed in (flipped, swapped, constant, whole.t().contiguous()):
        assert list(differing(expected, sums_of_pieces([Piece.whole("t", changed)]))) == ["t"]
        three = add_up(sums_of_pieces([Piece.whole("t", copy)]) for copy in (whole, changed, whole))
        assert list(differing(expected, three)) == ["t"]
    three = add_up(sums_of_pieces([Piece.whole("t", whole)]) for _ in range(3))
    assert differing(expected, three) == {}


def test_what_cannot_be_compared_is_not_called_different() -> None:
    whole = torch.randn(10)
    expected = {"t": fingerprint(whole), "gone": fingerprint(whole)}
    assert differing(expected, sums_of_pieces([Piece.whole("t", whole.double())])) == {}
    assert differing(expected, sums_of_pieces([Piece.of_flat("t", whole[:5], 0, 10)])) == {}
    empty = sums_of_pieces([Piece.whole("t", torch.empty(0)), Piece.whole("s", torch.tensor(3.0))])
    assert describe(empty) == {"t": "float32 0 " + "0" * 32, "s": by_hand(torch.tensor(3.0))}


@pytest.mark.parametrize("num_words", [1, 255, 256, 257, 16_384, 16_385, 70_003])
def test_the_sums_of_a_gpu_are_those_of_a_cpu(num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_BLOCK_ROWS", 7)
    words = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=torch.Generator().manual_seed(3))
    by_hand = [sum(words.tolist()), sum(place * word for place, word in enumerate(words.tolist()))]
    for found in (fingerprints._sums_in_rows(words.numpy()), fingerprints._sums_in_blocks(words)):
        assert [int(number) % 2**64 for number in found] == [number % 2**64 for number in by_hand]
