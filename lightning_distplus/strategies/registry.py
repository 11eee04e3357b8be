"""The names under which ``Trainer(strategy="...")`` finds the Resilient strategies, and which Trainer that is."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from lightning_distplus.errors import OTHER_LIGHTNING

__all__ = ["refuse_in_other_lightning", "register_strategies"]

_NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "resilient_ddp": ("ddp", "ResilientDDP", {}),
    "resilient_fsdp": ("fsdp", "ResilientFSDP", {}),
    "resilient_model_parallel": ("model_parallel", "ResilientModelParallel", {}),
    "resilient_deepspeed": ("deepspeed", "ResilientDeepSpeed", {}),
    **{
        f"resilient_deepspeed_stage_{stage}": ("deepspeed", "ResilientDeepSpeed", {"stage": stage})
        for stage in (1, 2, 3)
    },
}


def register_strategies() -> None:
    """Registers the names with Lightning; idempotent.

    Importing ``lightning_distplus`` after Lightning does it as well.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    for name, (module, cls, arguments) in _NAMES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(
                name, functools.partial(_make, module, cls), description=f"{cls} of lightning_distplus", **arguments
            )


def refuse_in_other_lightning() -> None:
    """Registers the names with ``pytorch_lightning``, where using one says what to import instead; idempotent."""
    registry = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
    for name in _NAMES:
        if name not in registry:
            registry.register(name, _refuse, description="of lightning_distplus, for lightning.pytorch")


def _refuse(**arguments: Any) -> Any:
    raise TypeError(OTHER_LIGHTNING)


def _make(module: str, cls: str, **arguments: Any) -> Any:
    """Builds a strategy; its module, and so DeepSpeed, is imported only now."""
    return getattr(importlib.import_module(f"lightning_distplus.strategies.{module}"), cls)(**arguments)
