"""Phases that succeed on all ranks or fail on all of them, with the name of the rank that failed first."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lightning_distplus.errors import ExitCode, SaveFailed

__all__ = ["Gather", "agree", "gather_alone"]

_MAX_ERROR_CHARACTERS = 4000


class Gather(Protocol):
    """Collects one JSON-able value of each rank, on all ranks, in rank order.

    A rank calls with the same sequence of names as the others; names come again in the next save. The implementation
    has a deadline of its own and raises a `PeerError` when a rank does not answer.
    """

    def __call__(self, name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
        """Returns the values of all ranks."""
        ...


def gather_alone(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
    """The `Gather` of a job with one process."""
    return [value]


def agree(phase: str, action: Callable[[], object], *, target: Path, rank: int, gather: Gather) -> list[Any]:
    """Runs the action; returns every rank's result, or raises on every rank if it failed on any.

    Args:
        phase: What the action is, for the message.
        action: This rank's part.
        target: The checkpoint that is not saved where it fails.
        rank: This process's rank.
        gather: How the ranks exchange their outcomes.

    Raises:
        SaveFailed: It failed somewhere.
    """
    failure: BaseException | None = None
    result: Any = None
    try:
        result = action()
    except BaseException as error:  # whatever it is, the other ranks must hear of it before it leaves
        failure = error
    ballot = {"result": result} if failure is None else _lament(failure, rank)
    try:
        ballots = gather(f"checkpoint {phase}", ballot)
    except Exception as lost:
        if failure is None:
            raise
        raise lost from failure
    failed = {rank: ballot for rank, ballot in enumerate(ballots) if "error" in ballot}
    if not failed:
        return [ballot.get("result") for ballot in ballots]
    if isinstance(failure, KeyboardInterrupt | SystemExit):
        raise failure
    raise _error(phase, failed, target, rank, len(ballots)) from failure


def _error(phase: str, failed: dict[int, dict[str, Any]], target: Path, rank: int, world_size: int) -> SaveFailed:
    failed = {rank: ballot for rank, ballot in failed.items() if not ballot["is_told"]} or failed
    first = min(failed, key=lambda rank: (failed[rank]["failed_at"], rank))
    others = sorted(set(range(world_size)) - failed.keys())
    error = SaveFailed(
        f"The checkpoint {target} is not saved: rank {first} failed first, in phase '{phase}', with "
        f"{failed[first]['error']}. Failed ranks: {sorted(failed)}; ranks without an error: {others}. No "
        "checkpoint was committed and the previous one is as it was. Remove the cause and save again.",
        ranks=failed,
    )
    if rank in failed:
        error.exit_code = ExitCode.FAILED  # the cause is here, not with a peer
    return error


def _lament(error: BaseException, rank: int) -> dict[str, Any]:
    """A rank's ballot for its error.

    torch's distributed checkpoint raises one error on all ranks, a `BaseException` that holds those of the ranks that
    failed.
    """
    failures = getattr(error, "failures", None)
    is_told = isinstance(failures, dict) and rank not in failures
    if isinstance(failures, dict) and rank in failures:
        error = failures[rank][0]
    text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
    return {"error": text, "failed_at": time.time(), "is_told": is_told}
