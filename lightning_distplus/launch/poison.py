"""A batch that ends every attempt: which samples the culprits had in hand, and whether those are set apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_distplus import env
from lightning_distplus.launch.history import History
from lightning_distplus.launch.policy import Attempt
from lightning_distplus.launcher_link import InHand

__all__ = ["Poison", "shown"]

_SHOWN_SAMPLES = 16


class Poison:
    """The samples in hand at the end of each attempt.

    A rank that raised has named its samples in the ledger. What a killed one had in hand stands in the launcher's
    memory, where its peers, which ended because of it, have theirs: so of these only the culprit's count.

    Args:
        num_ranks: Of this host.
        same_step: So many attempts in a row that ended at one step, with the same samples in the same culprit's hands,
            are evidence enough.
        sets_apart: Whether the samples are then set apart.
    """

    def __init__(self, num_ranks: int, *, same_step: int, sets_apart: bool) -> None:
        self._in_hand = InHand(num_ranks)
        self._same_step = same_step
        self._sets_apart = sets_apart
        self._ends: list[tuple[int | None, int, list[Any]]] = []
        self._tried: set[int | None] = set()
        self.apart: list[Any] = []
        """The ids that are set apart."""

    def begin_attempt(self) -> None:
        """Forgets what the ranks of the last attempt had in hand."""
        self._in_hand.forget()

    def close(self) -> None:
        """Gives the memory back."""
        self._in_hand.close()

    def samples(self, attempt: Attempt, history: History) -> Mapping[int, Sequence[Any]]:
        """By rank: of those that raised, and of the culprit."""
        culprit = attempt.culprit.rank
        killed = {rank: ids for rank, ids in self._in_hand.read().items() if rank == culprit}
        return {**killed, **history.samples}

    def note(self, attempt: Attempt, history: History) -> None:
        """Keeps the end of an attempt."""
        culprit = attempt.culprit.rank
        self._ends.append((attempt.step, culprit, list(self.samples(attempt, history).get(culprit, []))))

    def set_apart(self) -> list[Any]:
        """Sets samples apart for the attempts that follow; called where the step has not moved.

        Returns:
            The samples; empty where that is not asked for, or would not help: the attempts ended with different
            samples in hand, or this step did not move after its samples had been set apart.
        """
        ends = self._ends[-self._same_step :]
        step, _, samples = ends[-1]
        if not self._sets_apart or not samples or any(one != ends[-1] for one in ends) or step in self._tried:
            return []
        self._tried.add(step)
        self.apart += samples
        env.DISTPLUS_QUARANTINE.set(json.dumps(self.apart))
        return samples


def shown(samples: Sequence[Any]) -> str:
    """The ids in one line."""
    return ", ".join(map(str, samples[:_SHOWN_SAMPLES])) + (", ..." if len(samples) > _SHOWN_SAMPLES else "")
