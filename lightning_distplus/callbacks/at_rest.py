"""The check of what a rank alone holds: nothing may change it between the end of a step and the start of the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check
from lightning_distplus.divergence.agreement import disagreement
from lightning_distplus.divergence.fingerprint import fingerprint_of_each
from lightning_distplus.divergence.replicas import plain_name

__all__ = ["AtRestCheck"]

_SHOWN_NAMES = 6


class AtRestCheck(Check):
    """Names the rank and the tensor whose memory changed though nobody wrote to it.

    No other rank holds a copy of a shard, so that comparing ranks says nothing. What is compared is the same memory on
    the same rank, at the end of a step and before the next one: weights and the optimizer's state. Code that changes
    weights between two steps (an average of weights that is swapped in) is found too, and is no fault: such a run goes
    without this check.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._left: dict[torch.device, Tensor] = {}
        self._step = -1

    def start(self) -> None:
        """The first step to come is not done yet."""
        self._step = self.run.trainer.global_step

    def batch_end(self) -> None:
        """Fingerprints everything, on its device, when an optimizer step is done; waits for nothing."""
        if self.run.trainer.global_step == self._step:
            return
        self._step = self.run.trainer.global_step
        self._held = dict(_held(self.run.trainer))
        self._left = self._fingerprints()

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Compares, before the forward.

        Raises:
            DivergenceError: On this rank; its peers hear of it at their gate.
        """
        self._compare()
        self._left = {}
        return {}

    def before_save(self) -> None:
        """Compares what is about to be saved.

        Raises:
            DivergenceError: On this rank.
        """
        self._compare()

    def _compare(self) -> None:
        if not self._left or self.run.trainer.global_step != self._step:
            return
        changed = []
        for device, now in self._fingerprints().items():
            names = [name for name, tensor in self._held.items() if tensor.device == device]
            are_odd = (now != self._left[device]).tolist()
            changed += [name for name, is_odd in zip(names, are_odd, strict=True) if is_odd]
        if changed:
            self._tell(changed)

    def _tell(self, changed: list[str]) -> None:
        others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        error = disagreement(
            "state_at_rest",
            {self.run.rank: f"changed: {', '.join(changed[:_SHOWN_NAMES])}"},
            wrong=[self.run.rank],
            where=f"({changed[0]}{others}) between step {self._step} and the next one, when nothing may write to it",
            remedy="load the last checkpoint; look at that host's memory, and for code that changes weights between "
            "two steps",
        )
        error.parameter = changed[0]  # type: ignore[attr-defined]
        self.run.tell(error)

    def _fingerprints(self) -> dict[torch.device, Tensor]:
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in self._held.values():
            by_device.setdefault(tensor.device, []).append(tensor)
        return {device: fingerprint_of_each(tensors) for device, tensors in by_device.items()}


def _held(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of weights and optimizer state, between two steps."""
    model: torch.nn.Module = trainer.strategy.model
    known = {id(parameter) for parameter in model.parameters()}
    units = _compat.flat_units(model)
    for unit in units:
        yield f"shard of {plain_name(unit.sections[0][0])} and what is beside it", unit.local
    for name, parameter in model.named_parameters():
        if not units:
            yield from _local(plain_name(name), parameter)
    for index, optimizer in enumerate(trainer.optimizers):
        inner = getattr(optimizer, "optimizer", optimizer)  # ZeRO wraps the one that has the state
        held = [parameter for group in getattr(inner, "param_groups", ()) for parameter in group["params"]]
        # ZeRO-3 gives them to the optimizer for the length of a step only; their state stays.
        for number, parameter in enumerate(dict.fromkeys([*held, *getattr(inner, "state", {})])):
            if id(parameter) not in known:
                yield from _local(f"weights {number} of optimizer {index}", parameter)
        for number, state in enumerate(getattr(inner, "state", {}).values()):
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                if isinstance(value, Tensor):
                    yield from _local(f"{key} of tensor {number} of optimizer {index}", value)


def _local(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    # ZeRO-3 keeps the shard beside a parameter that is whole or empty, as it likes.
    tensor = getattr(tensor, "ds_tensor", tensor)
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if tensor.numel() and not tensor.is_meta:
        yield name, tensor.detach()
