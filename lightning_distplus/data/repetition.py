"""Repetition: how many times a run of a given length reads each source of a mixture."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_distplus.data.mixture import DENOMINATOR
from lightning_distplus.data.phases import Phase

__all__ = ["MAX_EPOCHS", "refuse_repetition"]

# Text that is read up to four times is nearly worth new text (Muennighoff et al., "Scaling Data-Constrained Language
# Models", 2023).
MAX_EPOCHS = 4.0

_log = logging.getLogger(__name__)


def refuse_repetition(
    identity: Mapping[str, Any], names: Sequence[str], num_samples: int, *, bound: float | None, is_said: bool
) -> None:
    """Compares how many times each source is read with the bound, or warns above 4 times where there is none.

    Args:
        identity: Of ``TokenDataModule``: sources, weights, sizes, phase.
        names: Of the sources.
        num_samples: Of the whole run.
        bound: Times that a source may be read.
        is_said: Whether this rank warns.

    Raises:
        ValueError: A source is read more often than ``bound``.
    """
    lines = []
    for name, (_, weight, size), draws in zip(names, identity["sources"], _draws(identity, num_samples), strict=True):
        if draws > (MAX_EPOCHS if bound is None else bound) * size:
            share = f"its weight is {weight / DENOMINATOR:.4g}, so that {draws} of {num_samples} samples come from it"
            lines.append(f"  {name}: {draws / size:.1f} times; {share}, and it has {size}")
    if not lines:
        return
    text = "\n".join(lines)
    remedy = "Take fewer steps, smaller weights or more data"
    if bound is not None:
        raise ValueError(f"This run reads a source more than max_epochs_per_source={bound:g} times:\n{text}\n{remedy}.")
    if is_said:
        _log.warning("this run reads a source many times:\n%s\n%s; max_epochs_per_source sets a bound.", text, remedy)


def _draws(identity: Mapping[str, Any], num_samples: int) -> list[int]:
    """About how often each source is drawn by then (within one sample)."""
    phase = Phase.in_state(identity)
    here = max(0, num_samples - phase.first)
    rows = zip(phase.draws, identity["sources"], strict=True)
    return [before + here * weight // DENOMINATOR for before, (_, weight, _) in rows]
