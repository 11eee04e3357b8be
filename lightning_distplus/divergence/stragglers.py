"""A rank for which all others wait in every step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.check import Check, GateMonitor
from lightning_distplus.process import HostLoad

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

_LATE_SHARE = 0.9  # of the steps: noise makes now this rank late and now that one
_LEAST_WAIT_S = 0.045  # of 50 ms more, a little is lost to what the others take longer
_SHORT_S = 1e-3  # of a part that takes less, no multiple is told
_PARTS = {"data": "data fetch", "forward": "forward", "optimizer": "optimizer"}
"""What a rank does alone in a step, where its strategy measures it; in the backward it may wait for others."""


class Straggler(NamedTuple):
    """A rank for which the others wait in every step; medians over the window."""

    rank: int
    wait_s: float
    """How much later it comes than its peers."""
    lead_s: float
    """The part of it between the gate and the first backward."""
    step_s: float
    """What a step takes."""
    part: str = ""
    """The one of ``_PARTS`` that is longer than on the others; empty where none explains it."""
    part_s: float = 0.0
    others_s: float = 0.0
    """The median of its peers for that part."""

    def describe_part(self) -> str:
        """For example ``data fetch 2.1x the median``."""
        if not self.part:
            return ""
        if self.others_s < _SHORT_S:
            return f"{_PARTS[self.part]} {1e3 * (self.part_s - self.others_s):.0f} ms above the median"
        return f"{_PARTS[self.part]} {self.part_s / self.others_s:.1f}x the median"


class Arrivals:
    """When each rank came to its first backward and to the gate of the next step, over windows that overlap by half.

    All ranks leave a gate together, and leave the sum of the gradients together. So who comes last to the first
    backward, or to the next gate, is the one for whom the others wait, whatever they wait in; a wait inside a
    collective of the forward makes all ranks equally late and names nobody. What a rank does within its backward is not
    seen.

    Args:
        share: A rank is late when its peers wait for it so much of a step, and 45 ms at least.
        size: Steps of a window; who is late in nine of ten of them is a straggler.
    """

    def __init__(self, share: float, size: int) -> None:
        self._share = share
        self._size = size
        self._steps: list[tuple[Any, ...]] = []

    def add(
        self, leads_s: Sequence[float], waits_s: Sequence[float], step_s: float, parts_s: Sequence[Sequence[float]] = ()
    ) -> list[Straggler] | None:
        """Takes one step, and judges the window when it is full.

        Args:
            leads_s: From the gate to its first backward, of each rank.
            waits_s: How long each rank waited at the gate.
            step_s: From gate to gate, on this rank.
            parts_s: Of each rank, what each part of a step took; empty where nobody measures it.

        Returns:
            The stragglers; None where the window is not full, or the step is not comparable.
        """
        if not math.isfinite(sum(leads_s) + sum(waits_s)):
            return None
        # No rank is later than this; where that is too little in too many steps, nobody is a straggler.
        latest_s = (max(leads_s) - min(leads_s)) + (max(waits_s) - min(waits_s))
        may_be_late = latest_s >= max(self._share * step_s, _LEAST_WAIT_S)
        self._steps.append((leads_s, waits_s, parts_s, step_s, may_be_late))
        if len(self._steps) < self._size:
            return None
        found = self._judge() if sum(step[-1] for step in self._steps) / self._size >= _LATE_SHARE else []
        # Windows overlap: who becomes slow within one is named at the next.
        del self._steps[: math.ceil(self._size / 2)]
        return found

    def _judge(self) -> list[Straggler]:
        leads, waits, parts, steps, _ = (np.asarray(part, dtype=float) for part in zip(*self._steps, strict=True))
        leads = _behind_peers(leads)
        late = leads + _behind_peers(-waits)
        limits = np.maximum(self._share * steps, _LEAST_WAIT_S)
        shares = (late >= limits[:, None]).mean(axis=0)
        return [
            Straggler(
                rank=rank,
                wait_s=float(np.median(late[:, rank])),
                lead_s=float(np.median(leads[:, rank])),
                step_s=float(np.median(steps)),
                **_longest_part(parts, rank, float(np.median(late[:, rank]))),
            )
            for rank in np.flatnonzero(shares >= _LATE_SHARE).tolist()
        ]


def _behind_peers(times: np.ndarray) -> np.ndarray:
    """How much later each rank comes than the median of the others, in each step; shape (steps, ranks)."""
    others = [np.median(np.delete(times, rank, axis=1), axis=1) for rank in range(times.shape[1])]
    behind: np.ndarray = times - np.stack(others, axis=1)
    return behind


def _longest_part(parts: np.ndarray, rank: int, wait_s: float) -> dict[str, Any]:
    """The part that makes a rank late, where one does; ``parts`` has the shape (steps, ranks, ``_PARTS``)."""
    if parts.ndim != 3:
        return {}
    own = np.median(parts, axis=0)
    others = np.median(np.delete(own, rank, axis=0), axis=0)
    longest = int(np.argmax(own[rank] - others))
    if own[rank, longest] - others[longest] < wait_s / 2:
        return {}
    return {"part": list(_PARTS)[longest], "part_s": float(own[rank, longest]), "others_s": float(others[longest])}


# -- the callback and its check ----------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
OnStraggler = Literal["warn", "note", "ignore"]
_SHARE = 0.2
_NUM_STEPS = 32
_QUIET_STEPS = 1024  # before the same rank is named again
_LARGEST_S = 6e4  # that a record holds
_BEFORE = "in training_step, before the backward"
_AFTER = "between its backward and the next training_step: the optimizer, callbacks, logging, the next batch"
_TIMES = attrgetter("lead_s", "wait_s", *(f"{part}_s" for part in _PARTS))


class StragglerMonitor(GateMonitor):
    """Warns of a rank for which all others wait in every step: slow data, a slow callback, a slow host.

    Rank 0 and the straggler say so in their logs, and every ledger has a line; no run is ended. It looks at the time of
    the host, which for work on a GPU is that of issuing it. Beside a ``RankDivergenceMonitor``, or another one of its
    kind, that one runs this check in the place of its own. Not above 64 ranks.

    Args:
        share: How much of a step the others have to wait for it, beside 45 ms at least.
        num_steps: Over how many steps; it has to be late in nine of ten of them.
    """

    def __init__(self, share: float = _SHARE, num_steps: int = _NUM_STEPS) -> None:
        if not 0 < share < 1:
            raise ValueError(f"share is {share}; it is a part of a step, above 0 and below 1.")
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; it is at least 1.")
        super().__init__([StragglerCheck(share, num_steps)])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Meets the ranks, or hands its check to the monitor that does."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [one for one in callbacks if isinstance(one, GateMonitor)]
        first = min(monitors, key=lambda one: isinstance(one, StragglerMonitor))
        if first is self:
            super().setup(trainer, pl_module, stage)
        else:
            first.take_over(self.checks)


class StragglerCheck(Check):
    """Says when this rank came to its first backward and to the gate, and hears who is late in every step."""

    def __init__(self, share: float = _SHARE, num_steps: int = _NUM_STEPS, *, warns: bool = True) -> None:
        self._share = share
        self._num_steps = num_steps
        self._warns = warns
        self._num_named = 0

    def attach(self) -> None:
        """A window of its own for each run."""
        self._arrivals = Arrivals(self._share, self._num_steps)
        self._since: dict[int, int] = {}
        self._last_named: dict[int, int] = {}
        self._parts: Mapping[str, float] = {}
        self._lead_s = self._wait_s = self._passed_at = math.nan
        self._is_ahead_of_backward = False

    def before_backward(self, loss: torch.Tensor) -> None:
        """The first one of a step; later ones may have waited for a rank that was slow in its backward."""
        if self._is_ahead_of_backward:
            self._is_ahead_of_backward = False
            self._lead_s = time.monotonic() - self._passed_at

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """What was measured in the last step."""
        told = {"lead_s": min(self._lead_s, _LARGEST_S), "wait_s": min(self._wait_s, _LARGEST_S)}
        before, self._parts = self._parts, self.run.step_parts()
        for part in _PARTS:
            took = self._parts.get(part, 0.0) - before.get(part, 0.0)
            told[f"{part}_s"] = min(max(took, 0.0), _LARGEST_S)
        return told

    def hear(self, records: Sequence[GateRecord]) -> None:
        """All ranks leave the gate."""
        now = time.monotonic()
        step_s, self._passed_at = now - self._passed_at, now
        self._wait_s, self._lead_s, self._is_ahead_of_backward = self.run.gate.waited_s, math.nan, True
        if not self.run.gate.reads_all_records or not math.isfinite(step_s):
            return
        leads, waits, *parts = zip(*map(_TIMES, records), strict=True)
        found = self._arrivals.add(leads, waits, step_s, list(zip(*parts, strict=True)))
        if found is not None:
            began = max(self.run.trainer.global_step - self._num_steps, 0)
            self._since = {one.rank: self._since.get(one.rank, began) for one in found}
        for straggler in found or []:
            self._tell(straggler)

    def metrics(self) -> dict[str, float]:
        """How often a rank was named."""
        return {"stragglers": float(self._num_named)}

    def _tell(self, found: Straggler) -> None:
        step = self.run.trainer.global_step
        last = self._last_named.get(found.rank)
        if last is not None and step - last < _QUIET_STEPS:
            return
        self._last_named[found.rank] = step
        self._num_named += 1
        since, peer = self._since[found.rank], self.run.plane.peers_of([found.rank]).get(found.rank)
        self.run.note(
            "straggler", global_step=step, ranks=[found.rank], wait_s=found.wait_s, lead_s=found.lead_s,
            step_s=found.step_s, since_step=since, host="" if peer is None else peer.host, part=found.part,
            part_s=found.part_s, others_s=found.others_s,
        )  # fmt: skip
        if not self._warns or self.run.rank not in (0, found.rank):
            return
        where = _BEFORE if found.lead_s > found.wait_s / 2 else _AFTER
        if found.part:
            where += f": {found.describe_part()} on rank {found.rank}{f' (host {peer.host})' if peer else ''}"
        host = f": {HostLoad.now().describe()}" if self.run.rank == found.rank else ""
        log.warning(
            "rank %d is slow in every step: its peers wait %.0f ms of %.0f ms for it (medians of %d steps, at step "
            "%d), %s, since step %s. Look there, and at its host%s",
            found.rank, 1e3 * found.wait_s, 1e3 * found.step_s, self._num_steps, step, where, f"{since:,}", host,
        )  # fmt: skip
