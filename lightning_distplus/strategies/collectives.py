"""Lightning's collectives: named and checked before they begin; one that fails names the rank that caused it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, Point, Points
from lightning_distplus.errors import DistplusError, message_of
from lightning_distplus.liveness import running_time
from lightning_distplus.trees import describe, describe_tensor
from lightning_distplus.watchdog import Marks
from lightning_distplus.watchdog.stacks import stack_of, user_location

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["ChecksCollectives", "NamesPeers", "is_of_a_collective", "line_of_the_caller", "naming_peers", "raise_cause"]

# -- errors inside collectives -----------------------------------------------------------------------------------------

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


# -- checked collectives -----------------------------------------------------------------------------------------------

T = TypeVar("T")

_SAVE = Point(operation="barrier", name="Trainer.save_checkpoint")


class ChecksCollectives(NamesPeers):
    """Overrides the calls of a strategy in which all ranks take part.

    A call that takes others inside (``reduce_boolean_decision`` reduces) is one point; what it takes is covered by it.
    A call on a part of the ranks is not compared.
    """

    _points: Points | None = None
    _is_covered = False
    _is_in_step = False

    def optimizer_step(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part; a backward within it is one in which the gradients of all ranks meet."""
        self._is_in_step = True
        try:
            return super().optimizer_step(*arguments, **named)
        finally:
            self._is_in_step = False

    def backward(self, *arguments: Any, **named: Any) -> Any:
        """The parent's part, once it is known where this rank is: inside it, it cannot say so."""
        if self._points is not None and self._is_in_step:
            self._points.begin_backward(f"backward{self._batch}")
        return super().backward(*arguments, **named)

    def barrier(self, *arguments: Any, **named: Any) -> None:
        """The parent's part, once all ranks are at a barrier of this name."""
        name = arguments[0] if arguments else named.get("name")
        parent = super().barrier
        self._together(lambda: _point("barrier", name=str(name or "")), lambda: parent(*arguments, **named))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The parent's part, once all ranks broadcast from the same one; what they hold may differ."""
        parent = super().broadcast
        return self._together(lambda: _point("broadcast", arguments=f"from rank {src}"), lambda: parent(obj, src))

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The parent's part, once all ranks reduce equal shapes and dtypes, and log the same key."""
        parent = super().reduce
        if not isinstance(tensor, Tensor):
            return parent(tensor, group, reduce_op)  # the parents hand it back without a collective
        caller = sys._getframe(1)
        return self._together(
            lambda: _reduction(tensor, reduce_op, caller), lambda: parent(tensor, group, reduce_op), group
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # the parent's name
        """The parent's part, once all ranks decide in the same way."""
        parent = super().reduce_boolean_decision
        return self._together(
            lambda: _point("reduce_boolean_decision", arguments="all" if all else "any"),
            lambda: parent(decision, all),
        )

    @property
    def all_gather(self) -> Callable[..., Any]:
        """The parent's method, once all ranks gather equal trees.

        A property, because ``LightningModule.all_gather`` takes the method once for a whole tree and then calls it for
        each tensor, and not at all for a tree that is empty on this rank. Taking it is where the trees are compared.
        """
        frame = sys._getframe(1)
        if frame.f_code is not LightningModule.all_gather.__code__:
            return self._all_gather
        tree, group = frame.f_locals["data"], frame.f_locals["group"]
        point = _gathering(describe(tree), frame.f_locals["sync_grads"])
        number = self._together(lambda: point, lambda: self._marks.call, group)
        parent, operation = super().all_gather, str(point)

        def gather_leaf(tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
            return self._covered(operation, lambda: parent(tensor, group=group, sync_grads=sync_grads), number=number)

        return gather_leaf

    def _all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        parent = super().all_gather
        return self._together(
            lambda: _gathering(describe(tensor), sync_grads),
            lambda: parent(tensor, group=group, sync_grads=sync_grads),
            group,
        )

    def _announcing(self, save: Callable[..., None]) -> Callable[..., None]:
        """``Trainer.save_checkpoint``, once all ranks save: what it collects first may be a collective already."""

        def save_checkpoint(*arguments: Any, **named: Any) -> None:
            self._together(lambda: _SAVE, _nothing)
            save(*arguments, **named)

        return save_checkpoint

    # -- inside ------------------------------------------------------------------------------------------------------

    def _together(self, make_point: Callable[[], Point], call: Callable[[], T], group: Any | None = None) -> T:
        """Makes the parent's call once all ranks are at the same point; covers the calls that it takes inside.

        Raises:
            DivergenceError: The ranks are in different calls.
            PeerMissing, PeerFailed, PeerLost: A peer is the cause.
        """
        points = self._points
        if points is None or self._is_covered or not points.are_due or not self._is_of_all_ranks(group):
            return self._named(call)  # type: ignore[no-any-return]
        point = make_point()
        return self._covered(str(point), call, lambda: points.meet(point), number=points.num_calls + 1)

    def _covered(
        self, operation: str, call: Callable[[], T], before: Callable[[], None] | None = None, *, number: int = 0
    ) -> T:
        was_covered, self._is_covered = self._is_covered, True
        was_in, self._marks.call = self._marks.call, number
        outer = self._marks.enter(operation)
        try:
            if before is not None:
                before()
            found = call()
            self._marks.leave(outer)
        except BaseException as error:
            self._marks.abandon(outer)
            if isinstance(error, RuntimeError):
                raise_cause(self._plane, error)
            raise
        finally:
            self._is_covered = was_covered
            self._marks.call = was_in
        return found

    def _is_of_all_ranks(self, group: Any | None) -> bool:
        return group is None or group is dist.group.WORLD or dist.get_world_size(group) == self.world_size


def _nothing() -> None:
    pass


def line_of_the_caller() -> str | None:
    """``file.py:line`` in the user's code from which this thread has come here; takes about a millisecond."""
    return user_location(stack_of(threading.get_ident()))


@lru_cache(maxsize=1000)
def _point(operation: str, **what: str) -> Point:
    """A run comes to the same few points again and again, and each keeps its digest."""
    return Point(operation=operation, **what)


def _gathering(structure: str, sync_grads: bool) -> Point:
    return _point("all_gather", structure=structure, arguments="with gradients" if sync_grads else "")


def _reduction(tensor: Tensor, reduce_op: Any, caller: FrameType | None) -> Point:
    """A reduction; one of a logged value carries its key."""
    structure, operator = describe_tensor(tensor), str(reduce_op).rpartition(".")[2].lower().replace("avg", "mean")
    logged = _compat.logged_metric(caller)
    if logged is None:
        return _point("reduce", structure=structure, arguments=operator)
    key, moment = logged
    return _point("log", name=key, structure=structure, arguments=f"{operator}, {moment}")
