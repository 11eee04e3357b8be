"""The staged copy: values of its moment, in the memory of the copy before it. What a ModelCheckpoint knows."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus.errors import SaveFailed
from lightning_distplus.strategies.saving import FailingSaves, Staging


def staged(staging: Staging, *states: Any) -> list[Any]:
    staging.begin()
    copies = [staging.copy(state, place) for place, state in enumerate(states)]
    staging.end()
    return copies


def test_a_copy_lies_in_the_memory_of_the_one_before_and_holds_what_is_now() -> None:
    staging, weight = Staging(None), torch.zeros(4, 3)
    (first,) = staged(staging, {"state": {"weight": weight}, "lr": [0.1]})
    weight += 1
    assert first["state"]["weight"].tolist() == [[0.0] * 3] * 4
    # A state that is gathered anew for each save is at the same place, and another tensor.
    (second,) = staged(staging, {"state": {"weight": weight.clone()}, "lr": [0.2]})
    assert second["state"]["weight"].tolist() == [[1.0] * 3] * 4
    assert second["state"]["weight"].data_ptr() == first["state"]["weight"].data_ptr()
    assert (first["lr"], second["lr"]) == ([0.1], [0.2])


def test_states_of_one_save_do_not_share_memory_and_what_is_not_saved_any_more_is_freed() -> None:
    staging, weight = Staging(None), torch.ones(3)
    mine, yours = staged(staging, [weight], [weight * 2])
    assert (mine[0].tolist(), yours[0].tolist()) == ([1.0] * 3, [2.0] * 3)
    assert len(staging._kept) == 2
    staged(staging, [weight])
    assert len(staging._kept) == 1
    (other,) = staged(staging, [torch.ones(5, dtype=torch.int64)])
    assert (other[0].shape, other[0].dtype, len(staging._kept)) == ((5,), torch.int64, 1)


def test_types_attributes_strides_ties_and_values_that_are_no_tensors_are_kept() -> None:
    state = OrderedDict(a=torch.arange(6.0).view(2, 3).t(), step=torch.tensor(3.0), none=None, size=torch.Size([2]))
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    state["tied"], state["empty"], state["books"] = state["a"], torch.empty(0, 3), {"best": {1, 2}}
    state["weight"] = torch.nn.Parameter(torch.ones(2))
    ((copy, as_list),) = [tuple(staged(Staging(None), state, (1, [2.0])))]
    assert type(copy) is OrderedDict
    assert copy._metadata == {"version": 1}
    assert copy["a"].stride() == state["a"].stride()
    assert copy["tied"] is copy["a"]
    assert all(torch.equal(copy[key], state[key]) for key in ("a", "step", "empty", "weight"))
    assert not copy["weight"].requires_grad
    assert (copy["none"], copy["size"], copy["books"], as_list) == (None, torch.Size([2]), {"best": {1, 2}}, (1, [2.0]))
    assert copy["books"]["best"] is not state["books"]["best"]


def test_a_part_of_a_buffer_is_copied_without_the_rest_and_found_by_what_it_is_a_copy_of() -> None:
    staging, buffer = Staging(None), torch.arange(1000.0)
    ((copy,),) = staged(staging, [buffer[10:20]])
    assert copy.untyped_storage().nbytes() == 40
    assert staging.copy_of(buffer[10:20]) is copy
    assert staging.copy_of(buffer[10:21]) is None
    staging.begin()
    assert staging.copy_of(buffer[10:20]) is None


def test_a_tensor_in_memory_that_another_one_of_the_save_has_left_is_copied_anew() -> None:
    staging, addresses, buffer = Staging(None), [], torch.empty(3)
    staging.begin()
    assert [staging.copy(buffer.fill_(number), ("buffer", number))[0] for number in range(2)] == [0, 1]
    for number in range(20):
        gathered = torch.full((1000,), float(number))  # for this state alone, as engines gather them
        addresses.append(gathered.data_ptr())
        assert staging.copy([gathered], number)[0][0] == number
        del gathered
    assert len(set(addresses)) < len(addresses), "no memory was used again"


def test_who_has_entered_a_save_that_fails_knows_what_it_knew_before_and_others_are_left_alone() -> None:
    best, other = ModelCheckpoint(monitor="x", mode="max", save_top_k=2), ModelCheckpoint(save_last=True)
    failing = FailingSaves("continue")
    failing.begin(SimpleNamespace(checkpoint_callbacks=[best, other]))  # type: ignore[arg-type]
    for score, models in ((1.0, "1"), (2.0, "12"), (3.0, "23")):  # which lets 1 go before 3 is saved
        best.best_k_models = {path: torch.tensor(float(path)) for path in models}
        best.best_model_path, best.kth_best_model_path = models[-1], models[0]
        best.best_model_score, best.kth_value = torch.tensor(score), torch.tensor(float(models[0]))
        if score < 3:
            failing.succeeded()
    other.last_model_path = "of its own"
    assert not failing.is_in_books("1")
    failing.failed("3", SaveFailed("No space left", [1]))
    assert list(best.best_k_models) == ["1", "2"]
    assert (best.best_model_path, best.kth_best_model_path, best.best_model_score, best.kth_value) == ("2", "1", 2, 1)
    assert other.last_model_path == "of its own"
    assert [failing.is_in_books(path) for path in ("1", "2", "3")] == [True, True, False]
    with pytest.raises(SaveFailed, match=r"1 saves failed in this run.*No space left"):
        failing.require_saved()
    failing.succeeded()
    failing.require_saved()
