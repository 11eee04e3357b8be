"""Lightning's collectives: named and checked before they begin; one that fails names the rank that caused it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, Point, Points
from lightning_distplus.errors import DistplusError, message_of
from lightning_distplus.gathering import describe, describe_tensor
from lightning_distplus.process import running_time
from lightning_distplus.watchdog import Marks

# -- errors inside collectives -----------------------------------------------------------------------------------------

_EVIDENCE_S = 2.0  # how long the cause may take to reach this rank
_POLL_S = 0.02
_SIGNS = ("gloo", "NCCL", "ncclUnhandled", "Connection closed by peer", "Connection reset by peer", "pair closure")


def is_of_a_collective(error: BaseException) -> bool:
    """Whether a collective has raised this."""
    return isinstance(error, dist.DistBackendError) or any(sign in message_of(error) for sign in _SIGNS)


def cause_of(plane: ControlPlane | None, error: BaseException) -> DistplusError | None:
    """What a peer did, where an error is only what a collective made of that.

    Waits up to two seconds for what the control plane hears, or this host sees, of the other ranks.

    Returns:
        ``PeerFailed`` with the peer's traceback, ``PeerLost`` where its process is gone, or the ``DivergenceError``
        that it has found; None where the error is another one, or nothing becomes known.
    """
    if plane is None or not isinstance(error, RuntimeError) or isinstance(error, DistplusError):
        return None
    end = running_time() + _EVIDENCE_S if is_of_a_collective(error) else 0.0
    while running_time() < end:
        try:
            plane.raise_if_peer_failed()
            plane.raise_if_gone("a collective")
        except DistplusError as cause:
            return cause
        time.sleep(_POLL_S)
    return None


# -- checked collectives -----------------------------------------------------------------------------------------------

T = TypeVar("T")

_END = Point.at_end("run")


class Collectives:
    """The calls of a strategy in which all ranks take part.

    Each is marked, so that a verdict shows where a rank waits; those of Lightning are compared before they begin. A
    call that takes others inside (``reduce_boolean_decision`` reduces) is one point; what it takes is covered by it. A
    call on a part of the ranks is not compared.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.plane: ControlPlane | None = None
        """Names the cause of an error; None before the ranks have met."""
        self.points: Points | None = None
        """Compares the calls of all ranks; None: there is nothing to compare."""
        self.batch = ""
        self._is_in_step = False

    # -- the engine's own ----------------------------------------------------------------------------------------------

    def optimizer_step(self, parent: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The parent's part; a backward within it is one in which the gradients of all ranks meet."""
        self._is_in_step = True
        try:
            return self.named(parent, *arguments, **named)
        finally:
            self._is_in_step = False

    def step(self, name: str, parent: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The parent's step, whose second argument is the batch's index where the user's step takes one."""
        number = arguments[1] if len(arguments) > 1 else None
        self.batch = f" batch {number}" if isinstance(number, int) else ""
        return self.marked(f"{name}{self.batch}", parent, *arguments, **named)

    def backward(self, parent: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The parent's part, once it is known where this rank is: inside it, it cannot say so."""
        operation = f"backward{self.batch}"
        if self.points is not None and self._is_in_step:
            self.points.begin_backward(operation)
        return self.marked(operation, parent, *arguments, **named)

    def marked(self, operation: str, parent: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The parent's part, inside which the engine issues collectives of its own."""
        outer = self.marks.enter(operation)
        try:
            found = self.named(parent, *arguments, **named)
        except BaseException:
            self.marks.abandon(outer)
            raise
        self.marks.leave(outer)
        return found

    def named(self, parent: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The parent's part; an error of a collective becomes that of the rank which caused it."""
        try:
            return parent(*arguments, **named)
        except RuntimeError as error:
            if cause := cause_of(self.plane, error):
                raise cause from error
            raise

    # -- Lightning's ---------------------------------------------------------------------------------------------------

    def reduce(
        self, parent: Callable[[], T], tensor: Any, group: Any | None, reduce_op: Any, caller: FrameType | None
    ) -> T:
        """The parent's part, once all ranks reduce equal shapes and dtypes, and log the same key.

        The parents hand back what is no tensor without a collective. ``caller`` is the frame that reduces: Lightning's
        frame of a logged value knows its key.
        """
        if not isinstance(tensor, Tensor):
            return parent()
        return self.together(lambda: _reduction(tensor, reduce_op, caller), parent, group)

    def all_gather(self, parent: Callable[..., Tensor], caller: FrameType) -> Callable[..., Tensor]:
        """The parent's method, once all ranks gather equal trees.

        ``LightningModule.all_gather`` takes the method once for a whole tree and then calls it for each tensor, and not
        at all for a tree that is empty on this rank. Taking it, in the caller's frame, is where trees are compared.
        """
        if caller.f_code is not LightningModule.all_gather.__code__:
            return partial(self._all_gather, parent)
        tree, group = caller.f_locals["data"], caller.f_locals["group"]
        point = _gathering(describe(tree), caller.f_locals["sync_grads"])
        is_compared = self._is_compared(group)
        number = self.together(lambda: point, lambda: self.marks.call, group)
        operation = str(point)

        def gather_leaf(tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
            gather = partial(parent, tensor, group=group, sync_grads=sync_grads)
            return self._covered(operation, gather, number=number) if is_compared else self.marked(operation, gather)

        return gather_leaf

    def _all_gather(
        self, parent: Callable[..., Tensor], tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        return self.together(
            lambda: _gathering(describe(tensor), sync_grads),
            lambda: parent(tensor, group=group, sync_grads=sync_grads),
            group,
        )

    def end(self, point: Point = _END) -> None:
        """Compares nothing any more; peers hear where this rank has ended."""
        if self.points is not None:
            self.points.end(point)
            self.points = None

    # -- inside --------------------------------------------------------------------------------------------------------

    def together(self, make_point: Callable[[], Point], call: Callable[[], T], group: Any | None = None) -> T:
        """Makes the parent's call once all ranks are at the same point; covers the calls that it takes inside.

        Raises:
            DivergenceError: The ranks are in different calls.
            PeerMissing, PeerFailed, PeerLost: A peer is the cause.
        """
        points = self.points
        if points is None or not self._is_compared(group):
            return self.named(call)
        point = make_point()

        def meet_and_call() -> T:
            points.meet(point)
            return call()

        return self._covered(str(point), meet_and_call, number=points.num_calls + 1)

    def _covered(self, operation: str, call: Callable[[], T], *, number: int) -> T:
        was_in, self.marks.call = self.marks.call, number
        try:
            with nullcontext() if self.points is None else self.points.covering():
                return self.marked(operation, call)
        finally:
            self.marks.call = was_in

    def _is_compared(self, group: Any | None) -> bool:
        return self.points is not None and self.points.are_due and self._is_of_all_ranks(group)

    def _is_of_all_ranks(self, group: Any | None) -> bool:
        return group is None or group is dist.group.WORLD or dist.get_world_size(group) == dist.get_world_size()


@lru_cache(maxsize=1000)
def point_of(operation: str, **what: str) -> Point:
    """A run comes to the same few points again and again, and each keeps its digest."""
    return Point(operation=operation, **what)


def _gathering(structure: str, sync_grads: bool) -> Point:
    return point_of("all_gather", structure=structure, arguments="with gradients" if sync_grads else "")


def _reduction(tensor: Tensor, reduce_op: Any, caller: FrameType | None) -> Point:
    """A reduction; one of a logged value carries its key."""
    structure, operator = describe_tensor(tensor), str(reduce_op).rpartition(".")[2].lower().replace("avg", "mean")
    logged = _compat.logged_metric(caller)
    if logged is None:
        return point_of("reduce", structure=structure, arguments=operator)
    key, moment = logged
    return point_of("log", name=key, structure=structure, arguments=f"{operator}, {moment}")
