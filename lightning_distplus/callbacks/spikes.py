"""The check for losses and gradient norms of one rank that stand out: a bad batch, or a device that miscalculates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.agreement import disagreement
from lightning_distplus.divergence.spikes import Outlier, Window
from lightning_distplus.errors import DivergenceError

__all__ = ["OnSpike", "SpikeCheck"]

log = logging.getLogger(__name__)

OnSpike = Literal["warn", "raise", "ignore"]

_NAMES = {"loss": "loss", "gradient_norm": "gradient norm"}
_SHOWN_IDS = 16


class SpikeCheck(Check):
    """Names the rank whose loss or gradient norm stands out from the other ranks and from its own past.

    Every rank says at the gate what its last step gave, so that all come to the same conclusion, one step later. The
    windows are not kept in checkpoints: it begins to judge 32 steps after a start. Above 64 ranks, where records are
    counted and not read, nothing is compared.

    Args:
        norm: The norm of this rank's gradients in this step, before the engine reduced them; NaN where it is not known.
        on_spike: What follows.
        replayed: What a replay of the last step has shown on this rank, if it was replayed.
    """

    def __init__(
        self, norm: Callable[[], float], on_spike: OnSpike, replayed: Callable[[], str | None] = lambda: None
    ) -> None:
        self._norm = norm
        self._on_spike = on_spike
        self._replayed = replayed
        self._windows = {"loss": Window(), "gradient_norm": Window(least_ratio=10.0)}
        self._losses: list[torch.Tensor] = []
        self._samples: list[Any] = []
        self._said = dict.fromkeys(_NAMES, math.nan)
        self._num_spikes = 0

    def attach(self, run: MonitoredRun) -> None:
        """Takes the loss scaler, whose factor is in every loss and gradient that is seen here."""
        super().attach(run)
        self._scaler: Any = getattr(run.trainer.precision_plugin, "scaler", None)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Keeps the loss, and of which samples it is."""
        self._losses.append(loss.detach() if loss.numel() == 1 else loss.detach().sum())
        self._samples += self.run.sample_ids() or []

    def before_optimizer_step(self, optimizer: Any) -> None:
        """The check for what is not finite has just waited for the device."""
        if self._losses:
            scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            loss = float(self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum())
            self._said = {"loss": loss / scale, "gradient_norm": self._norm() / scale}

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """What the last step gave on this rank."""
        said, self._said = self._said, dict.fromkeys(_NAMES, math.nan)
        self._losses.clear()
        self._last_samples, self._samples = self._samples, []
        return said

    def hear(self, records: Sequence[GateRecord]) -> None:
        """Looks for a rank that stands out.

        Raises:
            DivergenceError: On all ranks, where the user wants that.
        """
        if not self.run.gate.reads_all_records:
            return
        for field, window in self._windows.items():
            values = [getattr(record, field) for record in records]
            for outlier in window.judge(values):
                self._tell(field, outlier, values)

    def metrics(self) -> dict[str, float]:
        """How often a rank stood out."""
        return {"spikes": float(self._num_spikes)}

    def _tell(self, field: str, outlier: Outlier, values: list[float]) -> None:
        """All ranks come here together."""
        self._num_spikes += 1
        step, rank = self.run.trainer.global_step - 1, outlier.rank
        told = self.run.gather("spike", {"samples": self._last_samples[:_SHOWN_IDS], "replayed": self._replayed()})
        samples, replayed = told[rank]["samples"], told[rank]["replayed"]
        self.run.note("spike", field=field, global_step=step, ranks=[rank], z=outlier.z, values=values, **told[rank])
        more = [
            f"z = {outlier.z:.1f}",
            f"as a rule {outlier.usual:.6g} there",
            *([f"samples {samples}"] if samples else []),
            *([f"the step {replayed}"] if replayed else []),
        ]
        error = disagreement(
            _NAMES[field],
            {number: f"{value:.6g}" for number, value in enumerate(values)},
            wrong=[rank],
            where=f"in step {step}, where that of rank {rank} stands out ({'; '.join(more)})",
            remedy="look at these samples; the same rank again with other samples is rather its device. "
            "replay_suspects=True tells them apart.",
        )
        self._end_or_warn(error)

    def _end_or_warn(self, error: DivergenceError) -> None:
        if self._on_spike == "raise":
            self.run.tell(error)
        elif self.run.rank in (0, *error.ranks):
            log.warning("rank %d: %s", self.run.rank, error)
