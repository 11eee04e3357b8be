from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_distplus.preflight.agreement import content_of


class OwnKind(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise AssertionError("it is read")

    def __len__(self) -> int:
        return 3


class Tells(OwnKind):
    def __init__(self, text: str) -> None:
        self.text = text

    def fingerprint(self) -> str:
        return self.text


def tensors(last: float) -> torch.Tensor:
    values = torch.arange(12.0).reshape(4, 3)
    values[-1, -1] = last
    return values


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tensors(1), tensors(2)),
        (tensors(1), tensors(1).double()),
        (tensors(1), tensors(1).reshape(3, 4)),
        (tensors(1).bfloat16(), tensors(2).bfloat16()),
        (TensorDataset(tensors(1), tensors(5)), TensorDataset(tensors(1), tensors(6))),
        (tensors(1).numpy(), tensors(2).numpy()),
        (["a", 1, b"x"], ["a", 2, b"x"]),
        ([{"x": tensors(1)}] * 3, [{"x": tensors(1)}, {"x": tensors(2)}, {"x": tensors(1)}]),
        (Subset(tensors(1), [0, 1]), Subset(tensors(1), [0, 2])),
        (ConcatDataset([TensorDataset(tensors(1))]), ConcatDataset([TensorDataset(tensors(2))])),
        (Tells("one"), Tells("other")),
        (Subset(Tells("one"), [0]), Subset(Tells("other"), [0])),
    ],
)  # fmt: skip
def test_other_content_has_another_digest_and_the_same_content_the_same(one: Any, other: Any) -> None:
    assert content_of(one) == content_of(one) is not None
    assert content_of(one) != content_of(other)


@pytest.mark.parametrize("dataset", [OwnKind(), [OwnKind()], np.array([object()]), {1, 2}])
def test_what_is_of_a_kind_of_its_own_is_not_read(dataset: Any) -> None:
    assert content_of(dataset) is None


def test_of_a_large_array_some_rows_are_read_the_first_and_the_last_among_them() -> None:
    large = np.zeros((1 << 20, 9), dtype=np.int64)
    before = content_of(large)
    large[-1, -1] = 1
    assert content_of(large) != before
