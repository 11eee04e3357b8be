"""What the ranks of a Trainer compare before the first step: settings, model and data."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from lightning_distplus import _compat
from lightning_distplus.preflight import Facts, Status, raise_errors
from lightning_distplus.preflight.agreement import content_of, disagreements, state_of_process
from lightning_distplus.process import boot_id
from lightning_distplus.strategies.starting import facts_of, settings_of

__all__ = ["check_agreement", "check_data", "model_of", "settings_of_trainer"]

_NAMED_PARAMETERS = 2000
_NAMED_PARAMETERS_OF_ALL = 20_000

_SETTINGS = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "precision",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_train_batches",
    "limit_val_batches",
    "reload_dataloaders_every_n_epochs",
)


def check_agreement(strategy: Any, trainer: Any) -> None:
    """Compares versions, revision, seed, variables, settings and model; called by all ranks before the engine wraps it.

    Raises:
        PreflightError: On all ranks, with the odd rank, the field and both values.
    """
    facts = facts_of(strategy)
    mine = {
        **state_of_process(facts),
        **settings_of_trainer(trainer),
        **model_of(strategy.lightning_module, strategy.world_size),
    }
    _compare(strategy, facts, mine, device=_device(strategy.root_device))


def check_data(strategy: Any, trainer: Any) -> None:
    """Compares length and content of the training data, once they are known.

    Raises:
        PreflightError: As for ``check_agreement``.
    """
    found = {"data.number of batches": str(trainer.num_training_batches)}
    loader = trainer.train_dataloader
    if hasattr(getattr(loader, "sampler", None), "num_replicas"):  # it cuts what must be the same on all ranks
        found["data.length of the data set"] = str(len(loader.dataset))
        found["data.content of the data set"] = content_of(loader.dataset) or "not read"
    _compare(strategy, facts_of(strategy), found)


def _compare(strategy: Any, facts: Facts, mine: dict[str, str], *, device: str = "") -> None:
    if strategy.preflight is False or strategy.world_size == 1:
        return
    patience, settings = strategy.phases.patience, settings_of(strategy)
    findings = disagreements(strategy.plane, mine, patience, settings, device=device)
    raise_errors([found for found in findings if found.status is Status.ERROR or strategy.global_rank == 0], facts)


def settings_of_trainer(trainer: Any) -> dict[str, str]:
    """The settings that decide the course of a run, as texts."""
    return {f"trainer.{name}": str(getattr(trainer, name, None)) for name in _SETTINGS}


def model_of(module: torch.nn.Module, world_size: int) -> dict[str, str]:
    """The parameters by name, as many as the messages of all ranks can hold; and the digest of all."""
    shapes = {f"model.{name}": _shape(parameter) for name, parameter in module.named_parameters()}
    digest = hashlib.sha256(str(shapes).encode()).hexdigest()[:16]
    named = dict(list(shapes.items())[: min(_NAMED_PARAMETERS, _NAMED_PARAMETERS_OF_ALL // world_size)])
    return {**named, "model.class": type(module).__name__, "model.parameters": f"{len(shapes)}, digest {digest}"}


def _shape(parameter: torch.nn.Parameter) -> str:
    if isinstance(parameter, torch.nn.UninitializedParameter):
        return "not initialized"
    if _compat.is_fsdp_shard(parameter):  # of an earlier run of this module: each rank sees its own part
        return f"sharded {parameter.dtype}"
    shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 the parameter itself is empty
    return f"{tuple(shape)} {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"


def _device(device: torch.device) -> str:
    """A GPU by its unique name; two hosts may both have a GPU 0."""
    if device.type != "cuda":
        return ""
    return f"{boot_id()[:8]}/{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}"
