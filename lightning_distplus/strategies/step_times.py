"""Where the training thread spends its steps, added up over windows, each of which is one line of the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["StepTimes"]

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
        self._read_loss: Callable[[], float | None] = lambda: None

    def begin(self, trainer: Any, *, reads_loss: bool) -> None:
        """Training starts: the first window begins when the first step is done, which belongs to the set-up."""
        self._began_at = None
        self._step = self._window_step = trainer.global_step
        self._read_loss = (lambda: _logged_loss(trainer)) if reads_loss else lambda: None

    def add(self, part: str, seconds: float) -> None:
        """A part of a step, such as ``"forward"``, has taken so long; also what stands between steps."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def within(self, part: str) -> float:
        """What was added to a part in this window."""
        return self._seconds.get(part, 0.0)

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
            self.write()

    def write(self, global_step: int | None = None) -> None:
        """Writes what is there of the window, and begins the next one.

        Args:
            global_step: Steps that are done, where training has ended; by default those of the last gate.
        """
        now = time.monotonic()
        self._step = self._step if global_step is None else global_step
        steps = self._step - self._window_step
        if self._began_at is not None and steps > 0:
            seconds = self._seconds
            # Lightning calls the forward and the backward from within the step of the optimizer.
            if "optimizer" in seconds:
                inner = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
                seconds["optimizer"] = max(seconds["optimizer"] - inner, 0.0)
            parts = {f"{part}_s": value for part, took in seconds.items() if (value := round(took, _MILLISECOND))}
            loss = self._read_loss()
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


def _logged_loss(trainer: Any) -> float | None:
    """The newest training loss that the model has logged; None where there is none, or reading it may fail."""
    with suppress(Exception):
        metrics = trainer.logged_metrics
        names = [name for name in metrics if "loss" in name and not name.startswith(("val", "test"))]
        return float(metrics[min(names, key=len)]) if names else None
    return None
