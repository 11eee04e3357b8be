"""Which fault strikes which rank in which step, and the record of those that have struck."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_distplus import env
from lightning_distplus.choices import require_choice

if TYPE_CHECKING:
    import torch

__all__ = ["Fault", "FaultPlan", "FiredFault", "Kind", "Where"]

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
        return self._with(Fault(kind="kill", rank=rank, step=step, where=where))

    def stop(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """SIGSTOP: the process is there, holds its sockets and does nothing."""
        return self._with(Fault(kind="stop", rank=rank, step=step, where=where))

    def hang(self, rank: int, step: int, *, duration_s: float | None = None, where: Where = "batch_start") -> FaultPlan:
        """The training thread sleeps; other threads and signal handlers run."""
        return self._with(Fault(kind="hang", rank=rank, step=step, duration_s=duration_s, where=where))

    def hang_gil(
        self, rank: int, step: int, *, duration_s: float | None = None, where: Where = "batch_start"
    ) -> FaultPlan:
        """The training thread waits in C and holds the GIL: no Python of this process runs. Needs Linux."""
        return self._with(Fault(kind="hang_gil", rank=rank, step=step, duration_s=duration_s, where=where))

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
        error = f"{kind.__module__}:{kind.__qualname__}"
        return self._with(Fault(kind="raise", rank=rank, step=step, error=error, message=message, where=where))

    def slow(self, rank: int, step: int, duration_s: float, *, where: Where = "batch_start") -> FaultPlan:
        """A pause that ends."""
        return self._with(Fault(kind="slow", rank=rank, step=step, duration_s=duration_s, where=where))

    def sigterm(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """SIGTERM to the rank, as a scheduler sends it."""
        return self._with(Fault(kind="sigterm", rank=rank, step=step, where=where))

    def nan(self, rank: int, step: int, *, parameter: str | None = None, where: Where = "before_backward") -> FaultPlan:
        """NaN in the loss and all gradients (``before_backward``), or in one gradient (any later point of the step)."""
        return self._with(Fault(kind="nan", rank=rank, step=step, parameter=parameter, where=where))

    def oom(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """``torch.OutOfMemoryError``."""
        return self._with(Fault(kind="oom", rank=rank, step=step, where=where))

    def skip_collective(self, rank: int, step: int, *, where: Where = "batch_start") -> FaultPlan:
        """The rank leaves out one collective: its next call of ``torch.distributed``, or DDP's next gradient sum.

        A ``DistributedDataParallel`` module skips the gradient all-reduce of the next backward; for any other module
        the next collective that is called through ``torch.distributed`` returns at once, with its output as it was.
        """
        return self._with(Fault(kind="skip_collective", rank=rank, step=step, where=where))

    def flip_bit(
        self, rank: int, step: int, parameter: str | None = None, *, where: Where = "batch_start"
    ) -> FaultPlan:
        """One bit of the largest element of this rank's (shard of a) parameter; the value stays finite."""
        return self._with(Fault(kind="flip_bit", rank=rank, step=step, parameter=parameter, where=where))

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
        due = [
            number
            for number, fault in enumerate(self.faults)
            if (fault.rank, fault.step, fault.where) == (rank, step, where)
        ]
        if not due:
            return ()
        done = {entry["fault"] for entry in self._entries()}
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

    def _with(self, fault: Fault) -> FaultPlan:
        return replace(self, faults=(*self.faults, fault))

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
        from lightning_distplus.testing.deeds import commit

        assert self.record is not None, "the record was read before the deed"
        line = json.dumps({"fault": number, "pid": os.getpid(), "unix_s": time.time()}) + "\n"
        descriptor = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        commit(self.faults[number], loss, module)
