"""The saved position in the data, and whether it fits the run that loads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_distplus.data.order import ORDER_VERSION, READABLE_ORDER_VERSIONS
from lightning_distplus.data.plan import Geometry
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

__all__ = [
    "STATE_VERSION",
    "Position",
    "change_of_cut",
    "differences",
    "position_at",
    "read_state",
    "require_same_batch",
    "require_same_data",
    "state_of",
]

STATE_VERSION = 2
_READABLE = (1, STATE_VERSION)  # version 1 knew neither schedules of batches nor changed mixtures

_log = logging.getLogger(__name__)
# What the state records of ignored differences, so that it stays below 1 KB.
_MAX_IGNORED, _MAX_DIFFERENCES, _MAX_CHARACTERS = 2, 3, 40
_GONE = {"schedule": "a schedule of global batches", "parts": "several data sets side by side (their sizes)"}
"""What earlier versions saved, and this one cannot go on with."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place between two optimizer steps.

    Attributes:
        epoch: The Trainer's epoch.
        batches: Micro-batches of this epoch that are done.
        offset: Samples of this epoch that are done, over all ranks.
        consumed_samples: Samples of all epochs that are done, over all ranks.
        total_batches: Micro-batches of all epochs that are done.
        steps: Optimizer steps done.
        is_validated: Whether the validation that is due here, if any, has run.
        validation_batches: Validation batches that have run in this epoch.
        is_epoch_done: Whether iterable data ended here; with map-style data this follows from ``batches``.
    """

    epoch: int = 0
    batches: int = 0
    offset: int = 0
    consumed_samples: int = 0
    total_batches: int = 0
    steps: int = 0
    is_validated: bool = False
    validation_batches: int = 0
    is_epoch_done: bool = False


def state_of(
    position: Position, geometry: Geometry, identity: Mapping[str, Any], records: Mapping[str, Any]
) -> dict[str, Any]:
    """What is saved: less than 1 KB of plain values, equal on all ranks.

    Args:
        position: Where the run stands.
        geometry: Batch sizes of the run.
        identity: What must be equal for the same order.
        records: What has changed before; what is empty is left out.
    """
    return {
        "version": STATE_VERSION,
        "order_version": ORDER_VERSION,
        **identity,
        "global_batch": geometry.global_batch,
        "micro_step": geometry.micro_step,
        "ranks": geometry.ranks.size,
        "global_batch_changes": [],
        **{name: record for name, record in records.items() if record},
        **asdict(position),
    }


def position_at(sample: int, geometry: Geometry, *, num_batches: int | float, num_steps: int) -> Position:
    """The position at a sample of the global order, for a checkpoint that holds none.

    Args:
        sample: Samples that are done, over all ranks and epochs.
        geometry: Batch sizes of the run.
        num_batches: Micro-batches of an epoch.
        num_steps: Optimizer steps that are done.

    Raises:
        ValueError: No optimizer step begins there, or iterable data would have to be read up to there.
    """
    num_windows, rest = divmod(sample, geometry.global_batch)
    if rest or sample < 0:
        raise ValueError(
            f"start_sample={sample} is not where an optimizer step begins: the global batch is {geometry}. The step "
            f"before begins at sample {max(0, sample - rest)}."
        )
    if sample and num_batches == float("inf"):
        raise ValueError(f"start_sample={sample}: iterable training data begins at its beginning only, start_sample=0.")
    done = num_windows * geometry.accumulation
    epoch, batches = divmod(done, int(num_batches)) if sample else (0, 0)
    return Position(
        epoch=epoch,
        batches=batches,
        offset=batches * geometry.micro_step,
        consumed_samples=sample,
        total_batches=done,
        steps=num_steps,
    )


def read_state(state: Mapping[str, Any]) -> Position:
    """The position in a saved state.

    Raises:
        DatasetMismatch: The state or its order is of a version that this package does not know, or of a feature that
            it no longer has.
    """
    for name, ours in (("version", _READABLE), ("order_version", READABLE_ORDER_VERSIONS)):
        if state.get(name) not in ours:
            raise DatasetMismatch(
                f"The checkpoint's data state has {name} {state.get(name)!r}; this lightning_distplus reads "
                f"{' and '.join(map(str, ours))}. "
                "Resume with the version of lightning_distplus that wrote the checkpoint."
            )
    for name, what in _GONE.items():
        if state.get(name):
            raise DatasetMismatch(
                f"The checkpoint was written under {what}: {_text(state[name])}. This lightning_distplus does not read "
                "data that way any more. Load its weights into a new run, or resume with the version that wrote it."
            )
    names = Position.__dataclass_fields__.keys() - {"is_epoch_done"}  # which older states lack
    return Position(**{name: state[name] for name in names}, is_epoch_done=state.get("is_epoch_done", False))


def _text(record: Any) -> str:
    return str(record["text"] if isinstance(record, Mapping) else record)


def require_same_data(
    state: Mapping[str, Any],
    ours: Mapping[str, Any],
    names: Sequence[str],
    *,
    explain: Callable[[int], str],
    ignore_fingerprint: bool,
) -> list[list[Any]]:
    """Compares what defines the data and its order.

    Args:
        state: The saved one.
        ours: What defines them here.
        names: Of our sources.
        explain: What differs first inside a source of this number; empty where that is not known.
        ignore_fingerprint: Go on with what differs.

    Returns:
        What was ignored here and in the resumes before, for the next state: from which sample on, and what differs.

    Raises:
        DatasetMismatch: Something differs and ``ignore_fingerprint`` is False.
    """
    found = differences({name: state.get(name) for name in ours}, ours, names, explain)
    before = [list(record) for record in state.get("ignored", [])]
    if not found:
        return before
    text = "\n".join(f"  {line}" for line in found)
    if ignore_fingerprint:
        _log.warning("The data is not that of the checkpoint; going on, because ignore_fingerprint=True:\n%s", text)
        what = [*dict.fromkeys(line.split(": ", 1)[0][:_MAX_CHARACTERS] for line in found)]
        return [*before, [state["consumed_samples"], *what[:_MAX_DIFFERENCES]]][-_MAX_IGNORED:]
    raise DatasetMismatch(
        f"The checkpoint was written with other data or another order:\n{text}\n"
        "Give this run the data and settings of the checkpoint, or pass ignore_fingerprint=True to the data module to "
        "go on at the same position of the new order (samples may then repeat or be missed)."
    )


def require_same_batch(saved: Mapping[str, Any], geometry: Geometry, *, allow_change: bool) -> None:
    """Compares the global batch.

    Raises:
        DatasetMismatch: They differ and ``allow_change`` is False.
    """
    if saved["global_batch"] != geometry.global_batch and not allow_change:
        raise DatasetMismatch(
            f"The checkpoint was written with a global batch of {saved['global_batch']} samples; this run has "
            f"{geometry}. Choose batch size, ranks and accumulation with the same product, or pass "
            "allow_global_batch_change=True."
        )


def change_of_cut(state: Mapping[str, Any], geometry: Geometry) -> str:
    """How the global batches are cut now and were cut before; empty where nothing has changed."""
    saved = (state["global_batch"], state["micro_step"], state.get("ranks", geometry.ranks.size))
    if saved == (geometry.global_batch, geometry.micro_step, geometry.ranks.size):
        return ""
    global_batch, micro_step, ranks = saved
    before = Geometry(
        micro_batch=micro_step // ranks, accumulation=global_batch // micro_step, ranks=DataParallel(size=ranks)
    )
    return f"; global batch {geometry}, before {before}"


def differences(
    saved: Mapping[str, Any], ours: Mapping[str, Any], names: Sequence[str], explain: Callable[[int], str]
) -> list[str]:
    """One line for each thing that differs, with both sides; ``explain`` as in ``require_same_data``."""
    lines = []
    for name in sorted((saved.keys() | ours.keys()) - {"sources"}):
        if saved.get(name) != ours.get(name):
            lines.append(f"{name}: {saved.get(name)!r} in the checkpoint, {ours.get(name)!r} in this run")
    old, new = saved.get("sources", []), ours.get("sources", [])
    if len(old) != len(new):
        lines.append(f"number of sources: {len(old)} in the checkpoint, {len(new)} in this run")
        return lines
    labels = [f"source {place} ({name})" for place, name in enumerate(names)] or [
        f"source {n}" for n in range(len(new))
    ]
    for place, (label, *pair) in enumerate(zip(labels, old, new, strict=True)):
        for what, before, now in zip(("fingerprint", "weight / 2**32", "num_samples"), *pair, strict=True):
            if before != now:
                lines.append(f"{label}: {what}: {before!r} in the checkpoint, {now!r} in this run")
            if before != now and what == "fingerprint" and (inside := explain(place)):
                lines.append(f"{label}: {inside}")
    return lines
