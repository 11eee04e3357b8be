"""Who is late in every step: from when each rank comes to two places that all ranks leave together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Arrivals", "Straggler"]

_LATE_SHARE = 0.9  # of the steps: noise makes now this rank late and now that one
_LEAST_WAIT_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank for which the others wait in every step; medians over the window."""

    rank: int
    wait_s: float
    """How much later it comes than its peers."""
    lead_s: float
    """The part of it between the gate and the first backward."""
    step_s: float
    """What a step takes."""


class Arrivals:
    """When each rank came, over a window of steps, to its first backward and to the gate of the next step.

    All ranks leave a gate together, and leave the sum of the gradients together. So who comes last to the first
    backward, or to the next gate, is the one for whom the others wait, whatever they wait in; a wait inside a
    collective of the forward makes all ranks equally late and names nobody. What a rank does within its backward is not
    seen.

    Args:
        share: A rank is late when its peers wait for it so much of a step, and 50 ms at least.
        size: Steps of a window; who is late in nine of ten of them is a straggler.
    """

    def __init__(self, share: float, size: int) -> None:
        self._share = share
        self._size = size
        self._steps: deque[tuple[Sequence[float], Sequence[float], float]] = deque(maxlen=size)

    def add(self, leads_s: Sequence[float], waits_s: Sequence[float], step_s: float) -> list[Straggler] | None:
        """Takes one step, and judges the window when it is full.

        Args:
            leads_s: From the gate to its first backward, of each rank.
            waits_s: How long each rank waited at the gate.
            step_s: From gate to gate, on this rank.

        Returns:
            The stragglers; None where the window is not full, or the step is not comparable.
        """
        if not math.isfinite(sum(leads_s) + sum(waits_s)):
            return None
        self._steps.append((leads_s, waits_s, step_s))
        if len(self._steps) < self._size:
            return None
        leads, waits, steps = (np.asarray(part, dtype=float) for part in zip(*self._steps, strict=True))
        self._steps.clear()
        return self._judge(_behind_peers(leads), _behind_peers(-waits), steps)

    def _judge(self, leads: np.ndarray, gates: np.ndarray, steps: np.ndarray) -> list[Straggler]:
        late = leads + gates
        limits = np.maximum(self._share * steps, _LEAST_WAIT_S)
        shares = (late >= limits[:, None]).mean(axis=0)
        return [
            Straggler(
                rank=rank,
                wait_s=float(np.median(late[:, rank])),
                lead_s=float(np.median(leads[:, rank])),
                step_s=float(np.median(steps)),
            )
            for rank in np.flatnonzero(shares >= _LATE_SHARE).tolist()
        ]


def _behind_peers(times: np.ndarray) -> np.ndarray:
    """How much later each rank comes than the median of the others, in each step; shape (steps, ranks)."""
    others = [np.median(np.delete(times, rank, axis=1), axis=1) for rank in range(times.shape[1])]
    behind: np.ndarray = times - np.stack(others, axis=1)
    return behind
