"""Steps that all ranks have agreed to skip, and how many of them may follow on one another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_distplus.errors import DivergenceError

__all__ = ["SkipBudget", "drop_gradients"]


class SkipBudget:
    """Counts skipped steps.

    Args:
        max_in_a_row: So many skipped steps may follow on one another.
    """

    def __init__(self, max_in_a_row: int) -> None:
        if max_in_a_row < 0:
            raise ValueError(f"max_skips_in_a_row is {max_in_a_row}; it is at least 0.")
        self.max_in_a_row = max_in_a_row
        self.in_a_row = 0
        self.total = 0
        self.is_skipping = False
        """Whether the present step is left out."""

    def begin(self) -> None:
        """A step begins."""
        self.is_skipping = False

    def skipped(self, reason: DivergenceError) -> None:
        """A step is skipped on all ranks.

        Raises:
            DivergenceError: It was one too many in a row; the reason's ranks, field and values.
        """
        if self.is_skipping:  # another reason for the same step
            return
        self.is_skipping = True
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row > self.max_in_a_row:
            raise DivergenceError(
                f"{self.in_a_row} steps in a row would be skipped; max_skips_in_a_row is {self.max_in_a_row}. "
                f"The last one: {reason}",
                ranks=reason.ranks,
                field=reason.field,
                values=reason.values,
            ) from reason

    def stepped(self) -> None:
        """A step is made, as far as one check can tell; another one may have left it out."""
        if not self.is_skipping:
            self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts of the run that is continued."""
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])


def drop_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Leaves nothing for the optimizer: a parameter without gradient keeps its value and its optimizer state."""
    for parameter in parameters:
        parameter.grad = None
