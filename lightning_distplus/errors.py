"""Every error this package raises, and the exit code each one ends a process with.

```text
DistplusError                      root; has .exit_code
|-- PreflightError (ValueError)    refused to start: launch, network, host, agreement       173
|-- RendezvousError                the ranks could not form one group                       173
|-- PeerError                      another rank is the cause; has .ranks                    171
|   |-- PeerFailed                 it raised; the text of its first error is in the message 171
|   |   `-- SaveFailed             a checkpoint could not be saved; .ranks are those that failed 171
|   |-- PeerLost                   its process or its host is gone                          171
|   |-- PeerMissing                it did not arrive before the deadline                    171
|   `-- HangDetected               it is there and does not move                            170
|-- DivergenceError                ranks differ; has .ranks, .field, .values                172
|-- CheckpointCorrupt              a file is torn, missing or changed                       1
|-- CheckpointMismatch (ValueError)    a sound checkpoint of something else                 1
|-- CheckpointUnsafe               a pickle of a checkpoint names what may run code         1
`-- DatasetMismatch (ValueError)       the data, its order or its position do not fit       1
Preempted (SystemExit)             stopped when asked, after a committed save               143
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

__all__ = [
    "CheckpointCorrupt",
    "CheckpointMismatch",
    "CheckpointUnsafe",
    "DatasetMismatch",
    "DistplusError",
    "DivergenceError",
    "ExitCode",
    "HangDetected",
    "PeerError",
    "PeerFailed",
    "PeerLost",
    "PeerMissing",
    "Preempted",
    "PreflightError",
    "RendezvousError",
    "SaveFailed",
]


class ExitCode(IntEnum):
    """Exit status of one process. 143, 170 and 171 may be retried; 172, 173 and 174 need a person."""

    DONE = 0
    FAILED = 1
    PREEMPTED = 143
    HANG = 170
    PEER_LOST = 171
    DIVERGENCE = 172
    PREFLIGHT = 173
    NO_PROGRESS = 174

    @property
    def is_retryable(self) -> bool:
        """Whether a scheduler may start the same job again."""
        return self in (ExitCode.PREEMPTED, ExitCode.HANG, ExitCode.PEER_LOST)


class DistplusError(RuntimeError):
    """Root of the tree. Every message says what happened, both sides, and the remedy."""

    exit_code: ExitCode = ExitCode.FAILED
    has_verdict: bool = False
    """Whether its verdict is written already, by whoever found it."""


class PreflightError(DistplusError, ValueError):
    """The run would start wrong, so it does not start."""

    exit_code = ExitCode.PREFLIGHT


class RendezvousError(DistplusError):
    """The ranks could not form one group: busy port, foreign job, duplicate rank."""

    exit_code = ExitCode.PREFLIGHT


class PeerError(DistplusError):
    """Another rank is the cause.

    Args:
        message: What happened and what to do.
        ranks: The ranks that caused it, in any order.
    """

    exit_code = ExitCode.PEER_LOST

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: list[int] = sorted(set(ranks))


class PeerFailed(PeerError):
    """A peer raised; its first error is in the message."""


class SaveFailed(PeerFailed):
    """A checkpoint was not saved, because of the ranks in ``.ranks``; what was there before is as it was."""


class PeerLost(PeerError):
    """A peer's process or host is gone."""


class PeerMissing(PeerError):
    """A peer did not arrive before the deadline."""


class HangDetected(PeerError):
    """A peer is there and does not move."""

    exit_code = ExitCode.HANG


class DivergenceError(DistplusError):
    """Ranks differ where they must agree.

    Args:
        message: What differs, both values, and the remedy.
        ranks: The ranks that are wrong; all ranks when no majority decides.
        field: The name of what differs, for example ``"global_step"``.
        values: The value on each rank.
    """

    exit_code = ExitCode.DIVERGENCE

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), field: str = "", values: Mapping[int, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks: list[int] = sorted(set(ranks))
        self.field = field
        self.values: dict[int, Any] = dict(values or {})


class CheckpointCorrupt(DistplusError):
    """A file of a checkpoint is torn, missing or changed."""


class CheckpointMismatch(DistplusError, ValueError):
    """The checkpoint is sound, but of another model, strategy or layout."""


class CheckpointUnsafe(DistplusError):
    """A pickle of a checkpoint names more than tensors and plain data, so that reading it may run code."""


class DatasetMismatch(DistplusError, ValueError):
    """The data, its order or its position are not those of the checkpoint."""


class Preempted(SystemExit):
    """The run stopped when asked to, after a committed save; an evaluation has nothing to save."""

    exit_code = ExitCode.PREEMPTED

    def __init__(self) -> None:
        super().__init__(int(ExitCode.PREEMPTED))


def message_of(error: BaseException) -> str:
    """``str(error)``, also where that raises: it is the user's code, and the error itself must be heard of."""
    try:
        return str(error)
    except Exception as failure:
        return f"(no message: its __str__ raises {type(failure).__name__})"
