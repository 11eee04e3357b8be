"""What follows from a failed attempt: whose exit code counts, and whether another attempt makes sense."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from lightning_distplus.errors import ExitCode

__all__ = ["Attempt", "Culprit", "RestartPolicy", "find_culprit", "is_innocent"]

_NEEDS_A_PERSON = (ExitCode.DIVERGENCE, ExitCode.PREFLIGHT, ExitCode.NO_PROGRESS)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The rank that ended an attempt."""

    rank: int
    code: int
    """Its exit code; a signal is a negative number."""

    @property
    def exit_code(self) -> int:
        """As a shell shows it: 128 and the number of the signal."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank}, killed by {signal.Signals(-self.code).name}"
        try:
            return f"rank {self.rank}, exit code {self.code} ({ExitCode(self.code).name.lower()})"
        except ValueError:
            return f"rank {self.rank}, exit code {self.code}"


def find_culprit(
    failures: Mapping[int, int], named: Iterable[int] = (), codes: Mapping[int, int] | None = None
) -> Culprit:
    """Whose exit code is that of the attempt.

    A rank that ended because of a peer (171), or by the agent's SIGTERM, is to blame only where nobody else is.

    Args:
        failures: Exit code per global rank, for the ranks that failed; at least one.
        named: The culprits of the watchdog's verdict, which come before everything else.
        codes: The exit code that goes with the error of a rank, by the ledger; it counts where a rank that is named
            ended by the agent's SIGTERM, because its peers were quicker to end.
    """
    suspects = [rank for rank in sorted(named) if rank in failures]
    rank = min(suspects or sorted(failures), key=lambda one: (is_innocent(failures[one]), one))
    told = (codes or {}).get(rank) if suspects and is_innocent(failures[rank]) else None
    return Culprit(rank=rank, code=failures[rank] if told is None else told)


def is_innocent(code: int) -> bool:
    """Whether a rank that ends with this code was ended by another: it lost a peer, or its agent terminated it."""
    return code in (ExitCode.PEER_LOST, -signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is known of an attempt that has ended."""

    number: int
    culprit: Culprit
    ended_at: float
    """``time.monotonic()``"""
    has_started: bool
    """Whether the ranks have met and set up: without that, the command itself is wrong."""
    step: int | None
    """Completed optimizer steps when it ended; None where no rank could tell."""


@dataclass
class RestartPolicy:
    """Decides after each failed attempt.

    Args:
        max_restarts: So many restarts are made within ``window``.
        window: The time in which they count; None: the whole job.
        same_step: So many attempts in a row may end without the step having moved; then a person has to look.
    """

    max_restarts: int
    window: timedelta | None = None
    same_step: int = 3
    _restarts: list[float] = field(default_factory=list, init=False)
    _best_step: int = field(default=-1, init=False)
    _in_vain: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.same_step < 1:
            raise ValueError(
                f"max_restarts is {self.max_restarts} and same_step is {self.same_step}; at least 0 and 1 are needed."
            )

    def refusal(self, attempt: Attempt) -> tuple[int, str] | None:
        """Why there is no further attempt, with the exit code of the job; None: there is one."""
        code = attempt.culprit.exit_code
        if code == ExitCode.PREEMPTED:
            return code, "the ranks stopped when asked to; the same command continues"
        if code in _NEEDS_A_PERSON:
            return code, "another attempt would end the same way; read the error above"
        if not attempt.has_started and attempt.culprit.code > 0:
            return code, "the ranks ended before they had met; read the error above"
        if self._is_stuck(attempt):
            where = "before the first step" if attempt.step is None else f"at step {attempt.step}"
            return int(ExitCode.NO_PROGRESS), f"{self._in_vain} attempts in a row ended {where}"
        if not self._has_budget(attempt.ended_at):
            within = "" if self.window is None else f" within {self.window}"
            return code, f"all {self.max_restarts} restarts{within} are spent"
        self._restarts.append(attempt.ended_at)
        return None

    def begin_anew(self) -> None:
        """Counts the attempts at one step from the beginning: what has ended them is out of the way."""
        self._in_vain = 0

    def _is_stuck(self, attempt: Attempt) -> bool:
        step = -1 if attempt.step is None else attempt.step
        self._in_vain = 1 if step > self._best_step else self._in_vain + 1
        self._best_step = max(step, self._best_step)
        return self._in_vain >= self.same_step

    def _has_budget(self, now: float) -> bool:
        if self.window is not None:
            self._restarts = [at for at in self._restarts if now - at <= self.window.total_seconds()]
        return len(self._restarts) < self.max_restarts
