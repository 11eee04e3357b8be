"""Which copy is wrong, in which element, by how much; ranks are threads that exchange through a list."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from lightning_distplus.divergence.replicas import (
    Difference,
    Replica,
    Windows,
    find_difference,
    fingerprint_of_each,
    from_sums,
    replicated_state,
)


def together(held: list[list[Replica]]) -> Difference | None:
    """What all ranks find; they must find the same."""
    barrier = threading.Barrier(len(held))
    posted: dict[str, list[bytes]] = {}

    def exchange_of(rank: int) -> Callable[[str, bytes], list[bytes]]:
        def exchange(name: str, data: bytes) -> list[bytes]:
            posted.setdefault(name, [b""] * len(held))[rank] = data
            barrier.wait(10)
            found = list(posted[name])
            barrier.wait(10)
            return found

        return exchange

    with ThreadPoolExecutor(len(held)) as pool:
        found = list(pool.map(lambda rank: find_difference(held[rank], exchange_of(rank)), range(len(held))))
    assert all(repr(one) == repr(found[0]) for one in found)
    return found[0]


def copies(count: int, dtype: torch.dtype = torch.float32) -> list[list[Replica]]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(700, 300, generator=generator), "b": torch.randn(5, generator=generator)}
    return [
        [Replica("parameters", name, tensor.to(dtype, copy=True)) for name, tensor in tensors.items()]
        for _ in range(count)
    ]


def test_equal_copies_have_no_difference() -> None:
    assert together(copies(3)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("index", [0, 54_321, 700 * 300 - 1])
def test_the_minority_and_the_element_are_found(index: int, dtype: torch.dtype) -> None:
    held = copies(3, dtype)
    wrong = held[1][0].tensor.view(-1)
    wrong[index] += 2
    found = together(held)
    assert found is not None
    assert (found.key, found.names, found.wrong, found.source) == (("parameters", "a", ""), ["a"], [1], 0)
    assert found.element == index
    assert found.largest == pytest.approx(2, abs=0.05)
    assert found.values[0] == found.values[2] != found.values[1] == wrong[index].item()


def test_the_element_that_differs_most_is_shown_and_nan_is_furthest_away() -> None:
    held = copies(2)
    held[1][0].tensor.view(-1)[[7, 90_000, 150_000]] += torch.tensor([1.0, 5.0, 3.0])
    found = together(held)
    assert found is not None
    assert (found.element, found.wrong, found.source) == (90_000, [0, 1], None)
    held[0][1].tensor[2] = math.nan
    held[0][0].tensor.view(-1)[100_000] = math.nan
    found = together(held)
    assert found is not None
    assert (found.element, found.largest, found.names) == (100_000, math.inf, ["a", "b"])


def test_the_sign_of_a_zero_is_a_difference() -> None:
    held = copies(3)
    for rank, value in enumerate((0.0, -0.0, 0.0)):
        held[rank][1].tensor[4] = value
    found = together(held)
    assert found is not None
    assert (found.names, found.element, found.wrong) == (["b"], 4, [1])


def test_ranks_of_another_group_are_not_compared() -> None:
    held = [[Replica("parameters", "shard", torch.full((9,), float(rank // 2)), f"0:{rank // 2}")] for rank in range(4)]
    assert together(held) is None
    held[3][0].tensor[8] = 7.0
    found = together(held)
    assert found is not None
    assert (found.key[2], found.wrong, sorted(found.values)) == ("0:1", [2, 3], [2, 3])


def test_what_some_ranks_do_not_hold_is_a_difference() -> None:
    held = copies(3)
    del held[2][1]
    found = together(held)
    assert found is not None
    assert (found.names, found.wrong, found.values) == (["b"], [2], {0: "there", 1: "there", 2: "missing"})


def test_another_shape_is_shown_instead_of_an_element() -> None:
    held = copies(3)
    held[0][1] = Replica("parameters", "b", torch.zeros(6))
    found = together(held)
    assert found is not None
    assert (found.wrong, found.values[0], found.values[1]) == ([0], "torch.float32 [6]", "torch.float32 [5]")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_running_statistics_and_unsaved_buffers_are_left_out_and_optimizer_state_is_named() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    held = replicated_state(model, [optimizer])
    assert [one.name for one in held if one.kind == "parameters"] == [
        "net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias",
    ]  # fmt: skip
    assert [one.name for one in held if one.kind == "buffers"] == ["kept"]
    states = [one.name for one in held if one.kind == "optimizer_state"]
    assert states[:3] == ["net.0.weight: exp_avg", "net.0.weight: exp_avg_sq", "net.0.weight: step"]
    assert len(states) == 12
    assert {one.kind for one in replicated_state(model, [optimizer], holds_whole_parameters=False)} == {"buffers"}


# -- fingerprints ------------------------------------------------------------------------------------------------------

Fingerprint = Callable[[Tensor], int]


def fingerprint(tensor: Tensor) -> int:
    return int(fingerprint_of_each([tensor]))


@pytest.fixture(params=["on a CPU", "elsewhere"])
def of(request: pytest.FixtureRequest) -> Fingerprint:
    """Both kinds."""
    return fingerprint if request.param == "on a CPU" else lambda tensor: int(from_sums([tensor]))


@pytest.mark.parametrize("numel", [1, 3, 70_001])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_every_byte_counts_in_every_dtype(of: Fingerprint, dtype: torch.dtype, numel: int) -> None:
    before = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert of(before) == of(before.clone())
    for index in {0, numel // 2, numel - 1}:
        after = before.clone()
        after.view(torch.uint8).view(numel, -1)[index, -1] ^= 1
        assert of(before) != of(after)


def test_what_an_xor_or_a_plain_sum_misses_is_seen(of: Fingerprint) -> None:
    before = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    swapped, of_two_signs, constant = before.clone(), before.clone(), torch.zeros(300_000)
    swapped[[10, 250_000]] = before[[250_000, 10]]
    of_two_signs[[1, 200_001]] *= -1
    others = (swapped, of_two_signs, -before, before.flip(0), constant, constant * -1, constant / 0)
    assert len({of(before), *map(of, others)}) == 8


def test_the_layout_in_memory_does_not_count(of: Fingerprint) -> None:
    tensor = torch.randn(3 * 1001).bfloat16()
    assert of(tensor[1001:2002]) == of(tensor[1001:2002].clone()), "an offset that is no whole word"
    matrix = torch.randn(64, 48)
    assert of(matrix.t().contiguous()) == of(matrix.t())
    assert of(torch.nn.Parameter(matrix)) == of(matrix)
    assert of(torch.empty(0)) == of(torch.empty(0))
    assert of(torch.tensor(1.0)) != of(torch.tensor(2.0))


def state() -> list[Tensor]:
    shapes = [(1000, 700), (700,), (), (3,), (50_000,), (0,), (64, 64, 3, 3), (7,)]
    generator = torch.Generator().manual_seed(2)
    dtypes = [torch.float32, torch.bfloat16]
    return [torch.randn(shape, generator=generator).to(dtypes[i % 2]) for i, shape in enumerate(shapes)]


def test_windows_cover_every_element_once_and_are_about_equal() -> None:
    tensors = state()
    windows = Windows(tensors)
    seen = [torch.zeros(tensor.numel(), dtype=torch.int) for tensor in tensors]
    sizes = []
    for pieces in windows.pieces:
        sizes.append(sum((piece.stop - piece.start) * tensors[piece.number].element_size() for piece in pieces))
        for piece in pieces:
            seen[piece.number][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in seen)
    assert max(sizes) < 2 * sum(sizes) / len(sizes) + 40_000


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 6, 7])
def test_a_flip_anywhere_shows_in_exactly_one_window(index: int) -> None:
    tensors = state()
    before = [windows_of(tensors, number) for number in range(16)]
    flat = tensors[index].view(-1)
    flat[flat.numel() // 2] += 1
    after = [windows_of(tensors, number) for number in range(16)]
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


def windows_of(tensors: list[Tensor], number: int) -> int | None:
    found = Windows(tensors).fingerprint(number)
    return None if found is None else int(found)


def test_small_tensors_are_read_whole_and_their_order_counts() -> None:
    windows = Windows([torch.zeros(1000)] * 3, count=4)
    assert [(one.start, one.stop) for pieces in windows.pieces for one in pieces] == [(0, 1000)] * 3
    one, other = torch.tensor([1]), torch.tensor([2])
    assert int(from_sums([one, other])) != int(from_sums([other, one]))


def test_windows_of_nothing_are_empty() -> None:
    assert Windows([]).fingerprint(3) is None


def test_a_tensor_can_be_freed_and_filled_again_after_a_look_at_it() -> None:
    """As FSDP2 does with whole parameters; numpy would forbid it."""
    tensor = torch.ones(1000)
    fingerprint(tensor)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4000)


def test_a_window_reads_tensors_where_they_lie_now() -> None:
    tensors = [torch.nn.Parameter(torch.arange(10.0)), torch.nn.Parameter(torch.ones(7))]
    windows = Windows(tensors, 1)
    found = [int(windows.fingerprint(0))]
    with torch.no_grad():
        tensors[1][3] = 2
    found.append(int(windows.fingerprint(0)))
    tensors[0].data = torch.arange(10.0).flip(0)
    found.append(int(windows.fingerprint(0)))
    tensors[0].data = torch.arange(20.0)[::2]
    found.append(int(windows.fingerprint(0)))
    assert len(set(found)) == 4
    for one in tensors:
        one.data = one.data.contiguous()
    assert int(windows.fingerprint(0)) == found[-1] == int(Windows(tensors, 1).fingerprint(0))
