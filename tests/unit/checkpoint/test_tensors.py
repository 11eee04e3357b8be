"""A fingerprint is the same however the tensor is cut up, and another one for other bytes."""

from __future__ import annotations

from operator import mul

import numpy as np
import pytest
import torch

from lightning_distplus.checkpoint import tensors
from lightning_distplus.checkpoint.tensors import Piece, add_up, describe, differing, sums_of_pieces
from lightning_distplus.data.order import splitmix64

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
    """The definition, lane by lane."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    content += b"\0" * (-len(content) % 4)
    lanes = [int.from_bytes(content[start : start + 4], "little", signed=True) for start in range(0, len(content), 4)]
    columns = tensors._column_factors().tolist()
    rows = [sum(map(mul, lanes[start : start + 1024], columns)) for start in range(0, len(lanes), 1024)]
    first, second = (
        sum(row * (splitmix64((2 * place + which) * 0x9E3779B97F4A7C15) | 1) for place, row in enumerate(rows)) % 2**64
        for which in (0, 1)
    )
    return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.numel()} v2:{first:016x}{second:016x}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_add_up_to_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_WIDENED_ELEMENTS", 10_000)  # a cut by columns is widened in parts
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
    assert describe(empty) == {"t": "float32 0 v2:" + "0" * 32, "s": by_hand(torch.tensor(3.0))}


def test_what_an_older_version_counted_is_not_compared() -> None:
    whole = torch.randn(10)
    assert differing({"t": f"float32 10 {'c' * 32}"}, sums_of_pieces([Piece.whole("t", whole)])) == {}
    assert differing({"t": f"float32 10 v2:{'c' * 32}"}, sums_of_pieces([Piece.whole("t", whole)]))


def test_no_two_columns_have_the_same_number_and_a_row_is_summed_exactly() -> None:
    factors = tensors._column_factors()
    assert sorted(factors.abs().tolist()) == list(range(1, 2048, 2))
    largest = torch.where(factors > 0, 2**31 - 1, -(2**31)).to(torch.int32).expand(33, 1024).contiguous()
    by_hand = sum(map(mul, largest[0].tolist(), factors.tolist()))
    assert tensors._row_sums(largest).tolist() == [by_hand] * 33


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 70])
def test_the_sums_of_a_gpu_are_those_of_a_cpu(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_GPU_ROWS", 7)
    lanes = torch.randint(-(2**31), 2**31 - 1, (num_rows, 1024), generator=torch.Generator().manual_seed(3))
    lanes = lanes.to(torch.int32)
    assert torch.equal(tensors._row_sums(lanes), tensors._row_sums_in_integers(lanes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tries", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_one_or_two_flipped_bits_never_go_unseen(dtype: torch.dtype, num_tries: int) -> None:
    random = np.random.default_rng(5)
    whole = torch.randn(6000, generator=torch.Generator().manual_seed(4)).to(dtype)
    size_bits, expected = whole.element_size() * 8, fingerprint(whole)
    raw = whole.view(torch.uint8).numpy()
    unseen = 0
    for attempt in range(num_tries):
        # Each position in an element in turn; the second flip is at the same position, or at any, or there is none.
        bits = [int(element) * size_bits + attempt % size_bits for element in random.choice(6000, 2, replace=False)]
        bits[1] = (bits[1], int(random.integers(6000 * size_bits)), bits[0])[attempt // size_bits % 3]
        places = sorted(set(bits))
        for place in places:
            raw[place // 8] ^= 1 << place % 8
        unseen += fingerprint(whole) == expected
        for place in places:
            raw[place // 8] ^= 1 << place % 8
    assert unseen == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "of one number", "of two signs in turn"])
def test_a_negated_tensor_is_another_one(dtype: torch.dtype, kind: str) -> None:
    for numel in (1, 2, 4, 1000, 1024, 4096, 300_000):
        whole = torch.randn(numel) if kind == "random" else torch.full((numel,), 0.5)
        if kind == "of two signs in turn":
            whole[1::2] *= -1
        assert fingerprint(whole.to(dtype)) != fingerprint(-whole.to(dtype)), numel
