"""Orders with weights and by length: pure functions, rightly distributed, the same for every cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

from lightning_distplus import ResumableDataModule, samplers
from lightning_distplus.data.batches import EpochPlan, Geometry
from lightning_distplus.data.samplers import OwnSampler
from lightning_distplus.world import DataParallel

SIZE = 97
LENGTHS = np.random.default_rng(0).integers(1, 1000, SIZE)
WEIGHTS = np.random.default_rng(1).random(SIZE) * (np.arange(SIZE) % 5 > 0)
KINDS: dict[str, Any] = {
    "with replacement": samplers.weighted(WEIGHTS, num_samples=120),
    "without replacement": samplers.weighted(WEIGHTS, num_samples=60, replacement=False),
    "by length": samplers.by_length(LENGTHS, global_batch=12),
    "own": lambda seed, epoch: np.roll(np.arange(SIZE), seed + epoch)[:96].reshape(48, 2),
}


def own(sampler: Any, size: int = SIZE) -> OwnSampler:
    return OwnSampler(sampler, size=size, seed=0, batch_size=2)


def epoch_of(sampler: Any, *, seed: int = 3, epoch: int = 0) -> list[int]:
    return np.ravel(sampler(seed, epoch)).tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(
    cut=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (1, 4), (3, 2), (12, 1)]),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10),
    first_step=st.integers(0, 4),
)
def test_every_grid_and_every_beginning_gives_the_same_global_batches(
    kind: str, cut: tuple[int, int], seed: int, epoch: int, first_step: int
) -> None:
    sampler, (world_size, micro_batch) = KINDS[kind], cut
    accumulation = 12 // (world_size * micro_batch)
    order = own(sampler).order(seed=seed, epoch=epoch)
    steps: list[list[int]] = [[] for _ in range(5)]
    for batch in range(first_step * accumulation, 5 * accumulation):
        for rank in range(world_size):
            ranks = DataParallel(rank=rank, size=world_size)
            plan = EpochPlan(
                order=order,
                geometry=Geometry(micro_batch=micro_batch, accumulation=accumulation, ranks=ranks),
                first_batch=first_step * accumulation,
                first_position=first_step * 12,
                num_batches=5 * accumulation,
            )
            steps[batch // accumulation] += plan.ids(batch).tolist()
    expected = epoch_of(sampler, seed=seed, epoch=epoch)
    assert steps[first_step:] == [expected[12 * step : 12 * step + 12] for step in range(first_step, 5)]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_past_the_end_begin_again_at_the_first_sample(kind: str) -> None:
    expected = epoch_of(KINDS[kind])
    order = own(KINDS[kind]).order(seed=3, epoch=0)
    assert order(np.arange(len(expected) + 5)).tolist() == expected + expected[:5]


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), global_batch=st.integers(1, 120))
def test_grouping_by_length_is_a_permutation_with_neighbours_in_length(
    seed: int, epoch: int, global_batch: int
) -> None:
    indices = epoch_of(samplers.by_length(LENGTHS, global_batch=global_batch), seed=seed, epoch=epoch)
    assert sorted(indices) == list(range(SIZE))
    num_batches = SIZE // global_batch
    lengths = LENGTHS[indices[: num_batches * global_batch]].reshape(num_batches, global_batch)
    for group in range(0, num_batches, 50):
        ranges = sorted((one.min(), one.max()) for one in lengths[group : group + 50])
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_drawing_without_replacement_repeats_nothing_and_takes_no_sample_of_weight_0(seed: int, epoch: int) -> None:
    indices = epoch_of(KINDS["without replacement"], seed=seed, epoch=epoch)
    assert len(set(indices)) == len(indices) == 60
    assert all(WEIGHTS[index] > 0 for index in indices)


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_are_distributed_as_those_of_torch(replacement: bool) -> None:
    weights, draws, repeats = [0.0, 1.0, 2.0, 3.0, 10.0], 3, 4000
    ours = samplers.weighted(weights, num_samples=draws, replacement=replacement)
    torch.manual_seed(0)
    theirs = WeightedRandomSampler(weights, draws, replacement)
    found, expected = np.zeros((draws, 5)), np.zeros((draws, 5))
    for epoch in range(repeats):
        found[np.arange(draws), epoch_of(ours, epoch=epoch)] += 1
        expected[np.arange(draws), list(theirs)] += 1
    # Both are counts of the same multinomial: 5 standard deviations of their difference.
    spread = np.sqrt(found + expected) + 1e-9
    assert (np.abs(found - expected) <= 5 * spread).all()
    assert found[:, 0].sum() == 0


def test_epochs_and_seeds_differ_and_a_golden_vector_keeps_the_order_of_this_version() -> None:
    for sampler in KINDS.values():
        assert epoch_of(sampler) == epoch_of(sampler)
        assert len({tuple(epoch_of(sampler, epoch=epoch)) for epoch in range(4)}) == 4
        assert epoch_of(sampler, seed=4) != epoch_of(sampler)
    assert {kind: epoch_of(sampler)[:6] for kind, sampler in KINDS.items()} == GOLDEN


GOLDEN = {
    "with replacement": [2, 43, 84, 41, 6, 79],
    "without replacement": [69, 58, 17, 34, 84, 41],
    "by length": [4, 83, 90, 87, 79, 70],
    "own": [94, 95, 96, 0, 1, 2],
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplers.weighted([[1.0]]), r"weights has shape \(1, 1\)"),
        (lambda: samplers.weighted([1.0, -2.0]), r"weights\[1\] is -2.0"),
        (lambda: samplers.weighted([np.nan, 1.0]), r"weights\[0\] is nan"),
        (lambda: samplers.weighted([0.0, 0.0]), "not all 0"),
        (
            lambda: samplers.weighted([0.0, 1.0], num_samples=2, replacement=False),
            "1 samples have a weight above 0",
        ),
        (lambda: samplers.by_length(3, global_batch=2), r"lengths has shape \(\)"),
        (lambda: samplers.by_length([1, 2], global_batch=0), "global_batch is 0"),
        (lambda: own(samplers.weighted([1.0]), 2), "made for 1 samples; the data set has 2"),
        (lambda: own(samplers.by_length([1, 2, 3], global_batch=2), 2), "made for 3 samples; the data set has 2"),
        (lambda: own(lambda seed, epoch: [0, 2], 2), "returns indices in 0..1"),
        (lambda: own(WeightedRandomSampler([1.0], 1), 2), "is a WeightedRandomSampler"),
        (lambda: own(lambda seed, epoch: [[0, 1, 0]], 2), r"shape \(1, 3\); a row is a micro-batch of batch_size=2"),
        (
            lambda: ResumableDataModule(batch_size=2, sampler=lambda seed, epoch: [0], shuffle=False),
            "shuffle is False and sampler decides",
        ),
    ],
)
def test_impossible_sampling_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sampler_that_gives_another_number_in_another_epoch_is_refused() -> None:
    sampling = own(lambda seed, epoch: list(range(4 - epoch)), 4)
    with pytest.raises(ValueError, match=r"sampler\(0, 1\) returned 3 indices and 4 in epoch 0"):
        sampling.order(seed=0, epoch=1)
