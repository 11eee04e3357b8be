"""Errors inside collectives, named: what torch reports of a dead peer hits the innocent ranks and names nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import DistplusError, message_of
from lightning_distplus.process import running_time
from lightning_distplus.watchdog import Marks

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["NamesPeers", "is_of_a_collective", "naming_peers", "raise_cause"]

_EVIDENCE_S = 2.0  # how long the cause may take to reach this rank
_POLL_S = 0.02
_SIGNS = ("gloo", "NCCL", "ncclUnhandled", "Connection closed by peer", "Connection reset by peer", "pair closure")


@contextmanager
def naming_peers(plane: ControlPlane | None) -> Iterator[None]:
    """Turns an error of a collective into that of the rank which caused it, where that becomes known.

    Raises:
        PeerFailed: A peer raised; its traceback is in the message.
        PeerLost: A peer's process is gone.
        DivergenceError: A peer has found that the ranks differ.
    """
    try:
        yield
    except RuntimeError as error:
        raise_cause(plane, error)
        raise


def raise_cause(plane: ControlPlane | None, error: RuntimeError) -> None:
    """Raises what a peer did, where it becomes known that the error comes from that; what ``naming_peers`` raises."""
    if plane is None or isinstance(error, DistplusError) or not is_of_a_collective(error):
        return
    cause = _cause(plane)
    if cause is not None:
        raise cause from error


def is_of_a_collective(error: BaseException) -> bool:
    """Whether a collective has raised this."""
    return isinstance(error, dist.DistBackendError) or any(sign in message_of(error) for sign in _SIGNS)


def _cause(plane: ControlPlane) -> DistplusError | None:
    """What the control plane hears, or this host sees, of the other ranks within two seconds."""
    end = running_time() + _EVIDENCE_S
    while running_time() < end:
        try:
            plane.raise_if_peer_failed()
            plane.raise_if_gone("a collective")
        except DistplusError as cause:
            return cause
        time.sleep(_POLL_S)
    return None


class NamesPeers(_Base):
    """Overrides the methods of a strategy inside which the engine issues collectives of its own.

    Each marks itself with its batch: where the engine waits for a peer, a verdict shows that.
    """

    _plane: ControlPlane | None = None
    _marks: Marks
    _batch = ""

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part: forward, backward and the step itself."""
        return self._named(super().optimizer_step, *arguments, **named)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._in_batch("training_step", super().training_step, *arguments, **named)

    def backward(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._marked(f"backward{self._batch}", super().backward, *arguments, **named)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._in_batch("validation_step", super().validation_step, *arguments, **named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._in_batch("test_step", super().test_step, *arguments, **named)

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._in_batch("predict_step", super().predict_step, *arguments, **named)

    def _in_batch(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The parent's step, whose second argument is the batch's index where the user's step takes one."""
        number = arguments[1] if len(arguments) > 1 else None
        self._batch = f" batch {number}" if isinstance(number, int) else ""
        return self._marked(f"{name}{self._batch}", method, *arguments, **named)

    def _marked(self, operation: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        outer = self._marks.enter(operation)
        try:
            found = self._named(method, *arguments, **named)
        except BaseException:
            self._marks.abandon(outer)
            raise
        self._marks.leave(outer)
        return found

    def _named(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """``naming_peers`` without its generator: each step comes by three times."""
        try:
            return method(*arguments, **named)
        except RuntimeError as error:
            raise_cause(self._plane, error)
            raise
