"""Where the training thread spends its steps: windows, each of which is a line of the ledger, and what we cost it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_distplus.watchdog import Marks

__all__ = ["ProtectionCosts", "StepTimes"]

_LEAST_STEPS = 4  # of a window: a line has up to 350 bytes, and a step may cost the ledger 100
_SHORTEST_S, _LONG_S = 0.5, 30.0
_MILLISECOND = 3  # digits


class StepTimes:
    """Adds up the parts of the steps on the clock of the host, for which work on a GPU lasts as long as issuing it.

    A window grows with the age of the run, from half a second to a hundredth of it, and from 30 s to a two thousandth,
    so that a short run has a history and a long one a small ledger. A step costs some twenty readings of the clock.

    Args:
        note: Writes one event into the ledger.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._seconds: dict[str, float] = {}
        self._began_at: float | None = None
        self._window_at = 0.0
        self._window_step = 0
        self._step = 0
        self._loss: torch.Tensor | None = None

    def begin(self, global_step: int) -> None:
        """Training starts: the first window begins when the first step is done, which belongs to the set-up."""
        self._began_at = None
        self._step = self._window_step = global_step
        self._loss = None

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
        """Writes what is there of the window, and begins the next one.

        Args:
            global_step: Steps that are done, where training has ended; by default those of the last gate.
            loss: Of the last step, where it is known.
        """
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

    Args:
        note: Writes one event into the ledger.
        marks: Of this rank.
    """

    def __init__(self, note: Callable[..., None], marks: Marks) -> None:
        self._note = note
        self._marks = marks
        self.ledger_s = 0.0
        """To be added to, by who measures it."""
        self._steps = 0

    def begin(self, monitor_s: float) -> None:
        """Training starts; the monitor has spent so much before."""
        self._steps, self._told_at, self._gate_s, self._shortest_s = 0, _FIRST_TOLD, 0.0, math.inf
        self._monitor_before_s, self._num_marks_before = monitor_s, self._marks.read().number
        self.ledger_s = 0.0

    def pass_gate(self, waited_s: float, monitor_s: float) -> None:
        """A step begins."""
        self._steps += 1
        self._shortest_s = min(self._shortest_s, waited_s)
        if self._steps % _BLOCK == 0:
            self._gate_s += _BLOCK * self._shortest_s
            self._shortest_s = math.inf
            if self._steps >= self._told_at:
                self.write(monitor_s)
                self._told_at *= 2

    def write(self, monitor_s: float) -> None:
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
            "monitor": monitor_s - self._monitor_before_s,
            "watchdog": mark_s * (self._marks.read().number - self._num_marks_before),
            "ledger": self.ledger_s,
        }
        told = {f"{name}_us": round(1e6 * seconds / self._steps, 1) for name, seconds in spent.items()}
        self._note("costs", steps=self._steps, **told)
