"""The fields of a step's record that must agree, and what stands behind one that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_distplus.callbacks.check import MonitoredRun
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.agreement import disagreement, first_difference

__all__ = ["Comparison"]

# In this order: a field that differs is often the cause of those after it.
_REMEDIES = {
    "learning_rate": "a scheduler or a callback changes the rate on some ranks only",
    "settings": "the optimizers or the trainable parameters are not the same on all ranks",
    "loss_scale": "a rank skipped a step, or loaded another checkpoint",
    "collectives": "a rank called a collective more often than the others since the last step; "
    "trace_collectives=True names the call",
    "consumed_samples": "a rank stands at another place in the data",
    "data_fingerprint": "a rank stands at another place in the data: set_epoch, seed, checkpoint",
    "batch_structure": "the batch of a rank has other parts or types, so that its step may take another path",
}


class Comparison:
    """Compares field by field; for a fingerprint, all ranks lay open what is behind it.

    Args:
        run: The run.
        explain: What stands behind a fingerprint on this rank: names to plain values.
    """

    def __init__(self, run: MonitoredRun, explain: Callable[[str], dict[str, Any]]) -> None:
        self._run = run
        self._explain = explain

    def require_agreement(self, records: Sequence[GateRecord]) -> None:
        """Every rank has the same records and so comes to the same conclusion.

        Raises:
            DivergenceError: Two ranks differ, unless the user only wants to be warned.
        """
        if all(record is records[0] for record in records):
            return
        for field, remedy in _REMEDIES.items():
            values = {rank: getattr(record, field) for rank, record in enumerate(records)}
            if len(set(map(repr, values.values()))) > 1:
                self._tell(field, values, remedy)

    def _tell(self, field: str, values: dict[int, Any], remedy: str) -> None:
        explained = self._run.gather(f"behind {field}", self._explain(field))
        name, found = first_difference(explained) or (field, values)
        where = f"before step {self._run.trainer.global_step}; nothing was averaged"
        self._run.tell(disagreement(name, found, where=where, remedy=remedy))
