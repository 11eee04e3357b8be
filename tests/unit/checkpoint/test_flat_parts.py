"""A range of the flat view of a tensor, in boxes, and the tensor that has nothing else."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_distplus.checkpoint.fingerprints import Piece, sums_of_pieces
from lightning_distplus.checkpoint.flat_parts import FlatPart, boxes_of_range
from lightning_distplus.strategies.staging import Staging
from lightning_distplus.strategies.tensors import pieces_of_saved

SHAPES = [(), (1,), (7,), (1, 5), (5, 1), (3, 4), (2, 3, 4), (3, 1, 4), (2, 2, 3, 2), (1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_boxes_of_every_range_hold_its_elements_in_order_and_are_few(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = list(boxes_of_range(shape, start, stop))
            parts = [
                whole[tuple(slice(first, first + size) for first, size in zip(*box, strict=True))] for box in boxes
            ]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *map(torch.flatten, parts)]).tolist() == list(
                range(start, stop)
            )
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def parts_of(whole: torch.Tensor, *cuts: int) -> list[FlatPart]:
    flat = whole.reshape(-1)
    return [FlatPart(flat[start:stop], start, whole.shape) for start, stop in pairwise((0, *cuts, whole.numel()))]


def test_a_part_is_written_and_read_like_the_tensor_that_it_is_of(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, 5)
    (part,) = parts_of(whole)
    save({"model": {"weight": part, "step": FlatPart(torch.ones(1), 0, ())}}, checkpoint_id=tmp_path, no_dist=True)
    read = {"model": {"weight": torch.zeros(3, 4, 5), "step": torch.zeros(())}}
    load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["model"]["weight"], whole)
    assert read["model"]["step"] == 1

    first, second = parts_of(whole, 27)
    for piece in (first, second):
        for item in piece.__create_write_items__("weight", piece):
            box = item.tensor_data.chunk
            index = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(piece.__get_tensor_shard__(item.index), whole[index])
    with pytest.raises(ValueError, match="has no box at"):
        second.__get_tensor_shard__(first.__create_write_items__("weight", first)[0].index)


def test_a_part_can_be_copied_and_cast_and_says_why_nothing_else_is_possible() -> None:
    part, _ = parts_of(torch.arange(12.0).reshape(3, 4), 7)
    assert (part.shape, part.dtype, part.numel(), part.device.type) == ((3, 4), torch.float32, 12, "cpu")
    assert repr(part) == "FlatPart(elements 0 to 7 of shape (3, 4), torch.float32)"
    for copied in (part.clone(), copy.deepcopy({"a": part})["a"], part.detach().half(), part.cpu()):
        assert isinstance(copied, FlatPart)
        assert (copied.start, copied.flat.tolist()) == (0, list(range(7)))
    assert part.clone().flat.data_ptr() != part.flat.data_ptr()
    for refused in (
        lambda: part + 1,
        lambda: part.mean(),
        lambda: part[0],
        lambda: part.zero_(),
    ):
        with pytest.raises(ValueError, match=r"trainer.strategy.lightning_module_state_dict\(\)"):
            refused()
    with pytest.raises(ValueError, match="pickling needs the whole tensor"):
        pickle.dumps(part)


def test_parts_have_the_fingerprint_of_the_whole_and_are_copied_where_the_last_copy_lay() -> None:
    whole, staging = torch.randn(5, 3), Staging(None)
    states = [{"model": {"weight": part}} for part in parts_of(whole, 4, 4, 11)]
    sums = sums_of_pieces(piece for state in states for piece in pieces_of_saved(state, is_first=False))
    assert sums == sums_of_pieces([Piece.whole("weights/weight", whole)])
    twin = FlatPart(whole.reshape(-1), 0, whole.shape, is_first_copy=False)
    assert list(pieces_of_saved({"model": {"weight": twin}}, is_first=True)) == []

    addresses = []
    for _ in range(2):
        staging.begin()
        copied = staging.copy(states[0], 0)["model"]["weight"]
        staging.end()
        addresses.append(copied.flat.data_ptr())
        assert torch.equal(copied.flat, whole.reshape(-1)[:4])
    assert addresses[0] == addresses[1] != whole.data_ptr()
