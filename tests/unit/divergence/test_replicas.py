"""Which copy is wrong, in which element, by how much; ranks are threads that exchange through a list."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lightning_distplus.divergence.replicas import Difference, Replica, find_difference, odd_ranks, replicated_state


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
    assert (found.kind, found.name, found.names, found.wrong, found.source) == ("parameters", "a", ["a"], [1], 0)
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
    assert (found.name, found.element, found.wrong) == ("b", 4, [1])


def test_ranks_of_another_group_are_not_compared() -> None:
    held = [[Replica("parameters", "shard", torch.full((9,), float(rank // 2)), f"0:{rank // 2}")] for rank in range(4)]
    assert together(held) is None
    held[3][0].tensor[8] = 7.0
    found = together(held)
    assert found is not None
    assert (found.group, found.wrong, sorted(found.values)) == ("0:1", [2, 3], [2, 3])


def test_what_some_ranks_do_not_hold_is_a_difference() -> None:
    held = copies(3)
    del held[2][1]
    found = together(held)
    assert found is not None
    assert (found.name, found.wrong, found.values) == ("b", [2], {0: "there", 1: "there", 2: "missing"})


def test_another_shape_is_shown_instead_of_an_element() -> None:
    held = copies(3)
    held[0][1] = Replica("parameters", "b", torch.zeros(6))
    found = together(held)
    assert found is not None
    assert (found.wrong, found.values[0], found.values[1]) == ([0], "torch.float32 [6]", "torch.float32 [5]")


@pytest.mark.parametrize(
    ("values", "expected"),
    [("aab", ([2], 0)), ("abb", ([0], 1)), ("ab", ([0, 1], None)), ("aabb", ([0, 1, 2, 3], None)), ("aaa", ([], 0))],
)
def test_the_majority_decides(values: str, expected: tuple[list[int], int | None]) -> None:
    assert odd_ranks(dict(enumerate(values))) == expected


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
