"""The monitor's own cost: measured, agreed upon by the ranks, and kept below a share of a step's time."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

__all__ = ["Budget"]

_KEPT = 32  # measurements of a look, and lengths of steps
_SETTLED = 20  # steps, before their length is known
_PARTS = {"state": 0.5, "batch": 0.25, "everything": 0.25}


class _Measuring:
    """Notes the CPU time of this thread within it."""

    __slots__ = ("_began", "_scale", "_taken")

    def __init__(self, taken: deque[float], scale: int) -> None:
        self._taken = taken
        self._scale = scale

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._taken.append(self._scale * (time.thread_time() - self._began))


class Budget:
    """Tells how often the looks that may wait are due.

    Each rank measures what a look costs, in CPU time of its training thread, and how long a step takes. At a full
    comparison the ranks show each other these figures, and all of them plan with the largest cost and the shortest
    step. Until then, and without a share, every look is due whenever its check asks.

    Args:
        share: Of a step's time, for all looks together; None where nothing is left out.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._taken: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._began = 0.0
        self._agreed: dict[str, float] = {}
        self._factors: dict[tuple[str, float], int] = {}

    def begin_step(self) -> None:
        """A step begins; the time since the last call was that of a step."""
        now = time.perf_counter()
        if self._began:
            self._steps.append(now - self._began)
        self._began = now

    def measure(self, look: str, scale: int = 1) -> _Measuring:
        """Stands around a look.

        Args:
            look: ``"state"``, ``"batch"`` or ``"everything"``.
            scale: So many looks make the whole whose cost counts: the windows of the state.
        """
        return _Measuring(self._taken[look], scale)

    def figures(self) -> dict[str, float]:
        """What this rank has measured, in seconds; nothing as long as that is too little."""
        if len(self._steps) < _SETTLED:
            return {}
        taken = {look: statistics.median(values) for look, values in self._taken.items()}
        return {"step": statistics.median(self._steps), **taken}

    def agree(self, told: Sequence[Mapping[str, float]]) -> bool:
        """Plans with the figures of all ranks, the same on each of them; whether that could be done."""
        if self._share is None or not all(told):
            return False
        self._factors.clear()
        looks = {name for figures in told for name in figures}
        self._agreed = {look: max(figures.get(look, 0.0) for figures in told) for look in looks}
        self._agreed["step"] = min(figures["step"] for figures in told)
        return True

    def exceeds(self, look: str, times: float = 1.0) -> int:
        """By what factor a look costs more than its part of the budget; at least 1.

        Args:
            look: As in ``measure``.
            times: The look is that much rarer, or smaller, already.
        """
        if self._share is None or look not in self._agreed:
            return 1
        found = self._factors.get((look, times))
        if found is None:
            allowed_s = self._share * _PARTS[look] * self._agreed["step"]
            found = self._factors[look, times] = max(1, math.ceil(self._agreed[look] / (times * allowed_s)))
        return found
