"""``gather``: nested trees with different numbers of rows, on any strategy; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import lightning_distplus
from lightning_distplus import run_access
from lightning_distplus.errors import DivergenceError
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import kept


class Scored(NamedTuple):
    score: Any
    label: Any


def tree_of(rank: int) -> dict[str, Any]:
    """Rank 0 holds 3 rows, rank 1 none, rank 2 one; the dictionary is filled in another order on rank 1."""
    rows = (3, 0, 1)[rank]
    tree: dict[str, Any] = {
        "logits": torch.full((rows, 2), rank, dtype=torch.bfloat16, requires_grad=True),
        "scored": [Scored(torch.arange(rows) + 10 * rank, torch.ones(rows, 2, 2)[:, :, 1] > 0)],
        "loss": torch.tensor(rank / 2),
        "plain": (rank, rank * 0.1, rank == 1),
        "wave": torch.full((rows,), 1j * rank).conj(),
    }
    return dict(reversed(tree.items())) if rank == 1 else tree


def evaluate(strategy: str, folder: str, gather: Callable[[int], Any]) -> Any:
    """What the gathering behind a validation on three ranks gives."""
    found: list[Any] = []
    gathers = jobs.At("on_validation_epoch_end", lambda trainer, *_: found.append(gather(trainer.global_rank)))
    trainer = jobs.trainer(strategy, 3, folder, callbacks=[gathers])
    trainer.validate(jobs.Model(), jobs.loader(8), verbose=False)
    return found[0]


def gather_tree(rank: int) -> Any:
    return lightning_distplus.gather(tree_of(rank))


def assert_gathered(found: dict[str, Any]) -> None:
    assert set(found) == set(tree_of(0))
    assert (found["logits"].dtype, found["logits"].requires_grad) == (torch.bfloat16, False)
    assert found["logits"].tolist() == [[0, 0], [0, 0], [0, 0], [2, 2]]
    (scored,) = found["scored"]
    assert type(scored).__name__ == "Scored"
    assert scored.score.tolist() == [0, 1, 2, 20]
    assert scored.label.tolist() == [[True, True]] * 4
    assert found["loss"].tolist() == [0.0, 0.5, 1.0]
    assert [part.tolist() for part in found["plain"]] == [[0, 1, 2], [0.0, 0.1, 0.2], [False, True, False]]
    assert [part.dtype for part in found["plain"]] == [torch.int64, torch.float64, torch.bool]
    assert found["wave"].tolist() == [0, 0, 0, -2j]


GATHERING = ("DDPStrategy", *jobs.STRATEGIES)


@pytest.mark.parametrize("strategy", kept(GATHERING, ["DDPStrategy", "ResilientFSDP", "ResilientDeepSpeed"]))
def test_uneven_trees_are_gathered_row_by_row_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    results = spawn(evaluate, 3, args=(strategy, str(tmp_path), gather_tree), deadline="50s").check().results
    for rank in range(3):
        assert_gathered(results[rank])


def test_without_a_process_group_the_only_rank_gets_its_own_tree_in_the_same_shapes() -> None:
    found = lightning_distplus.gather(tree_of(0))
    assert found["logits"].shape == (3, 2)
    assert found["loss"].tolist() == [0.0]
    assert found["plain"][0].tolist() == [0]
    assert lightning_distplus.gather([]) == []


def another_row(rank: int) -> Any:
    return {"a": torch.ones(2, 3 + (rank == 1)), "b": torch.ones(2)}


def another_key(rank: int) -> Any:
    return {"a": torch.ones(2), **({"extra": 1} if rank == 1 else {})}


def another_dtype(rank: int) -> Any:
    return [torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32)]


def another_length(rank: int) -> Any:
    return [torch.ones(2)] * (1 + (rank == 1))


def a_text(rank: int) -> Any:
    return {"a": torch.ones(2), "b": "text" if rank == 1 else torch.ones(1)}


REFUSALS: dict[Callable[[int], Any], tuple[str, str | None]] = {
    another_row: ("holds ['a']: float32[*, 4]", "holds ['a']: float32[*, 3]"),
    another_key: ("holds ['extra']: int64[]", "holds nothing in that place"),
    another_dtype: ("holds [0]: float64[*]", "holds [0]: float32[*]"),
    another_length: ("holds [1]: float32[*]", "holds nothing in that place"),
    a_text: ("holds ['b']: str", None),
}


def refuse(rank: int) -> list[tuple[list[int], str, dict[int, str]]]:
    """All refusals of one run: each is raised on all ranks, and they go on together."""
    seen = []
    for make_tree in REFUSALS:
        try:
            lightning_distplus.gather(make_tree(rank))
        except DivergenceError as error:
            seen.append((error.ranks, str(error), error.values))
    return seen


@pytest.mark.parametrize("strategy", ["DDPStrategy", "ResilientDDP"])
def test_what_does_not_fit_together_is_refused_on_all_ranks_with_both_sides(strategy: str, tmp_path: Path) -> None:
    results = spawn(evaluate, 3, args=(strategy, str(tmp_path), refuse), deadline="50s").check().results
    for rank in range(3):
        assert len(results[rank]) == len(REFUSALS)
        for (ranks, text, values), (odd, common) in zip(results[rank], REFUSALS.values(), strict=True):
            assert ranks == [1]
            assert values == {1: odd, **({0: common, 2: common} if common else {})}
            assert f"rank 1 {odd}" in text
            assert common is None or f"ranks 0, 2 {common}" in text


# -- what each rank has for itself reaches all ranks of a save, whatever its size --------------------------------------


def gather_twice(rank: int) -> list[list[tuple[int, bytes]]]:
    dist.init_process_group("gloo")
    values = [bytes([rank]) * size for size in (rank, 2_500_000 * (rank + 1))]
    gathered = [run_access.gather_bytes(SimpleNamespace(), "state", value) for value in values]
    dist.destroy_process_group()
    return [[(len(value), value[-1:]) for value in one] for one in gathered]


def test_states_of_any_size_reach_all_ranks_of_a_stock_strategy_over_its_store() -> None:
    results = spawn(gather_twice, 2, deadline="30s").check().results
    assert results[0] == results[1] == [[(0, b""), (1, b"\1")], [(2_500_000, b"\0"), (5_000_000, b"\1")]]


def test_state_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_access, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="state of this rank has 11 bytes; at most 10 are gathered"):
        run_access.gather_bytes(SimpleNamespace(), "state", b"." * 11)
    assert run_access.gather_bytes(SimpleNamespace(), "state", b"alone") == [b"alone"]
