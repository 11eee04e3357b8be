"""The loader: lazy, in order, augmentation independent of workers, and no trace in the caller's generators."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_distplus.data.batches import Request
from lightning_distplus.data.loader import SampleFetcher, SampleLoader, WorkerOptions
from lightning_distplus.data.token_datamodule import TokenFetcher


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
    fetcher = TokenFetcher([Ramp(), Ramp()], names=["a", "b"], seq_len=4, vocab_size=54)
    taken = fetcher.__getitems__(Request(np.array([[1, 10], [0, 3]]), np.arange(2), 0))
    assert taken.tokens.dtype == np.uint16, "a worker process hands over the stored type"
    batch = fetcher.finish(taken, pin_memory=False)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13], [3, 4, 5, 6]]
    assert batch["shift_labels"].tolist() == [[11, 12, 13, 14], [4, 5, 6, 7]]
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())


def test_token_outside_the_vocabulary_is_named() -> None:
    fetcher = TokenFetcher([Ramp(), Ramp()], names=["a", "b"], seq_len=4, vocab_size=53)
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
