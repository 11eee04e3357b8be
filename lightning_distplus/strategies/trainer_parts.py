"""What a strategy puts into its Trainer for one run, and takes out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane
from lightning_distplus.preparing import PreparationBarrier
from lightning_distplus.strategies.first_word import FirstWord
from lightning_distplus.strategies.marking import MarkingProfiler
from lightning_distplus.watchdog import Marks

__all__ = ["bound_preparation", "put_in", "take_out"]


def bound_preparation(
    trainer: Any, barrier: Callable[[], PreparationBarrier], agree: Callable[[Any], str | None]
) -> None:
    """Gives the wait for ``prepare_data`` a deadline, and all ranks the same checkpoint to resume from."""
    _compat.replace_preparation_barrier(trainer, barrier)
    _compat.agree_on_resume(trainer, agree)


def put_in(
    trainer: Any,
    marks: Marks,
    plane: ControlPlane,
    *,
    judge_time_out: Callable[[BaseException], bool],
    link_checkpoint: Callable[..., None],
    announcing: Callable[[Callable[..., None]], Callable[..., None]],
    on_last_hook: Callable[[], None],
) -> None:
    """Puts in the profiler that sets marks, the callback that speaks first, and committed links and saves.

    Args:
        trainer: The Trainer, before the run.
        marks: This rank's marks.
        plane: The control plane.
        judge_time_out: What ``FirstWord`` takes.
        link_checkpoint: Makes ``last.ckpt``.
        announcing: Wraps ``Trainer.save_checkpoint``.
        on_last_hook: What ``MarkingProfiler`` takes.
    """
    trainer.profiler = MarkingProfiler(trainer.profiler, marks, on_last_hook)
    trainer.callbacks.insert(0, FirstWord(plane, judge_time_out))
    for callback in trainer.checkpoint_callbacks:
        _compat.replace_checkpoint_link(callback, link_checkpoint)
    trainer.save_checkpoint = announcing(trainer.save_checkpoint)


def take_out(trainer: Any | None) -> None:
    """Takes it out again, as much of it as is there."""
    if trainer is None:
        return
    if isinstance(trainer.profiler, MarkingProfiler):
        trainer.profiler = trainer.profiler.inner
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, FirstWord)]
    vars(trainer).pop("save_checkpoint", None)
    for callback in trainer.checkpoint_callbacks:
        _compat.restore_checkpoint_link(callback)
