"""The data module for map-style data sets."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.loader import Request, SampleFetcher, WorkerOptions
from lightning_distplus.data.lr_scaling import LrRule, LrScaling
from lightning_distplus.data.order import EpochOrder
from lightning_distplus.data.plan import EpochPlan, Geometry, Order, SequentialPlan, Uneven, num_global_batches
from lightning_distplus.data.position import Position
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

__all__ = ["ResumableDataModule"]


class ResumableDataModule(ExactDataModule):
    """Exact, position-independent resume for any map-style data set.

    Epoch e visits the data set in an order that is computed from (seed, e). The order is cut into global batches
    (batch size x data-parallel ranks x accumulation), these into micro-batches, these into one contiguous slice per
    data-parallel rank. A checkpoint holds the position and a fingerprint; resuming costs the same at any position.

    Override ``train_dataset()`` and ``val_dataset()`` instead of passing data sets where they are made after
    ``prepare_data``. Give a data set a method ``fingerprint() -> str`` to have changes noticed that keep its length.

    Args:
        train_dataset: Anything with ``__len__`` and ``__getitem__``.
        val_dataset: Likewise; read in order, every sample once.
        batch_size: Samples per data-parallel rank and micro-batch.
        val_batch_size: The same for validation; None means ``batch_size``.
        shuffle: False reads the training data in its own order.
        seed: Of the order and of the augmentation.
        num_workers: As in ``torch.utils.data.DataLoader``.
        uneven: What happens to the last global batch of an epoch when it is not full: "drop" leaves it out; "pad"
            fills it with repeats, and then every batch is the pair (batch, weights), weights being float32 of shape
            (batch_size,) with 0 for repeats; "error" refuses at setup. For validation the same words hold for the
            samples that do not divide by the number of ranks.
        collate_fn: As in ``DataLoader``.
        pin_memory: None means: when the Trainer runs on CUDA.
        persistent_workers: As in ``DataLoader``.
        prefetch_factor: As in ``DataLoader``.
        seed_samples: Seed python's, numpy's and torch's generators for each sample from (seed, epoch, position), so
            that augmentation is exact too; costs 7 microseconds per sample, and 100 per batch with ``num_workers=0``.
        scale_lr: Multiply the learning rates of ``configure_optimizers``, with their schedules, by (global batch /
            ``base_global_batch_size``), "linear", or by its square root, "sqrt"; once, also over resumes. None: never.
        base_global_batch_size: The global batch for which those learning rates were chosen.
        allow_global_batch_change: Resume with another global batch. The epoch in which it changes may leave out up to
            one global batch more.
        ignore_fingerprint: Resume although data, seed or order differ.
    """

    def __init__(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        batch_size: int,
        val_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        uneven: Uneven = "drop",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        seed_samples: bool = True,
        scale_lr: LrRule | None = None,
        base_global_batch_size: int | None = None,
        allow_global_batch_change: bool = False,
        ignore_fingerprint: bool = False,
    ) -> None:
        super().__init__(
            micro_batch=batch_size,
            seed=seed,
            options=WorkerOptions(
                num_workers=num_workers, persistent_workers=persistent_workers, prefetch_factor=prefetch_factor
            ),
            pin_memory=pin_memory,
            allow_global_batch_change=allow_global_batch_change,
            ignore_fingerprint=ignore_fingerprint,
            lr_scaling=LrScaling.of(scale_lr, base_global_batch_size),
        )
        if uneven not in ("drop", "pad", "error"):
            raise ValueError(f'uneven is {uneven!r}; it is one of "drop", "pad", "error".')
        self._given = {"train": train_dataset, "val": val_dataset}
        self._val_batch_size = val_batch_size or batch_size
        self._shuffle = shuffle
        self._uneven = uneven
        self._collate_fn = collate_fn
        self._seed_samples = seed_samples
        self._datasets: dict[str, Any] = {}
        if val_dataset is None and type(self).val_dataset is ResumableDataModule.val_dataset:
            self._hide_validation()

    def train_dataset(self) -> Any:
        """The training data; override this or pass it to the constructor."""
        return self._given["train"]

    def val_dataset(self) -> Any:
        """The validation data, or None; override this or pass it to the constructor."""
        return self._given["val"]

    def setup(self, stage: str) -> None:
        """Asks for the data sets anew and checks them against the batch sizes."""
        self._datasets = {}
        super().setup(stage)

    def _dataset(self, stage: str) -> Any:
        if stage not in self._datasets:
            dataset = self.train_dataset() if stage == "train" else self.val_dataset()
            _require_map_style(dataset, stage)
            self._datasets[stage] = dataset
        return self._datasets[stage]

    def _identity(self) -> dict[str, Any]:
        dataset = self._dataset("train")
        fingerprint = getattr(dataset, "fingerprint", None)
        return {
            "fingerprint": str(fingerprint())[:64] if callable(fingerprint) else None,
            "num_samples": len(dataset),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _num_global_batches(self, geometry: Geometry) -> int:
        return num_global_batches(len(self._dataset("train")), geometry, self._uneven)

    def _order(self, position: Position) -> tuple[Order, int]:
        size = len(self._dataset("train"))
        order = EpochOrder(num_samples=size, seed=self._seed, epoch=position.epoch, shuffle=self._shuffle)
        return order, position.offset

    def _requests(self, plan: EpochPlan, epoch: int) -> Iterator[Request]:
        size = len(self._dataset("train"))
        for positions, ids in plan:
            yield Request(ids, positions, epoch, self._weights(positions, size))

    def _fetcher(self, stage: str) -> SampleFetcher:
        seed = self._seed if self._seed_samples else None
        return SampleFetcher(self._dataset(stage), collate=self._collate_fn, seed=seed)

    def _validation_plan(self, ranks: DataParallel) -> SequentialPlan | None:
        dataset = self._dataset("val")
        if dataset is None:
            return None
        return SequentialPlan(
            num_samples=len(dataset), micro_batch=self._val_batch_size, ranks=ranks, uneven=self._uneven
        )

    def _validation_request(self, plan: SequentialPlan, positions: Any) -> Request:
        size = plan.num_samples
        return Request(positions % size, positions, 0, self._weights(positions, size))

    def _weights(self, positions: Any, num_samples: int) -> Any:
        return (positions < num_samples).astype(np.float32) if self._uneven == "pad" else None

    def _require_reachable(self, position: Position, global_batch: int) -> None:
        size = len(self._dataset("train"))
        if position.offset >= size + global_batch:
            raise DatasetMismatch(
                f"The checkpoint stands at sample {position.offset} of epoch {position.epoch}, and an epoch of this "
                f"run has {size} samples. Resume with the data of the checkpoint, or start a new run from its weights."
            )


def _require_map_style(dataset: Any, stage: str) -> None:
    if dataset is None and stage == "train":
        raise ValueError(
            "There is no training data: pass train_dataset=... to ResumableDataModule or override train_dataset()."
        )
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"The {stage} data {type(dataset).__name__} is iterable, so that no position can be reached without "
            "reading up to it. Pass a data set with __len__ and __getitem__."
        )
    if dataset is not None and not hasattr(dataset, "__len__"):
        raise ValueError(f"The {stage} data {type(dataset).__name__} has no __len__. Define it.")
