"""Progress marks and counts from inside Lightning, and where the training thread spends its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_distplus.watchdog import Marks, Progress

# -- times of steps ----------------------------------------------------------------------------------------------------

_LEAST_STEPS = 4  # of a window: a line has up to 350 bytes, and a step may cost the ledger 100
_SHORTEST_S, _LONG_S = 0.5, 30.0
_MILLISECOND = 3  # digits


class StepTimes:
    """Adds up the parts of the steps on the clock of the host, for which work on a GPU lasts as long as issuing it.

    A window grows with the age of the run, from half a second to a hundredth of it, and from 30 s to a two thousandth,
    so that a short run has a history and a long one a small ledger. A step costs some twenty readings of the clock.
    ``note`` writes one event into the ledger.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._seconds: dict[str, float] = {}
        self._window_at = 0.0
        self.begin(0, {})

    def begin(self, global_step: int, per_step: Mapping[str, int]) -> None:
        """Training starts, on ``{"samples": 64}`` per step: the first step belongs to the set-up, and to no window."""
        self._began_at: float | None = None
        self._per_step = per_step
        self._step = self._window_step = global_step
        self._loss: torch.Tensor | None = None

    def take_loss(self, output: Any) -> None:
        """Keeps the loss that a ``training_step`` has returned, to be read once a window."""
        loss = output.get("loss") if isinstance(output, dict) else output
        # Of a DTensor the value is a matter of all ranks.
        self._loss = loss.detach() if type(loss) is torch.Tensor and loss.numel() == 1 else None

    def add(self, part: str, seconds: float) -> None:
        """A part of a step, such as ``"forward"``, has taken so long; also what stands between steps."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def within(self, part: str) -> float:
        """What was added to a part in this window."""
        return self._seconds.get(part, 0.0)

    def parts(self) -> dict[str, float]:
        """Seconds of each part in this window so far."""
        seconds = dict(self._seconds)
        # Lightning calls the forward and the backward from within the step of the optimizer.
        if "optimizer" in seconds:
            inner = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
            seconds["optimizer"] = max(seconds["optimizer"] - inner, 0.0)
        return seconds

    def pass_gate(self, global_step: int, waited_s: float) -> None:
        """So many steps are done, and the next one begins; this rank has waited for the others."""
        if self._began_at is None:
            if global_step > self._step:
                self._began_at = time.monotonic()
                self._open_window(self._began_at, global_step)
            return
        self.add("wait", waited_s)
        self._step = global_step
        now = time.monotonic()
        age = now - self._began_at
        is_due = now - self._window_at >= max(_SHORTEST_S, min(age / 100, _LONG_S), age / 2000)
        if is_due and global_step - self._window_step >= _LEAST_STEPS:
            # Only here: it waits for the device, which may stand still where a run ends.
            self.write(loss=None if self._loss is None else self._loss.item())

    def write(self, global_step: int | None = None, *, loss: float | None = None) -> None:
        """Writes what is there of the window, up to the last gate or where training has ended; begins the next one."""
        now = time.monotonic()
        self._step = self._step if global_step is None else global_step
        steps = self._step - self._window_step
        if self._began_at is not None and steps > 0:
            told = self.parts().items()
            parts = {f"{part}_s": value for part, took in told if (value := round(took, _MILLISECOND))}
            self._note(
                "steps",
                global_step=self._step,
                steps=steps,
                seconds=round(now - self._window_at, _MILLISECOND),
                **parts,
                **{name: steps * count for name, count in self._per_step.items()},
                **({} if loss is None else {"loss": float(f"{loss:.6g}")}),
            )
        self._open_window(now, self._step)

    def _open_window(self, now: float, global_step: int) -> None:
        self._window_at, self._window_step, self._step = now, global_step, global_step
        self._seconds = {}


# -- what the protections cost -----------------------------------------------------------------------------------------

_FIRST_TOLD = 64  # steps; then after twice as many
_BLOCK = 16
_TRIALS = 200


class ProtectionCosts:
    """Measures in the run itself what each protection takes of a step, on the training thread, in microseconds.

    ``gate``: the shortest wait at the gate of each 16 steps, which is what the exchange takes when nobody is late.
    ``monitor``: within its hooks. ``watchdog``: the number of marks, times what one takes. ``ledger``: within its own.
    """

    def __init__(self, note: Callable[..., None], marks: Marks) -> None:
        self._note = note
        self._marks = marks
        self.begin(None)

    def begin(self, monitor: Any) -> None:
        """Training starts; a monitor adds up in ``spent_s`` what it takes."""
        self._steps, self._told_at, self._gate_s, self._shortest_s = 0, _FIRST_TOLD, 0.0, math.inf
        self._monitor, self._num_marks_before = monitor, self._marks.read().number
        self._monitor_before_s = self._monitor_s
        self.ledger_s = 0.0
        """To be added to, by who measures it."""

    @property
    def _monitor_s(self) -> float:
        return 0.0 if self._monitor is None else float(self._monitor.spent_s)

    def pass_gate(self, waited_s: float) -> None:
        """A step begins."""
        self._steps += 1
        self._shortest_s = min(self._shortest_s, waited_s)
        if self._steps % _BLOCK == 0:
            self._gate_s += _BLOCK * self._shortest_s
            self._shortest_s = math.inf
            if self._steps >= self._told_at:
                self.write()
                self._told_at *= 2

    def write(self) -> None:
        """Writes what a step has cost on average, once there are some."""
        if self._steps < _BLOCK:
            return
        scratch = Marks(phase=lambda: "")
        began = time.perf_counter()
        for _ in range(_TRIALS):
            scratch.set("cost")
        mark_s = (time.perf_counter() - began) / _TRIALS
        spent = {
            "gate": self._gate_s * self._steps / (self._steps // _BLOCK * _BLOCK),
            "monitor": self._monitor_s - self._monitor_before_s,
            "watchdog": mark_s * (self._marks.read().number - self._num_marks_before),
            "ledger": self.ledger_s,
        }
        told = {f"{name}_us": round(1e6 * seconds / self._steps, 1) for name, seconds in spent.items()}
        self._note("costs", steps=self._steps, **told)


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


class MarkingProfiler:
    """Stands before the user's profiler, ``inner``, and sets a mark for each action.

    Lightning names each action after its hook and, for a callback, its class: a mark tells which callback hangs.
    ``on_last_hook`` is called when the last hook of a run that succeeds has returned.
    """

    def __init__(
        self, inner: Any, marks: Marks, times: StepTimes, on_last_hook: Callable[[], None] = lambda: None
    ) -> None:
        self.inner = inner
        self.marks = marks
        self.times = times
        self._fetch_began_at = 0.0
        self._on_last_hook = on_last_hook
        self._actions: dict[str, _Action] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, action_name: str) -> None:
        """Marks the action and starts the user's profiler."""
        self.marks.set(action_name)
        if action_name == _FETCH:
            self._fetch_began_at = time.monotonic()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """Marks the end and stops the user's profiler."""
        self.marks.back_to(f"after {action_name}")
        if action_name == _FETCH:
            self.times.add("data", time.monotonic() - self._fetch_began_at)
        self.inner.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Marks the action around the user's own profiling."""
        try:
            return self._actions[action_name]
        except KeyError:
            return self._new(action_name)

    def _new(self, action_name: str) -> _Action:
        if action_name.endswith(_ON_EXCEPTION):
            self.marks.keep()
        action = _Action(self, action_name)
        if len(self._actions) < _KEPT_ACTIONS:
            self._actions[action_name] = action
        return action

    def describe(self) -> None:
        """Writes the user's summary, which is the last thing that a Trainer does in a run."""
        self.inner.describe()
        self._on_last_hook()


class _Action(AbstractContextManager[None]):
    """Marks one action, and measures it if it is a part of a step.

    What measures nothing holds nothing of one use: it serves every step, also within itself. A part of a step is never
    within itself.
    """

    __slots__ = ("_after", "_began_at", "_inner", "_marks", "_name", "_part", "_times")

    def __init__(self, profiler: MarkingProfiler, name: str) -> None:
        self._marks, self._times = profiler.marks, profiler.times
        self._inner = None if type(profiler.inner) is PassThroughProfiler else profiler.inner
        self._name, self._after = name, f"after {name}"
        whose, _, callee = name.partition("]")
        self._part = _PARTS.get((f"{whose}]", callee.rpartition(".")[2]))

    def __enter__(self) -> None:
        if self._part is not None:
            self._began_at = time.monotonic()
        self._marks.set(self._name)
        if self._inner is not None:
            self._inner.start(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or kind is StopIteration:  # the end of the data is no failure
            self._marks.back_to(self._after)
        if self._inner is not None:
            self._inner.stop(self._name)
        if self._part is not None:
            self._times.add(self._part, time.monotonic() - self._began_at)


# -- counts ------------------------------------------------------------------------------------------------------------


def progress_of(trainer: Any) -> Progress | None:
    """The batches of the present epoch, validation, test or prediction, or the steps of a run that ends sooner.

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
