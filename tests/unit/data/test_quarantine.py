from __future__ import annotations

import numpy as np
import pytest

from lightning_distplus.data.order import EpochOrder
from lightning_distplus.data.quarantine import Quarantine
from lightning_distplus.data.request import Request

ORDER = EpochOrder(num_samples=24, seed=3)
PLACES = np.arange(24, dtype=np.int64)


def apart(*ids: object) -> Quarantine:
    quarantine = Quarantine()
    quarantine.add(ids)
    return quarantine


def test_all_others_keep_their_places_and_none_that_is_set_apart_is_left() -> None:
    before = ORDER(PLACES)
    quarantine = apart(*before[4:8].tolist(), int(before[0]))
    after = quarantine.around(ORDER, step=8, first=0, end=24)(PLACES)
    is_apart = np.isin(before, quarantine.ids)
    assert (after[~is_apart] == before[~is_apart]).all()
    assert not quarantine.holds(after).any()
    assert (after[4:8] == before[12:16]).all()  # nothing stands before the first micro-batch
    assert after[0] == before[8]


def test_without_anything_apart_the_order_is_that_of_before() -> None:
    assert apart().around(ORDER, step=8, first=0, end=24) is ORDER


def test_ids_of_several_numbers_are_compared_as_a_whole() -> None:
    quarantine = apart([1, 5], (0, 7))
    assert quarantine.ids == [[0, 7], [1, 5]]
    assert quarantine.holds(np.array([[1, 5], [5, 1], [0, 7], [0, 5]])).tolist() == [True, False, True, False]
    assert not quarantine.holds(np.array([1, 5])).any()


def test_stand_ins_have_weight_0_where_there_are_weights() -> None:
    quarantine = apart(int(ORDER(PLACES)[1]))
    requests = [Request(ORDER(PLACES[:4]), PLACES[:4], 0, weights) for weights in (None, np.ones(4, dtype=np.float32))]
    without, with_weights = quarantine.weighted(iter(requests), ORDER)
    assert without.weights is None
    assert with_weights.weights is not None
    assert with_weights.weights.tolist() == [1, 0, 1, 1]


def test_nobody_left_to_stand_in_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="are in quarantine: 24 are"):
        apart(*range(24)).around(ORDER, step=8, first=0, end=24)(PLACES)
