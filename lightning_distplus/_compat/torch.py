"""What torch keeps to itself: process groups, stores, its flight recorder, state of modules, CRCs."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import ipaddress
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.serialization import get_crc32_options
from torch.utils.serialization import config

from lightning_distplus._compat import probed, replaced, warn_once

if TYPE_CHECKING:  # torch's stubs know its public stores only here
    from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, TCPStore

__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "clone_store",
    "default_group_timeout",
    "default_store",
    "fake_default_group",
    "flight_recorder_dumps",
    "init_default_group",
    "non_persistent_buffers",
    "num_collectives",
    "num_recorded_collectives",
    "on_terminate",
    "open_tcp_store",
    "process_groups",
    "read_group_timeout",
    "register_ddp_comm_hook",
    "set_group_timeout",
    "settle_ddp_buckets",
    "with_parameters_reversed",
    "without_crc",
]

# A torch.distributed.Store. Torch's stubs lack ``append`` and ``clone``, which every store has.
Store: TypeAlias = Any

# -- stores ------------------------------------------------------------------------------------------------------------


def open_tcp_store(host: str, port: int, **options: Any) -> TCPStore:
    """A ``TCPStore`` of ``options``; a numeric address asks no name server."""
    with _without_name_servers(host):
        return TCPStore(host, port, **options)


def clone_store(store: Store) -> Store:
    """The same store over a connection of its own; a numeric address asks no name server."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    with _without_name_servers(getattr(inner, "host", "")):
        return store.clone()


class _Server(ctypes.Structure):
    """``struct sockaddr_in``."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_uint16),
        ("address", ctypes.c_uint32),
        ("_", ctypes.c_uint64),
    )
    _pack_ = 4


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, of which each thread has one."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
        ("server", _Server),
    )


@contextmanager
def _without_name_servers(host: str) -> Iterator[None]:
    """Keeps torch from asking for the name of a numeric address to which this thread connects.

    It wants the name for its log only (2.13: ``SocketImpl`` in socket.cpp), and stands for five seconds and more where
    no name server answers. Meanwhile the name server of this thread is a socket that knows no name; without any, torch
    would warn about it.
    """
    libc: Any = ctypes.CDLL(None)
    try:
        ipaddress.ip_address(host)
        libc.__res_init()
        libc.__res_state.restype = ctypes.POINTER(_ResolverState)
        state = libc.__res_state().contents
    except (ValueError, AttributeError):  # a name must be looked up; another C library
        yield
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        threading.Thread(target=_know_no_name, args=(server,), name="distplus-names", daemon=True).start()
        kept = bytes(state)
        state.nscount = 1
        state.server = _Server(
            socket.AF_INET, socket.htons(server.getsockname()[1]), int.from_bytes(bytes([127, 0, 0, 1]), sys.byteorder)
        )
        try:
            yield
        finally:
            ctypes.memmove(ctypes.addressof(state), kept, len(kept))
            server.sendto(b"", server.getsockname())


def _know_no_name(server: socket.socket) -> None:
    """Answers each question with "no such name" (RFC 1035), until an empty one comes."""
    with suppress(OSError):
        while question := (mail := server.recvfrom(512))[0]:
            server.sendto(question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12:], mail[1])


# -- process groups ----------------------------------------------------------------------------------------------------


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of which this process is a member, the default group first."""
    groups = getattr(getattr(c10d, "_world", None), "pg_map", None)
    if groups is None:
        warn_once("torch.distributed.distributed_c10d._world.pg_map", "only the default group gets our deadlines")
        groups = [group for group in (dist.group.WORLD,) if group is not None]
    return list(groups)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Gives a live group another time-out; operations already in flight keep the old one."""
    for backend in _backends(group):
        setter = probed(backend, "_set_default_timeout", "its groups keep the time-out of their creation")
        if setter is not None:
            setter(timeout)


def read_group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out in force on a group; None where its backend does not tell."""
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group)]
    return next((timeout for timeout in timeouts if isinstance(timeout, timedelta)), None)


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
    backend: str, *, store: Store, rank: int, world_size: int, timeout: timedelta | None, device: torch.device
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
    consequence = "the numbers of collectives are not compared"
    count = probed(dist.group.WORLD, "_get_sequence_number_for_group", consequence)
    try:
        return 0 if count is None else int(count())
    except RuntimeError:  # a backend without sequence numbers
        return 0


def default_group_timeout(timeout: timedelta | None) -> AbstractContextManager[None]:
    """Gives every group that is made in this block, by anybody, this time-out instead of torch's 30 minutes.

    ``new_group`` does not inherit the time-out of the default group (torch 2.13, ``distributed_c10d.py`` 5980), so that
    the clone on which all ZeRO traffic runs, and the axes of a device mesh, keep torch's default otherwise.
    """
    if timeout is None:
        return nullcontext()
    consequence = "groups made during set-up wait for 30 minutes in it"
    return replaced((c10d,), "_get_default_timeout", lambda *_args, **_kwargs: timeout, consequence)


# -- the Flight Recorder, and a last word ------------------------------------------------------------------------------

_entries: list[Any] = []  # C++ may call them, so they must live


def flight_recorder_dumps(*, with_collectives: bool) -> list[dict[str, Any]]:
    """What torch's Flight Recorder holds, one dump per recorder: that of gloo, and that of NCCL in a build with CUDA.

    The first call decides how many entries a recorder keeps, as a collective would.
    """
    module = importlib.import_module("torch._C._distributed_c10d")
    probed(module, "_dump_fr_trace_json", "a verdict does not know the ranks' collectives")
    dumpers = [getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [json.loads(dump(with_collectives, False)) for dump in dumpers if dump is not None]


def num_recorded_collectives() -> int | None:
    """``num_collectives`` by the recorder, which leaves out point-to-point messages, as gloo does not (torch 2.13).

    None where nothing is recorded.
    """
    default = str(getattr(dist.group.WORLD, "group_name", ""))
    entries = [one for dump in flight_recorder_dumps(with_collectives=True) for one in dump.get("entries", [])]
    counts = [one.get("collective_seq_id", 0) for one in entries if one["process_group"][0] == default]
    return max(counts, default=None)


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


def _name_of_type(address: int | None) -> str:
    """The mangled name in a ``std::type_info``, which follows the pointer to its virtual table."""
    if not address:
        return ""
    name = ctypes.c_char_p.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value or b""
    return name.decode(errors="replace").lstrip("*")


# -- modules, their schedulers, and DDP --------------------------------------------------------------------------------

_NOT_SETTLED = (
    "DDP lays its buckets out anew in each process; on three or more ranks a resume may differ in the last bit"
)


def non_persistent_buffers(module: torch.nn.Module) -> frozenset[str]:
    """The buffers of a module, without its children, that are not saved."""
    return frozenset(probed(module, "_non_persistent_buffers_set", "buffers that are not saved are compared too") or ())


def register_ddp_comm_hook(model: Any, state: Any, hook: Any, wrapper: Any) -> None:
    """Registers a DDP communication hook as Lightning does on CUDA."""
    module = importlib.import_module("lightning.pytorch.overrides.distributed")
    register = probed(module, "_register_ddp_comm_hook", "DDP runs without its communication hook on the CPU")
    if register is not None:
        register(model=model, ddp_comm_state=state, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)


def with_parameters_reversed() -> AbstractContextManager[None]:
    """Has a DDP that is built in this block number its parameters last to first, as backward comes to them."""
    original: Any = getattr(DistributedDataParallel, "_build_params_for_reducer", None)

    def reversed_params(model: Any) -> tuple[list[Any], list[Any]]:
        parameters, expects_sparse = original(model)
        return parameters[::-1], expects_sparse[::-1]

    return replaced((DistributedDataParallel,), "_build_params_for_reducer", reversed_params, _NOT_SETTLED)


def settle_ddp_buckets(model: DistributedDataParallel) -> None:
    """Lays out DDP's buckets for good, in the order in which it numbers its parameters; all ranks call it together.

    Else DDP does so after the first step of a process, in the order in which gradients came.
    """
    reducer: Any = model.reducer
    if all(probed(reducer, name, _NOT_SETTLED) for name in ("_push_all_rebuilt_params", "_rebuild_buckets")):
        reducer._push_all_rebuilt_params()
        reducer._rebuild_buckets()


# -- what torch.save adds to a file ------------------------------------------------------------------------------------

_SETTING = "save.compute_crc32"


def without_crc() -> AbstractContextManager[None]:
    """In this block ``torch.save`` computes no CRC of what this thread writes; other threads go on as they are.

    torch 2.13 has the setting for each thread; where it is one for all threads, nothing is changed.
    """
    # torch adds ``patch`` to the module
    return config.patch(_SETTING, False) if _is_of_one_thread() else nullcontext()  # type: ignore[attr-defined]


@functools.cache
def _is_of_one_thread() -> bool:
    patch = probed(config, "patch", "shards are written with a CRC that nobody reads")
    if patch is None:
        return False
    seen: list[bool] = []
    before = get_crc32_options()
    other = threading.Thread(target=lambda: seen.append(get_crc32_options()))
    with patch(_SETTING, not before):
        other.start()
        other.join()
    return seen == [before]


# -- a process group that pretends -------------------------------------------------------------------------------------


@contextmanager
def fake_default_group(size: int) -> Iterator[bool]:
    """This process is rank 0 of ``size`` in this block; False where torch has no such group."""
    name = "torch.testing._internal.distributed.fake_pg"
    try:
        store = importlib.import_module(name).FakeStore()
    except (ImportError, AttributeError):
        warn_once(f"{name}.FakeStore", "no device mesh is there in a rehearsal")
        yield False
        return
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        yield True
    finally:
        dist.destroy_process_group()
