"""What each kind of fault does to the process that it strikes."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lightning_distplus.testing.faults import Fault

__all__ = ["commit"]

_FOR_EVER_S = 10 * 365 * 86400.0

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def commit(fault: Fault, loss: torch.Tensor | None, module: torch.nn.Module | None) -> None:
    """Lets the fault strike this process now."""
    duration_s = _FOR_EVER_S if fault.duration_s is None else fault.duration_s
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        case "hang" | "slow":
            time.sleep(duration_s)
        case "hang_gil":
            _hold_gil(duration_s)
        case "raise":
            _raise(fault)
        case "oom":
            _run_out_of_memory(fault)
        case "nan":
            _poison(fault, loss, module)
        case "flip_bit":
            _flip_bit(fault, module)
        case "skip_collective":
            _skip_collective(module)


def _hold_gil(duration_s: float) -> None:
    """Waits in C for a locked mutex. ``PyDLL`` keeps the GIL, and a mutex wait goes on after a signal."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)  # all zero is PTHREAD_MUTEX_INITIALIZER with glibc and musl
    until = (ctypes.c_long * 2)(int(time.time() + duration_s), 0)  # struct timespec, absolute, rounded down
    until[1] = int((time.time() + duration_s) % 1 * 1e9)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, until)


def _raise(fault: Fault) -> NoReturn:
    module_name, _, name = fault.error.partition(":")
    kind: Any = importlib.import_module(module_name)
    for part in name.split("."):
        kind = getattr(kind, part)
    raise kind(fault.message or f"planted: {fault}")


def _run_out_of_memory(fault: Fault) -> NoReturn:
    import torch

    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 20.00 GiB (planted: {fault})")


def _poison(fault: Fault, loss: torch.Tensor | None, module: torch.nn.Module | None) -> None:
    import torch

    if fault.where == "before_backward":
        if loss is None:
            raise ValueError(f"{fault}: the caller gave no loss. Call plan.fire(..., loss=loss).")
        loss.data.fill_(torch.nan)
        # The backward does not read the value of the loss, so its gradient is poisoned as well.
        loss.register_hook(lambda gradient: gradient * torch.nan)  # type: ignore[no-untyped-call]
        return
    for name, parameter in _parameters(fault, module):
        if parameter.grad is not None and _local(parameter.grad).numel():
            _local(parameter.grad).view(-1)[0] = torch.nan
            return
        if fault.parameter == name:
            break
    raise ValueError(
        f"{fault}: no gradient to poison at {fault.where}. DeepSpeed keeps none after the backward: "
        'use where="before_backward".'
    )


def _flip_bit(fault: Fault, module: torch.nn.Module | None) -> None:
    import torch

    for _, parameter in _parameters(fault, module):
        values = _local(parameter.detach())
        if values.numel() == 0 or not values.is_floating_point():
            continue
        flat = values.view(-1)
        index = int(flat.abs().argmax())
        # Bit 6 of the second highest byte: the top bit of the mantissa in float32 and bfloat16.
        flat[index : index + 1].view(torch.uint8)[-2] ^= 0x40
        return
    raise ValueError(f"{fault}: this rank holds no element of {fault.parameter or 'any parameter'}.")


def _skip_collective(module: torch.nn.Module | None) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        _skip_gradient_sum(module)
        return
    homes = (torch.distributed, torch.distributed.distributed_c10d)
    originals = [(home, name, getattr(home, name)) for home in homes for name in _COLLECTIVES if hasattr(home, name)]

    def left_out(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
        for home, name, original in originals:
            setattr(home, name, original)
        return _Done() if async_op else None

    for home, name, _ in originals:
        setattr(home, name, left_out)


def _skip_gradient_sum(module: torch.nn.parallel.DistributedDataParallel) -> None:
    module.require_backward_grad_sync = False
    synchronised: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # DDP decides in the forward whether the backward after it sums, so the switch goes back after one forward.
        output = synchronised(*args, **kwargs)
        module.require_backward_grad_sync = True
        del module.forward
        return output

    module.forward = forward  # type: ignore[method-assign]


class _Done:
    """The handle of a collective that was left out."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _parameters(fault: Fault, module: torch.nn.Module | None) -> list[tuple[str, torch.nn.Parameter]]:
    if module is None:
        raise ValueError(f"{fault}: the caller gave no module. Call plan.fire(..., module=model).")
    named = list(module.named_parameters())
    if fault.parameter is None:
        return named
    # A wrapper (DDP, FSDP) puts its own prefix before the name that the author of the model knows.
    chosen = [(name, parameter) for name, parameter in named if name.endswith(fault.parameter)]
    if not chosen:
        raise ValueError(f"{fault}: no parameter is called {fault.parameter!r}. It has {[name for name, _ in named]}.")
    return chosen


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the shard of a DTensor, else the tensor."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
