"""``distplus fit|validate|test|predict``: LightningCLI with interpolation, our strategies and ``--ckpt_path auto``.

An error is three lines: the innermost cause, the accepted names, and where to read more.
"""

from __future__ import annotations

import difflib
import io
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback, instantiate_class
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf.errors import OmegaConfBaseException

from lightning_distplus import env
from lightning_distplus.checkpoint.catalog import AUTO
from lightning_distplus.cli import import_from_here
from lightning_distplus.errors import DistplusError, ExitCode
from lightning_distplus.recipes import expand
from lightning_distplus.strategies import register_strategies
from lightning_distplus.strategies.loading import newest_checkpoint

__all__ = ["DistplusCLI", "KeepEveryConfig", "Parser", "explain", "main", "print_refusal"]


def main(argv: Sequence[str]) -> int:
    """Parses the configuration and runs the subcommand that ``argv`` begins with."""
    import_from_here()
    logging.getLogger("DeepSpeed").addFilter(_to_standard_error)
    is_the_process = list(argv) == sys.argv[1:]
    try:
        arguments = [*expand(argv), *_number_of_hosts()]
    except ValueError as error:
        print(f"distplus: {error}", file=sys.stderr)
        return 2
    if is_the_process:
        sys.argv[1:] = arguments
    # LightningCLI warns when it gets arguments beside those of the process.
    DistplusCLI(args=None if is_the_process else arguments)
    return int(ExitCode.DONE)


def _number_of_hosts() -> list[str]:
    """Under ``distplus launch --nnodes MIN:MAX`` the launcher knows it, and the configuration does not."""
    num_nodes = env.GROUP_WORLD_SIZE.get()
    return [f"--trainer.num_nodes={num_nodes}"] if env.DISTPLUS_ELASTIC.get() and num_nodes else []


def _to_standard_error(record: logging.LogRecord) -> bool:
    """DeepSpeed's handler writes to standard output, amid what ``--print_config`` prints; so no record reaches it."""
    print(f"DeepSpeed: {record.getMessage()}", file=sys.stderr)
    return False


class KeepEveryConfig(SaveConfigCallback):
    """Saves the configuration of each start in the log folder; on a resume with other values, the old file is kept.

    The stock callback refuses to start where a configuration lies already, so that nothing could resume in place.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Moves an older, different file from ``config.yaml`` to ``config-<n>.yaml``."""
        log_dir = trainer.log_dir  # a collective: on every rank, in the same order as in the parent
        path = Path(log_dir or ".") / self.config_filename
        older = path.read_bytes() if trainer.is_global_zero and not self.already_saved and path.is_file() else None
        super().setup(trainer, pl_module, stage)
        if older is not None and older != path.read_bytes():
            number = 1 + sum(1 for _ in path.parent.glob(f"{path.stem}-*{path.suffix}"))
            path.with_name(f"{path.stem}-{number}{path.suffix}").write_bytes(older)


class DistplusCLI(LightningCLI):
    """LightningCLI whose errors are one message, and whose ``--ckpt_path auto`` finds the newest valid checkpoint.

    Args:
        args: The arguments; those of the process by default.
        run: Whether the arguments begin with a subcommand, which is run; else everything is only built.
    """

    exits_on_error = True
    """Whether a wrong argument ends the process with its usage."""

    def __init__(self, args: Sequence[str] | None = None, *, run: bool = True) -> None:
        # What an interpolation names is an absolute key of the file, whose content lies below the subcommand's name.
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        register_strategies()
        super().__init__(
            save_config_callback=KeepEveryConfig,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"parser_mode": "omegaconf+", "prog": "distplus", "exit_on_error": self.exits_on_error},
            parser_class=Parser,
            args=None if args is None else expand(args),
            run=run,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what belongs to ``--ckpt_path auto``."""
        parser.add_argument(
            "--allow_fresh",
            action="store_true",
            help="with --ckpt_path auto: start anew even where there are checkpoints, none of them valid",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses; an interpolation that leads nowhere is an error like any other."""
        given = sys.argv[1:] if args is None else args
        try:
            if isinstance(given, list) and any(one.startswith("--print_config") for one in given):
                self._check_values(parser, [one for one in given if not one.startswith("--print_config")])
            super().parse_arguments(parser, args)
        except OmegaConfBaseException as error:
            self._refuse(error)

    def _check_values(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Builds strategy, callbacks and data, which look at their values, before the configuration is printed."""
        try:
            with redirect_stderr(io.StringIO()):
                config = parser.parse_args(args)
        except (SystemExit, OmegaConfBaseException):
            return  # the parse that prints says it, where it needs the values that are missing or wrong
        chosen = config[config.subcommand]
        trainer = chosen.trainer
        known = ("auto", *StrategyRegistry.available_strategies())
        try:
            if isinstance(trainer.strategy, str) and trainer.strategy not in known:
                raise ValueError(f"invalid strategy name: `strategy={trainer.strategy!r}`")
            for one in (trainer.strategy, *(trainer.callbacks or ()), chosen.get("data")):
                given = one.get("init_args", Namespace()) if isinstance(one, Namespace) else None
                if given is not None and not any(isinstance(value, Namespace) for value in given.values()):
                    instantiate_class((), one.as_dict())
        except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
            self._refuse(error)

    def instantiate_classes(self) -> None:
        """Builds model, data and trainer; what they refuse ends the process with their message."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, OSError, ImportError, MisconfigurationException, DistplusError) as error:
            self._refuse(error)

    def before_fit(self) -> None:
        """Resolves ``--ckpt_path auto``; where a fit has nothing to resume from, it starts anew."""
        config = self.config_init[self.subcommand]
        if config["ckpt_path"] != AUTO:
            return
        try:
            found = newest_checkpoint(self.trainer, str(self.subcommand), allow_fresh=config["allow_fresh"])
        except (ValueError, OSError, DistplusError) as error:
            self._refuse(error)
        config["ckpt_path"] = None if found is None else str(found)

    before_validate = before_test = before_predict = before_fit

    def _refuse(self, error: Exception) -> None:
        """Ends the process before anything has begun; no other rank waits for this one yet."""
        code = getattr(error, "exit_code", ExitCode.FAILED)
        print_refusal(str(error))
        raise SystemExit(int(code)) from error


# -- what is wrong with a configuration --------------------------------------------------------------------------------


_KEY = re.compile(r'Parser key "(.+)":')
_CLASS = re.compile(r"Problem with given class_path '(.+)':")
_OPTION = re.compile(r"(?:Option|option|arguments:) '?-*([\w.]+)'?")
_LITERAL = re.compile(r"Expected a typing\.Literal\[(.+)\]\. Got value: (.*)")
_TYPE = re.compile(r"Expected a <class '([\w.]+)'>\. Got value: (.*)")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NO_STRATEGY = re.compile(r"invalid strategy name: `strategy='(.+?)'`")
_NO_CLASS = re.compile(r"Expected a dot import path string.* Got value: NestedArg\(key='([\w.]+)'")
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
    names = _accepted(cause, owner, options)
    wrong = _OPTION.search(cause) or _NO_ATTRIBUTE.search(cause) or _NO_STRATEGY.search(cause)
    cause = _plain(cause)
    if wrong is not None:
        word = wrong[wrong.lastindex or 1]
        word = word if any("." in name for name in names) else word.partition(".")[0]  # a group that is not known
        if close := difflib.get_close_matches(word, names, n=1):
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
    if (match := _NO_STRATEGY.search(cause)) is not None:
        return f"there is no strategy {match[1]!r}"
    if (match := _NO_CLASS.search(cause)) is not None:
        return f"{match[1]} is an argument of a class, and none is named; such as lightning_distplus.ResilientDDP"
    return cause


def _accepted(cause: str, owner: str | None, options: Sequence[str]) -> list[str]:
    if (match := _NO_ATTRIBUTE.search(cause)) is not None:
        return sorted(getattr(import_module(match[1]), "__all__", ()))
    if _NO_STRATEGY.search(cause) is not None:
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
    parser = ArgumentParser()
    parser.add_class_arguments(getattr(import_module(module), name), fail_untyped=False)
    return [option for option in _options_of(parser) if option != "help" and "." not in option]


def _options_of(parser: ArgumentParser) -> list[str]:
    return [
        option.removeprefix("--")
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and "+" not in option
    ]
