"""What a loader is asked for: one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Request"]


class Request(NamedTuple):
    """One micro-batch to fetch.

    Attributes:
        ids: What the data set is asked for, one row per sample.
        positions: The samples' places in the epoch's global order.
        epoch: The epoch of that order.
        weights: float32 of shape (num_samples,), 0 for a repeat; None where the batch carries no weights.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    epoch: int
    weights: NDArray[np.float32] | None = None
