"""The eyes of one rank on its own gradients."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_distplus.divergence.gradients import (
    BucketHook,
    FlaggingReduceScatter,
    LocalGradients,
    NonFinite,
    name_at,
)


def a(index: int) -> str:
    return f"element {index}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_element_that_is_not_finite_is_remembered(dtype: torch.dtype, value: float) -> None:
    gradients = LocalGradients(lambda: "micro-batch 7, samples 3, 4")
    gradient = torch.ones(10, 10, dtype=dtype)
    assert gradients.look_at(gradient, a) is True
    gradient[4, 2] = value
    assert gradients.look_at(gradient, a) is False
    text = f"gradient of element 42 is {value} in micro-batch 7, samples 3, 4"
    assert gradients.found == NonFinite("gradient", "element 42", text)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e38), (torch.float16, 6e4), (torch.bfloat16, 1e38)])
def test_large_finite_gradients_are_no_alarm(dtype: torch.dtype, value: float) -> None:
    gradients = LocalGradients()
    assert gradients.look_at(torch.full((1000,), value, dtype=dtype), a) is True
    assert gradients.found is None


def test_once_something_is_found_nothing_more_contributes_until_the_next_step() -> None:
    gradients = LocalGradients()
    gradients.look_at_loss(torch.tensor(math.nan))
    assert gradients.found is not None
    assert gradients.look_at(torch.ones(3), a) is False
    replaced = gradients.filtered(torch.ones(3), a)
    assert replaced is not None
    assert replaced.tolist() == [0, 0, 0]
    gradients.reset()
    assert gradients.filtered(torch.ones(3), a) is None


def test_beside_a_loss_scaler_only_the_loss_counts() -> None:
    gradients = LocalGradients(gradients_may_overflow=True)
    assert gradients.look_at(torch.tensor([math.inf]), a) is True
    assert gradients.found is None
    gradients.look_at_loss(torch.tensor(math.inf))
    assert gradients.found is not None
    assert gradients.found.what == "loss"


def test_an_element_of_a_flat_gradient_has_the_name_of_its_parameter() -> None:
    sections = [("first", 3), ("empty", 0), ("last", 2)]
    assert [name_at(sections, index) for index in range(6)] == ["first", "first", "first", "last", "last", None]


def test_an_element_of_a_reduce_scatter_input_has_the_name_of_its_parameter() -> None:
    """Two ranks: dimension 0 of 3 is padded to 2 rows each."""
    reduce_scatter = FlaggingReduceScatter(LocalGradients(), [("w", torch.Size([3, 5])), ("b", torch.Size([3]))])
    names = [reduce_scatter._name_at(column, 12, 2) for column in range(12)]
    assert names == ["w"] * 10 + ["b"] * 2
    assert reduce_scatter._name_at(0, 10, 2) == "w or b", "one had no gradient"


def test_what_rides_along_in_a_bucket_is_no_gradient() -> None:
    """The mailbox's numbers are larger than the gradients of a trained model."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 2, 4)]
    names = {id(weights[0]): "first", id(weights[2]): "last"}
    hook = BucketHook(LocalGradients(), names, None)
    parts = [(begin, end, [len(one) for one in own]) for begin, end, own in hook._parts(weights)]
    assert parts == [(0, 3, [3]), (3, 5, []), (5, 9, [4])]
    assert [part[:2] for part in hook._parts([weights[0], weights[2]])] == [(0, 7)], "laid out anew"


def test_a_large_bucket_is_examined_in_blocks_as_if_at_once() -> None:
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (300_000, 300_000)]
    gradients = LocalGradients()
    hook = BucketHook(gradients, {id(weight): name for weight, name in zip(weights, "ab", strict=True)}, None)
    bucket = torch.randn(600_000)
    half = bucket / 2
    ((_, _, own),) = hook._parts(weights)
    assert hook._look_and_scale(bucket, own, 2) is True
    assert torch.equal(bucket, half)
    bucket[599_999] = math.nan
    assert hook._look_and_scale(bucket, own, 2) is False
    assert gradients.found is not None
    assert gradients.found.parameter == "b"
