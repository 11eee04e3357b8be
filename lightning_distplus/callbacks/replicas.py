"""The check for state that must be the same on several ranks: a window of it at each gate, all of it now and then."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.agreement import disagreement
from lightning_distplus.divergence.fingerprint import Windows
from lightning_distplus.divergence.replicas import EVERYWHERE, Difference, Replica, find_difference, replicated_state
from lightning_distplus.errors import DivergenceError
from lightning_distplus.world import ranges

__all__ = ["ReplicaCheck"]

log = logging.getLogger(__name__)

_NUM_WINDOWS = 16
_WINDOW_BYTES = 1 << 20  # less than this is not worth cutting
_SHOWN_NAMES = 6


class ReplicaCheck(Check):
    """Names the rank whose copy of a weight, a buffer or an optimizer state is not that of the others.

    Each gate carries the fingerprint of one window, so that everything has been read after 16 steps. Everything is read
    at once at the start, before each save and every ``parameters_every_n_steps``.

    Args:
        repairs: Whether a copy that differs from the majority's is overwritten with it, instead of raising.
    """

    def __init__(self, *, repairs: bool = False) -> None:
        self._repairs = repairs
        self._replicas: list[Replica] = []
        self._windows = Windows([])
        self._num_states = -1
        self._agreed_at = [0] * _NUM_WINDOWS
        self._num_repaired = 0

    def attach(self, run: MonitoredRun) -> None:
        """Looks at what kind of engine it is."""
        super().attach(run)
        model: torch.nn.Module = run.trainer.strategy.model  # type: ignore[assignment]
        self._is_zero = hasattr(model, "zero_optimization_stage") and model.zero_optimization_stage() > 0  # type: ignore[operator]
        # FSDP2 shows whole parameters between a validation and the next backward, and takes their memory away then.
        self._holds_whole = not any(
            isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules()
        ) and not any(hasattr(parameter, "ds_id") for parameter in model.parameters())

    def start(self) -> None:
        """Everything, before the first step.

        Raises:
            DivergenceError: On all ranks.
        """
        self._compare_all("before the first step")

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The fingerprint of this step's window."""
        found = self._windows.fingerprint(self.run.trainer.global_step)
        return {} if found is None else {"state_fingerprint": int(found) & (1 << 64) - 1}

    def hear(self, records: Sequence[GateRecord]) -> None:
        """Compares the windows of all ranks, and now and then everything.

        Raises:
            DivergenceError: On all ranks.
        """
        step = records[0].global_step
        if any(record.state_fingerprint != records[0].state_fingerprint for record in records):
            self._find(f"before step {step}")
        else:
            self._agreed_at[step % self._windows.count] = step
        if step % self.run.parameters_every_n_steps == 0 or self._num_states != self._count_states():
            self._compare_all(f"before step {step}")

    def before_save(self) -> None:
        """Everything, so that no checkpoint holds a wrong copy.

        Raises:
            DivergenceError: On all ranks.
        """
        self._compare_all(f"before the save after {self.run.trainer.global_step} steps")

    def metrics(self) -> dict[str, float]:
        """How many copies were overwritten."""
        return {"repaired_replicas": float(self._num_repaired)} if self._repairs else {}

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _count_states(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.run.trainer.optimizers if hasattr(optimizer, "state"))

    def _refresh(self) -> None:
        """The optimizer makes its state in the first step, and engines may exchange tensors."""
        self._num_states = self._count_states()
        model: Any = self.run.trainer.strategy.model
        optimizers = [] if self._is_zero else self.run.trainer.optimizers
        self._replicas = replicated_state(model, optimizers, holds_whole_parameters=self._holds_whole)
        device = self.run.trainer.strategy.root_device.type
        everywhere = [
            one.tensor for one in self._replicas if one.group == EVERYWHERE and one.tensor.device.type == device
        ]
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in everywhere)
        count = max(1, min(_NUM_WINDOWS, size_bytes // _WINDOW_BYTES))
        self._windows = Windows(everywhere, count)

    def _compare_all(self, when: str) -> None:
        self._refresh()
        told = self.run.gather("state", {"tensors": self._totals(), "facts": self._facts()})
        held: dict[str, set[str]] = defaultdict(set)
        for one in told:
            for group, value in one["tensors"].items():
                held[group].add(value)
        if any(len(values) > 1 for values in held.values()):
            self._find(when)
        else:
            self._agreed_at = [self.run.trainer.global_step] * _NUM_WINDOWS
        self._compare_facts([one["facts"] for one in told], when)

    def _totals(self) -> dict[str, str]:
        """One fingerprint for each group of ranks and device."""
        tensors: dict[str, list[Tensor]] = defaultdict(list)
        for one in self._replicas:
            tensors[f"{one.group}@{one.tensor.device.type}"].append(one.tensor)
        totals = {key: Windows(held, 1).fingerprint(0) for key, held in sorted(tensors.items())}
        return {key: f"{int(value) & (1 << 64) - 1:016x}" for key, value in totals.items() if value is not None}

    def _facts(self) -> dict[str, str]:
        """State that is no tensor: schedulers and the loss scaler, as text."""
        facts = {
            f"scheduler {number}": _as_text(config.scheduler.state_dict())
            for number, config in enumerate(self.run.trainer.lr_scheduler_configs)
        }
        scaler = getattr(self.run.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            facts["loss scaler"] = _as_text(scaler.state_dict())
        return facts

    def _compare_facts(self, told: Sequence[dict[str, str]], when: str) -> None:
        for name in sorted({name for one in told for name in one}):
            values = {rank: one.get(name, "none") for rank, one in enumerate(told)}
            if len(set(values.values())) > 1:
                remedy = "look for code that steps it on some ranks only, or with a metric that is not reduced"
                self.run.tell(disagreement(name, values, where=when, remedy=remedy))

    # -- finding -----------------------------------------------------------------------------------------------------

    def _find(self, when: str) -> None:
        """All ranks come here together."""
        for _ in range(len(self._replicas) + 1):
            difference = find_difference(self._replicas, self._exchange)
            if difference is None:
                return
            if not self._repair(difference):
                self.run.tell(self._error(difference, when))
                return

    def _exchange(self, name: str, data: bytes) -> list[bytes]:
        return self.run.plane.gather(f"divergence/state/{name}", data, self.run.patience())

    def _repair(self, difference: Difference) -> bool:
        """Overwrites the wrong copies with the majority's; whether it could."""
        if not self._repairs or difference.source is None or difference.group != EVERYWHERE:
            return False
        (replica,) = [one for one in self._replicas if (one.kind, one.name) == (difference.kind, difference.name)]
        with torch.no_grad():
            content = replica.tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(content, src=difference.source)
            replica.tensor.copy_(content)
        self._num_repaired += 1
        self.run.note(
            "repaired",
            state=difference.kind,
            name=difference.name,
            ranks=difference.wrong,
            source=difference.source,
            element=difference.element,
            values=difference.values,
            global_step=self.run.trainer.global_step,
        )
        log.warning(
            "rank %d: %s of rank %s is overwritten with that of rank %d; element %d was %s",
            self.run.rank,
            difference.name,
            ranges(difference.wrong),
            difference.source,
            difference.element,
            difference.values,
        )
        return True

    def _error(self, difference: Difference, when: str) -> DivergenceError:
        since = min(self._agreed_at[: self._windows.count])
        others = difference.names[1:]
        more = f"; {len(others)} more differ: {', '.join(others[:_SHOWN_NAMES])}" if others else ""
        where = (
            f"({difference.name}, element {difference.element}, off by {difference.largest:g}) {when}{more}. "
            f"It happened at step {since} or later"
        )
        error = disagreement(
            difference.kind,
            difference.values,
            where=where,
            wrong=difference.wrong,
            remedy="load the last checkpoint; look for code that changes weights on one rank only, then at that host's "
            "memory",
        )
        error.parameter = difference.name  # type: ignore[attr-defined]
        return error


def _as_text(state: dict[str, Any]) -> str:
    """The plain values of a state, in order."""
    plain = {key: value for key, value in state.items() if isinstance(value, (int, float, str, bool, list, tuple))}
    return repr(dict(sorted(plain.items())))[:1000]
