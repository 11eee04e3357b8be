"""Scaling of the learning rate with the global batch: the rule, and what it is applied to."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_distplus import _compat

__all__ = ["LrRule", "LrScaling", "scale_learning_rates"]

LrRule = Literal["linear", "sqrt"]

_log = logging.getLogger(__name__)
_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULER = ("base_lrs", "max_lrs", "min_lrs", "eta_min")


@dataclass(frozen=True)
class LrScaling:
    """How the learning rate follows the global batch.

    Args:
        rule: "linear" multiplies by the ratio of the global batches, "sqrt" by its square root.
        base_global_batch: The global batch for which the learning rates in ``configure_optimizers`` were chosen.

    Raises:
        ValueError: The rule is another, or the base is below 1.
    """

    rule: LrRule
    base_global_batch: int

    def __post_init__(self) -> None:
        if self.rule not in ("linear", "sqrt"):
            raise ValueError(f'scale_lr is {self.rule!r}; it is "linear", "sqrt" or None.')
        if self.base_global_batch < 1:
            raise ValueError(f"base_global_batch_size is {self.base_global_batch}; it is at least 1.")

    @classmethod
    def of(cls, rule: LrRule | None, base_global_batch: int | None) -> LrScaling | None:
        """From the two options of a data module.

        Raises:
            ValueError: One is given without the other.
        """
        if rule is None and base_global_batch is None:
            return None
        if rule is None or base_global_batch is None:
            raise ValueError(
                f"scale_lr={rule!r} and base_global_batch_size={base_global_batch} belong together: the rule, and the "
                "global batch for which the learning rate was chosen. Give both or none."
            )
        return cls(rule, base_global_batch)

    def factor(self, global_batch: int) -> float:
        """By what the learning rates are multiplied."""
        ratio = global_batch / self.base_global_batch
        return ratio if self.rule == "linear" else math.sqrt(ratio)

    def apply(self, trainer: Any, global_batch: int, *, before: float) -> float:
        """Scales a Trainer's learning rates, which are scaled by ``before``, to the factor; says it and returns it."""
        factor = self.factor(global_batch)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        done = "already in place"
        if factor != before:
            done = scale_learning_rates(trainer.optimizers, schedulers, factor / before)
        if trainer.is_global_zero:
            text = "learning rate x %.4g (%s: global batch %d, base %d): %s"
            _log.info(text, factor, self.rule, global_batch, self.base_global_batch, done)
        return factor


def scale_learning_rates(optimizers: Sequence[Any], schedulers: Sequence[Any], factor: float) -> str:
    """Multiplies every learning rate, and the schedules that start from it; returns what it did, in words."""
    changes = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            before = float(group["lr"])
            for name in _OF_GROUP:
                if name in group:
                    group[name] = _times(group[name], factor)
            changes.append(f"{before:.4g} -> {float(group['lr']):.4g}")
    for scheduler in _with_inner(schedulers):
        known = [name for name in _OF_SCHEDULER if hasattr(scheduler, name)]
        for name in known:
            setattr(scheduler, name, _times(getattr(scheduler, name), factor))
        if not known:
            _log.warning(
                "%s keeps its learning rates where scale_lr does not see them. Multiply them in configure_optimizers "
                "by the data module's lr_factor instead, and leave scale_lr out.",
                type(scheduler).__name__,
            )
    return ", ".join(dict.fromkeys(changes))


def _with_inner(schedulers: Sequence[Any]) -> Iterator[Any]:
    """Each scheduler that is no mere sequence of others."""
    for scheduler in schedulers:
        inner = _compat.inner_schedulers(scheduler)
        yield from _with_inner(inner) if inner else [scheduler]


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_times(one, factor) for one in value]
    return value.mul_(factor) if isinstance(value, torch.Tensor) else value * factor
