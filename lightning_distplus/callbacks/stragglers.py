"""The callback that names a rank for which all others wait in every step, and its check."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.callbacks.monitor import GateMonitor
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.stragglers import Arrivals, Straggler
from lightning_distplus.host_load import HostLoad

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["OnStraggler", "StragglerCheck", "StragglerMonitor"]

log = logging.getLogger(__name__)

OnStraggler = Literal["warn", "ignore"]

_SHARE = 0.2
_NUM_STEPS = 32
_QUIET_STEPS = 1024  # before the same rank is named again
_LARGEST_S = 6e4  # that a record holds
_BEFORE = "in training_step, before the backward"
_AFTER = "between its backward and the next training_step: the optimizer, callbacks, logging, the next batch"


class StragglerMonitor(GateMonitor):
    """Warns of a rank for which all others wait in every step: slow data, a slow callback, a slow host.

    Rank 0 and the straggler say so in their logs, and every ledger has a line; no run is ended. It looks at the time of
    the host, which for work on a GPU is that of issuing it. Beside a ``RankDivergenceMonitor``, or another one of its
    kind, that one runs this check in the place of its own. Not above 64 ranks.

    Args:
        share: How much of a step the others have to wait for it, beside 50 ms at least.
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

    def __init__(self, share: float = _SHARE, num_steps: int = _NUM_STEPS) -> None:
        self._share = share
        self._num_steps = num_steps
        self._last_named: dict[int, int] = {}
        self._num_named = 0
        self._wait_s = math.nan
        self._lead_s = math.nan
        self._passed_at = math.nan
        self._is_ahead_of_backward = False

    def attach(self, run: MonitoredRun) -> None:
        """A window of its own for each run."""
        super().attach(run)
        self._arrivals = Arrivals(self._share, self._num_steps)
        self._last_named.clear()
        self._lead_s = self._wait_s = self._passed_at = math.nan

    def before_backward(self, loss: torch.Tensor) -> None:
        """The first one of a step; later ones may have waited for a rank that was slow in its backward."""
        if self._is_ahead_of_backward:
            self._is_ahead_of_backward = False
            self._lead_s = time.monotonic() - self._passed_at

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """What was measured in the last step."""
        return {"lead_s": min(self._lead_s, _LARGEST_S), "wait_s": min(self._wait_s, _LARGEST_S)}

    def hear(self, records: Sequence[GateRecord]) -> None:
        """All ranks leave the gate."""
        now = time.monotonic()
        step_s, self._passed_at = now - self._passed_at, now
        self._wait_s, self._lead_s, self._is_ahead_of_backward = self.run.gate.waited_s, math.nan, True
        if not self.run.gate.reads_all_records or not math.isfinite(step_s):
            return
        found = self._arrivals.add([one.lead_s for one in records], [one.wait_s for one in records], step_s)
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
        self.run.note(
            "straggler", global_step=step, ranks=[found.rank], wait_s=found.wait_s, lead_s=found.lead_s,
            step_s=found.step_s,
        )  # fmt: skip
        if self.run.rank not in (0, found.rank):
            return
        where = _BEFORE if found.lead_s > found.wait_s / 2 else _AFTER
        host = f": {HostLoad.now().describe()}" if self.run.rank == found.rank else ""
        log.warning(
            "rank %d is slow in every step: its peers wait %.0f ms of %.0f ms for it (medians of %d steps, at step "
            "%d), %s. Look there, and at its host%s",
            found.rank, 1e3 * found.wait_s, 1e3 * found.step_s, self._num_steps, step, where, host,
        )  # fmt: skip
