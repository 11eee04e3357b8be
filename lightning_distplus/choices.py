"""Arguments that a user gives: words to choose from, misspelt names, and what took the place of removed ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

__all__ = ["refuse_unknown_arguments", "require_choice", "require_type"]

_REMOVED = {
    "digest": "XXH3 digests are always taken; keep `sha256sum` of the files elsewhere",
    "num_workers": "one process prepares all; a larger corpus: datatrove or Megatron's tool, whose files are read",
    "shard_bytes": "one process prepares all; a larger corpus: datatrove or Megatron's tool, whose files are read",
    "weights": "pass sampler=samplers.weighted(weights, num_samples=...)",
    "replacement": "pass sampler=samplers.weighted(weights, replacement=...)",
    "num_samples": "pass sampler=samplers.weighted(weights, num_samples=...)",
    "lengths": "pass sampler=samplers.by_length(lengths, global_batch=...)",
    "column": "read Arrow and Parquet by the datasets library, as a data set of ResumableDataModule",
    "max_epochs_per_source": "compare the steps of the run, times the weight of a source, with its samples",
    "combine": "pass one data set that returns a dict; docs/data.md, Several data sets, has it in ten lines",
    "rampup_batch_size": "keep the global batch constant, and warm the learning rate up by a scheduler",
    "scale_lr": "choose the learning rates in configure_optimizers; `distplus rehearse` prints the rule",
    "base_global_batch_size": "choose the learning rates in configure_optimizers; `distplus rehearse` prints the rule",
    "gradient_compression": "give Lightning's ddp_comm_hook one of torch's communication hooks",
    "nccl": "set NCCL's environment variables",
    "on_spike": "add Lightning's SpikeDetection, or a callback of your own",
    "read_back_saves": "run `distplus verify`, from cron for example",
    "replay_suspects": "add Lightning's SpikeDetection, or a callback of your own",
    "scrub_every": "run `distplus verify` from cron",
}
"""Arguments of earlier versions, and what to do instead."""


def require_choice(name: str, value: object, choices: Any) -> None:
    """Refuses an argument that is none of its choices.

    Args:
        name: What the user calls it.
        value: What the user gave.
        choices: The ``Literal`` of its type.

    Raises:
        ValueError: It is another.
    """
    allowed = get_args(choices)
    if value not in allowed:
        *first, last = (f'"{one}"' for one in allowed)
        raise ValueError(f"{name} is {value!r}; it is {', '.join(first)} or {last}.")


def require_type(name: str, value: object, kind: type, *, or_none: bool = False) -> None:
    """Refuses an argument of another type; a number or a text that would count as true is no bool.

    Args:
        name: What the user calls it.
        value: What the user gave.
        kind: The type.
        or_none: Whether None is accepted too.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(value, kind) and not (or_none and value is None):
        expected = {bool: "True or False", str: "a text", int: "a whole number"}.get(kind, kind.__name__)
        raise TypeError(f"{name} is {value!r}; it is {expected}{' or None' if or_none else ''}.")


def refuse_unknown_arguments(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses arguments that a class does not take.

    Args:
        owner: The class, as the user knows it.
        given: The names given.
        known: The names that it takes.

    Raises:
        TypeError: One is unknown; the message names its successor, or the nearest name that is known.
    """
    names = sorted(known)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise TypeError(" ".join(f"{owner} takes no argument {_explain(name, names)}" for name in unknown))


def _explain(name: str, known: Sequence[str]) -> str:
    if name in _REMOVED:
        return f"{name!r} any more: {_REMOVED[name]}."
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name!r}; did you mean {near[0]!r}?" if near else f"{name!r}; it takes {', '.join(known)}."
