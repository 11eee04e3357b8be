"""The control plane, gate and deadlines of a run: from our strategy, or made here on any other one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, connect_over, part
from lightning_distplus.events import EventLog, folder_of_run
from lightning_distplus.timeouts import Phase, Timeouts, group_timeout
from lightning_distplus.trainer_gate import BatchGate
from lightning_distplus.world import World

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Host", "host_of"]


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
