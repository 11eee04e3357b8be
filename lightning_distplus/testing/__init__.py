"""Test your own multi-rank jobs: start real processes, plant faults in them, prove that they resume exactly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_distplus.testing.faults import Fault, FaultPlan, FiredFault
    from lightning_distplus.testing.oracles import (
        FaultCallback,
        LightningRun,
        Trace,
        assert_resumes_exactly,
        assert_same_on_all_ranks,
        weights_digest,
    )
    from lightning_distplus.testing.spawning import SpawnResult, preload, spawn

__all__ = [
    "Fault",
    "FaultCallback",
    "FaultPlan",
    "FiredFault",
    "LightningRun",
    "SpawnResult",
    "Trace",
    "assert_resumes_exactly",
    "assert_same_on_all_ranks",
    "preload",
    "spawn",
    "weights_digest",
]

_LIGHT = dict.fromkeys(("Fault", "FaultPlan", "FiredFault"), "faults") | dict.fromkeys(
    ("SpawnResult", "preload", "spawn"), "spawning"
)
"""What loads neither torch nor lightning."""


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: a rank sets its environment before torch is loaded."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LIGHT.get(name, 'oracles')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
