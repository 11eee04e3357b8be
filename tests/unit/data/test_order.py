"""The global order: a permutation for every size, frozen by golden vectors, random to simple tests; and mixtures.

Row R2.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightning_distplus.data.order import (
    BLOCK,
    DENOMINATOR,
    MAX_SAMPLES,
    ORDER_VERSION,
    EpochOrder,
    MixedOrder,
    Mixture,
    derive_key,
    permute,
    splitmix64,
)

GOLDEN = [
    (1, 0, [0], 0),
    (2, 1, [0, 1], 1),
    (10, derive_key(0, 0, 0), [2, 3, 6, 4, 5, 7, 1, 8], 9),
    (1000, derive_key(1, 0, 3), [477, 71, 284, 526, 983, 340, 163, 556], 197),
    (
        10**9,
        derive_key(0, 1, 0),
        [264361154, 29407192, 28464253, 279565460, 593303313, 930063916, 527730133, 949997694],
        369933094,
    ),
    (
        2**40,
        derive_key(-5, 2, 2**33),
        [
            58337993841,
            669367989701,
            395556781684,
            1034221373216,
            238756557357,
            425370411829,
            123374154910,
            145447835457,
        ],
        900237331659,
    ),
]

GOLDEN_2 = [
    (1, 0, [0], 0),
    (2, 1, [0, 1], 1),
    (10, 2558736989570252433, [5, 9, 3, 6, 1, 7, 8, 4], 0),
    (64, 15804133323032236162, [28, 19, 35, 40, 12, 39, 13, 43], 9),
]


@pytest.mark.parametrize("version", [1, 2])
def test_keys_and_orders_of_all_versions_never_change(version: int) -> None:
    assert ORDER_VERSION == 2
    assert splitmix64(0) == 16294208416658607535  # the first output of the published generator for seed 0
    assert derive_key(1, 2, 3) == 15020427595393229491
    for n, key, first, last in GOLDEN if version == 1 else [*GOLDEN_2, *(one for one in GOLDEN if one[0] > 64)]:
        assert permute(np.arange(len(first)), n, key, version).tolist() == first
        assert permute(np.array([n - 1]), n, key, version).tolist() == [last]
    whole = permute(np.arange(100_003), 100_003, derive_key(7, 0, 1))
    assert xxhash.xxh3_64(whole.tobytes()).hexdigest() == "12c4b1ed0f2cc47d"


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_size_is_permuted(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(n=st.integers(1, MAX_SAMPLES), key=st.integers(0, 2**64 - 1), start=st.integers(0, MAX_SAMPLES))
def test_a_window_anywhere_has_distinct_values_in_range(n: int, key: int, start: int) -> None:
    first = start % n
    window = np.arange(first, min(first + 500, n))
    values = permute(window, n, key)
    assert len(np.unique(values)) == len(window)
    assert values.min() >= 0
    assert values.max() < n


def test_an_index_does_not_depend_on_the_others_in_the_call() -> None:
    whole = permute(np.arange(50_000), 50_000, 9)
    assert [permute(np.array([i]), 50_000, 9).item() for i in (0, 8191, 8192, 49_999)] == whole[
        [0, 8191, 8192, 49_999]
    ].tolist()
    assert permute(np.arange(6).reshape(2, 3), 50_000, 9).tolist() == whole[:6].reshape(2, 3).tolist()


@pytest.mark.parametrize("n", [1000, 65_536, 100_003])
def test_order_passes_tests_that_a_weak_cipher_fails(n: int) -> None:
    seeds, num_bins = 60, 64
    neighbours, bins = 0, np.zeros(num_bins)
    for seed in range(seeds):
        order = permute(np.arange(n), n, derive_key(seed, 0, 0))
        neighbours += int((np.abs(np.diff(order)) == 1).sum())
        bins += np.bincount((np.diff(order) % n) * num_bins // n, minlength=num_bins)
    expected = seeds * np.bincount(np.arange(1, n) * num_bins // n)  # every difference but 0 is equally likely
    chi_squared = float(((bins - expected) ** 2 / expected).sum())
    assert abs(chi_squared - (num_bins - 1)) / np.sqrt(2 * (num_bins - 1)) < 3.5  # 4 rounds at n=1000 give 12
    assert abs(neighbours / seeds - 2) < 3.5 * np.sqrt(2 / seeds)


def test_tiny_orders_reach_every_permutation_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        order = tuple(permute(np.arange(3), 3, derive_key(seed, 0, 0)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert max(counts.values()) < 1.3 * min(counts.values())


@pytest.mark.parametrize("n", [5, 9, 16, 64])
def test_small_orders_are_uniform_in_first_pairs_and_in_parity(n: int) -> None:
    """At n = 9 the network of version 1 has no odd permutation, and favours pairs by hundreds of deviations."""
    num_orders, pairs, num_odd = 5_000, np.zeros((n, n)), 0
    for seed in range(num_orders):
        order = permute(np.arange(n), n, derive_key(seed, 0, 0))
        pairs[order[0], order[1]] += 1
        num_odd += int(np.triu(order[:, None] > order[None, :]).sum()) % 2
    assert abs(num_odd - num_orders / 2) < 4.5 * np.sqrt(num_orders) / 2
    expected, degrees = num_orders / n / (n - 1), n * (n - 1) - 1
    found = pairs[~np.eye(n, dtype=bool)]
    assert abs(float(((found - expected) ** 2).sum()) / expected - degrees) < 4.5 * np.sqrt(2 * degrees)


def test_seed_source_and_epoch_each_change_the_order() -> None:
    def order(**parts: int) -> list[int]:
        return EpochOrder(num_samples=1000, **{"seed": 0, **parts})(np.arange(1000)).tolist()

    orders = [order(), order(seed=1), order(source=1), order(epoch=1), order(seed=-1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(seed=0, epoch=1) != order(seed=1, epoch=0)


def test_unshuffled_order_is_the_identity_and_begins_again_at_its_end() -> None:
    order = EpochOrder(num_samples=5, seed=3, shuffle=False)
    assert order(np.arange(7)).tolist() == [0, 1, 2, 3, 4, 0, 1]
    shuffled = EpochOrder(num_samples=5, seed=3)(np.arange(7)).tolist()
    assert shuffled[5:] == shuffled[:2]


@pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1])
def test_impossible_size_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"not {n}"):
        permute(np.array([0]), n, 0)


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_the_order_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"Indices lie in 0\.\.9"):
        permute(np.array([index]), 10, 0)


def test_a_block_costs_at_most_100_ns_per_index() -> None:
    indices = np.random.default_rng(0).integers(0, 10**9, 4096)
    best = float("inf")
    for _ in range(50):
        begin = time.perf_counter()
        permute(indices, 10**9, 7)
        best = min(best, time.perf_counter() - begin)
    assert best / 4096 < 100e-9


# -- mixtures: exact shares, no gap, no repeat -------------------------------------------------------------------------

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
