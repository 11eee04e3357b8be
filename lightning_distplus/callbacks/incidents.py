"""What stays of a difference between ranks: a verdict file, a line in the ledger, one message, and the error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_distplus.errors import DivergenceError
from lightning_distplus.watchdog.verdict import Verdict
from lightning_distplus.world import World

__all__ = ["Incidents"]

log = logging.getLogger(__name__)

_BLOCKING = frozenset({"moment", "epoch", "global_step", "micro_batch", "last_batch", "collective"})
"""The ranks stand at different points: to go on would be to hang."""


class Incidents:
    """Writes down every difference, and ends the run unless the user only wants to be warned.

    Args:
        world: This process.
        folder: Where verdicts go.
        note: Writes one event into the ledger.
        only_warns: Whether a difference that lets the run go on is only reported.
    """

    def __init__(self, world: World, folder: Path, *, note: Callable[..., None], only_warns: bool) -> None:
        self._world = world
        self._folder = folder
        self._note = note
        self._only_warns = only_warns
        self._warned: set[str] = set()
        self.count = 0

    def tell(self, error: DivergenceError, *, global_step: int) -> None:
        """Every rank that has found the same difference calls this.

        Raises:
            DivergenceError: The one given, unless it is only reported.
        """
        self.count += 1
        if self._only_warns and error.field not in _BLOCKING:
            self._warn(error, global_step)
            return
        self.write(error, global_step=global_step)
        error.has_verdict = True
        raise error

    def write(self, error: DivergenceError, *, global_step: int, kind: str = "divergence") -> None:
        """Puts the evidence on disk; never raises."""
        self._note(kind, field=error.field, ranks=error.ranks, values=error.values, global_step=global_step)
        knows_alone = set(error.values) == {self._world.rank}
        if self._world.local_rank != 0 and not knows_alone:
            return
        verdict = Verdict(
            incident=f"{kind}-{int(time.time())}-step{global_step}",
            kind=kind,
            culprits=error.ranks,
            waiting=sorted(set(self._world.ranks) - set(error.ranks)),
            phase="step",
            operation=error.field,
            location=None,
            global_step=global_step,
            elapsed_s=0.0,
            cause=str(error).splitlines()[0],
            remedy=str(error).rpartition("do: ")[2],
            field=error.field,
            values={str(rank): _plain(value) for rank, value in error.values.items()},
            parameter=getattr(error, "parameter", None),
        )
        with suppress(OSError):
            verdict.write(self._folder, self._world.host)

    def _warn(self, error: DivergenceError, global_step: int) -> None:
        """The first time in full, then in the ledger only."""
        if error.field not in self._warned:
            self._warned.add(error.field)
            self.write(error, global_step=global_step)
            log.warning("rank %d: %s", self._world.rank, error)
        else:
            self._note("divergence", field=error.field, ranks=error.ranks, global_step=global_step)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else str(value)
