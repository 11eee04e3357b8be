"""Lightning's strategies, made resilient: one mixin and one parent each.

Importing this package imports neither Lightning nor DeepSpeed; the classes come when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_distplus.strategies.ddp import ResilientDDP
    from lightning_distplus.strategies.deepspeed import ResilientDeepSpeed
    from lightning_distplus.strategies.fsdp import ResilientFSDP
    from lightning_distplus.strategies.model_parallel import ResilientModelParallel
    from lightning_distplus.strategies.registry import register_strategies
    from lightning_distplus.strategies.start import report_progress

__all__ = [
    "ResilientDDP",
    "ResilientDeepSpeed",
    "ResilientFSDP",
    "ResilientModelParallel",
    "register_strategies",
    "report_progress",
]

_HOMES = {
    "ResilientDDP": "ddp",
    "ResilientDeepSpeed": "deepspeed",
    "ResilientFSDP": "fsdp",
    "ResilientModelParallel": "model_parallel",
    "register_strategies": "registry",
    "report_progress": "start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
