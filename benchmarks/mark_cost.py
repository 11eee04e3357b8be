"""What the marks of the watchdog add to a step of the training thread.

Toggled inside one fit on two processes, each pinned to a core: blocks of steps with marks, without them, and without
them again (A/A), in random order. The watchdog's own threads run in all three.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from benchmarks.figures import Figure, bootstrap_ci95, median
from benchmarks.strategy_cost import Toggle, differences, measure
from lightning_distplus.watchdog import Marks

__all__ = ["ToggleMarks", "run"]

_TARGET_US = 20.0


def run(quick: bool) -> list[Figure]:
    """One fit, 100 alternations (quick: 20)."""
    ranks = measure("ResilientDDP", 20 if quick else 100, toggle=ToggleMarks)
    figures = []
    for what, quantity, target in (("CPU time", "cpu_us", _TARGET_US), ("wall time", "wall_us", None)):
        for arm in ("ours", "control"):
            values = [value for blocks in ranks.values() for value in differences(blocks, quantity, arm)]
            name = f"marks, added {what} of the training thread" if arm == "ours" else f"A/A, {what}"
            figures.append(
                Figure(
                    name=name, value=median(values), unit="us/step", ci95=bootstrap_ci95(values),
                    target=target if arm == "ours" else None, note=f"{len(values)} alternations",
                )
            )  # fmt: skip
    return figures


class _NoMarks(Marks):
    """Sets nothing."""

    def set(self, operation: str) -> None:
        pass

    def enter(self, operation: str) -> str:
        return ""

    def leave(self, outer: str) -> None:
        pass

    def ended(self, operation: str) -> None:
        pass


class ToggleMarks(Toggle):
    """The gate stays in all arms; the Trainer's profiler and the strategy's marks change at it."""

    def arms(self, trainer: pl.Trainer) -> dict[str, Any]:
        """With all marks, and twice without any."""
        strategy: Any = trainer.strategy
        gate, marking, marks, nothing = (
            strategy.on_train_batch_start, trainer.profiler, strategy._marks, _NoMarks(phase=lambda: ""),
        )  # fmt: skip

        def with_marks(batch: Any, batch_idx: int) -> None:
            trainer.profiler, strategy._marks = marking, marks
            gate(batch, batch_idx)

        def without(batch: Any, batch_idx: int) -> None:
            trainer.profiler, strategy._marks = marking.inner, nothing
            gate(batch, batch_idx)

        return {"ours": with_marks, "stock": without, "control": without}
