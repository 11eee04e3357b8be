"""Which checks a divergence monitor has, and in which order they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_distplus.callbacks.at_rest import AtRestCheck
from lightning_distplus.callbacks.batches import BatchCheck
from lightning_distplus.callbacks.check import Check
from lightning_distplus.callbacks.decisions import DecisionCheck
from lightning_distplus.callbacks.local_failures import LocalFailureCheck
from lightning_distplus.callbacks.metrics import MetricCheck
from lightning_distplus.callbacks.nonfinite import NonFiniteCheck
from lightning_distplus.callbacks.pairing import PairingCheck
from lightning_distplus.callbacks.plan import PlanCheck
from lightning_distplus.callbacks.replay import ReplayCheck
from lightning_distplus.callbacks.replicas import ReplicaCheck
from lightning_distplus.callbacks.settings import SettingsCheck
from lightning_distplus.callbacks.spikes import SpikeCheck
from lightning_distplus.callbacks.stragglers import StragglerCheck
from lightning_distplus.callbacks.tracing import TraceCheck

if TYPE_CHECKING:
    from lightning_distplus.callbacks.divergence import RankDivergenceMonitor

__all__ = ["make_checks"]


def make_checks(chosen: RankDivergenceMonitor, before_save: Callable[[], None]) -> list[Check]:
    """All checks that the user has chosen. Each keeps its own state.

    Args:
        chosen: The monitor with its arguments.
        before_save: Called on all ranks when they have met before a save.
    """
    replay = ReplayCheck(lambda: finite.norm())
    finite = NonFiniteCheck(lambda: replay.outcome)
    spikes = SpikeCheck(lambda: finite.local_norm, chosen.on_spike, lambda: replay.last_outcome)
    pairing = PairingCheck(lambda: finite.is_incomplete)
    return [
        *([AtRestCheck()] if chosen.state_at_rest else []),
        PlanCheck(chosen.rng_policy),
        SettingsCheck(),
        BatchCheck(chosen.every_n_steps, chosen.batch_shapes),
        DecisionCheck(before_save),
        MetricCheck(),
        *([LocalFailureCheck(pairing.tie)] if chosen.on_local_failure == "skip_all" else []),
        *([replay] if chosen.replay_suspects else []),
        finite,
        *([spikes] if chosen.on_spike != "ignore" else []),
        pairing,
        *([StragglerCheck()] if chosen.on_straggler != "ignore" else []),
        ReplicaCheck(repairs=chosen.repair_replicas),
        *([TraceCheck()] if chosen.trace_collectives else []),
    ]
