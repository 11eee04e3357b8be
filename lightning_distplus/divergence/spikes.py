"""A value of one rank that stands out from those of its peers and from its own past."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Outlier", "Window"]

_SIZE = 64  # steps of which all values are kept
_PEAKS = 256  # steps of which the largest value is kept
_LEAST = 32  # steps before anything is judged
_LEAST_Z = 6.0
_MAD_TO_SIGMA = 1.4826  # for a normal distribution
_LEAST_SIGMA = 0.05  # of the median: values that hardly vary are no reason for an alarm


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One rank's value that stands out."""

    rank: int
    value: float
    usual: float
    """The median of this rank's values in the window."""
    z: float
    """The robust z-score, (value - median) / (1.4826 MAD): the smaller one of that against its own values, and that of
    its distance to the median of the other ranks."""


class Window:
    """The last 64 values of one quantity on each rank.

    A value stands out when its robust z-score is at least 6, against this rank's own window and, as its distance to the
    other ranks in the same step, against the window of such distances; and when it is several times as large as
    anything that any rank had in the last 256 steps. So what all ranks do together is no outlier, nor a rare kind of
    batch that has been seen. Where nothing is negative, scores are taken on the scale of asinh, the logarithm above a
    tenth of the median, because losses and norms of gradients have long tails upwards.

    Args:
        least_ratio: How many times as large. Three for a loss; ten for a norm of gradients, as Megatron's check has it:
            a normalisation over few samples makes it six times as large now and then.
    """

    def __init__(self, least_ratio: float = 3.0) -> None:
        self._least_ratio = least_ratio
        self._steps: deque[tuple[float, ...]] = deque(maxlen=_SIZE)
        self._peaks: deque[float] = deque(maxlen=_PEAKS)
        self._top = 0.0
        """The largest of them."""

    def judge(self, values: Sequence[float]) -> list[Outlier]:
        """Compares one step's value of each rank with the window, then keeps it there.

        A step in which some value is not finite is neither judged nor kept.
        """
        if not math.isfinite(sum(values)):
            return []
        largest = max(values)
        is_new = len(self._steps) >= _LEAST and largest > self._least_ratio * self._top
        found = self._outliers(np.asarray(values)) if is_new else []
        self._steps.append(tuple(values))
        self._keep_peak(max(largest, -min(values)))
        return found

    def _keep_peak(self, peak: float) -> None:
        leaves = self._peaks[0] if len(self._peaks) == _PEAKS else -math.inf
        self._peaks.append(peak)
        self._top = max(self._peaks) if leaves == self._top else max(self._top, peak)

    def _outliers(self, values: np.ndarray) -> list[Outlier]:
        held = np.asarray(self._steps)  # (steps, ranks)
        middle = float(np.median(np.abs(held)))
        if not middle:
            return []
        past, now = held / middle, values / middle
        if held.min() >= 0:
            past, now = np.arcsinh(10 * past), np.arcsinh(10 * now)
        found = []
        for rank in np.flatnonzero(values > self._least_ratio * self._top).tolist():
            z = _z(past[:, rank], now[rank])
            if len(values) > 1:
                others = np.delete(past, rank, axis=1), np.delete(now, rank)
                z = min(z, _z(past[:, rank] - np.median(others[0], axis=1), now[rank] - np.median(others[1])))
            if z >= _LEAST_Z:
                usual = float(np.median(held[:, rank]))
                found.append(Outlier(rank=rank, value=float(values[rank]), usual=usual, z=z))
        return found


def _z(past: np.ndarray, now: float) -> float:
    middle = np.median(past)
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(past - middle)))
    return float((now - middle) / max(sigma, _LEAST_SIGMA))
