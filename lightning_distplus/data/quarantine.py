"""Quarantine: samples that end every attempt are set apart; others stand in for them, and the order stays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distplus import env
from lightning_distplus.data.plan import Order
from lightning_distplus.data.request import Request

__all__ = ["Quarantine"]


class Quarantine:
    """Ids of samples that are not to be trained on again, in any epoch.

    A sample that is set apart keeps its position, and the sample of the same rank at the same place of the nearest
    micro-batch before it (else after it) stands in there, so that batches keep their shape and all others their places.
    Where batches carry weights the stand-in has weight 0; elsewhere it counts once more.
    """

    def __init__(self) -> None:
        self.ids: list[Any] = []
        """Numbers, or lists of numbers, in order; plain values, as a checkpoint holds them."""
        self._rows: NDArray[np.int64] = np.empty((0, 1), dtype=np.int64)

    @classmethod
    def of_launcher(cls) -> Quarantine:
        """What ``distplus launch --quarantine`` has set apart in this job."""
        quarantine = cls()
        quarantine.add(json.loads(env.DISTPLUS_QUARANTINE.get() or "[]"))
        return quarantine

    def add(self, ids: Iterable[Any]) -> None:
        """Sets samples apart; those of a checkpoint, say."""
        rows = sorted({tuple(one) if isinstance(one, Sequence) else (one,) for one in (*self.ids, *ids)})
        self.ids = [one[0] if len(one) == 1 else list(one) for one in rows]
        if rows:
            self._rows = np.array(rows, dtype=np.int64)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ids, of shape (num_samples,) or (num_samples, numbers per id), are set apart: (num_samples,)."""
        rows = ids.reshape(len(ids), -1)
        if not self.ids or rows.shape[1] != self._rows.shape[1]:
            return np.zeros(len(rows), dtype=np.bool_)
        found: NDArray[np.bool_] = (rows[:, None, :] == self._rows[None, :, :]).all(axis=2).any(axis=1)
        return found

    def around(self, order: Order, *, step: int, first: int, end: int) -> Order:
        """An order with stand-ins.

        Args:
            order: Positions to ids.
            step: Positions from a sample to that of the same place in the next micro-batch.
            first: The first position of the order.
            end: The position behind the last one that is asked for.

        Raises:
            ValueError: By the order: there is no sample left to stand in.
        """

        def with_stand_ins(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            ids = order(positions)
            for row in np.flatnonzero(self.holds(ids)).tolist():
                ids[row] = self._stand_in(order, int(positions[row]), step, first, end)
            return ids

        return with_stand_ins if self else order

    def _stand_in(self, order: Order, position: int, step: int, first: int, end: int) -> NDArray[np.int64]:
        for others in (range(position - step, first - 1, -step), range(position + step, end, step)):
            for other in others:
                found = order(np.array([other], dtype=np.int64))
                if not self.holds(found)[0]:
                    return np.asarray(found[0])
        raise ValueError(
            f"All samples that could stand in for the one at position {position} are in quarantine: {len(self.ids)} "
            "are. Mend the data, and start without the checkpoint's quarantine."
        )

    def weighted(self, requests: Iterator[Request], order: Order) -> Iterator[Request]:
        """The requests, whose stand-ins have weight 0 where there are weights; ``order`` has no stand-ins."""
        for request in requests:
            if request.weights is None:
                yield request
            else:
                is_apart = self.holds(order(request.positions))
                yield request._replace(weights=np.where(is_apart, np.float32(0), request.weights))
