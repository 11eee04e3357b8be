"""Progress marks from inside Lightning: every hook, step and fetch runs through the Trainer's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from lightning.pytorch.profilers import Profiler

from lightning_distplus.watchdog import Marks

__all__ = ["MarkingProfiler"]


class MarkingProfiler(Profiler):
    """Sets a mark for each action and hands it on to the user's profiler.

    Lightning names each action after its hook and, for a callback, its class: a mark tells which callback hangs.

    Args:
        inner: The profiler of the Trainer; it stays in charge of everything else.
        marks: Where the marks go.
    """

    def __init__(self, inner: Any, marks: Marks) -> None:
        self.inner = inner
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, action_name: str) -> None:
        """Marks the action and starts the user's profiler."""
        self._marks.set(action_name)
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """Marks the end and stops the user's profiler."""
        self._marks.ended(action_name)
        self.inner.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Marks the action around the user's own profiling."""
        return _Marked(self, action_name)

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
        """Writes the user's summary."""
        self.inner.describe()


class _Marked(AbstractContextManager[None]):
    __slots__ = ("_action", "_profiler")

    def __init__(self, profiler: MarkingProfiler, action: str) -> None:
        self._profiler = profiler
        self._action = action

    def __enter__(self) -> None:
        self._profiler.start(self._action)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.stop(self._action)
