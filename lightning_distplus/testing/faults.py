"""Which fault strikes which rank in which step, and the record of those that have struck."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from lightning_distplus import env
from lightning_distplus.errors import require_choice

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Kind = Literal[
    "kill", "stop", "hang", "hang_gil", "raise", "slow", "sigterm", "nan", "oom", "skip_collective", "flip_bit"
]
Where = Literal[
    "batch_start", "before_backward", "after_backward", "before_optimizer_step", "batch_end", "validation", "save"
]
_IN_A_STEP: tuple[Where, ...] = (
    "batch_start",
    "before_backward",
    "after_backward",
    "before_optimizer_step",
    "batch_end",
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: what happens to which rank, when."""

    kind: Kind
    """What happens."""
    rank: int
    """The global rank that it happens to."""
    step: int
    """Optimizer steps completed when the step began in which it happens: 0 is the first step."""
    where: Where = "batch_start"
    """The point within the step."""
    duration_s: float | None = None
    """How long a slow or hanging rank takes; None is for ever."""
    error: str = "builtins:RuntimeError"
    """``module:name`` of the exception that a ``raise`` raises."""
    message: str = ""
    """The text of that exception."""
    parameter: str | None = None
    """The parameter in which a bit flips or a gradient becomes NaN; None takes the first one with elements."""

    def __post_init__(self) -> None:
        require_choice("Fault.kind", self.kind, Kind)
        require_choice("Fault.where", self.where, Where)
        if self.rank < 0 or self.step < 0:
            raise ValueError(f"Fault.rank is {self.rank} and Fault.step is {self.step}; neither is negative.")
        if self.duration_s is not None and self.duration_s <= 0:
            raise ValueError(f"Fault.duration_s is {self.duration_s}; it is longer than zero, or None for ever.")
        if self.kind == "slow" and self.duration_s is None:
            raise ValueError(
                "Fault.duration_s is None; a slow rank needs a duration, and one that never ends is a hang."
            )

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} in step {self.step} at {self.where}"


@dataclass(frozen=True, kw_only=True)
class FiredFault:
    """One fault that has struck."""

    fault: Fault
    pid: int
    unix_s: float
    """Wall clock just before the deed: the start of a detection time."""


@dataclass(frozen=True)
class FaultPlan:
    """The faults of one job. Each fires once per job, also across restarts.

    The methods return a new plan, so that they chain: ``FaultPlan().kill(1, step=3).nan(0, step=5)``. A plan is a
    value: it can be pickled, compared, and written as JSON or YAML.

    Before a fault strikes, it is written to the record and synced, so that not even SIGKILL loses it. The idea of
    counting what fired, so that a fault test cannot pass without its fault, is torchft's ``EventInjector``.

    Args:
        faults: The faults, in any order.
        record: The file that tells which have fired. ``spawn`` sets it.
    """

    faults: tuple[Fault, ...] = ()
    record: str | None = None

    def kill(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """SIGKILL: the process is gone at once."""
        return self._with("kill", rank, step, where)

    def stop(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """SIGSTOP: the process is there, holds its sockets and does nothing."""
        return self._with("stop", rank, step, where)

    def hang(self, rank: int, step: int, *, duration_s: float | None = None, where: Where = "batch_start") -> FaultPlan:
        """The training thread sleeps; other threads and signal handlers run."""
        return self._with("hang", rank, step, where, duration_s=duration_s)

    def hang_gil(
        self, rank: int, step: int, *, duration_s: float | None = None, where: Where = "batch_start"
    ) -> FaultPlan:
        """The training thread waits in C and holds the GIL: no Python of this process runs. Needs Linux."""
        return self._with("hang_gil", rank, step, where, duration_s=duration_s)

    def raise_(
        self,
        rank: int,
        step: int,
        *,
        exc: type[BaseException] | BaseException = RuntimeError,
        where: Where = "batch_start",
    ) -> FaultPlan:
        """An exception, given as an importable class or as an instance that its text alone can rebuild."""
        kind, message = (exc, "") if isinstance(exc, type) else (type(exc), str(exc))
        return self._with("raise", rank, step, where, error=f"{kind.__module__}:{kind.__qualname__}", message=message)

    def slow(self, rank: int, step: int, duration_s: float, *, where: Where = "batch_start") -> FaultPlan:
        """A pause that ends."""
        return self._with("slow", rank, step, where, duration_s=duration_s)

    def sigterm(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """SIGTERM to the rank, as a scheduler sends it."""
        return self._with("sigterm", rank, step, where)

    def nan(self, rank: int, step: int, *, parameter: str | None = None, where: Where = "before_backward") -> FaultPlan:
        """NaN in the loss and all gradients (``before_backward``), or in one gradient (any later point of the step)."""
        return self._with("nan", rank, step, where, parameter=parameter)

    def oom(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """``torch.OutOfMemoryError``."""
        return self._with("oom", rank, step, where)

    def skip_collective(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """The rank leaves out one collective: its next call of ``torch.distributed``, or DDP's next gradient sum.

        A ``DistributedDataParallel`` module skips the gradient all-reduce of the next backward; for any other module
        the next collective that is called through ``torch.distributed`` returns at once, with its output as it was.
        """
        return self._with("skip_collective", rank, step, where)

    def flip_bit(
        self, rank: int, step: int, parameter: str | None = None, *, where: Where = "batch_start"
    ) -> FaultPlan:
        """One bit of the largest element of this rank's (shard of a) parameter; the value stays finite."""
        return self._with("flip_bit", rank, step, where, parameter=parameter)

    @classmethod
    def random_kill(cls, seed: int, world_size: int, max_step: int) -> FaultPlan:
        """SIGKILL of one rank at a point of a step in ``range(max_step)``; the same seed is the same fault."""
        draw = random.Random(seed)
        return cls().kill(draw.randrange(world_size), draw.randrange(max_step), where=draw.choice(_IN_A_STEP))

    def fire(
        self,
        rank: int,
        step: int,
        where: Where = "batch_start",
        *,
        loss: torch.Tensor | None = None,
        module: torch.nn.Module | None = None,
    ) -> tuple[Fault, ...]:
        """Does what the plan has for this point, unless it is done already. Call it from a plain torch loop.

        Args:
            rank: The global rank of the caller.
            step: Optimizer steps completed when the current step began.
            where: The point within the step.
            loss: The loss, for ``nan`` before the backward.
            module: The model, for ``nan``, ``flip_bit`` and ``skip_collective``.

        Returns:
            The faults that fired and let the caller live.
        """
        due = [i for i, one in enumerate(self.faults) if (one.rank, one.step, one.where) == (rank, step, where)]
        done = {entry["fault"] for entry in self._entries()} if due else set()
        fresh = [number for number in due if number not in done]
        for number in fresh:
            self._strike(number, loss, module)
        return tuple(self.faults[number] for number in fresh)

    def fired(self) -> list[FiredFault]:
        """The faults that have struck, in order of time."""
        return [
            FiredFault(fault=self.faults[entry["fault"]], pid=entry["pid"], unix_s=entry["unix_s"])
            for entry in self._entries()
        ]

    def recorded_in(self, record: str | Path) -> FaultPlan:
        """The same plan with its record in this file, which all ranks and restarts of the job can write."""
        return replace(self, record=str(Path(record).absolute()))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Reads what ``to_json`` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FaultPlan:
        """Reads ``{"faults": [{"kind": ..., "rank": ..., "step": ...}, ...]}``, as JSON and YAML give it."""
        return cls(tuple(Fault(**fault) for fault in values.get("faults", ())), values.get("record"))

    @classmethod
    def from_environment(cls) -> FaultPlan:
        """The plan that ``spawn`` gave to this process; an empty one where there is none."""
        text = env.DISTPLUS_FAULTS.get()
        return cls() if text is None else cls.from_json(text)

    def _with(self, kind: Kind, rank: int, step: int, where: Where, **rest: Any) -> FaultPlan:
        return replace(self, faults=(*self.faults, Fault(kind=kind, rank=rank, step=step, where=where, **rest)))

    def _entries(self) -> Iterable[dict[str, Any]]:
        if self.record is None:
            raise ValueError(
                f"This plan has {len(self.faults)} fault(s) and no record, so nobody could tell which have fired. "
                "Run it through spawn(..., faults=plan), or give it a file: plan.recorded_in(path)."
            )
        record = Path(self.record)
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        return [json.loads(line) for line in lines]

    def _strike(self, number: int, loss: torch.Tensor | None, module: torch.nn.Module | None) -> None:
        assert self.record is not None, "the record was read before the deed"
        line = json.dumps({"fault": number, "pid": os.getpid(), "unix_s": time.time()}) + "\n"
        with Path(self.record).open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        commit(self.faults[number], loss, module)


# -- what each kind of fault does to its process -----------------------------------------------------------------------

_FOR_EVER_S = 10 * 365 * 86400.0
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "sigterm": signal.SIGTERM}
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter",
)  # fmt: skip


def commit(fault: Fault, loss: torch.Tensor | None, module: torch.nn.Module | None) -> None:
    """Lets the fault strike this process now."""
    duration_s = _FOR_EVER_S if fault.duration_s is None else fault.duration_s
    match fault.kind:
        case "kill" | "stop" | "sigterm":
            os.kill(os.getpid(), _SIGNALS[fault.kind])
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
        if parameter.grad is not None and local_part(parameter.grad).numel():
            local_part(parameter.grad).view(-1)[0] = torch.nan
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
        values = local_part(parameter.detach())
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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the shard of a DTensor, what ZeRO-3 has left of a parameter, or all."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    part: torch.Tensor | None = getattr(tensor, "ds_tensor", None) if to_local is None else to_local()
    return tensor if part is None else part
