"""The check of what an optimizer step depends on beside gradients: rates, counts, trainable parameters, scale."""

from __future__ import annotations

from typing import Any

import torch

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check, MonitoredRun

__all__ = ["SettingsCheck"]

_MAX_PARAMETERS = 2000
_MASK = (1 << 64) - 1


class SettingsCheck(Check):
    """Compares, before every step, learning rates, step counts, the trainable parameters and the loss scale.

    Above 2,000 parameters, which of them are trainable is compared every ``parameters_every_n_steps`` only; a value
    that lies on a device is not read.
    """

    def attach(self, run: MonitoredRun) -> None:
        """Takes down the parameters in order."""
        super().attach(run)
        self._parameters = dict(run.module.named_parameters())
        self._tensors = list(self._parameters.values())
        self._num_said = 0

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The first learning rate and the loss scale as they are, everything as one number."""
        numbers = list(self._numbers())
        if len(self._tensors) <= _MAX_PARAMETERS or self._num_said % self.run.parameters_every_n_steps == 0:
            numbers.append(hash(tuple([tensor.requires_grad for tensor in self._tensors])))
        self._num_said += 1
        return {
            "learning_rate": self._first_rate(),
            "loss_scale": self._loss_scale(),
            # The hash of a tuple of numbers is the same in every process.
            "settings": hash(tuple(numbers)) & _MASK,
            "collectives": _compat.num_collectives(),
        }

    def explain(self, field: str) -> dict[str, Any]:
        """Each number with its name."""
        if field != "settings":
            return {}
        named: dict[str, Any] = {}
        for index, optimizer in enumerate(self._optimizers()):
            for number, group in enumerate(optimizer.param_groups):
                for name in ("lr", "weight_decay"):
                    named[f"{name} of optimizer {index}, group {number}"] = _number(group.get(name, 0.0))
            named[f"step count of optimizer {index}"] = _steps_of(optimizer)
        for name, parameter in list(self._parameters.items())[:_MAX_PARAMETERS]:
            named[f"requires_grad of {name}"] = parameter.requires_grad
        return named

    def _numbers(self) -> list[float]:
        numbers: list[float] = []
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                numbers += (_number(group.get("lr", 0.0)), _number(group.get("weight_decay", 0.0)))
            numbers.append(_steps_of(optimizer))
        return numbers

    def _optimizers(self) -> list[Any]:
        return [one for one in self.run.trainer.optimizers if getattr(one, "param_groups", None)]

    def _first_rate(self) -> float:
        optimizers = self._optimizers()
        return _number(optimizers[0].param_groups[0].get("lr", 0.0)) if optimizers else 0.0

    def _loss_scale(self) -> float:
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        is_on_cpu = self.run.trainer.strategy.root_device.type == "cpu"
        return float(scaler.get_scale()) if scaler is not None and is_on_cpu else 0.0


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" else 0.0
    return float(value)


def _steps_of(optimizer: Any) -> float:
    """The count that the optimizer keeps for its first parameter; 0 where it keeps none, or keeps it on a device."""
    state: Any = getattr(optimizer, "state", None)
    first = next(iter(state.values()), None) if hasattr(state, "values") else None
    return _number(first.get("step", 0.0)) if isinstance(first, dict) else 0.0
