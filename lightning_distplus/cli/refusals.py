"""Errors of the command line in three lines: the innermost cause, the accepted names, and where to read more."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry

__all__ = ["Parser", "explain", "print_refusal"]

_KEY = re.compile(r'Parser key "(.+)":')
_CLASS = re.compile(r"Problem with given class_path '(.+)':")
_OPTION = re.compile(r"(?:Option|option|arguments:) '?-*([\w.]+)'?")
_LITERAL = re.compile(r"Expected a typing\.Literal\[(.+)\]\. Got value: (.*)")
_TYPE = re.compile(r"Expected a <class '([\w.]+)'>\. Got value: (.*)")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_GIVEN = "Given value: "
_HEADERS = ("Given value", "Subtypes:", "Does not validate against", "Parser key", "Problem with given class_path")
_SHOWN_NAMES = 24


class Parser(LightningArgumentParser):
    """The parser of ``fit`` and its like, without 52 lines of usage before an error."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Says what is wrong and ends the process; raises where this parser does not end processes."""
        if not self.exit_on_error:
            super().error(message, ex)
        of_subcommand: Any = getattr(ex, "subcommand_parser", None) or self
        print_refusal(message, _options_of(of_subcommand), of_subcommand.prog.replace(" [options]", ""))
        raise SystemExit(2)


def print_refusal(message: str, options: Sequence[str] = (), program: str = "distplus") -> None:
    """Prints the innermost cause of an error, what would be accepted, and the command that lists all of it."""
    cause, names = explain(message, options)
    print(f"{program}: {cause}", file=sys.stderr)
    if names:
        more = f", and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        print(f"  accepted: {', '.join(names[:_SHOWN_NAMES])}{more}", file=sys.stderr)
    print(f"  {program} --help lists every option; --print_config shows the configuration as read", file=sys.stderr)


def explain(message: str, options: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The innermost cause of an error of jsonargparse or Lightning in one line, and the names accepted there.

    Args:
        message: What was raised.
        options: The options of the command, with dots.
    """
    lines = message.splitlines() or ["no reason was given"]
    if not any(line.startswith(("Parser key", "Does not validate")) for line in lines):
        lines = [message]  # not of the parser: each line says something
    path = _innermost(lines)
    keys = [match[1] for line in path if (match := _KEY.search(line))]
    owner = next((match[1] for line in reversed(path) if (match := _CLASS.search(line))), None)
    cause = next((line.strip() for line in path if not line.strip().startswith(_HEADERS)), lines[0].strip())
    given = next((line.strip() for line in reversed(lines) if line.strip().startswith(_GIVEN)), "")
    if given and cause.startswith("Expected a ") and "Got value" not in cause:  # of alternatives, said once for all
        cause += f". Got value: {given.removeprefix(_GIVEN)}"
    cause = _plain(cause)
    names = _accepted(cause, owner, options)
    wrong = _OPTION.search(cause) or _NO_ATTRIBUTE.search(cause)
    if wrong is not None and (close := difflib.get_close_matches(wrong[wrong.lastindex or 1], names, n=1)):
        cause += f"; did you mean {close[0]}?"
    where = f"{'.'.join(keys)}: " if keys else ""
    return f"{where}{cause}{f' ({owner})' if owner else ''}", names


def _innermost(lines: Sequence[str]) -> list[str]:
    """The lines that lead to the cause: of alternatives that all failed, the one that was meant."""
    for number, line in enumerate(lines):
        if line.strip() == "Errors:":
            head, below = list(lines[:number]), lines[number + 1 :]
            starts = [place for place, text in enumerate(below) if text.lstrip().startswith("- ")]
            indent = min((len(below[place]) - len(below[place].lstrip()) for place in starts), default=0)
            starts = [place for place in starts if below[place].startswith(" " * indent + "- ")]
            entries = [below[a:b] for a, b in zip(starts, [*starts[1:], len(below)], strict=True)]
            if entries:
                meant = max(entries, key=_rank)
                return [*head, *_innermost([meant[0].replace("- ", "  ", 1), *meant[1:]])]
    return list(lines)


def _rank(entry: Sequence[str]) -> int:
    """How much an alternative looks like the one that was meant: a class, a reason, a mere type."""
    text = entry[0].lstrip(" -")
    return 2 if _CLASS.match(text) else 0 if text.startswith(("Expected a <class", "Not a valid subclass")) else 1


def _plain(cause: str) -> str:
    if (match := _LITERAL.search(cause)) is not None:
        return f"{match[2]} is none of {match[1]}"
    if (match := _TYPE.search(cause)) is not None:
        return f"{match[2]} is no {match[1]}"
    return cause


def _accepted(cause: str, owner: str | None, options: Sequence[str]) -> list[str]:
    if (match := _NO_ATTRIBUTE.search(cause)) is not None:
        return sorted(getattr(import_module(match[1]), "__all__", ()))
    if "invalid strategy name" in cause:
        return sorted(
            StrategyRegistry.available_strategies(), key=lambda name: (not name.startswith("resilient"), name)
        )
    if owner is not None:
        return _arguments_of(owner) if "is not accepted" in cause else []
    if (match := _OPTION.search(cause)) is None:
        return []
    group, _, _ = match[1].rpartition(".")
    beside = [name for name in options if name.rpartition(".")[0] == group]
    return beside or [name for name in options if "." not in name]


def _arguments_of(class_path: str) -> list[str]:
    """The arguments of a class and of those to which it hands the rest."""
    module, _, name = class_path.rpartition(".")
    found: dict[str, None] = {}
    for base in getattr(import_module(module), name).__mro__:
        if base is object or "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base).parameters.values())
        found.update(
            dict.fromkeys(one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
        )
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return list(found)


def _options_of(parser: ArgumentParser) -> list[str]:
    groups: Iterable[Any] = parser._actions
    return [
        option.removeprefix("--")
        for action in groups
        for option in action.option_strings
        if option.startswith("--") and "+" not in option
    ]
