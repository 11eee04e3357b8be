"""The one place that touches private names of torch, Lightning and DeepSpeed. Each is probed before it is used.

When an upstream name has vanished, the feature behind it is switched off with one warning and training goes on.
``tests/unit/test_compat.py`` fails loudly for every name, so that we hear of it first.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.optim import lr_scheduler

# The stores are public as torch.distributed.*Store, but torch's type stubs know them only here.
__all__ = [
    "FlatUnit",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "add_to_worker_signals",
    "agree_on_resume",
    "default_group_timeout",
    "default_store",
    "discard_next_deepspeed_step",
    "flat_units",
    "flight_recorder_dumps",
    "full_state_dict_without_offload",
    "init_default_group",
    "inner_schedulers",
    "is_fsdp_shard",
    "loading_universal",
    "logged_metric",
    "non_persistent_buffers",
    "num_collectives",
    "on_terminate",
    "process_groups",
    "read_group_timeout",
    "register_ddp_comm_hook",
    "replace_batch_broadcast",
    "replace_checkpoint_link",
    "replace_preparation_barrier",
    "replace_sigterm_notifier",
    "replace_stock_signals",
    "replacing_sharded_saves",
    "restore_batch_broadcast",
    "restore_checkpoint_link",
    "restore_method",
    "restore_sigterm_notifier",
    "restore_worker_signals",
    "set_group_timeout",
    "synced_metrics",
    "warn_once",
    "wrap_method",
]

log = logging.getLogger(__name__)

# A torch.distributed.Store. Torch's stubs lack ``append`` and ``clone``, which every store has.
Store: TypeAlias = Any

_warned: set[str] = set()

_WORKER_SIGNALS = "torch.utils.data._utils.signal_handling"
_FRAMES_TO_METRIC = 3  # between strategy.reduce and the metric that is logged stands at most a partial's own frame


def warn_once(name: str, consequence: str) -> None:
    """Says once that an upstream name is gone and what follows from it."""
    if name not in _warned:
        _warned.add(name)
        log.warning("%s is not in this version of its library: %s. Training goes on.", name, consequence)


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of which this process is a member, the default group first."""
    world = getattr(c10d, "_world", None)
    if world is None or not hasattr(world, "pg_map"):
        warn_once("torch.distributed.distributed_c10d._world.pg_map", "only the default group gets our deadlines")
        default = dist.group.WORLD
        return [] if default is None else [default]
    return list(world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Gives a live group another time-out; operations already in flight keep the old one."""
    for backend in _backends(group):
        setter = getattr(backend, "_set_default_timeout", None)
        if setter is None:
            warn_once(
                f"{type(backend).__name__}._set_default_timeout", "its groups keep the time-out of their creation"
            )
        else:
            setter(timeout)


def read_group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out in force on a group; None where its backend does not tell."""
    for backend in _backends(group):
        options = getattr(backend, "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, one per device type, each once."""
    found: list[Any] = []
    if not hasattr(group, "_get_backend"):
        warn_once("ProcessGroup._get_backend", "groups keep the time-out of their creation")
        return found
    for device_type in ("cpu", "cuda", "xpu"):
        try:
            backend = group._get_backend(torch.device(device_type))
        except RuntimeError:  # no backend for this device type
            continue
        if not any(backend is other for other in found):
            found.append(backend)
    return found


def init_default_group(
    backend: str,
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta | None,
    device: torch.device,
) -> None:
    """Forms the default process group on a store of ours; otherwise as Lightning does it."""
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if backend == "nccl":
        # Lightning destroys an NCCL group at exit, where an interrupt would leave the communicators behind.
        fabric = importlib.import_module("lightning.fabric.utilities.distributed")
        atexit.register(getattr(fabric, "_destroy_dist_connection", dist.destroy_process_group))


def inner_schedulers(scheduler: Any) -> list[Any]:
    """The schedulers of a ``SequentialLR`` or ``ChainedScheduler``; of any other none."""
    if not isinstance(scheduler, (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)):
        return []
    inner = getattr(scheduler, "_schedulers", None)
    if inner is None:
        warn_once(f"{type(scheduler).__name__}._schedulers", "scale_lr does not scale the schedulers inside it")
        return []
    return list(inner)


def default_store() -> Store:
    """The store over which the default process group was formed.

    Raises:
        RuntimeError: Torch keeps it elsewhere now; a control plane on a stock strategy cannot do without it.
    """
    find = getattr(c10d, "_get_default_store", None)
    if find is None:
        raise RuntimeError(
            "torch.distributed.distributed_c10d._get_default_store is not in this version of torch. Use a Resilient "
            "strategy, which forms the process group on a store of its own."
        )
    return find()


def num_collectives() -> int:
    """How many collectives this process has started on the default group; 0 where the group does not tell."""
    group = dist.group.WORLD
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        warn_once("ProcessGroup._get_sequence_number_for_group", "the numbers of collectives are not compared")
        return 0
    try:
        return int(count())
    except RuntimeError:  # a backend without sequence numbers
        return 0


def register_ddp_comm_hook(model: Any, state: Any, hook: Any, wrapper: Any) -> None:
    """Registers a DDP communication hook as Lightning does on CUDA."""
    module = importlib.import_module("lightning.pytorch.overrides.distributed")
    register = getattr(module, "_register_ddp_comm_hook", None)
    if register is None:
        warn_once(f"{module.__name__}._register_ddp_comm_hook", "DDP runs without its communication hook on the CPU")
        return
    register(model=model, ddp_comm_state=state, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)


def logged_metric(frame: FrameType | None) -> tuple[str, str] | None:
    """What Lightning is about to reduce for ``self.log(..., sync_dist=True)``, read off the frames of its callers.

    Args:
        frame: The caller of ``strategy.reduce``.

    Returns:
        The hook and the key, as in ``"training_step.loss"``, and ``"step"`` or ``"epoch"``; None for any other call.
    """
    module = importlib.import_module("lightning.pytorch.trainer.connectors.logger_connector.result")
    metric = getattr(module, "_ResultMetric", None)
    if not hasattr(metric, "update") or not hasattr(metric, "compute"):
        warn_once(f"{module.__name__}._ResultMetric", "a reduction of a logged value is not named after its key")
        return None
    moments = {metric.update.__code__: "step", metric.compute.__code__: "epoch"}  # type: ignore[union-attr]
    for _ in range(_FRAMES_TO_METRIC):
        if frame is None:
            return None
        if moment := moments.get(frame.f_code):
            meta = getattr(frame.f_locals["self"], "meta", None)
            return f"{getattr(meta, 'fx', '')}.{getattr(meta, 'name', '')}", moment
        frame = frame.f_back
    return None


def replace_batch_broadcast(trainer: Any, gate: Callable[[], None]) -> bool:
    """Puts ``gate`` in the place of the broadcast that Lightning issues on the default group before every batch.

    That broadcast carries one bit (SIGTERM on rank 0) and swallows its own errors (lightning 2.6.6,
    ``training_epoch_loop.py`` 259-272); it runs only when a process group exists.

    Returns:
        Whether the broadcast was there to be replaced.
    """
    loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
    if not callable(getattr(loop, "_broadcast_sigterm_tensor", None)):
        warn_once("_TrainingEpochLoop._broadcast_sigterm_tensor", "ranks are not compared before each step")
        return False
    loop._broadcast_sigterm_tensor = gate  # type: ignore[union-attr]
    return True


def restore_batch_broadcast(trainer: Any) -> None:
    """Puts the stock broadcast back."""
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any], consequence: str) -> bool:
    """Calls ``wrapper(method, *arguments)`` in the place of a method of this one object.

    Args:
        owner: A Trainer, a loop, a connector or a strategy.
        name: The method, private or not.
        wrapper: Gets the method as it was, and its arguments.
        consequence: What follows where the method is gone.

    Returns:
        Whether the method was there.
    """
    inner = getattr(owner, name, None)
    if not callable(inner):
        warn_once(f"{type(owner).__name__}.{name}", consequence)
        return False
    vars(owner)[name] = functools.partial(wrapper, inner)
    return True


def restore_method(owner: Any, name: str) -> None:
    """Undoes ``wrap_method``."""
    vars(owner).pop(name, None)


def synced_metrics(trainer: Any) -> list[str]:
    """The logged metrics, in order, that Lightning will reduce over all ranks at the end of this epoch."""
    results = getattr(trainer, "_results", None)
    if results is None:
        return []
    found = []
    for key, metric in results.items():
        meta = getattr(metric, "meta", None)
        if meta is None or not hasattr(meta, "sync"):
            warn_once("_ResultMetric.meta.sync", "the names of logged metrics are not compared")
            return []
        if meta.on_epoch and (meta.sync.should or not metric.is_tensor):
            found.append(str(key))
    return found


def replace_preparation_barrier(trainer: Any, barrier: Callable[[], Any]) -> bool:
    """Puts the context manager that ``barrier`` makes in the place of the one around the next ``prepare_data``.

    Lightning's waits 10,000 days, and waits so too where ``prepare_data`` has raised on one rank (lightning 2.6.6,
    ``data_connector.py`` 93 and 100).

    Returns:
        Whether the barrier was there to be replaced.
    """
    connector = getattr(trainer, "_data_connector", None)
    module = importlib.import_module("lightning.pytorch.trainer.connectors.data_connector")
    prepare = getattr(connector, "prepare_data", None)
    original = getattr(module, "_InfiniteBarrier", None)
    if not callable(prepare) or original is None:
        warn_once(f"{module.__name__}._InfiniteBarrier", "ranks wait for prepare_data without a deadline")
        return False

    def prepare_once() -> None:
        vars(connector).pop("prepare_data", None)
        setattr(module, "_InfiniteBarrier", barrier)  # noqa: B010  # mypy refuses the attribute
        try:
            prepare()
        finally:
            setattr(module, "_InfiniteBarrier", original)  # noqa: B010

    connector.prepare_data = prepare_once  # type: ignore[union-attr]
    return True


def agree_on_resume(trainer: Any, agree: Callable[[Any], Any]) -> bool:
    """Has the next run of ``trainer`` resume from what ``agree`` makes of this rank's ``ckpt_path``.

    Lightning resolves ``"last"`` and ``"hpc"`` on each rank by itself (lightning 2.6.6, ``checkpoint_connector.py``
    158-230), so that some may resume while others start anew.

    Returns:
        Whether the path could be taken over.
    """
    connector = getattr(trainer, "_checkpoint_connector", None)
    resume = getattr(connector, "resume_start", None)
    if connector is None or not callable(resume):
        warn_once("_CheckpointConnector.resume_start", "each rank resumes from what it has found itself")
        return False

    def resume_once(checkpoint_path: Any = None, *arguments: Any, **named: Any) -> None:
        vars(connector).pop("resume_start", None)
        connector.resume_start(agree(checkpoint_path), *arguments, **named)

    connector.resume_start = resume_once
    return True


def replace_checkpoint_link(callback: Any, link: Callable[[Any, str, str], None]) -> bool:
    """Puts ``link`` in the place of a ModelCheckpoint's for ``save_last="link"``, which removes the old link first.

    Returns:
        Whether there was one to be replaced.
    """
    if not callable(getattr(callback, "_link_checkpoint", None)):
        if hasattr(callback, "save_last"):
            warn_once("ModelCheckpoint._link_checkpoint", 'with save_last="link" there are moments without a link')
        return False
    callback._link_checkpoint = link
    return True


def restore_checkpoint_link(callback: Any) -> None:
    """Puts a ModelCheckpoint's own method back."""
    vars(callback).pop("_link_checkpoint", None)


def replace_sigterm_notifier(trainer: Any, handler: Callable[[int, Any], None]) -> bool:
    """Puts ``handler`` in the place of Lightning's SIGTERM handler, which broadcasts inside the signal.

    Takes effect when the Trainer registers its handlers, after the strategy's set-up.

    Returns:
        Whether the handler was there to be replaced.
    """
    connector = getattr(trainer, "_signal_connector", None)
    if not callable(getattr(connector, "_sigterm_notifier_fn", None)):
        warn_once("_SignalConnector._sigterm_notifier_fn", "a SIGTERM may block this rank in a broadcast")
        return False
    connector._sigterm_notifier_fn = handler  # type: ignore[union-attr]
    return True


def restore_sigterm_notifier(trainer: Any) -> None:
    """Puts Lightning's SIGTERM handler back."""
    connector = getattr(trainer, "_signal_connector", None)
    if connector is not None:
        vars(connector).pop("_sigterm_notifier_fn", None)


def replace_stock_signals(trainer: Any, restore: Callable[[], None]) -> bool:
    """Keeps Lightning from registering signal handlers in the next run of this Trainer.

    Its SIGTERM handler broadcasts, and its Slurm handler saves, inside the signal (lightning 2.6.6,
    ``signal_connector.py`` 58-118).

    Args:
        trainer: The Trainer, before it registers its handlers, which it does after the strategy's set-up.
        restore: Called once, when the Trainer would put back the handlers that it found; Lightning's are back then.

    Returns:
        Whether the registration was there to be kept off.
    """
    connector = getattr(trainer, "_signal_connector", None)
    if not callable(getattr(connector, "register_signal_handlers", None)):
        warn_once("_SignalConnector.register_signal_handlers", "Lightning's own signal handlers stand before ours")
        return False

    def teardown() -> None:
        for name in ("register_signal_handlers", "teardown"):
            vars(connector).pop(name, None)
        restore()

    connector.received_sigterm = False  # type: ignore[union-attr]
    connector.register_signal_handlers = lambda: None  # type: ignore[union-attr]
    connector.teardown = teardown  # type: ignore[union-attr]
    return True


def add_to_worker_signals(also: Callable[[], None]) -> bool:
    """Calls ``also`` in each data worker that is forked from now on, once torch has set its signal handlers there.

    Torch's own handler ends a worker on SIGTERM, whoever sends it, and the step that needs its batch fails (torch
    2.13, ``signal_handling.py``).

    Returns:
        Whether the place was there.
    """
    module = importlib.import_module(_WORKER_SIGNALS)
    original = getattr(module, "_set_worker_signal_handlers", None)
    if not callable(original):
        warn_once(f"{_WORKER_SIGNALS}._set_worker_signal_handlers", "a SIGTERM to all processes ends data workers")
        return False

    def set_handlers() -> None:
        original()
        also()

    vars(module).setdefault("_distplus_original", original)
    setattr(module, "_set_worker_signal_handlers", set_handlers)  # noqa: B010  # mypy refuses the attribute
    return True


def restore_worker_signals() -> None:
    """Undoes ``add_to_worker_signals``."""
    module = importlib.import_module(_WORKER_SIGNALS)
    if original := vars(module).pop("_distplus_original", None):
        setattr(module, "_set_worker_signal_handlers", original)  # noqa: B010


@contextmanager
def default_group_timeout(timeout: timedelta | None) -> Iterator[None]:
    """Gives every group that is made in this block, by anybody, this time-out instead of torch's 30 minutes.

    ``new_group`` does not inherit the time-out of the default group (torch 2.13, ``distributed_c10d.py`` 5980), so that
    the clone on which all ZeRO traffic runs, and the axes of a device mesh, keep torch's default otherwise.
    """
    name = "_get_default_timeout"
    original = getattr(c10d, name, None)
    if timeout is None or original is None:
        if original is None:
            warn_once(
                f"torch.distributed.distributed_c10d.{name}", "groups made during set-up wait for 30 minutes in it"
            )
        yield
        return
    setattr(c10d, name, lambda *_args, **_kwargs: timeout)
    try:
        yield
    finally:
        setattr(c10d, name, original)


@contextmanager
def full_state_dict_without_offload() -> Iterator[None]:
    """Gathers full FSDP1 state dicts without ``offload_to_cpu`` in this block.

    On the CPU the offload is a use-after-free that crashes the process (Lightning-AI/pytorch-lightning#21804, fixed
    after lightning 2.6.6).
    """
    modules = ("lightning.pytorch.strategies.fsdp", "lightning.fabric.strategies.model_parallel")
    consequence = "a full FSDP checkpoint on the CPU may crash the process"
    with _replaced(modules, "_get_full_state_dict_context", _full_state_dict_on_cpu, consequence):
        yield


@contextmanager
def loading_unsharded_models() -> Iterator[None]:
    """Lets ModelParallelStrategy load, in this block, a model of which nothing is sharded.

    It saves such a model, and refuses to load it (lightning 2.6.6, fabric's ``model_parallel.py`` 424).
    """
    modules = ("lightning.fabric.strategies.model_parallel",)
    consequence = "the checkpoint of a model without shards is not loaded"
    with _replaced(modules, "_has_dtensor_modules", lambda part: isinstance(part, torch.nn.Module), consequence):
        yield


@contextmanager
def _replaced(names: Iterable[str], attribute: str, value: Any, consequence: str) -> Iterator[None]:
    """Puts a value in the place of an attribute of each module in this block; says so where it is not there."""
    originals = []
    for module in map(importlib.import_module, names):
        if hasattr(module, attribute):
            originals.append((module, getattr(module, attribute)))
        else:
            warn_once(f"{module.__name__}.{attribute}", consequence)
    for module, _ in originals:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, original in originals:
            setattr(module, attribute, original)


def _full_state_dict_on_cpu(module: Any, world_size: int, rank0_only: bool = True) -> Any:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.api import FullOptimStateDictConfig

    return FullyShardedDataParallel.state_dict_type(
        module=module,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


def flight_recorder_dumps(*, with_collectives: bool) -> list[dict[str, Any]]:
    """What torch's Flight Recorder holds, one dump per recorder: that of gloo, and that of NCCL in a build with CUDA.

    The first call decides how many entries a recorder keeps, as a collective would.
    """
    module = importlib.import_module("torch._C._distributed_c10d")
    if not hasattr(module, "_dump_fr_trace_json"):
        warn_once("torch._C._distributed_c10d._dump_fr_trace_json", "a verdict does not know the ranks' collectives")
    dumpers = [getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [json.loads(dump(with_collectives, False)) for dump in dumpers if dump is not None]


def on_terminate(handler: Callable[[str], None]) -> Callable[[], None] | None:
    """Calls ``handler`` when C++ ends this process because nobody catches an exception; then what was there before.

    Gloo throws so on a thread of its own when a peer's message does not fit (torch 2.13): no Python exception, no hook.
    The handler runs on that thread, gets the (mangled) type of the exception, and the process ends after it.

    Returns:
        Takes the handler out again; None where the C++ library cannot be asked.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate, type_of_exception = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    except (OSError, AttributeError):
        warn_once("std::set_terminate", "an abort in gloo leaves no evidence")
        return None
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    type_of_exception.restype = ctypes.c_void_p
    signature = ctypes.CFUNCTYPE(None)

    def terminate() -> None:
        try:
            handler(_name_of_type(type_of_exception()))
        finally:
            signature(previous)()

    entry = signature(terminate)
    _entries.append(entry)
    previous: int = set_terminate(ctypes.cast(entry, ctypes.c_void_p))

    def restore() -> None:
        found = set_terminate(previous)
        if found == ctypes.cast(entry, ctypes.c_void_p).value:
            _entries.remove(entry)
        else:  # somebody has chained his own since then, who may call ours
            set_terminate(found)

    return restore


_entries: list[Any] = []  # C++ may call them, so they must live


def _name_of_type(address: int | None) -> str:
    """The mangled name in a ``std::type_info``, which follows the pointer to its virtual table."""
    if not address:
        return ""
    name = ctypes.c_char_p.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value or b""
    return name.decode(errors="replace").lstrip("*")


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


def flat_units(model: torch.nn.Module) -> list[FlatUnit]:
    """The units of an FSDP1 model; none of another one."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, getattr(ShardingStrategy, "_HYBRID_SHARD_ZERO2", None))
    found: list[FlatUnit] = []
    for unit in (module for module in model.modules() if isinstance(module, FullyShardedDataParallel)):
        handle = getattr(unit, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            if not hasattr(unit, "_handle"):
                warn_once("FullyShardedDataParallel._handle", "gradients and shards of FSDP are not compared")
            continue
        names = iter(getattr(flat, "_fqns", ()))
        numels = getattr(flat, "_numels_with_padding", ())
        padding = getattr(flat, "_is_padding_mask", [False] * len(numels))
        sections = [
            ("padding" if is_padding else next(names, "?"), numel)
            for numel, is_padding in zip(numels, padding, strict=False)
        ]
        shard = "" if unit.sharding_strategy is ShardingStrategy.NO_SHARD else None
        if unit.sharding_strategy in hybrid:
            shard = f"shard {dist.get_rank(unit.process_group)}"
        found.append(FlatUnit(flat, getattr(flat, "_local_shard", flat.data), sections, shard))
    return found


def non_persistent_buffers(module: torch.nn.Module) -> frozenset[str]:
    """The buffers of a module, without its children, that are not saved."""
    return frozenset(getattr(module, "_non_persistent_buffers_set", ()))


@contextmanager
def replacing_sharded_saves(save: Callable[[dict[str, Any], Any], None]) -> Iterator[None]:
    """Has FSDPStrategy and ModelParallelStrategy hand their shards to ``save`` in this block, instead of writing them.

    Lightning calls ``torch.distributed.checkpoint.save`` on the default group (lightning 2.6.6, ``fsdp.py`` 860).
    """
    modules = ("lightning.pytorch.strategies.fsdp", "lightning.pytorch.strategies.model_parallel")
    consequence = "sharded checkpoints are written while training waits"
    with _replaced(modules, "_distributed_checkpoint_save", save, consequence):
        yield


@contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
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
    before = getattr(settings, name)
    setattr(settings, name, True)
    try:
        yield
    finally:
        setattr(settings, name, before)


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
