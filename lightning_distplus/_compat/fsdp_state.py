"""The state of an FSDP1 model as each rank holds it: where its parameters lie, and a state dict of the parts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distplus._compat.fsdp import FlatUnit, flat_units, in_shards
from lightning_distplus._compat.probing import replaced, warn_once

__all__ = ["FlatPlace", "flat_places", "state_dict_name", "state_in_parts", "why_gathered"]

_UTILS = "torch.distributed.fsdp._state_dict_utils"
_HOOKS = ("_should_unshard_params", "_sharded_post_state_dict_hook", "_common_unshard_post_state_dict_hook")
_OF_UTILS = (*_HOOKS, "_pre_state_dict_hook", "_post_state_dict_hook", "FSDP_PREFIX", "FLAT_PARAM")
_OF_UNIT = ("_handle", "_use_orig_params", "_fsdp_extension", "training_state")
_OF_PARAMETER = (
    "_fqns", "_params", "_shapes", "_contiguities", "_modules", "_shard_param_infos", "_shared_param_infos",
    "_param_extensions",
)  # fmt: skip
_CONSEQUENCE = "a sharded save of FSDP gathers its state first"


@dataclass(frozen=True)
class FlatPlace:
    """Where this rank's part of one parameter of an FSDP1 model lies."""

    names: tuple[str, ...]
    """In the model's state dict; the first one is that of its moments, and others are tied to it."""
    shape: torch.Size
    """Of the whole parameter."""
    local: Tensor
    """This rank's part, with one axis."""
    start: int
    """At which element of the parameter it begins."""
    owner: Tensor
    """What an optimizer has: the parameter itself or, without ``use_orig_params``, the flat one of its unit."""
    place: slice
    """Where the part lies in this rank's part of ``owner``, as in its moments."""
    unit: int
    """The number of its unit."""
    is_first_copy: bool
    """Whether this rank answers for the part, where several ranks hold it."""


def flat_places(model: nn.Module) -> list[FlatPlace]:
    """The places of all parameters in FSDP1 units, in which ``why_gathered`` has found nothing."""
    found: list[FlatPlace] = []
    for number, unit in enumerate(flat_units(model)):
        flat: Any = unit.parameter
        tied = _tied_names(flat)
        originals = flat._params or [flat] * len(flat._fqns)
        named = unit.local.reshape(-1)
        for index, (section, _, start, place) in enumerate(unit.parts()):
            found.append(
                FlatPlace(
                    names=tuple(state_dict_name(unit.prefix + name) for name in (section, *tied.get(section, ()))),
                    shape=torch.Size(flat._shapes[index]),
                    local=named[place],
                    start=start,
                    owner=originals[index],
                    place=slice(0, place.stop - place.start) if flat._params else place,
                    unit=number,
                    is_first_copy=_is_first_copy(unit),
                )
            )
    return found


def _tied_names(flat: Any) -> dict[str, list[str]]:
    """By the name of a parameter in its unit: the others that it has there."""
    found: dict[str, list[str]] = {}
    for name, _, module, first, _, module_of_first in flat._shared_param_infos:
        found.setdefault(f"{module_of_first}.{first}".lstrip("."), []).append(f"{module}.{name}".lstrip("."))
    return found


def _is_first_copy(unit: FlatUnit) -> bool:
    return unit.shard is None or dist.get_rank(getattr(unit.module, "_inter_node_pg", None)) == 0


def state_dict_name(name: str) -> str:
    """A name in a model without what FSDP and activation checkpointing add to it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


# -- when it may be used -----------------------------------------------------------------------------------------------


def why_gathered(model: Any) -> str | None:
    """Why the state of this model has to be gathered for a sharded save; None where nothing speaks for it.

    "" where nothing is sharded, so that nothing is gathered.
    """
    utils = importlib.import_module(_UTILS)
    if gone := [name for name in _OF_UTILS if not hasattr(utils, name)]:
        warn_once(f"{_UTILS}.{gone[0]}", _CONSEQUENCE)
        return "this version of torch is not known"
    units = flat_units(model) if isinstance(model, nn.Module) else []
    if not units:
        return ""
    for unit in units:
        if (doubt := _doubt_about(unit)) is not None:
            return doubt
    managed = {part for unit in units for part in unit.parameter._modules}  # type: ignore[attr-defined]
    for name, module in model.named_modules():
        if _is_customized(module, utils) and any(part in managed for part in module.modules()):
            where = state_dict_name(f"{name}.").rstrip(".") or "the model"
            return f"{where} ({type(module).__name__}) makes its own state dict"
    return None


def _doubt_about(unit: FlatUnit) -> str | None:
    module: Any = unit.module
    flat: Any = unit.parameter
    gone = [name for name in _OF_UNIT if not hasattr(module, name)]
    if gone := gone + [name for name in _OF_PARAMETER if not hasattr(flat, name)]:
        warn_once(f"FullyShardedDataParallel: {gone[0]}", _CONSEQUENCE)
        return "this version of torch is not known"
    if unit.shard == "":
        return ""
    if unit.shard and not hasattr(module, "_inter_node_pg"):
        warn_once("FullyShardedDataParallel: _inter_node_pg", _CONSEQUENCE)
        return "this version of torch is not known"
    where = state_dict_name(unit.prefix).rstrip(".") or "the model"
    names = [name for name, _ in unit.sections if name != "padding"]
    if getattr(flat, "_local_shard", None) is None or module.training_state.name != "IDLE":
        return f"{where} is not at rest between two steps"
    if not _tied_names(flat).keys() <= set(names):
        return f"{where} shares parameters with other units"
    if module._fsdp_extension is not None or any(extension is not None for extension in flat._param_extensions):
        return f"{where} is sharded in two directions"
    if not all(flat._contiguities) or names != list(flat._fqns) or not all(map(torch.Size.numel, flat._shapes)):
        return f"{where} has parameters that are not contiguous, or empty"
    if moved := _moved_parameter(unit):
        return f"{state_dict_name(unit.prefix + moved)} was given other memory, which FSDP takes over in the next step"
    return None


def _moved_parameter(unit: FlatUnit) -> str | None:
    """A parameter that does not lie where FSDP has put it, because somebody has set its ``data``."""
    flat: Any = unit.parameter
    if flat._params is None or getattr(unit.module._handle, "_skipped_use_sharded_views", False):
        return None
    for name, parameter, part in zip(flat._fqns, flat._params, flat._shard_param_infos, strict=True):
        address = unit.local.data_ptr() + (part.offset_in_shard or 0) * unit.local.element_size()
        if part.in_shard and parameter.data_ptr() != address:
            return str(name)
    return None


def _is_customized(module: nn.Module, utils: Any) -> bool:
    kind = type(module)
    for name in ("state_dict", "_save_to_state_dict", "get_extra_state"):
        if getattr(kind, name, None) is not getattr(nn.Module, name) or name in vars(module):
            return True
    wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper").ActivationWrapper
    known = (utils._pre_state_dict_hook, utils._post_state_dict_hook, wrapper._post_state_dict_hook)
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return any(hook not in known for hook in hooks)


# -- the state dict ----------------------------------------------------------------------------------------------------


def state_in_parts(model: nn.Module, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """The model's own sharded state dict, with these parts in the place of gathered parameters. No rank waits.

    FSDP's hooks run as they are, for buffers and names; but nothing is unsharded before, nor cut after.

    Args:
        model: One in which ``why_gathered`` has found nothing.
        parts: What this rank holds of each parameter in an FSDP1 unit, by its name in the state dict.
    """
    utils = importlib.import_module(_UTILS)

    def put_in(state: dict[str, Any], prefix: str, name: str) -> None:
        state[name] = parts[state_dict_name(name)]

    def after_state_dict(module: nn.Module, unit: Any, state: dict[str, Any], prefix: str) -> Any:
        if unit._handle is not None and not unit._use_orig_params:
            del state[f"{prefix}{utils.FSDP_PREFIX}{utils.FLAT_PARAM}"]
            flat = unit._handle.flat_param
            for name in (*flat._fqns, *chain.from_iterable(_tied_names(flat).values())):
                put_in(state, prefix, prefix + state_dict_name(name))
        return utils._common_unshard_post_state_dict_hook(module, unit, state, prefix, put_in)

    with (
        in_shards(model),
        replaced((_UTILS,), "_should_unshard_params", lambda _: False, _CONSEQUENCE),
        replaced((_UTILS,), "_sharded_post_state_dict_hook", after_state_dict, _CONSEQUENCE),
    ):
        return model.state_dict()
