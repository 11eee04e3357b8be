"""The control plane, gate, deadlines and gathered bytes of a run: from our strategy, or made here on any other one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, connect_over, connected, part
from lightning_distplus.control.plane import MAX_MESSAGE_BYTES
from lightning_distplus.events import EventLog, folder_of_run
from lightning_distplus.phases import Phases
from lightning_distplus.timeouts import Phase, Timeouts, group_timeout
from lightning_distplus.trainer_gate import BatchGate
from lightning_distplus.world import World

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["MAX_BYTES", "Host", "gather_bytes", "host_of"]

MAX_BYTES = 256 * MAX_MESSAGE_BYTES
"""Of a value that ``gather_bytes`` takes."""


def host_of(trainer: Trainer) -> Host:
    """The strategy's own means where it has them."""
    return _Resilient(trainer) if hasattr(trainer.strategy, "phases") else _Stock(trainer)


class Host:
    """The control plane, the gate, the ledger and the deadlines of a run."""

    plane: ControlPlane
    folder: Path
    owns_gate: bool
    note: Callable[..., None]
    """Writes one event into the ledger."""

    def patience(self) -> timedelta:
        """How long a rank waits for its peers now."""
        raise NotImplementedError

    def gate(self, trainer: Trainer) -> BatchGate:
        """The gate of this run; the strategy is set up."""
        raise NotImplementedError

    def step_parts(self) -> Mapping[str, float]:
        """Seconds that this rank has spent in each part of its steps, added up; empty where nobody measures them."""
        return {}

    def report(self, error: BaseException) -> None:
        """Tells the peers of an error, unless the strategy does; never raises."""

    def close(self) -> None:
        """Puts everything back."""


class _Resilient(Host):
    owns_gate = False

    def __init__(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        self._strategy = strategy
        self.plane = strategy.plane
        self.folder = strategy.home
        self.note = strategy.note

    def patience(self) -> timedelta:
        patience: timedelta = self._strategy.phases.patience
        return patience

    def gate(self, trainer: Trainer) -> BatchGate:
        gate: BatchGate = self._strategy.gate
        return gate

    def step_parts(self) -> Mapping[str, float]:
        parts: Mapping[str, float] = self._strategy.times.parts()
        return parts


class _Stock(Host):
    """On a strategy of Lightning's: the store of the default process group carries the messages."""

    owns_gate = True

    def __init__(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        world = World(
            rank=trainer.global_rank,
            size=trainer.world_size,
            local_rank=trainer.local_rank,
            node_rank=trainer.node_rank,
            num_nodes=trainer.num_nodes,
        )
        self._deadlines = Timeouts()
        self.plane = connect_over(world, _compat.default_store(), self.patience())
        self.plane.listen()
        self.folder = folder_of_run(trainer.default_root_dir)
        self._events = EventLog(self.folder, world.rank, run_id=self.plane.run_id)
        self.note = self._events.write
        self._gate: BatchGate | None = None
        self._strategy = strategy
        self._has_failed = False

    def patience(self) -> timedelta:
        return group_timeout(self._deadlines.deadline(Phase.SETUP), "abort")

    def gate(self, trainer: Trainer) -> BatchGate:
        self._gate = BatchGate(trainer, self.plane, deadline=self.patience)
        return self._gate

    def report(self, error: BaseException) -> None:
        self._has_failed = True
        if not isinstance(error, SIGTERMException):
            self.plane.report_failure(error)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        part(self.plane, self.patience(), has_failed=self._has_failed)
        self._events.close()


# -- every rank's bytes on every rank ----------------------------------------------------------------------------------


def gather_bytes(strategy: Any, name: str, value: bytes, *, phase: Phase = Phase.CHECKPOINT) -> list[bytes]:
    """Every rank's value, in rank order; all ranks call it at the same point of the run.

    Under a Resilient strategy the messages travel through its control plane with the deadline of the phase,
    otherwise through the store of torch's default process group with the same deadline. No collective is issued.

    Args:
        strategy: The Trainer's strategy.
        name: What is gathered, for messages.
        value: At most 256 MiB; what is larger than 1 MiB goes in several messages.
        phase: Its deadline holds, or on a stock strategy the default one of that phase.

    Raises:
        ValueError: The value is too large.
        PeerMissing, PeerFailed, PeerLost: A peer did not come; ``.ranks`` names it.
    """
    if len(value) > MAX_BYTES:
        raise ValueError(
            f"The {name} of this rank has {len(value)} bytes; at most {MAX_BYTES} are gathered from each rank. "
            "Let its state hold positions, not data."
        )
    plane, deadline = _plane_of(strategy, phase)
    if plane is None:
        return [value]
    sizes = [int(size) for size in plane.gather(f"{name}-size", str(len(value)).encode(), deadline)]
    values: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, max(sizes), MAX_MESSAGE_BYTES):
        for parts, piece in zip(
            values, plane.gather(name, value[start : start + MAX_MESSAGE_BYTES], deadline), strict=True
        ):
            parts.append(piece)
    return [b"".join(parts) for parts in values]


def _plane_of(strategy: Any, phase: Phase) -> tuple[ControlPlane | None, timedelta]:
    phases = getattr(strategy, "phases", None)
    if isinstance(phases, Phases) and (plane := connected()) is not None:
        return plane, phases.patience_in(phase)
    deadline = Timeouts().deadline(phase)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None, deadline
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return connect_over(world, _compat.default_store(), deadline), deadline
