"""The callback that speaks first when a rank fails, before any other callback can block in a collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import DistplusError, Preempted
from lightning_distplus.strategies.naming import is_of_a_collective, naming_peers
from lightning_distplus.timeouts import Phase

__all__ = ["FirstWord"]

log = logging.getLogger(__name__)


class FirstWord(Callback):
    """Tells all ranks what happened on this one.

    Args:
        plane: The control plane.
        judge_time_out: Asked about an error of a collective that no peer explains; True: the ranks have judged.

    The strategy hears of an exception last, after every callback: a ``ModelCheckpoint(save_on_exception=True)`` would
    by then stand in a barrier that the others never reach, and the error would never be seen.
    """

    def __init__(self, plane: ControlPlane, judge_time_out: Callable[[BaseException], bool]) -> None:
        self._plane = plane
        self._judge_time_out = judge_time_out

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Before any callback can wait for ranks that still train."""
        trainer.strategy.leave_epoch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on a rank may work alone: its deadline is that of the end of a run."""
        trainer.strategy.phases.enter(Phase.TEARDOWN)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """As at the end of training."""
        trainer.strategy.phases.enter(Phase.TEARDOWN)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """As at the end of training."""
        trainer.strategy.phases.enter(Phase.TEARDOWN)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """As at the end of training, where validation is the whole run."""
        if trainer.state.fn == "validate":
            trainer.strategy.phases.enter(Phase.TEARDOWN)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The hooks that follow the strategy's teardown are watched as well."""
        trainer.strategy.watch_last_hooks()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """As at the end of a fit."""
        trainer.strategy.watch_last_hooks()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Reports the error, and keeps the callbacks that follow from saving without their peers; never raises."""
        if isinstance(exception, SIGTERMException):
            return  # agreed at the gate: the others raise it as well
        if isinstance(exception, Preempted):
            trainer.save_checkpoint = lambda filepath, *_arguments, **_named: log.info(
                "rank %d: %s is not saved: the run is stopping, and its checkpoint is committed",
                self._plane.world.rank,
                filepath,
            )
            return
        cause = self._cause_of(exception)
        if cause is None and not isinstance(exception, DistplusError) and is_of_a_collective(exception):
            self._judge_time_out(exception)  # the rank that waited is not the first cause
        error = self._plane.report_failure(cause or exception) or exception
        rank = getattr(error, "rank", self._plane.world.rank)
        trainer.save_checkpoint = lambda filepath, *_arguments, **_named: log.warning(
            "rank %d: %s is not saved: rank %d has failed, and a save needs all ranks",
            self._plane.world.rank,
            filepath,
            rank,
        )

    def _cause_of(self, exception: BaseException) -> DistplusError | None:
        """What a peer did, where the exception is only what a collective made of it; it becomes its ``__cause__``.

        A collective that is called through the strategy raises the cause itself; one that a callback or a model calls
        through ``torch.distributed`` gets here.
        """
        trace = exception.__traceback__
        try:
            with naming_peers(self._plane):
                raise exception
        except DistplusError as cause:
            if cause is exception:
                return None
            cause.__cause__ = None
            exception.__cause__ = exception.__cause__ or cause
            return cause
        except BaseException:
            return None
        finally:
            exception.__traceback__ = trace
