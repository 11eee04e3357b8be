"""FSDP, DeepSpeed and torch's distributed checkpoint: what they hold of a model, save and load."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from lightning_distplus._compat import probed, replaced, warn_once, wrapped
from lightning_distplus.errors import CheckpointUnsafe

__all__ = [
    "FlatUnit",
    "calls_torch_save",
    "discard_next_deepspeed_step",
    "end_deepspeed_save",
    "flat_units",
    "full_state_dict_without_offload",
    "in_shards",
    "is_fsdp_shard",
    "loading_empty_optimizers_of_fsdp",
    "loading_empty_optimizers_of_fsdp2",
    "loading_universal",
    "loading_unsharded_models",
    "loading_whole_files",
    "refusing_code",
    "replacing_sharded_saves",
    "state_dict_name",
]


def full_state_dict_without_offload() -> AbstractContextManager[None]:
    """Gathers full FSDP1 state dicts without ``offload_to_cpu`` in this block.

    On the CPU the offload is a use-after-free that crashes the process (Lightning-AI/pytorch-lightning#21804, fixed
    after lightning 2.6.6).
    """
    modules = ("lightning.pytorch.strategies.fsdp", "lightning.fabric.strategies.model_parallel")
    consequence = "a full FSDP checkpoint on the CPU may crash the process"
    return replaced(modules, "_get_full_state_dict_context", _full_state_dict_on_cpu, consequence)


def _full_state_dict_on_cpu(module: Any, world_size: int, rank0_only: bool = True) -> Any:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.api import FullOptimStateDictConfig

    return FullyShardedDataParallel.state_dict_type(
        module=module,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


def in_shards(model: torch.nn.Module) -> Any:
    """FSDP1 gives and takes shards on the CPU in this block, as Lightning has it."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
    from torch.distributed.fsdp.api import ShardedOptimStateDictConfig

    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )


def loading_unsharded_models() -> AbstractContextManager[None]:
    """Lets ModelParallelStrategy load, in this block, a model of which nothing is sharded.

    It saves such a model, and refuses to load it (lightning 2.6.6, fabric's ``model_parallel.py`` 424).
    """
    modules = ("lightning.fabric.strategies.model_parallel",)
    consequence = "the checkpoint of a model without shards is not loaded"
    return replaced(modules, "_has_dtensor_modules", lambda part: isinstance(part, torch.nn.Module), consequence)


def loading_whole_files(weights_only: bool | None) -> AbstractContextManager[None]:
    """Has FSDPStrategy read a whole checkpoint as ModelParallelStrategy does: mapped into memory, by ``torch.load``.

    Its own reader finds any class that a pickle names (lightning 2.6.6, fabric's ``load.py`` 170).
    """

    def load(path: Any) -> Any:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)

    consequence = "a whole checkpoint that FSDP reads may run code"
    return replaced(("lightning.pytorch.strategies.fsdp",), "_lazy_load", load, consequence)


def replacing_sharded_saves(save: Callable[[dict[str, Any], Any], None]) -> AbstractContextManager[None]:
    """Has FSDPStrategy and ModelParallelStrategy hand their shards to ``save`` in this block, instead of writing them.

    Lightning calls ``torch.distributed.checkpoint.save`` on the default group (lightning 2.6.6, ``fsdp.py`` 860).
    """
    modules = ("lightning.pytorch.strategies.fsdp", "lightning.pytorch.strategies.model_parallel")
    consequence = "sharded checkpoints are written while training waits"
    return replaced(modules, "_distributed_checkpoint_save", save, consequence)


def is_fsdp_shard(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 has taken this parameter over, so that each rank may see its own part of it only."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


@dataclass(frozen=True)
class FlatUnit:
    """The flat parameter of one FSDP1 unit."""

    parameter: torch.Tensor
    """The leaf whose gradient is the whole, flat gradient of this rank."""
    local: torch.Tensor
    """What this rank holds of it between steps."""
    sections: list[tuple[str, int]]
    """Name and number of elements of each parameter in it, in order."""
    shard: str | None
    """Ranks with the same value hold the same content; None where this rank is the only holder."""
    prefix: str
    """What stands before the names of the sections in the names of the whole model."""
    start: int
    """At which element of the flat parameter ``local`` begins."""
    module: Any
    """The unit itself."""

    def parts(self) -> list[tuple[str, int, int, slice]]:
        """Of each parameter: its name, its elements, at which of them this rank's part begins, and where in ``local``.

        The part is empty where this rank holds nothing of the parameter.
        """
        found, first, held = [], 0, self.local.numel()
        for name, numel in self.sections:
            if name != "padding":
                begin = min(max(first - self.start, 0), held)
                end = min(max(first + numel - self.start, 0), held)
                found.append((name, numel, min(max(self.start - first, 0), numel), slice(begin, end)))
            first += numel
        return found


_NOT_COMPARED = "gradients and shards of FSDP are not compared"


def flat_units(model: torch.nn.Module) -> list[FlatUnit]:
    """The units of an FSDP1 model; none of another one."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, getattr(ShardingStrategy, "_HYBRID_SHARD_ZERO2", None))
    found: list[FlatUnit] = []
    for prefix, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        if not hasattr(unit, "_handle"):
            warn_once("FullyShardedDataParallel._handle", _NOT_COMPARED)
        flat = getattr(getattr(unit, "_handle", None), "flat_param", None)
        if flat is None:  # it has no parameters
            continue
        told = [probed(flat, name, _NOT_COMPARED) for name in ("_fqns", "_numels_with_padding", "_is_padding_mask")]
        if any(one is None for one in told):
            continue
        names, numels, padding = iter(told[0]), told[1], told[2]
        sections = [
            ("padding" if is_padding else next(names, "?"), numel)
            for numel, is_padding in zip(numels, padding, strict=True)
        ]
        shard = "" if unit.sharding_strategy is ShardingStrategy.NO_SHARD else None
        if unit.sharding_strategy in hybrid:
            shard = f"shard {dist.get_rank(unit.process_group)}"
        local = getattr(flat, "_local_shard", flat.data)
        start = 0 if shard == "" else dist.get_rank(unit.process_group) * local.numel()
        found.append(FlatUnit(flat, local, sections, shard, f"{prefix}." if prefix else "", start, unit))
    return found


def state_dict_name(name: str) -> str:
    """A name in a model without what FSDP and activation checkpointing add to it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


# -- optimizers without state, which Lightning saves and cannot load ---------------------------------------------------

_NOT_LOADED = "the checkpoint of an optimizer without state is not loaded"


@contextmanager
def loading_empty_optimizers_of_fsdp(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Lets FSDPStrategy load in this block what it has saved of optimizers of which none has any state.

    torch's distributed checkpoint drops the empty dict, which FSDP1 wants; and in a whole checkpoint the strategy looks
    at the first parameter that has a state (lightning 2.6.6, ``fsdp.py`` 614 and 655).
    """
    whole: dict[str, Any] = {}
    left: list[dict[str, Any]] = []

    def load_with_state(load: Callable[..., Any], **arguments: Any) -> Any:
        loaded = load(**arguments)
        loaded[arguments["optimizer_key"]].setdefault("state", {})
        return loaded

    def leave_out(materialize: Callable[..., Any], checkpoint: Any) -> Any:
        nonlocal whole
        whole = materialize(checkpoint)
        if not any(one["state"] for one in whole.get("optimizer_states") or ()):
            left.extend(whole.pop("optimizer_states", None) or ())
        return whole

    shards, strategy = "torch.distributed.checkpoint.optimizer", "lightning.pytorch.strategies.fsdp"
    with (
        wrapped(shards, "load_sharded_optimizer_state_dict", load_with_state, _NOT_LOADED),
        wrapped(strategy, "_materialize_tensors", leave_out, _NOT_LOADED),
    ):
        yield
    if left:
        whole["optimizer_states"] = left
        for optimizer, state in zip(optimizers, left, strict=False):  # only a fit has optimizers
            _set_groups(optimizer, state)


@contextmanager
def loading_empty_optimizers_of_fsdp2() -> Iterator[None]:
    """Lets ModelParallelStrategy load in this block what it has saved as one file of an optimizer without state.

    It looks at the first parameter that has one, and torch at its device (lightning 2.6.6, fabric's
    ``model_parallel.py`` 597; torch 2.13's ``set_optimizer_state_dict``).
    """

    def rekey_state(rekey: Callable[..., Any], state: dict[str, Any], module: Any) -> Any:
        return rekey(state, module) if state["state"] else state

    def set_any_state(
        set_state: Callable[..., Any], module: Any, optimizer: Any, optim_state_dict: Any, **named: Any
    ) -> None:
        if isinstance(optimizer, Optimizer) and not optim_state_dict.get("state"):
            _set_groups(optimizer, optim_state_dict)
        else:
            set_state(module, optimizer, optim_state_dict, **named)

    strategy, states = "lightning.fabric.strategies.model_parallel", "torch.distributed.checkpoint.state_dict"
    with (
        wrapped(strategy, "_rekey_optimizer_state_if_needed", rekey_state, _NOT_LOADED),
        wrapped(states, "set_optimizer_state_dict", set_any_state, _NOT_LOADED),
    ):
        yield


def _set_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Sets all that a state holds beside the parameters' states, such as learning rates."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def calls_torch_save(engine: Any) -> bool:
    """Whether a checkpoint engine of DeepSpeed hands the path that it is given to ``torch.save``, and no more."""
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine

    return type(engine) is getattr(torch_checkpoint_engine, "TorchCheckpointEngine", None)


def end_deepspeed_save(engine: Any) -> None:
    """Meets the other ranks where they end a save: in the optimizer's epilogue, and at the engine's last barrier.

    deepspeed 0.19.8, ``engine.py`` 4953-4964.
    """
    from deepspeed import comm

    has_epilogue = probed(engine, "_optimizer_has_ckpt_event_epilogue", "a save that fails may hold the other ranks")
    if has_epilogue is not None and has_epilogue():
        engine.optimizer.checkpoint_event_epilogue()
    comm.barrier()


def loading_universal(engine: Any) -> AbstractContextManager[None]:
    """Lets a DeepSpeed engine load a universal checkpoint in this block, whatever its configuration says.

    Raises:
        RuntimeError: This version of DeepSpeed keeps the setting elsewhere; nothing can be loaded without it.
    """
    settings = getattr(engine, "_config", None)
    name = "load_universal_checkpoint"
    if not hasattr(settings, name):
        raise RuntimeError(
            f"DeepSpeedEngine._config.{name} is not in this version of DeepSpeed. Set "
            '{"checkpoint": {"load_universal": true}} in its configuration.'
        )
    return replaced((settings,), name, True, "")


def discard_next_deepspeed_step(engine: Any) -> bool:
    """Lets the next step of a ZeRO optimizer drop its gradients, as it does after an overflow; weights stay.

    DeepSpeed keeps reduced gradients in buffers of its own, where clearing ``.grad`` does not reach them (0.19.8).

    Returns:
        Whether it will.
    """
    optimizer = engine.optimizer
    inner = optimizer.step
    own = vars(optimizer).get("step")
    if not callable(getattr(optimizer, "_update_scale", None)):
        warn_once(f"{type(optimizer).__name__}._update_scale", "a step cannot be left out, so that it raises instead")
        return False

    def step(*arguments: Any, **named: Any) -> Any:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own
        # Called once in a step, before ``overflow`` is read; the scale itself stays.
        optimizer._update_scale = lambda has_overflow=False: setattr(optimizer, "overflow", True)
        try:
            return inner(*arguments, **named)
        finally:
            del optimizer._update_scale
            optimizer.overflow = False

    optimizer.step = step
    return True


# -- what is unpickled of a checkpoint ---------------------------------------------------------------------------------

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # torch 2.0 to 2.2
_OF_DCP = {
    (_METADATA, "BytesStorageMetadata"), (_METADATA, "ChunkStorageMetadata"), (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"), (_METADATA, "StorageMeta"), (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"), (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_SHARDED, "MEM_FORMAT_ENCODING"), (_SHARDED, "TensorProperties"),
    (_FILESYSTEM, "_StorageInfo"), ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),  # where it was saved to
    ("collections", "OrderedDict"),
}  # fmt: skip
_OF_DEEPSPEED = (
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
_NAMED_BY_TORCH = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_RUNS_CODE = "a checkpoint's pickle may run code"


@contextmanager
def refusing_code(path: Path | str, remedy: str) -> Iterator[None]:
    """Refuses what might run code of what this thread unpickles in this block, whoever asks for it.

    DeepSpeed's loaders and torch's DCP unpickle without any restriction (deepspeed 0.19.8, torch 2.13 in
    ``filesystem.py`` 930 and ``default_planner.py`` 387). Here ``torch.load`` is that of ``weights_only=True``, with
    what was given to ``torch.serialization.add_safe_globals``, and ``.metadata`` may name the classes of DCP. The
    ``remedy`` says how to go past the refusal of this checkpoint.

    Raises:
        CheckpointUnsafe: A pickle names something else; nothing of it was run.
    """
    guard = _Guard(path, remedy)
    with (
        replaced(("torch", "torch.serialization"), "load", guard.load, _RUNS_CODE),
        replaced((_FILESYSTEM,), "pickle", _PickleOfMetadata(guard), _RUNS_CODE),
    ):
        try:
            yield
        except (Exception, CheckpointException) as error:
            refusal = guard.refusal or _refusal_of_a_peer(error)
            if refusal is None or refusal is error:
                raise
            raise refusal from error  # torch and Lightning tell it in words of their own, or only a part of it


class _Guard:
    def __init__(self, path: Path | str, remedy: str) -> None:
        self.refusal: CheckpointUnsafe | None = None
        self._path, self._remedy = path, remedy
        self._thread = threading.get_ident()
        self._load: Callable[..., Any] = torch.load

    @property
    def watches(self) -> bool:
        return threading.get_ident() == self._thread  # other threads go on as they are

    def load(self, f: Any, map_location: Any = None, pickle_module: Any = None, **named: Any) -> Any:
        """``torch.load``."""
        if not self.watches:
            return self._load(f, map_location, pickle_module, **named)
        try:
            with torch.serialization.safe_globals(_missing_of_deepspeed()):
                return self._load(f, map_location, **{**named, "weights_only": True})
        except pickle.UnpicklingError as error:
            found = _NAMED_BY_TORCH.search(str(error))
            self.refuse(_file_name(f), found[1] if found else None, error)

    def load_metadata(self, file: Any) -> Any:
        """``pickle.load`` of DCP's ``.metadata``."""
        unpickler = _MetadataUnpickler(file)
        try:
            return unpickler.load()
        except pickle.UnpicklingError as error:
            self.refuse(_file_name(file), unpickler.refused, error)

    def refuse(self, file: str, name: str | None, cause: Exception) -> NoReturn:
        why = f"names {name}" if name else f"is no plain pickle ({str(cause).splitlines()[-1][:200]})"
        self.refusal = CheckpointUnsafe(
            f"The checkpoint {self._path} is refused: {file} {why}. Tensors and plain data are read, and what else a "
            f"pickle names may run any code; nothing of it was run. {self._remedy}"
        )
        raise self.refusal from cause


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes of DCP and the types of tensors, and nothing else."""

    refused: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) not in _OF_DCP:
            self.refused = f"{module}.{name}"
            raise pickle.UnpicklingError(f"{self.refused} is not a class of torch.distributed.checkpoint")
        return super().find_class(module, name)


class _PickleOfMetadata:
    """The module ``pickle``, as the module that reads ``.metadata`` sees it."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def load(self, file: Any) -> Any:
        return self._guard.load_metadata(file) if self._guard.watches else pickle.load(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


def _missing_of_deepspeed() -> list[Any]:
    """DeepSpeed's classes as far as it is imported, but for those that somebody has declared safe for good."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _OF_DEEPSPEED]
    declared = torch.serialization.get_safe_globals()
    return [one for one in found if one is not None and one not in declared]


def _file_name(file: Any) -> str:
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return "a value in a shard" if name is None else os.fspath(name)


def _refusal_of_a_peer(error: BaseException) -> CheckpointUnsafe | None:
    """A refusal by which something else has failed, here or, in DCP, on another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CheckpointUnsafe):
            return seen
        for failure, _ in seen.failures.values() if isinstance(seen, CheckpointException) else ():
            if isinstance(failure, CheckpointUnsafe):
                return failure
        seen = seen.__cause__
    return None
