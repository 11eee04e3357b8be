"""Lightning's strategies, made resilient: one mixin and one parent each, and the names by which a Trainer finds them.

Importing this package imports neither Lightning nor DeepSpeed; the classes come when they are asked for.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from lightning_distplus.errors import OTHER_LIGHTNING

if TYPE_CHECKING:
    from lightning_distplus.strategies.deepspeed import ResilientDeepSpeed
    from lightning_distplus.strategies.engines import ResilientDDP, ResilientFSDP, ResilientModelParallel
    from lightning_distplus.strategies.start import report_progress

__all__ = [
    "ResilientDDP",
    "ResilientDeepSpeed",
    "ResilientFSDP",
    "ResilientModelParallel",
    "refuse_in_other_lightning",
    "register_strategies",
    "report_progress",
]

_HOMES = {
    **dict.fromkeys(("ResilientDDP", "ResilientFSDP", "ResilientModelParallel"), "engines"),
    "ResilientDeepSpeed": "deepspeed",
    "report_progress": "start",
}
_REGISTERED: dict[str, tuple[str, dict[str, Any]]] = {
    "resilient_ddp": ("ResilientDDP", {}),
    "resilient_fsdp": ("ResilientFSDP", {}),
    "resilient_model_parallel": ("ResilientModelParallel", {}),
    "resilient_deepspeed": ("ResilientDeepSpeed", {}),
    **{f"resilient_deepspeed_stage_{stage}": ("ResilientDeepSpeed", {"stage": stage}) for stage in (1, 2, 3)},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def register_strategies() -> None:
    """Registers the names with Lightning; idempotent.

    Importing ``lightning_distplus`` after Lightning does it as well.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    for name, (cls, arguments) in _REGISTERED.items():
        if name not in StrategyRegistry:
            make = functools.partial(_make, cls)
            StrategyRegistry.register(name, make, description=f"{cls} of lightning_distplus", **arguments)


def refuse_in_other_lightning() -> None:
    """Registers the names with ``pytorch_lightning``, where using one says what to import instead; idempotent."""
    registry = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
    for name in _REGISTERED:
        if name not in registry:
            registry.register(name, _refuse, description="of lightning_distplus, for lightning.pytorch")


def _make(cls: str, **arguments: Any) -> Any:
    """Builds a strategy; its module, and so DeepSpeed, is imported only now."""
    return __getattr__(cls)(**arguments)


def _refuse(**arguments: Any) -> Any:
    raise TypeError(OTHER_LIGHTNING)
