"""The data module for any data set: map-style, or iterable with a state."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch.utilities import CombinedLoader
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lightning_distplus.data.batches import (
    EpochPlan,
    Geometry,
    Order,
    Request,
    SequentialPlan,
    Uneven,
    num_global_batches,
)
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.iterable import (
    IterableOptions,
    IterableTraining,
    Stateful,
    StreamPasses,
    StreamReader,
    StreamState,
    is_iterable,
    require_data,
)
from lightning_distplus.data.loader import SampleFetcher, WorkerOptions
from lightning_distplus.data.order import ORDER_VERSION, EpochOrder
from lightning_distplus.data.progress import data_parallel, is_overfitting
from lightning_distplus.data.samplers import OwnSampler
from lightning_distplus.data.state import Position
from lightning_distplus.errors import DatasetMismatch, refuse_unknown_arguments, require_choice
from lightning_distplus.run_access import gather_bytes
from lightning_distplus.world import DataParallel

__all__ = ["ResumableDataModule"]

# -- epochs of map-style data ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """The epochs of one data set.

    Attributes:
        dataset: Anything with ``__len__`` and ``__getitem__``.
        sampling: How an epoch draws from it; None: every sample once.
        seed: Of the order.
        shuffle: False keeps the data's own order.
        uneven: What happens to the last global batch when it is not full.
        order_version: Of the order.
    """

    dataset: Any
    sampling: OwnSampler | None
    seed: int
    shuffle: bool
    uneven: Uneven
    order_version: int = ORDER_VERSION

    @property
    def num_samples(self) -> int:
        """Samples of an epoch before it is cut into global batches."""
        return len(self.dataset) if self.sampling is None else self.sampling.num_samples

    def identity(self) -> dict[str, Any]:
        """What must be equal for the same order, beside the data's fingerprint and the seed."""
        return {
            "num_samples": len(self.dataset),
            "shuffle": self.shuffle,
            "sampling": None if self.sampling is None else self.sampling.fingerprint(),
        }

    def order(self, epoch: int) -> Order:
        """Positions of an epoch to dataset indices."""
        if self.sampling is not None:
            return self.sampling.order(seed=self.seed, epoch=epoch)
        return EpochOrder(
            num_samples=len(self.dataset),
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            version=self.order_version,
        )

    def num_global_batches(self, geometry: Geometry) -> int:
        """Optimizer steps of an epoch."""
        return num_global_batches(self.num_samples, geometry, self.uneven)

    def uneven_end(self, global_batch: int) -> str:
        """How many samples of each epoch are left out, or how many repeats fill its last global batch."""
        size = self.num_samples
        rest = size % global_batch
        if not rest:
            return ""
        if self.uneven == "pad":
            return f"; {global_batch - rest} repeats of weight 0 fill each epoch of {size} samples"
        return f"; {rest} of {size} samples are left out of each epoch"

    def require_reachable(self, position: Position, before: int) -> None:
        """Checks a position that was saved with global batches of ``before`` samples.

        Raises:
            DatasetMismatch: It lies past the end of an epoch.
        """
        if position.offset >= self.num_samples + before:
            raise DatasetMismatch(
                f"The checkpoint stands at sample {position.offset} of epoch {position.epoch}, and an epoch of this "
                f"run has {self.num_samples} samples. Resume with the data of the checkpoint, or start a new run from "
                "its weights."
            )


def weights_of(positions: NDArray[np.int64], num_samples: int, uneven: Uneven) -> NDArray[np.float32] | None:
    """With "pad": 0 for a repeat, which lies past the end of the epoch, and else 1."""
    return (positions < num_samples).astype(np.float32) if uneven == "pad" else None


_log = logging.getLogger(__name__)

_STATES = "lightning_distplus_iterable"  # in a checkpoint: the states of all ranks


class ResumableDataModule(ExactDataModule):
    """Exact resume for any data set: map-style at any position at the same cost, iterable by the state of its own.

    Epoch e visits a map-style data set in an order that is computed from (seed, e). The order is cut into global
    batches (batch size x data-parallel ranks x accumulation), these into micro-batches, these into one contiguous slice
    per data-parallel rank. A checkpoint holds the position and a fingerprint.

    An iterable data set divides itself among ranks and workers, as under a stock Trainer. A checkpoint holds the state
    of each rank after the batches of the completed steps. The Trainer's epoch ends with the data; with an integer
    ``limit_train_batches`` it has that many batches, and the data goes on in the next one.

    Override ``train_dataset()`` and ``val_dataset()`` instead of passing data sets where they are made after
    ``prepare_data``. Give a data set a method ``fingerprint() -> str`` to have changes noticed that keep its length.

    Args:
        train_dataset: Anything with ``__len__`` and ``__getitem__``; or an iterable with ``state_dict()`` and
            ``load_state_dict(state)``, among them a ``StatefulDataLoader``, nodes of ``torchdata.nodes``, and the
            ``StreamingDataLoader`` of litdata.
        val_dataset: Likewise; read in order, every sample once. An iterable needs no state. Of a dict each is read by
            itself, one after the other, and ``validation_step`` gets a ``dataloader_idx``.
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
        allow_global_batch_change: Resume with another global batch. The epoch in which it changes may leave out up to
            one global batch more.
        ignore_fingerprint: Resume although data, seed or order differ.
        start_sample: Samples that count as done where a checkpoint holds no position, as one of another data module;
            with 0 the data begins. A checkpoint with a position goes on there.
        sampler: A function (seed, epoch) -> dataset indices of the epoch, of shape (num_samples,), or of shape
            (num_batches, batch_size), whose rows are micro-batches. It must depend on its arguments alone.
            ``samplers.weighted(...)`` and ``samplers.by_length(...)`` make some.
        batched: The iterable yields batches of ``batch_size`` samples, which are passed on as they are.
        allow_stateless: Take iterable training data that has no state; a resumed run then begins it anew.
    """

    def __init__(
        self,
        train_dataset: Any = None,
        val_dataset: Any = None,
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
        allow_global_batch_change: bool = False,
        ignore_fingerprint: bool = False,
        start_sample: int | None = None,
        sampler: Callable[[int, int], Any] | None = None,
        batched: bool = False,
        allow_stateless: bool = False,
        **removed: Any,
    ) -> None:
        refuse_unknown_arguments(type(self).__name__, removed, inspect.signature(ResumableDataModule).parameters)
        super().__init__(
            micro_batch=batch_size,
            seed=seed,
            options=WorkerOptions(
                num_workers=num_workers, persistent_workers=persistent_workers, prefetch_factor=prefetch_factor
            ),
            pin_memory=pin_memory,
            allow_global_batch_change=allow_global_batch_change,
            ignore_fingerprint=ignore_fingerprint,
            start_sample=start_sample,
        )
        require_choice("uneven", uneven, Uneven)
        self._given = {"train": train_dataset, "val": val_dataset}
        self._val_batch_size = val_batch_size or batch_size
        self._shuffle = shuffle
        self._uneven = uneven
        self._collate_fn = collate_fn
        self._seed_samples = seed_samples
        if sampler is not None and not shuffle:
            raise ValueError("shuffle is False and sampler decides about the order. Leave one of them out.")
        self._sampler = sampler
        self._sampling: OwnSampler | None = None
        self._batched = batched
        self._allow_stateless = allow_stateless
        self._datasets: dict[str, Any] = {}
        self._iterable: IterableTraining | None = None
        if val_dataset is None and not self._overrides("val_dataset"):
            self._hide_validation()

    @property
    def is_iterable(self) -> bool:
        """Whether the training data can only be read from front to back."""
        return is_iterable(self._dataset("train"))

    def train_dataset(self) -> Any:
        """The training data; override this or pass it to the constructor."""
        return self._given["train"]

    def val_dataset(self) -> Any:
        """The validation data, or None; override this or pass it to the constructor."""
        return self._given["val"]

    def setup(self, stage: str) -> None:
        """Asks for the data sets anew and checks them against the batch sizes.

        Raises:
            ValueError: The Trainer would ask for other training data later.
        """
        self._datasets = {}
        if stage == "fit":
            self._refuse_other_data_later()
        super().setup(stage)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(ResumableDataModule, name)

    def _forget_validation(self) -> None:
        """Lets the next loader ask for the validation data again."""
        for stage in [one for one in {*self._datasets, *self._loaders} if one.partition("/")[0] == "val"]:
            self._datasets.pop(stage, None)
            if (loader := self._loaders.pop(stage, None)) is not None:
                loader.close()

    def _refuse_other_data_later(self) -> None:
        every = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[union-attr]
        if every and self._overrides("train_dataset"):
            raise ValueError(
                f"reload_dataloaders_every_n_epochs={every} asks for other training data in later epochs, and "
                f"{type(self).__name__}.train_dataset() is asked once in a run: a position in data that changes cannot "
                "be resumed. Leave reload_dataloaders_every_n_epochs out, or train on other data in another run."
            )

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Gathers the states of iterable data from all ranks."""
        if self._iterable is not None:
            mine = self._iterable.packed(self.position().total_batches)
            states = gather_bytes(self._joined().trainer.strategy, "state of the training data", mine)
            checkpoint[_STATES] = self._iterable.to_checkpoint(states)

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes this rank's state of iterable data.

        Raises:
            DatasetMismatch: There is none, or it was saved by another number of ranks or workers.
        """
        if self._iterable is not None:
            trainer = self._joined().trainer
            self._iterable.from_checkpoint(checkpoint.get(_STATES), trainer.global_rank, trainer.world_size)

    def _dataset(self, stage: str) -> Any:
        if stage not in self._datasets:
            dataset = self.train_dataset() if stage == "train" else self.val_dataset()
            require_data(dataset, stage)
            if stage == "train":
                self._iterable = self._read_iterable(dataset) if is_iterable(dataset) else None
                self._sampling = self._sample(dataset) if self._sampler is not None else None
            self._datasets[stage] = dataset
        return self._datasets[stage]

    def _sample(self, dataset: Any) -> OwnSampler:
        if self._iterable is not None:
            raise ValueError("sampler needs a data set with an index, and the training data is iterable.")
        sampler: Any = self._sampler
        return OwnSampler(sampler, size=len(dataset), seed=self._seed, batch_size=self._micro_batch)

    def _epochs(self) -> Epochs:
        """Of map-style training data."""
        return Epochs(
            dataset=self._dataset("train"),
            sampling=self._sampling,
            seed=self._seed,
            shuffle=self._shuffle,
            uneven=self._uneven,
            order_version=self._known_identity.get("order_version", ORDER_VERSION),
        )

    def _training_loader(self) -> Any:
        if self._iterable is None:
            return super()._training_loader()
        self._joined()
        return self._iterable.loader(self)

    def _validation_loader(self, stage: str = "val") -> Any:
        trainer: Any = self.trainer
        is_anew = trainer is not None and trainer.reload_dataloaders_every_n_epochs > 0
        if is_anew and stage == "val" and self._overrides("val_dataset"):
            self._forget_validation()
        dataset = self._dataset(stage)
        if type(dataset) is dict:
            self._datasets.update({f"{stage}/{name}": one for name, one in dataset.items()})
            return {name: self._validation_loader(f"{stage}/{name}") for name in dataset}
        if not is_iterable(dataset):
            return super()._validation_loader(stage)
        if isinstance(dataset, DataLoader | CombinedLoader):
            return dataset
        return StreamPasses(partial(self._validation_reader, dataset), options=self._worker_options())

    def _read_iterable(self, dataset: Any) -> IterableTraining:
        before, cursor = self._iterable, self._cursor
        if before is not None and before.data is dataset and cursor is not None and cursor.trainer is self.trainer:
            return before  # a Trainer that fits again goes on
        if is_overfitting(self.trainer):
            raise ValueError(
                "overfit_batches takes the same batches in every epoch, and iterable training data goes on. Overfit on "
                "a list of its first samples."
            )
        options = IterableOptions(
            batch_size=self._micro_batch,
            batched=self._batched,
            uneven=self._uneven,
            collate_fn=self._collate_fn,
            seed=self._seed if self._seed_samples else None,
            allow_stateless=self._allow_stateless,
            workers=self._worker_options(),
        )
        return IterableTraining(dataset, options, data_parallel(self.trainer), before)

    def _validation_reader(self, dataset: Any) -> StreamReader:
        return StreamReader(
            Stateful(dataset, allow_stateless=True),
            batch_size=None if self._batched else self._val_batch_size,
            collate=self._collate_fn,
            rest="pad" if self._uneven == "pad" else "keep",
            seed=self._seed,
            begin=StreamState.at_beginning(self._options.num_workers),
        )

    # -- for the loader of iterable data -------------------------------------------------------------------------------

    @property
    def is_endless(self) -> bool:
        """Whether the Trainer says how many batches an epoch has: iterable data begins anew where it ends before."""
        trainer: Any = self.trainer
        return isinstance(trainer.limit_train_batches, int)

    @property
    def num_trained(self) -> int:
        """Micro-batches that the Trainer has processed."""
        return int(self._joined().trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def begin_stream(self) -> int | None:
        """The number of the next batch to train on; None: nothing is left of the epoch.

        Called when an iteration begins, also where Lightning looks ahead before the states are restored.
        """
        cursor = self._joined()
        if self._loaded is not None:
            position = self.position()
            return None if position.is_epoch_done else position.total_batches
        if cursor.is_placed_at_end():
            return None
        epochs = cursor.trainer.fit_loop.epoch_progress.current
        if epochs.ready > epochs.processed:  # else the epoch that the batches are for has not begun yet
            cursor.begin_epoch()
        return self.num_trained

    def _end_of_data(self) -> Callable[[int], bool] | None:
        if self._iterable is None or self.is_endless:
            return None
        return self._iterable.is_end

    def _close(self) -> None:
        if self._iterable is not None and "train" in self._loaders:
            self._iterable.close(self.position().total_batches)
        super()._close()

    def _identity(self) -> dict[str, Any]:
        dataset = self._dataset("train")
        fingerprint = getattr(dataset, "fingerprint", None)
        order = {"num_samples": None, "shuffle": None, "sampling": None}
        return {
            "fingerprint": str(fingerprint())[:64] if callable(fingerprint) else None,
            "seed": self._seed,
            **(order if self._iterable is not None else self._epochs().identity()),
        }

    def _num_global_batches(self, geometry: Geometry) -> int:
        return self._epochs().num_global_batches(geometry)

    def uneven_end(self) -> str:
        """How many samples of each epoch are left out, or how many repeats fill its last global batch."""
        if self._iterable is not None or is_overfitting(self.trainer):
            return ""
        return self._epochs().uneven_end(self.geometry.global_batch)

    def _num_batches(self, geometry: Geometry) -> int | float:
        self._dataset("train")
        return math.inf if self._iterable is not None else super()._num_batches(geometry)

    def _order(self, position: Position) -> tuple[Order, int]:
        return self._epochs().order(position.epoch), position.offset

    def _requests(self, plan: EpochPlan, epoch: int) -> Iterator[Request]:
        size = self._epochs().num_samples
        for positions, ids in plan:
            yield Request(ids, positions, epoch, weights_of(positions, size, self._uneven))

    def _warn_of_cut(self, receipt: str) -> None:
        fetcher = self._fetcher("train") if self._iterable is None else None
        if fetcher is not None and fetcher.is_seeded_per_batch and self.trainer.is_global_zero:  # type: ignore[union-attr]
            _log.warning(
                "%s fetches whole batches (__getitems__), so that random numbers drawn in it depend on how batches are "
                "cut, which has changed%s. The samples and their order are those of the checkpoint; a random "
                "augmentation inside the data set is not. Keep ranks and batch size to have the same one.",
                type(fetcher.dataset).__name__,
                receipt,
            )

    def _fetcher(self, stage: str) -> SampleFetcher:
        seed = self._seed if self._seed_samples else None
        return SampleFetcher(self._dataset(stage), collate=self._collate_fn, seed=seed)

    def _validation_plan(self, ranks: DataParallel, stage: str) -> SequentialPlan | None:
        dataset = self._dataset(stage)
        if dataset is None:
            return None
        size, batch = len(dataset), self._val_batch_size
        return SequentialPlan(num_samples=size, micro_batch=batch, ranks=ranks, uneven=self._uneven)

    def _validation_request(self, plan: SequentialPlan, positions: Any) -> Request:
        size = plan.num_samples
        return Request(positions % size, positions, 0, weights_of(positions, size, self._uneven))

    def _require_reachable(self, position: Position, global_batch: int) -> None:
        if self._iterable is None:
            self._epochs().require_reachable(position, global_batch)
