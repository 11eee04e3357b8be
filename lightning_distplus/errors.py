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

Also here: the checks of arguments that a user gives, and the excepthook that ends a process with the code of its error.
"""

from __future__ import annotations

import difflib
import gc
import io
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, redirect_stderr, suppress
from enum import IntEnum
from types import TracebackType
from typing import Any, Protocol, get_args

__all__ = [
    "OTHER_LIGHTNING",
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
    "install_exit_codes",
    "refuse_other_trainer",
    "refuse_unknown_arguments",
    "require_choice",
    "require_type",
    "show_errors_with",
    "stop_showing_errors_with",
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


# -- arguments that a user gives ---------------------------------------------------------------------------------------

_PREPARED = "one process prepares all; a larger corpus: datatrove or Megatron's tool, whose files are read"
_WEIGHTED = "pass sampler=samplers.weighted(weights, num_samples=..., replacement=...)"
_SCALED = "choose the learning rates in configure_optimizers; `distplus rehearse` prints the rule"
_SPIKES = "add Lightning's SpikeDetection, or a callback of your own"
_REMOVED = {
    "digest": "XXH3 digests are always taken; keep `sha256sum` of the files elsewhere",
    **dict.fromkeys(("num_workers", "shard_bytes"), _PREPARED),
    **dict.fromkeys(("weights", "replacement", "num_samples"), _WEIGHTED),
    "lengths": "pass sampler=samplers.by_length(lengths, global_batch=...)",
    "column": "read Arrow and Parquet by the datasets library, as a data set of ResumableDataModule",
    "max_epochs_per_source": "compare the steps of the run, times the weight of a source, with its samples",
    "combine": "pass one data set that returns a dict; docs/guides/data.md, Several data sets, has it in ten lines",
    "rampup_batch_size": "keep the global batch constant, and warm the learning rate up by a scheduler",
    **dict.fromkeys(("scale_lr", "base_global_batch_size"), _SCALED),
    "gradient_compression": "give Lightning's ddp_comm_hook one of torch's communication hooks",
    "nccl": "set NCCL's environment variables",
    **dict.fromkeys(("on_spike", "replay_suspects"), _SPIKES),
    **dict.fromkeys(("read_back_saves", "scrub_every"), "run `distplus verify`, from cron for example"),
}
"""Arguments of earlier versions, and what to do instead."""


def require_choice(name: str, value: object, choices: Any) -> None:
    """Refuses an argument that is none of its ``choices``, the ``Literal`` of its type.

    Raises:
        ValueError: It is another.
    """
    allowed = get_args(choices)
    if value not in allowed:
        *first, last = (f'"{one}"' for one in allowed)
        raise ValueError(f"{name} is {value!r}; it is {', '.join(first)} or {last}.")


def require_type(name: str, value: object, kind: type, *, or_none: bool = False) -> None:
    """Refuses an argument of another type; a number or a text that would count as true is no bool.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(value, kind) and not (or_none and value is None):
        expected = {bool: "True or False", str: "a text", int: "a whole number"}.get(kind, kind.__name__)
        raise TypeError(f"{name} is {value!r}; it is {expected}{' or None' if or_none else ''}.")


OTHER_LIGHTNING = (
    "lightning_distplus works with the Trainer of lightning.pytorch; this one is of pytorch_lightning, which has "
    "classes of its own. Write `import lightning.pytorch as pl` in the place of `import pytorch_lightning as pl`."
)


def refuse_other_trainer(trainer: object) -> None:
    """Refuses the Trainer of ``pytorch_lightning``: it calls the hooks of our callbacks, and their parts are missing.

    Raises:
        TypeError: Says what to import.
    """
    if any(base.__module__.startswith("pytorch_lightning.") for base in type(trainer).__mro__):
        raise TypeError(OTHER_LIGHTNING)


def refuse_unknown_arguments(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses arguments that a class does not take.

    Raises:
        TypeError: One is unknown; the message names its successor, or the nearest name that is known.
    """
    names = sorted(known)

    def explain(name: str) -> str:
        if name in _REMOVED:
            return f"{name!r} any more: {_REMOVED[name]}."
        near = difflib.get_close_matches(name, names, n=1)
        return f"{name!r}; did you mean {near[0]!r}?" if near else f"{name!r}; it takes {', '.join(names)}."

    if unknown := sorted(set(given) - set(names)):
        raise TypeError(" ".join(f"{owner} takes no argument {explain(name)}" for name in unknown))


# -- the end of a process ----------------------------------------------------------------------------------------------


_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # it stands before errors of other ranks as well
_displays: list[ErrorDisplay] = []


class ErrorDisplay(Protocol):
    """Shows uncaught errors on the terminal."""

    @property
    def is_full(self) -> bool:
        """Whether the hooks of others print as well."""

    def show(self, error: BaseException, printed: str) -> None:
        """Shows an error; ``printed`` is what the hooks of others have printed of it."""


def show_errors_with(display: ErrorDisplay) -> None:
    """From now on, uncaught errors are shown by this display, and by no earlier one."""
    _displays[:] = [display]


def stop_showing_errors_with(display: ErrorDisplay) -> None:
    """Lets go of a display."""
    _displays[:] = [one for one in _displays if one is not display]


def install_exit_codes() -> None:
    """Chains ``sys.excepthook``, so that an uncaught error of ours ends the process with its code.

    Idempotent; called again after others have chained their own hook, it stands outermost again.
    """
    if not isinstance(sys.excepthook, _ExitCodes):
        sys.excepthook = _ExitCodes(sys.excepthook)


class _ExitCodes:
    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._show(kind, error, trace)
        # Not where a later hook calls this one: torch's collects what is printed, and writes it after this returns.
        # An error of a collective is only what the first cause did to this rank: the code is that of the cause.
        known = error if isinstance(error, DistplusError) else error.__cause__
        if sys.excepthook is not self:
            return
        with suppress(ValueError):  # not the main thread
            # An agent sends one to the ranks that still end when the first has ended: it would take the code's place.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _spare_the_last_collections()
        if isinstance(known, DistplusError):
            # A SystemExit that leaves the hook becomes the exit status, and the interpreter still shuts down in order.
            raise SystemExit(int(known.exit_code))

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Calls the hooks of others, which may do more than print, and prints in their place."""
        display = next(iter(_displays), None) if sys.excepthook is self else None
        printed = io.StringIO()
        with nullcontext() if display is None or display.is_full else redirect_stderr(printed):
            self._previous(kind, error, trace)  # type: ignore[operator]
        if display is None:
            return
        try:
            display.show(error, _TORCHS_PREFIX.sub("", printed.getvalue()))
        except Exception:  # the error itself must be seen
            sys.stderr.write(printed.getvalue())


def _spare_the_last_collections() -> None:
    """Sets what lives aside from the garbage collector, which otherwise takes a second at the end of the interpreter.

    The launcher waits for that second before it starts the ranks again. Files in reference cycles, which those
    collections would have closed, are flushed here.
    """
    for one in gc.get_objects():
        if issubclass(type(one), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with suppress(OSError, ValueError):
                one.flush()
    gc.freeze()
