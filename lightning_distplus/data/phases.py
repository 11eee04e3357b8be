"""Phases of a mixture: from which sample on it holds, and how far each source was drawn before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_distplus.data.mixture import DENOMINATOR, MixedOrder, Mixture
from lightning_distplus.data.order import ORDER_VERSION, derive_key

__all__ = ["Phase", "change_of_mixture", "order_of", "past_mixture"]

_PHASE = -5  # separates the keys of later phases from those of orders and augmentation


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of the global order in which the weights and sources stay the same.

    Attributes:
        first: The sample with which it begins.
        draws: How often each source was drawn before.
        lanes: The number by which the order of each source is keyed. A source keeps it when others come and go.
    """

    first: int
    draws: tuple[int, ...]
    lanes: tuple[int, ...]

    @classmethod
    def in_state(cls, state: Mapping[str, Any]) -> Phase:
        """The phase in a data module's identity or state; without a record there it is the first one."""
        num_sources = len(state["sources"])
        first, draws, lanes = state.get("phase", [0, [0] * num_sources, range(num_sources)])
        return cls(first=first, draws=tuple(draws), lanes=tuple(lanes))

    def as_state(self) -> dict[str, Any]:
        """What is added to the identity: nothing for the first phase."""
        return {"phase": [self.first, list(self.draws), list(self.lanes)]} if self.first else {}

    def mixture(self, weights: Sequence[float], seed: int) -> Mixture:
        """The mixture whose number 0 is ``first``; each phase mixes in an order of its own."""
        return Mixture(weights, derive_key(seed, _PHASE, self.first) if self.first else seed)

    def followed_by(
        self, old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]], *, sample: int, seed: int
    ) -> Phase:
        """The phase in which sources ``new`` take the place of ``old`` from ``sample`` on.

        A source that stays (same content, same number of samples) goes on with its next draw; any other begins.

        Args:
            old: Rows (fingerprint, weight as an integer, number of samples) of this phase.
            new: Rows of the next one.
            sample: Where it begins.
            seed: Of the order.
        """
        mixture = self.mixture([row[1] for row in old], seed)
        drawn = [before + here for before, here in zip(self.draws, mixture.draws_at(sample - self.first), strict=True)]
        known: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
        for row, lane, count in zip(old, self.lanes, drawn, strict=True):
            known.setdefault((row[0], row[2]), []).append((lane, count))
        free_lane = max(self.lanes) + 1
        lanes, draws = [], []
        for row in new:
            if stayed := known.get((row[0], row[2])):
                lane, count = stayed.pop(0)
            else:
                lane, count = free_lane, 0
                free_lane += 1
            lanes.append(lane)
            draws.append(count)
        return Phase(first=sample, draws=tuple(draws), lanes=tuple(lanes))


def past_mixture(phase: Phase, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The record of a mixture that holds no more: where it began, and its weights to four digits."""
    return [phase.first, [round(row[1] / DENOMINATOR, 4) for row in rows]]


def change_of_mixture(
    phase: Phase, old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]], names: Sequence[str]
) -> str:
    """What changes where a phase begins, in one line."""
    before = ", ".join(f"{row[1] / DENOMINATOR:.4g}" for row in old)
    rows = zip(names, new, phase.draws, strict=True)
    after = ", ".join(f"{name} {row[1] / DENOMINATOR:.4g} (from its sample {count} on)" for name, row, count in rows)
    return f"the mixture changes at sample {phase.first}: weights {before} become {after}"


def order_of(identity: Mapping[str, Any]) -> MixedOrder:
    """The global order of samples that an identity of ``TokenDataModule`` describes, from its phase on."""
    _, numerators, sizes = zip(*identity["sources"], strict=True)
    phase, seed = Phase.in_state(identity), identity["seed"]
    return MixedOrder(
        phase.mixture(numerators, seed),
        sizes,
        seed=seed,
        shuffle=identity["shuffle"],
        first=phase.first,
        draws=np.array(phase.draws),
        lanes=phase.lanes,
        version=identity.get("order_version", ORDER_VERSION),
    )
