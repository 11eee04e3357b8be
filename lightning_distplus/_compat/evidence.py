"""What torch and the C++ library tell about a job that fails: the Flight Recorder, and a last word."""

from __future__ import annotations

import ctypes
import importlib
import json
from collections.abc import Callable
from typing import Any

from lightning_distplus._compat.probing import warn_once

__all__ = ["flight_recorder_dumps", "on_terminate"]

_entries: list[Any] = []  # C++ may call them, so they must live


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


def _name_of_type(address: int | None) -> str:
    """The mangled name in a ``std::type_info``, which follows the pointer to its virtual table."""
    if not address:
        return ""
    name = ctypes.c_char_p.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value or b""
    return name.decode(errors="replace").lstrip("*")
