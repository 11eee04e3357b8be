"""Iterable data sets in the styles in which people write them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from lightning_distplus.data import ResumableDataModule
from tests.distributed.resume_jobs import Augmented

EPOCH = 1000  # sample number i of pass p is p * EPOCH + i


def place() -> tuple[int, int]:
    """This reader among all readers: ranks, and the workers of each."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    info = get_worker_info()
    return (rank, size) if info is None else (rank * info.num_workers + info.id, size * info.num_workers)


class Counting(IterableDataset):
    """Numbers of a pass in a shuffled order, each with a random number; keeps its place in attributes.

    At the end it resets itself, as the examples of torchdata do.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.done = 0
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        own = self.share(*place())
        random.Random(self.passes).shuffle(own)
        while self.done < len(own):
            self.done += 1
            yield self.sample(own[self.done - 1])
        self.done = 0
        self.passes += 1

    def share(self, reader: int, num_readers: int) -> list[int]:
        return list(range(reader, self.num_samples, num_readers))

    def sample(self, number: int) -> torch.Tensor:
        return torch.tensor([float(self.passes * EPOCH + number), torch.rand(()).item() + random.random()])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "passes": self.passes, "reader": place()[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["reader"] == place()[0], "the state of another rank or worker"
        self.done, self.passes = state["done"], state["passes"]


class Lopsided(Counting):
    """Gives the first of two readers three samples, and the other the rest."""

    def share(self, reader: int, num_readers: int) -> list[int]:
        return list(range(3)) if reader == 0 else list(range(3, self.num_samples))


class Resuming(Counting):
    """The other common style: a position that only the next ``iter`` looks at; every later pass begins at 0."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.resume_at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        reader, num_readers = place()
        own = range(reader, self.num_samples, num_readers)
        begin, self.resume_at = self.resume_at, 0
        for place_in_own in range(begin, len(own)):
            self.done = place_in_own + 1
            yield self.sample(own[place_in_own])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resume_at = self.done


class Endless(Counting):
    """Has no end and no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        reader, num_readers = place()
        while True:
            self.done += 1
            yield self.sample((self.done - 1) * num_readers + reader)


def iterable_data(dataset: Any, **arguments: Any) -> ResumableDataModule:
    settings = {"batch_size": 2, "val_batch_size": 3, "seed": 3}
    return ResumableDataModule(dataset, Augmented(5), **{**settings, **arguments})


class Noise:
    """Map-style: sample i with a random number, for loaders of others."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def loader_of_torchdata(kind: str, num_workers: int = 0) -> Any:
    """A StatefulDataLoader over each kind of data that it takes."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "iterable":
        return StatefulDataLoader(Counting(19), batch_size=2, num_workers=num_workers)
    return StatefulDataLoader(Noise(19), batch_size=2, num_workers=num_workers, shuffle=kind == "shuffled")


def nodes_of_torchdata(kind: str) -> Any:
    """A pipeline of torchdata.nodes that yields samples, or batches."""
    from torch.utils.data import SequentialSampler
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper

    samples = Mapper(SamplerWrapper(SequentialSampler(range(17))), Noise(17).__getitem__)
    if kind == "samples":
        return samples
    if kind == "ahead":
        mapped = ParallelMapper(SamplerWrapper(SequentialSampler(range(17))), tensor_of, num_workers=2, method="thread")
        return Prefetcher(mapped, prefetch_factor=3)
    return Loader(Mapper(Batcher(samples, 2), torch.stack))


def tensor_of(number: int) -> torch.Tensor:
    return torch.tensor([float(number), 0.0])
