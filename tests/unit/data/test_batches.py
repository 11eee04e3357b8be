"""Cutting the order into batches: every position once, on any number of ranks; and the loader that fetches them."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

from lightning_distplus.data.batches import (
    EpochPlan,
    Geometry,
    Quarantine,
    Request,
    SampleFetcher,
    SampleLoader,
    SequentialPlan,
    WorkerOptions,
    num_global_batches,
)
from lightning_distplus.data.order import EpochOrder, MixedOrder, Mixture
from lightning_distplus.data.token_datamodule import TokenFetcher
from lightning_distplus.world import DataParallel


def geometry(micro_batch: int, accumulation: int = 1, size: int = 1, rank: int = 0) -> Geometry:
    return Geometry(micro_batch=micro_batch, accumulation=accumulation, ranks=DataParallel(rank=rank, size=size))


def global_batches(order: Any, cut: tuple[int, int, int], num_steps: int, first_step: int) -> list[list[int]]:
    """The ids of each optimizer step from one on: micro-steps in order, ranks in order."""
    size, micro_batch, accumulation = cut
    plans = [
        EpochPlan(
            order=order,
            geometry=geometry(micro_batch, accumulation, size, rank),
            first_batch=first_step * accumulation,
            first_position=first_step * size * micro_batch * accumulation,
            num_batches=num_steps * accumulation,
        )
        for rank in range(size)
    ]
    micro_steps = [np.concatenate([ids for _, ids in step]) for step in zip(*plans, strict=True)]
    steps = [micro_steps[i : i + accumulation] for i in range(0, len(micro_steps), accumulation)]
    return [np.concatenate(step).tolist() for step in steps]


@given(
    cut=st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(1, 4)),
    num_steps=st.integers(1, 6),
    rest=st.integers(0, 200),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_any_cut_of_a_global_batch_and_any_resume_is_the_same_permutation(
    cut: tuple[int, int, int], num_steps: int, rest: int, seed: int, data: st.DataObject
) -> None:
    """Odd numbers of ranks too; ``cut`` is ranks, micro-batch, accumulation."""
    global_batch = int(np.prod(cut))
    num_samples = num_steps * global_batch + rest % global_batch
    order = EpochOrder(num_samples=num_samples, seed=seed)
    steps = global_batches(order, cut, num_steps, 0)
    assert steps == order(np.arange(num_steps * global_batch)).reshape(num_steps, global_batch).tolist()
    seen = [sample for step in steps for sample in step]
    assert len({*seen}) == len(seen) == num_samples - rest % global_batch, "disjoint over ranks, and complete"
    assert {*seen} <= {*range(num_samples)}
    first_step = data.draw(st.integers(0, num_steps))
    assert global_batches(order, cut, num_steps, first_step) == steps[first_step:]
    assert global_batches(order, (1, global_batch, 1), num_steps, first_step) == steps[first_step:]


@given(cut=st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(1, 4)), first_step=st.integers(0, 10**9))
def test_any_cut_of_a_mixture_has_the_same_steps_far_into_the_run(cut: tuple[int, int, int], first_step: int) -> None:
    order = MixedOrder(Mixture([0.7, 0.3], seed=5), [1000, 77], seed=5, shuffle=True)
    start = first_step * int(np.prod(cut))
    expected = order(np.arange(start, start + int(np.prod(cut)))).tolist()
    assert global_batches(order, cut, first_step + 1, first_step) == [expected]


def test_ids_of_one_batch_are_those_of_the_iteration() -> None:
    plan = EpochPlan(
        order=EpochOrder(num_samples=10**6, seed=0),
        geometry=geometry(8, 1, size=4, rank=2),
        first_batch=3,
        first_position=3 * 32,
        num_batches=3000,
    )
    for batch, (positions, ids) in enumerate(plan, start=3):
        if batch % 500 < 3:
            assert ids.tolist() == plan.ids(batch).tolist()
            assert positions.tolist() == list(range(batch * 32 + 16, batch * 32 + 24))


@given(
    num_samples=st.integers(1, 500),
    micro_batch=st.integers(1, 9),
    size=st.integers(1, 5),
    uneven=st.sampled_from(["drop", "pad"]),
)
def test_validation_reads_every_sample_once_with_equally_many_batches_per_rank(
    num_samples: int, micro_batch: int, size: int, uneven
) -> None:
    plans = [
        SequentialPlan(
            num_samples=num_samples,
            micro_batch=micro_batch,
            ranks=DataParallel(rank=rank, size=size),
            uneven=uneven,
        )
        for rank in range(size)
    ]
    batches = [list(plan) for plan in plans]
    assert {len(one) for one in batches} == {len(plans[0])}
    positions = np.sort(np.concatenate([np.zeros(0, np.int64), *[p for one in batches for p in one]]))
    rest = num_samples % size
    expected = num_samples - rest if uneven == "drop" else num_samples + (size - rest if rest else 0)
    assert positions.tolist() == list(range(expected))
    assert all(0 < len(p) <= micro_batch for one in batches for p in one)


def test_uneven_end_is_dropped_padded_or_refused() -> None:
    cut = geometry(4, accumulation=2, size=3)
    assert num_global_batches(100, cut, "drop") == 4
    assert num_global_batches(100, cut, "pad") == 5
    assert num_global_batches(96, cut, "pad") == 4
    assert num_global_batches(96, cut, "error") == 4
    with pytest.raises(ValueError, match=r"100 samples are 4 global batches of 24 .* and 4 samples more"):
        num_global_batches(100, cut, "error")
    with pytest.raises(ValueError, match="23 samples, fewer than one global batch of 24"):
        num_global_batches(23, cut, "drop")
    with pytest.raises(ValueError, match=r"10 validation samples do not divide by 3 .*\(1 remain\)"):
        SequentialPlan(num_samples=10, micro_batch=2, ranks=DataParallel(size=3), uneven="error")


# -- samples set apart -------------------------------------------------------------------------------------------------

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


def test_the_first_micro_batch_stands_in_for_the_second() -> None:
    before = ORDER(PLACES)
    assert apart(int(before[8])).around(ORDER, step=8, first=0, end=24)(PLACES)[8] == before[0]


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


# -- the loader --------------------------------------------------------------------------------------------------------


class Augmented:
    """Each sample is its index and three random numbers."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class AugmentedBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Ramp:
    num_samples = 50
    dtype = np.uint16

    def gather(self, indices: np.ndarray) -> np.ndarray:
        return (indices[:, None] + np.arange(5)).astype(np.uint16)

    def fingerprint(self) -> str:
        return "0" * 16


class Unreadable(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(index)


@pytest.fixture
def _worker_handler() -> Iterator[None]:
    """torch sets a handler for SIGCHLD with its first worker, and never takes it back."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def requests(first: int = 0, size: int = 3, weights: bool = False) -> list[Request]:
    weight = np.array([1, 1, 0], dtype=np.float32) if weights else None
    positions = [np.arange(start, start + size) for start in range(first, 24, size)]
    return [Request((7 * p) % 100, p, 2, weight) for p in positions]


def loader(plan: Any, dataset: Any = None, *, workers: int = 0, seed: int | None = 5, **options: Any) -> SampleLoader:
    return SampleLoader(
        SampleFetcher(dataset or Augmented(), collate=None, seed=seed),
        plan=lambda: plan,
        num_batches=lambda: len(plan),
        options=WorkerOptions(num_workers=workers, **options),
    )


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_nothing_happens_before_the_first_next() -> None:
    asked = []

    def plan() -> Iterator[Request]:
        asked.append(True)
        return iter(requests())

    lazy = SampleLoader(
        SampleFetcher(Augmented(), collate=None, seed=0),
        plan=plan,
        num_batches=lambda: 8,
        options=WorkerOptions(),
    )
    iterator = iter(lazy)
    assert not asked
    next(iterator)
    assert asked
    assert len(lazy) == 8


def test_lightning_finds_neither_a_dataloader_nor_a_state() -> None:
    plain = loader(requests())
    assert not isinstance(plain, DataLoader)
    assert not hasattr(plain, "load_state_dict")


@pytest.mark.usefixtures("_worker_handler")
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 1}])
def test_augmentation_does_not_depend_on_workers(options: dict[str, Any]) -> None:
    alone = torch.cat(list(loader(requests())))
    assert alone[:, 0].tolist() == [(7 * p) % 100 for p in range(24)]
    assert len(torch.unique(alone[:, 1:])) == 72
    with_workers = loader(requests(), workers=2, **options)
    for _ in range(2):
        assert torch.equal(torch.cat(list(with_workers)), alone)
    with_workers.close()


def test_augmentation_does_not_depend_on_where_iteration_begins_or_how_it_is_cut() -> None:
    whole = torch.cat(list(loader(requests())))
    assert torch.equal(torch.cat(list(loader(requests(first=12)))), whole[12:])
    assert torch.equal(torch.cat(list(loader(requests(size=8)))), whole)


@pytest.mark.usefixtures("_worker_handler")
def test_dataset_that_fetches_whole_batches_is_seeded_per_batch() -> None:
    alone = torch.cat(list(loader(requests(), AugmentedBatches())))
    again = torch.cat(list(loader(requests(first=12), AugmentedBatches(), workers=1)))
    assert torch.equal(again, alone[12:])


@pytest.mark.usefixtures("_worker_handler")
@pytest.mark.parametrize("workers", [0, 1])
def test_callers_generators_are_left_as_they_were(workers: int) -> None:
    before = generators()
    for _ in loader(requests(), workers=workers):
        assert generators() == before
    assert generators() == before


def test_generators_are_put_back_when_a_sample_cannot_be_read() -> None:
    broken = loader([Request(np.array([3]), np.array([0]), 0)], Unreadable())
    before = generators()
    with pytest.raises(KeyError):
        next(iter(broken))
    assert generators() == before


def test_unseeded_samples_draw_from_the_callers_generators() -> None:
    torch.manual_seed(1)
    expected = torch.rand(()).item()
    torch.manual_seed(1)
    first = next(iter(loader(requests(), seed=None)))
    assert first[0, 3].item() == expected


def test_weights_come_with_the_batch() -> None:
    batch, weights = next(iter(loader(requests(weights=True))))
    assert batch.shape == (3, 4)
    assert weights.tolist() == [1.0, 1.0, 0.0]


def test_token_batch_is_shifted_by_one_token() -> None:
    fetcher = TokenFetcher(sources=[Ramp(), Ramp()], names=["a", "b"], seq_len=4, vocab_size=54)
    taken = fetcher.__getitems__(Request(np.array([[1, 10], [0, 3]]), np.arange(2), 0))
    assert taken.tokens.dtype == np.uint16, "a worker process hands over the stored type"
    batch = fetcher.finish(taken, pin_memory=False)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13], [3, 4, 5, 6]]
    assert batch["shift_labels"].tolist() == [[11, 12, 13, 14], [4, 5, 6, 7]]
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())


def test_token_outside_the_vocabulary_is_named() -> None:
    fetcher = TokenFetcher(sources=[Ramp(), Ramp()], names=["a", "b"], seq_len=4, vocab_size=53)
    with pytest.raises(ValueError, match=r"Source a holds the token id 53 \(sample 49\), and vocab_size is 53"):
        fetcher.check_vocabulary()
    with pytest.raises(ValueError, match=r"Source b .* \(sample 49\)"):
        fetcher.__getitems__(Request(np.array([[0, 1], [1, 49]]), np.arange(2), 0))


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + index


def test_augmentation_under_a_subset_does_not_depend_on_the_cut() -> None:
    """Row R14: a Subset has ``__getitems__``, which torch calls with a whole batch."""
    half, _ = torch.utils.data.random_split(Subset(Noisy(), range(10)), [6, 4], torch.Generator().manual_seed(0))
    fetcher = SampleFetcher(half, collate=None, seed=3)
    whole = fetcher.__getitems__(Request(np.arange(6), np.arange(6), 0))
    parts = [fetcher.__getitems__(Request(np.arange(a, a + 2), np.arange(a, a + 2), 0)) for a in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    assert not fetcher.is_seeded_per_batch
