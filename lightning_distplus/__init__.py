"""Multi-rank PyTorch Lightning training that survives reality.

Importing this package defines names and does nothing else. One exception: where Lightning is already loaded, the
names of the strategies (``Trainer(strategy="resilient_fsdp")``) are registered with it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_distplus.checkpoint import newest_valid, verify
    from lightning_distplus.data import ResumableDataModule, SampleAudit, TokenDataModule, samplers
    from lightning_distplus.divergence import RankDivergenceMonitor, StragglerMonitor
    from lightning_distplus.errors import DistplusError, ExitCode
    from lightning_distplus.gathering import gather
    from lightning_distplus.preemption import PreemptionHandler
    from lightning_distplus.strategies import (
        ResilientDDP,
        ResilientDeepSpeed,
        ResilientFSDP,
        ResilientModelParallel,
        register_strategies,
    )
    from lightning_distplus.timeouts import Timeouts

__version__ = "0.2.0"

__all__ = [
    "DistplusError",
    "ExitCode",
    "PreemptionHandler",
    "RankDivergenceMonitor",
    "ResilientDDP",
    "ResilientDeepSpeed",
    "ResilientFSDP",
    "ResilientModelParallel",
    "ResumableDataModule",
    "SampleAudit",
    "StragglerMonitor",
    "Timeouts",
    "TokenDataModule",
    "gather",
    "newest_valid",
    "register_strategies",
    "samplers",
    "verify",
]

_HOMES = {
    "DistplusError": "errors",
    "ExitCode": "errors",
    "PreemptionHandler": "preemption",
    "RankDivergenceMonitor": "divergence",
    "ResilientDDP": "strategies",
    "ResilientDeepSpeed": "strategies",
    "ResilientFSDP": "strategies",
    "ResilientModelParallel": "strategies",
    "ResumableDataModule": "data",
    "SampleAudit": "data",
    "StragglerMonitor": "divergence",
    "Timeouts": "timeouts",
    "TokenDataModule": "data",
    "gather": "gathering",
    "newest_valid": "checkpoint",
    "register_strategies": "strategies",
    "samplers": "data",
    "verify": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


if "lightning.pytorch" in sys.modules:
    importlib.import_module(f"{__name__}.strategies").register_strategies()
if "pytorch_lightning.strategies" in sys.modules:
    importlib.import_module(f"{__name__}.strategies").refuse_in_other_lightning()
