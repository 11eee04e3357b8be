"""Progress marks and counts from inside Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_distplus.strategies.step_times import StepTimes
from lightning_distplus.watchdog import Marks, Progress

__all__ = ["MarkingProfiler", "last_batch", "progress_of"]

# -- marks -------------------------------------------------------------------------------------------------------------

_ON_EXCEPTION = ".on_exception"
_FETCH = "[_TrainingEpochLoop].train_dataloader_next"
# Of the hooks of one name, that of the callee which does the work.
_PARTS = {
    ("[Strategy]", "training_step"): "forward",
    ("[Strategy]", "backward"): "backward",
    ("[LightningModule]", "optimizer_step"): "optimizer",
}
_KEPT_ACTIONS = 1000  # Lightning has a hundred; a user's own may have a number in each name


class MarkingProfiler(Profiler):
    """Sets a mark for each action and hands it on to the user's profiler.

    Lightning names each action after its hook and, for a callback, its class: a mark tells which callback hangs.

    Args:
        inner: The profiler of the Trainer; it stays in charge of everything else.
        marks: Where the marks go.
        times: Told how long the parts of a step take.
        on_last_hook: Called when the last hook of a run that succeeds has returned.
    """

    def __init__(
        self, inner: Any, marks: Marks, times: StepTimes, on_last_hook: Callable[[], None] = lambda: None
    ) -> None:
        self.inner = inner
        self._times = times
        self._fetch_began_at = 0.0
        self._on_last_hook = on_last_hook
        self._marks = marks
        self._actions: dict[str, AbstractContextManager[Any]] = {}
        self._kind = _Marked if type(inner) is PassThroughProfiler else _Profiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, action_name: str) -> None:
        """Marks the action and starts the user's profiler."""
        self._marks.set(action_name)
        if action_name == _FETCH:
            self._fetch_began_at = time.monotonic()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """Marks the end and stops the user's profiler."""
        self._marks.back_to(f"after {action_name}")
        if action_name == _FETCH:
            self._times.add("data", time.monotonic() - self._fetch_began_at)
        self.inner.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Marks the action around the user's own profiling."""
        try:
            return self._actions[action_name]
        except KeyError:
            return self._new(action_name)

    def _new(self, action_name: str) -> AbstractContextManager[Any]:
        if action_name.endswith(_ON_EXCEPTION):
            self._marks.keep()
        marked: AbstractContextManager[Any] = self._kind(self._marks, action_name, self.inner)
        whose, _, name = action_name.partition("]")
        if part := _PARTS.get((f"{whose}]", name.rpartition(".")[2])):
            marked = _Timed(marked, part, self._times)
        if len(self._actions) < _KEPT_ACTIONS:
            self._actions[action_name] = marked
        return marked

    def setup(self, *arguments: Any, **named: Any) -> None:
        """Sets the user's profiler up."""
        self.inner.setup(*arguments, **named)

    def teardown(self, *arguments: Any, **named: Any) -> None:
        """Tears the user's profiler down."""
        self.inner.teardown(*arguments, **named)

    def summary(self) -> str:
        """The user's summary."""
        return str(self.inner.summary())

    def describe(self) -> None:
        """Writes the user's summary, which is the last thing that a Trainer does in a run."""
        self.inner.describe()
        self._on_last_hook()


class _Marked(AbstractContextManager[None]):
    """The marks of one action. It holds nothing of one use, so that it serves every step, also within itself."""

    __slots__ = ("_action", "_after", "_inner", "_marks")

    def __init__(self, marks: Marks, action: str, inner: Any) -> None:
        self._marks = marks
        self._action = action
        self._after = f"after {action}"
        self._inner = inner

    def __enter__(self) -> None:
        self._marks.set(self._action)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or kind is StopIteration:  # the end of the data is no failure
            self._marks.back_to(self._after)


class _Profiled(_Marked):
    """The same, around a profiler that measures something."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        self._inner.start(self._action)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inner.stop(self._action)


class _Timed(AbstractContextManager[None]):
    """An action that is a part of a step; it is never within itself."""

    __slots__ = ("_began_at", "_marked", "_part", "_times")

    def __init__(self, marked: AbstractContextManager[Any], part: str, times: StepTimes) -> None:
        self._marked = marked
        self._part = part
        self._times = times

    def __enter__(self) -> None:
        self._began_at = time.monotonic()
        self._marked.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._marked.__exit__(*error)
        self._times.add(self._part, time.monotonic() - self._began_at)


# -- counts ------------------------------------------------------------------------------------------------------------


def progress_of(trainer: Any) -> Progress | None:
    """The batches of the present epoch, validation, test or prediction, or the steps of a run that ends sooner.

    Returns:
        None where the Trainer does nothing that is counted; it may be between two stages at any moment.
    """
    with suppress(AttributeError, TypeError, RuntimeError):
        if trainer.training:
            return _training(trainer)
        if trainer.sanity_checking or trainer.validating:
            is_within_fit = trainer.state.fn == "fit"
            loop = trainer.fit_loop.epoch_loop.val_loop if is_within_fit else trainer.validate_loop
            return _batches("the validation", loop.batch_progress, loop.max_batches)
        if trainer.testing:
            return _batches("the test", trainer.test_loop.batch_progress, trainer.test_loop.max_batches)
        if trainer.predicting:
            return _batches("the prediction", trainer.predict_loop.batch_progress, trainer.predict_loop.max_batches)
    return None


def last_batch(trainer: Any) -> int | None:
    """The index of the last batch of the epoch that this rank has begun; None outside of a fit."""
    if trainer is None or trainer.state.fn != "fit":
        return None
    return max(0, int(trainer.fit_loop.epoch_loop.batch_progress.current.ready) - 1)


def _training(trainer: Any) -> Progress:
    batches = _batches("the epoch", trainer.fit_loop.epoch_loop.batch_progress, [trainer.num_training_batches])
    steps_left = trainer.max_steps - trainer.global_step
    if trainer.max_steps < 0 or (
        batches.total is not None and batches.total - batches.done <= steps_left * trainer.accumulate_grad_batches
    ):
        return batches
    return Progress(unit="steps", whole="the run", done=trainer.global_step, total=trainer.max_steps)


def _batches(whole: str, progress: Any, of_loaders: Sequence[float]) -> Progress:
    total, done = sum(of_loaders), progress.current.completed
    is_known = done <= total < float("inf")
    return Progress(unit="batches", whole=whole, done=done, total=int(total) if is_known else None)
