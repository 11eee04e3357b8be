"""What ``Trainer(strategy=Resilient...())`` adds to steps of 20 ms with all that it brings, against stock.

Gate, divergence monitor and preemption handler are toggled inside one fit as in ``strategy_cost``: all of them, the
broadcast of Lightning alone, and the broadcast again (A/A). The full comparisons of the state, of which the budget
allows one in hundreds of steps, fall out of the medians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import strategy_cost
from benchmarks.figures import Figure
from lightning_distplus import PreemptionHandler, RankDivergenceMonitor
from lightning_distplus.divergence.gradients import GradientCheck

__all__ = ["Toggle", "run"]


def run(quick: bool) -> list[Figure]:
    """One fit for each strategy, 100 alternations, of the noisier steps of FSDP and DeepSpeed 400 (quick: 20)."""
    figures: list[Figure] = []
    for name in strategy_cost.STRATEGIES:
        alternations = 20 if quick else 400 if name in ("ResilientFSDP", "ResilientDeepSpeed") else 100
        ranks = strategy_cost.measure(name, alternations, toggle=Toggle, brings_callbacks=True)
        figures += strategy_cost.figures_of(name, ranks)
    return figures


class Toggle(strategy_cost.Toggle):
    """Takes the brought callbacks out of the Trainer where stock is measured, and their eyes off the gradients.

    The monitor plans its looks by what they cost when all ranks have compared their state, at step 50 and 100.
    """

    warm_up = ("ours",) * 110

    def arms(self, trainer: Any) -> dict[str, Callable[[Any, int], None]]:
        """The gates, with and without the callbacks."""
        with_ours = list(trainer.callbacks)
        kinds = (RankDivergenceMonitor, PreemptionHandler)
        (monitor,) = (one for one in with_ours if isinstance(one, RankDivergenceMonitor))
        (check,) = (one for one in monitor.checks if isinstance(one, GradientCheck))
        assert any(isinstance(one, PreemptionHandler) for one in with_ours)
        without = [one for one in with_ours if not isinstance(one, kinds)]

        def switched(gate: Callable[[Any, int], None], is_on: bool) -> Callable[[Any, int], None]:
            def pass_gate(batch: Any, batch_idx: int) -> None:
                trainer.callbacks[:] = with_ours if is_on else without
                trainer.strategy.gate.is_open = is_on
                if check._hook is not None:
                    check._hook._gradients = check._gradients if is_on else None
                vars(check._gradients).pop("filtered", None)
                if not is_on:
                    check._gradients.filtered = lambda gradient, name_of: None  # type: ignore[method-assign]
                gate(batch, batch_idx)

            return pass_gate

        return {arm: switched(gate, arm == "ours") for arm, gate in super().arms(trainer).items()}
