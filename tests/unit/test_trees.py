"""Trees of tensors: what two ranks must have in common is in the text, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_distplus.gathering import describe, flatten


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    loss: Any
    name: str = ""


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (ONES, "float32[2, 3]"),
        (torch.tensor(1), "int64[]"),
        ((ONES,), "(float32[2, 3])"),
        ([ONES, ONES.to(torch.bfloat16)], "[float32[2, 3], bfloat16[2, 3]]"),
        ({"b": ONES, "a": {"c": [ONES]}}, "{'b': float32[2, 3], 'a': {'c': [float32[2, 3]]}}"),
        (Pair(ONES, 1), "Pair{first: float32[2, 3], second: int32[]}"),
        (Output(ONES, "x"), "Output{loss: float32[2, 3]}"),
        ([1, 2.0, True, np.zeros(3)], "[int32[], float32[], uint8[], float64[3]]"),
        ({"loss": ONES, "text": "x", "none": None, "empty": []}, "{'loss': float32[2, 3]}"),
        ((), "no tensors"),
        ("text", "no tensors"),
    ],
)
def test_containers_dtypes_and_shapes_are_told_and_what_holds_no_tensor_is_not(tree: Any, text: str) -> None:
    assert describe(tree) == text


def test_a_tree_is_taken_apart_and_put_together_again() -> None:
    tree = {"b": [1, (2, Pair(3, 4))], "a": OrderedDict(z=5, y=6), "c": []}
    leaves, rebuild = flatten(tree)
    assert leaves == [
        ("['a']['y']", 6),
        ("['a']['z']", 5),
        ("['b'][0]", 1),
        ("['b'][1][0]", 2),
        ("['b'][1][1].first", 3),
        ("['b'][1][1].second", 4),
    ]
    again = rebuild(iter([value * 10 for _, value in leaves]))
    assert again == {"b": [10, (20, Pair(30, 40))], "a": {"z": 50, "y": 60}, "c": []}
    assert list(again) == list(tree)
    assert isinstance(again["b"][1][1], Pair)


def test_dictionaries_that_were_filled_in_another_order_have_the_same_leaves() -> None:
    assert flatten({"a": 1, "b": 2})[0] == flatten({"b": 2, "a": 1})[0]
