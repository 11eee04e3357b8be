"""The check of every call of ``torch.distributed``, when it is asked for."""

from __future__ import annotations

import threading
from contextlib import nullcontext

from lightning_distplus.callbacks.check import Check
from lightning_distplus.divergence.tracing import CollectiveTrace
from lightning_distplus.watchdog.stacks import stack_of, user_location

__all__ = ["TraceCheck"]


class TraceCheck(Check):
    """Compares collectives before they begin: those of the user, of torchmetrics, of Lightning, FSDP and DDP's hook."""

    def __init__(self) -> None:
        self._trace: CollectiveTrace | None = None
        self._num_calls = 0

    def start(self) -> None:
        """All ranks are about to train."""
        run = self.run
        self._trace = CollectiveTrace(run.plane, patience=run.patience, locate=_location, tell=run.tell)
        self._trace.start()
        run.gate.attend = self._trace.at_gate

    def train_end(self) -> None:
        """What follows is not of the training."""
        self.detach()

    def metrics(self) -> dict[str, float]:
        """How many calls this rank has made."""
        return {"traced_collectives": float(self._count())}

    def detach(self) -> None:
        """Puts the functions back."""
        self._num_calls = self._count()
        if self._trace is not None:
            self._trace.stop()
            self.run.gate.attend = lambda moment: nullcontext()
        self._trace = None

    def _count(self) -> int:
        return self._num_calls if self._trace is None else self._trace.num_calls


def _location() -> str | None:
    return user_location(stack_of(threading.get_ident()))
