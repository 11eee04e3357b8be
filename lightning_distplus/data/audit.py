"""The callback that writes down which samples really went through ``training_step``."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray

from lightning_distplus.control import connected
from lightning_distplus.data.audit_records import AuditWriter, SampleSum
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.request import Request
from lightning_distplus.errors import DatasetMismatch

__all__ = ["SampleAudit"]

_VERSION = 1
_DEADLINE = timedelta(seconds=60)  # of the exchange of the sums in a save
_MODULUS = 1 << 64


class SampleAudit(Callback):
    """Writes the ids of each micro-batch that went through ``training_step``; ``distplus audit`` reads them.

    By itself it knows what the data set was asked for: one that returns another sample passes. Where the batch carries
    the ids, name their place by ``ids``; then they are recorded too, and compared. The report says which it has.

    A checkpoint holds the sum of a hash of every sample of its completed steps, over all ranks: ``distplus audit``
    compares it with what the runs before it have written. In a save the ranks exchange their sums, over the control
    plane under a Resilient strategy, otherwise over the default group. List it before callbacks of your own that save;
    Lightning puts a ModelCheckpoint last by itself.

    Args:
        folder: For the records; None means ``<default_root_dir>/distplus/audit``. All runs of a job have the same.
        ids: Where a batch carries the index with which the data set was asked for each sample: a key of a dict, or a
            place in a tuple. Integers of shape (num_samples,), or (num_samples, 2) for source and index. Reading them
            from a GPU waits for it.
    """

    def __init__(self, folder: str | None = None, *, ids: str | int | None = None) -> None:
        self._folder = folder
        self._place_of_ids = ids
        self._writer: AuditWriter | None = None
        self._data: ExactDataModule | None = None
        self._loaded: dict[str, Any] | None = None
        self._request: Request | None = None
        self._step = 0
        self._is_stream = False
        self._is_counted = True  # tensor-parallel peers get the same samples: the first of them counts
        # Of the steps that are done, and of the one that is not, on this rank; the loaded part counts on rank 0 alone.
        self._done = SampleSum()
        self._window: list[tuple[int, Request]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens this run's file."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, ExactDataModule):
            raise ValueError(
                f"SampleAudit knows the samples of ResumableDataModule and TokenDataModule, not of "
                f"{type(data).__name__}. Fit with one of them, or leave SampleAudit out."
            )
        if data.is_iterable:
            raise ValueError(
                "SampleAudit writes the ids of samples, and those of iterable training data have none. Leave it out."
            )
        if vars(trainer)["overfit_batches"] > 0:  # an attribute that Lightning sets unannounced
            raise ValueError(
                "overfit_batches repeats samples on purpose, and SampleAudit would name each. Leave it out."
            )
        self._data, self._step = data, trainer.global_step
        loaded, self._loaded = self._loaded, None
        is_first = trainer.is_global_zero
        self._done = SampleSum(int(loaded["sum"], 16), loaded["num_samples"]) if loaded and is_first else SampleSum()
        self._window = []
        position, geometry = data.position(), data.geometry
        self._is_counted = trainer.global_rank % (trainer.world_size // geometry.ranks.size) == 0
        self._is_stream = "sources" in data.identity
        facts = {
            "version": _VERSION,
            "ids": "asked for" if self._place_of_ids is None else "arrived",
            "world_size": trainer.world_size,
            "data_parallel": [geometry.ranks.rank, geometry.ranks.size],
            "first_step": trainer.global_step,
            "first": [0, position.consumed_samples] if self._is_stream else [position.epoch, position.offset],
            "epoch_samples": int(trainer.num_training_batches) * geometry.micro_step,
            "identity": data.identity,
            "quarantine": data.quarantine.ids,
            "loaded": loaded,
        }
        folder = self._folder or Path(trainer.default_root_dir) / "distplus" / "audit"
        run = trainer.strategy.broadcast(f"{time.time_ns():020d}")
        self._writer = AuditWriter(folder, run, trainer.global_rank, facts)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes the samples for the sum."""
        assert self._data is not None
        if (step := trainer.global_step) != self._step:
            self._done.add(self._window)
            self._window, self._step = [], step
        request = self._request = self._data.delivered
        assert request is not None, "a batch was delivered"
        if self._place_of_ids is not None:
            arrived = self._arrived(batch, has_weights=request.weights is not None)
            request = self._request = request._replace(ids=_side_by_side(request.ids, arrived))
        if self._is_counted:
            self._window.append((self._epoch(request), request))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the record."""
        assert self._writer is not None
        request = self._request
        assert request is not None, "on_train_batch_start has run"
        self._writer.write(self._epoch(request), self._step, request.positions, request.ids)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that the run ended by itself."""
        if self._writer is not None:
            self._writer.end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """The sum over all ranks of all completed steps."""
        if self._data is None:
            return dict(self._loaded or {})
        if self._data.position().steps > self._step:
            self._done.add(self._window)
            self._window = []
        sums, counts = zip(*_from_all_ranks(list(self._done.value())), strict=True)
        return {"version": _VERSION, "sum": f"{sum(sums) % _MODULUS:016x}", "num_samples": sum(counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the sum of a checkpoint over.

        Raises:
            DatasetMismatch: It is of a version that this package does not know.
        """
        if state_dict and state_dict.get("version") != _VERSION:
            raise DatasetMismatch(
                f"The checkpoint's SampleAudit has version {state_dict.get('version')!r}; this lightning_distplus "
                f"reads {_VERSION}. Resume with the version that wrote it, or without SampleAudit."
            )
        self._loaded = dict(state_dict) or None

    def _arrived(self, batch: Any, *, has_weights: bool) -> NDArray[np.int64]:
        """The ids in a batch: int64 of shape (num_samples, numbers per id)."""
        carrier, place = batch[0] if has_weights else batch, self._place_of_ids
        try:
            found = torch.as_tensor(carrier[place])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            what = f"the keys {sorted(map(str, carrier))}" if isinstance(carrier, dict) else type(carrier).__name__
            raise ValueError(
                f"SampleAudit(ids={place!r}): the batch carries no ids there, it is {what} ({error}). Name the key of "
                "a dict or the place in a tuple that holds the index of each sample, or leave ids out."
            ) from error
        ids: NDArray[np.int64] = found.detach().cpu().numpy().astype(np.int64)
        return ids.reshape(len(ids), -1) if ids.ndim else ids.reshape(1, 1)

    def _epoch(self, request: Request) -> int:
        """Positions of a stream count over all epochs."""
        return 0 if self._is_stream else request.epoch


def _side_by_side(asked: NDArray[np.int64], arrived: NDArray[np.int64]) -> NDArray[np.int64]:
    """What was asked for and what arrived, in a row of twice the numbers per id; -1 where nothing arrived."""
    asked = asked.reshape(len(asked), -1)
    rows, width = np.full_like(asked, -1), min(asked.shape[1], arrived.shape[1])
    rows[: len(arrived), :width] = arrived[: len(asked), :width]
    return np.concatenate([asked, rows], axis=1)


def _from_all_ranks(mine: list[int]) -> list[list[int]]:
    plane = connected()
    if plane is not None:
        return [json.loads(one) for one in plane.gather("sample-audit", json.dumps(mine).encode(), _DEADLINE)]
    if not dist.is_available() or not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
