"""Errors inside collectives, named: what torch reports of a dead peer hits the innocent ranks and names nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import DistplusError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["NamesPeers", "naming_peers"]

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
        if plane is None or isinstance(error, DistplusError) or not _is_of_a_collective(error):
            raise
        cause = _cause(plane)
        if cause is None:
            raise
        raise cause from error


def _is_of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in _SIGNS)


def _cause(plane: ControlPlane) -> DistplusError | None:
    """What the control plane hears, or this host sees, of the other ranks within two seconds."""
    end = time.monotonic() + _EVIDENCE_S
    while time.monotonic() < end:
        try:
            plane.raise_if_peer_failed()
            plane.raise_if_gone("a collective")
        except DistplusError as cause:
            return cause
        time.sleep(_POLL_S)
    return None


class NamesPeers(_Base):
    """Overrides every method of a strategy in which its training thread may stand in a collective."""

    _plane: ControlPlane | None = None

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part: forward, backward and the step itself."""
        return self._named(super().optimizer_step, *arguments, **named)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().training_step, *arguments, **named)

    def backward(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().backward, *arguments, **named)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().validation_step, *arguments, **named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().test_step, *arguments, **named)

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().predict_step, *arguments, **named)

    def barrier(self, *arguments: Any, **named: Any) -> None:
        """The parent's part."""
        self._named(super().barrier, *arguments, **named)

    def broadcast(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().broadcast, *arguments, **named)

    def reduce(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().reduce, *arguments, **named)

    def all_gather(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part."""
        return self._named(super().all_gather, *arguments, **named)

    def _named(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with naming_peers(self._plane):
            return method(*arguments, **named)
