"""Weighted mixing: exact shares, no gap and no repeat, any block by itself, frozen by golden vectors."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightning_distplus.data.mixture import BLOCK, DENOMINATOR, MixedOrder, Mixture

TINYLLAMA = [0.693584, 0.306416]


def test_mixture_of_version_1_never_changes() -> None:
    mixture = Mixture(TINYLLAMA, seed=7)
    assert mixture.numerators == [2978920597, 1316046699]
    sources, draws = mixture.locate(np.arange(12))
    assert sources.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert draws.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10]
    sources, draws = mixture.locate(np.arange(10**12, 10**12 + 6))
    assert sources.tolist() == [0, 0, 0, 0, 1, 0]
    assert draws.tolist() == [
        693583999993,
        693583999994,
        693583999995,
        693583999996,
        306416000007,
        693583999997,
    ]
    ids = MixedOrder(mixture, [1000, 50], seed=7, shuffle=True, version=1)(np.arange(20_000))
    assert ids[:3].tolist() == [[0, 772], [0, 817], [0, 905]]
    assert xxhash.xxh3_64(ids.tobytes()).hexdigest() == "3384944eefc1f068"


@given(weights=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6), first_block=st.integers(0, 2**26))
def test_every_source_is_drawn_without_a_gap(weights: list[float], first_block: int) -> None:
    mixture = Mixture(weights, seed=1)
    numbers = np.arange(first_block * BLOCK, (first_block + 3) * BLOCK)
    sources, draws = mixture.locate(numbers)
    before = mixture.draws_before(first_block * BLOCK)
    after = mixture.draws_before((first_block + 3) * BLOCK)
    assert sum(before) == first_block * BLOCK
    for source, (start, end) in enumerate(zip(before, after, strict=True)):
        assert draws[sources == source].tolist() == list(range(start, end))


@pytest.mark.parametrize("weights", [TINYLLAMA, [1e-6, 0.3, 0.2, 0.5, 1e-3], [1.0] * 7])
def test_shares_are_met_to_within_two_samples_at_every_block_edge(weights: list[float]) -> None:
    mixture = Mixture(weights, seed=0)
    shares = np.array(mixture.numerators) / DENOMINATOR
    for block in (1, 2, 3, 1000, 10**6, 2**27):
        drawn = np.array(mixture.draws_before(block * BLOCK), dtype=np.float64)
        assert np.abs(drawn - shares * block * BLOCK).max() < 2


def test_a_number_does_not_depend_on_the_others_in_the_call() -> None:
    mixture = Mixture([3, 1], seed=5)
    numbers = np.random.default_rng(0).integers(0, 20 * BLOCK, 1000)
    sources, draws = mixture.locate(numbers)
    for place in range(0, 1000, 97):
        source, draw = Mixture([3, 1], seed=5).locate(numbers[place : place + 1])
        assert (source.item(), draw.item()) == (sources[place], draws[place])


def test_one_source_is_drawn_in_order() -> None:
    sources, draws = Mixture([2.5], seed=0).locate(np.arange(100, 200))
    assert not sources.any()
    assert draws.tolist() == list(range(100, 200))


def test_each_epoch_of_each_source_is_a_permutation_of_its_own() -> None:
    order = MixedOrder(Mixture([1, 1], seed=0), [500, 500], seed=0, shuffle=True)
    ids = order(np.arange(BLOCK))
    epochs = []
    for source in (0, 1):
        indices = ids[ids[:, 0] == source, 1]
        epochs += [indices[:500].tolist(), indices[500:1000].tolist()]
    assert all(sorted(epoch) == list(range(500)) for epoch in epochs)
    assert all(a != b for i, a in enumerate(epochs) for b in epochs[:i])


def test_unshuffled_sources_are_read_from_beginning_to_end() -> None:
    ids = MixedOrder(Mixture([3, 1], seed=0), [10, 7], seed=0, shuffle=False)(np.arange(100))
    for source, size in ((0, 10), (1, 7)):
        indices = ids[ids[:, 0] == source, 1]
        assert indices.tolist() == [k % size for k in range(len(indices))]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of source 1"):
        Mixture([1.0, weight], seed=0)


def test_weight_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="source 1, 1e-12 of"):
        Mixture([1.0, 1e-12], seed=0)
    with pytest.raises(ValueError, match="at least one source"):
        Mixture([], seed=0)
