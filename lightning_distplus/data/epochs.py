"""Epochs of map-style data: how many samples they have, in which order, and what becomes of a rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.data.order import ORDER_VERSION, EpochOrder
from lightning_distplus.data.plan import Geometry, Order, Uneven, num_global_batches
from lightning_distplus.data.position import Position
from lightning_distplus.data.samplers import OwnSampler
from lightning_distplus.errors import DatasetMismatch

__all__ = ["Epochs", "weights_of"]


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
