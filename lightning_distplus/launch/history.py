"""What the attempts of a job have left behind: how far they came, what failed, which samples were in hand, verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_distplus.events import read_events
from lightning_distplus.watchdog import find_verdicts

__all__ = ["History", "read_history"]


@dataclass(frozen=True, kw_only=True)
class History:
    """One attempt, as the ledger and the verdict tell it."""

    has_started: bool = False
    has_saved: bool = False
    is_preempted: bool = False
    step: int | None = None
    errors: dict[int, str] = field(default_factory=dict)
    """The error of each rank, in one line."""
    codes: dict[int, int] = field(default_factory=dict)
    """The exit code that goes with each error."""
    samples: dict[int, Sequence[Any]] = field(default_factory=dict)
    """The samples that a failing rank had in hand."""
    culprits: list[int] = field(default_factory=list)
    """The ranks that the verdict names."""
    is_hang: bool = False


def read_history(home: Path | None, attempt: int, since: float, run_id: str | None) -> History:
    """Reads what an attempt has written.

    Args:
        home: The folder of the run's artefacts; None where no rank came so far as to name it.
        attempt: Its number.
        since: Unix time at which it began; older verdicts and events are those of earlier attempts.
        run_id: The run; what other runs have left in the same folder concerns it as little. None: it is not known.
    """
    if home is None:
        return History()
    of_run = read_events(home, run_id=run_id)
    events = [event for event in of_run if event["attempt"] == attempt and event["time"] >= since]
    failed = [event for event in events if event["kind"] == "failed"]
    steps = [event["global_step"] for event in events if event.get("global_step") is not None]
    # The first verdict since then: what came after it is its consequence.
    verdict: dict[str, Any] = next(iter(find_verdicts(home, run_id=run_id, since=since)), {})
    if verdict:
        steps.append(verdict["global_step"])
    return History(
        has_started=any(event["kind"] == "start" for event in events),
        has_saved=any(event["kind"] in ("saved", "preempted") for event in events),
        is_preempted=any(event["kind"] == "preempted" for event in events),
        step=max(steps, default=None),
        errors={event["rank"]: event["error"].partition("\n")[0] for event in failed},
        codes={event["rank"]: event.get("exit_code", 1) for event in failed},
        samples={event["rank"]: event["samples"] for event in failed if event.get("samples")},
        culprits=verdict.get("culprits", []),
        is_hang=verdict.get("kind") == "hang",
    )
