"""What a manifest tells of the run that saved: its engine, its parallel layout, and a digest of its configuration."""

from __future__ import annotations

import hashlib
from typing import Any

from lightning_distplus.checkpoint.manifest import Manifest
from lightning_distplus.strategies.agreeing import model_of, settings_of_trainer

__all__ = ["configuration_digest", "engine_in", "engine_of", "layout_of"]

_PACKAGE = "lightning_distplus."
_SIGNS = {
    "zero_stage": "ResilientDeepSpeed",
    "sharding": "ResilientFSDP",
    "tensor_parallel": "ResilientModelParallel",
}  # in a layout; the first one that is there tells


def engine_of(strategy: type) -> str:
    """The name of our strategy that a class is or derives from: a subclass reads and writes its parent's shards."""
    return next(one.__name__ for one in strategy.__mro__ if one.__module__.startswith(_PACKAGE))


def engine_in(manifest: Manifest) -> str:
    """The name of our strategy whose shards a checkpoint holds; early releases named the user's subclass."""
    if manifest.strategy in _SIGNS.values():
        return manifest.strategy
    return next((engine for sign, engine in _SIGNS.items() if sign in manifest.layout), manifest.strategy)


def layout_of(strategy: Any) -> dict[str, Any]:
    """How the ranks share the model and the data: sizes by the name of the axis, and what is sharded.

    ``{"data_parallel": 4}`` of DDP; FSDP adds ``"sharding": "FULL_SHARD"``, ZeRO ``"zero_stage": 2``; the axes of a
    device mesh come under their own names.
    """
    mesh = getattr(strategy, "_device_mesh", None)
    if mesh is not None and mesh.mesh_dim_names:
        layout: dict[str, Any] = dict(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))
    else:
        layout = {"data_parallel": int((strategy.distributed_sampler_kwargs or {}).get("num_replicas", 1))}
    if sharding := getattr(strategy, "sharding_strategy", None):
        layout["sharding"] = getattr(sharding, "name", str(sharding))
    zero = (getattr(strategy, "config", None) or {}).get("zero_optimization")
    if zero is not None:
        layout["zero_stage"] = int(zero.get("stage", 0))
    return layout


def configuration_digest(trainer: Any) -> str:
    """32 hex digits over what decides the course of a run, the same on all ranks and after a restart.

    It covers the Trainer's settings, the names, shapes and types of the parameters, and the hyperparameters that the
    module and the data module have saved.
    """
    module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
    parts = {
        **settings_of_trainer(trainer),
        "model": model_of(module, 1)["model.parameters"],
        "module.hyperparameters": _hyperparameters(module),
        "data.hyperparameters": _hyperparameters(datamodule),
    }
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:32]


def _hyperparameters(owner: Any) -> list[tuple[str, str]]:
    return sorted((str(name), str(value)) for name, value in (getattr(owner, "hparams", None) or {}).items())
