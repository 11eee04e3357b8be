"""The replay of a suspicious step: the same forward and backward again, to tell the samples from the device."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.divergence.spikes import Window
from lightning_distplus.rng import rng_state, set_rng_state

__all__ = ["ReplayCheck"]

log = logging.getLogger(__name__)

_NORM_TOLERANCE = 0.01  # it is summed in another order; what stands out is larger by far


@dataclass(frozen=True)
class _Result:
    """What a forward and a backward gave."""

    loss: float
    norm: float

    def is_same_as(self, other: _Result) -> bool:
        """The loss bit for bit, and the norm up to the order of its sum."""
        both_odd = not math.isfinite(self.norm) and not math.isfinite(other.norm)
        is_near = both_odd or math.isclose(self.norm, other.norm, rel_tol=_NORM_TOLERANCE)
        return repr(self.loss) == repr(other.loss) and is_near

    def __str__(self) -> str:
        return f"loss {self.loss:.6g} and gradient norm {self.norm:.6g}"


@dataclass(frozen=True)
class _Start:
    """What a step is a function of, beside the weights."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    generators: dict[str, bytes]
    buffers: dict[str, torch.Tensor]
    num_collectives: int


class _Hook:
    """Of the module's forward; a copy of the module takes along one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    pass


class ReplayCheck(Check):
    """Computes a step again on its rank, before the weights change, when its loss or gradient norm is suspicious.

    Suspicious is what is not finite, or stands out from this rank's own past. The replay runs ``training_step`` and its
    backward on a copy of the module, with the batch, the buffers and the random generators of the first time; no other
    rank takes part. The same numbers again speak for the samples or the code; other numbers, for the device.

    That holds only where a step is a function of these. So the first step of a run is replayed for trial, and where
    that gives other numbers, or ``training_step`` issues collectives, nothing is replayed, with one warning.

    Args:
        norm: The norm of this rank's gradients in this step, before they were reduced; asked for after the backward.
    """

    def __init__(self, norm: Callable[[], float]) -> None:
        self._norm = norm
        self._windows = {"loss": Window(), "norm": Window(least_ratio=10.0)}
        self._handles: list[Any] = []
        self._depth = 0
        self._start: _Start | None = None
        self._loss: torch.Tensor | None = None
        self._is_on = True
        self._is_proven = False
        self.outcome: str | None = None
        """What a replay of this step has shown on this rank; None where it was not replayed."""
        self.last_outcome: str | None = None
        """The same of the step before."""

    def before_engine(self) -> None:
        """Refuses what cannot work.

        Raises:
            ValueError: A step is more than one forward and one backward of whole parameters.
        """
        trainer: Any = self.run.trainer
        for is_bad, what in (
            (
                not isinstance(trainer.strategy, DDPStrategy) or isinstance(trainer.strategy, DeepSpeedStrategy),
                f"strategy {type(trainer.strategy).__name__}: a rank alone cannot compute a sharded step",
            ),
            (not self.run.module.automatic_optimization, "manual optimization"),
            (trainer.accumulate_grad_batches != 1, f"accumulate_grad_batches={trainer.accumulate_grad_batches}"),
            (getattr(trainer.precision_plugin, "scaler", None) is not None, "a loss scaler"),
        ):
            if is_bad:
                raise ValueError(
                    f"replay_suspects=True works with DDP, one micro-batch per step and without a loss scaler; this "
                    f"run has {what}. Leave replay_suspects out."
                )

    def attach(self, run: MonitoredRun) -> None:
        """Stands before and after the module's step."""
        super().attach(run)
        self._handles = [
            run.module.register_forward_pre_hook(_Hook(self._enter), with_kwargs=True),
            run.module.register_forward_hook(_Hook(self._leave)),
        ]

    def detach(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A new step begins."""
        self._depth, self._start, self._loss = 0, None, None
        self.last_outcome, self.outcome = self.outcome, None
        return {}

    # -- the first time ----------------------------------------------------------------------------------------------

    def _enter(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before ``training_step``: Lightning calls it as the module's forward."""
        self._depth += 1
        if self._depth == 1 and module.training and self._is_on:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            self._start = _Start(arguments, named, rng_state(), buffers, _compat.num_collectives())

    def _leave(self, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._start is not None and _compat.num_collectives() != self._start.num_collectives:
            self._switch_off("training_step issues collectives, which no rank can repeat alone")

    def before_backward(self, loss: torch.Tensor) -> None:
        """The number to compare with."""
        self._loss = loss.detach()

    def before_optimizer_step(self, optimizer: Any) -> None:
        """The gradients are there, and no weight has changed."""
        if self._start is None or self._loss is None or not self._is_on:
            return
        first = _Result(float(self._loss), self._norm())
        if not self._is_proven:
            self._try(self._start, first)
        elif self._is_suspicious(first):
            self.outcome = self._replay(self._start, first)
            log.warning("rank %d: step %d %s", self.run.rank, self.run.trainer.global_step, self.outcome)

    def _is_suspicious(self, result: _Result) -> bool:
        values = {"loss": result.loss, "norm": result.norm}
        are_odd = [bool(self._windows[name].judge([value])) for name, value in values.items()]
        return any(are_odd) or not all(map(math.isfinite, values.values()))

    # -- once more ---------------------------------------------------------------------------------------------------

    def _try(self, start: _Start, first: _Result) -> None:
        """On every rank in its first step."""
        again = self._again(start)
        if again is not None and not again.is_same_as(first):
            self._switch_off(f"the first step gave {first} and, once more, {again}: it is no function of its inputs")
        self._is_proven = True

    def _replay(self, start: _Start, first: _Result) -> str:
        again = self._again(start)
        if again is None:
            return "could not be replayed"
        if again.is_same_as(first):
            return "was replayed and gave the same numbers: its samples, its weights or the code make it"
        once_more = self._again(start)
        if once_more is not None and once_more.is_same_as(again):
            return f"was replayed twice and gave {again} both times: this device miscalculated the first time"
        return f"was replayed twice and gave {again}, then {once_more}: this device miscalculates"

    def _again(self, start: _Start) -> _Result | None:
        """Forward and backward on a copy; None where there can be none."""
        now = rng_state()
        try:
            return self._compute(_copy_of(self.run.module), start)
        except Exception as error:  # whatever the user's code raises on a copy, the run goes on
            self._switch_off(f"a replay failed with {type(error).__name__}: {error}")
            return None
        finally:
            set_rng_state(now)

    def _compute(self, module: Any, start: _Start) -> _Result:
        for name, buffer in module.named_buffers():
            buffer.copy_(start.buffers[name])
        set_rng_state(start.generators)
        with torch.enable_grad(), self.run.trainer.precision_plugin.train_step_context():
            output = module.training_step(*start.arguments, **start.named)
        loss = output["loss"] if isinstance(output, Mapping) else output
        loss.backward()
        norms = [torch.linalg.vector_norm(one.grad).float() for one in module.parameters() if one.grad is not None]
        return _Result(float(loss.detach()), float(torch.linalg.vector_norm(torch.stack(norms))))

    def _switch_off(self, reason: str) -> None:
        self._is_on = False
        log.warning("rank %d: no step is replayed: %s", self.run.rank, reason)


def _copy_of(module: Any) -> Any:
    """The module with weights of its own, which logs nothing; it shares the Trainer."""
    twin = copy.deepcopy(module, {id(module.trainer): module.trainer})
    vars(twin)["log"] = vars(twin)["log_dict"] = lambda *arguments, **named: None
    return twin
