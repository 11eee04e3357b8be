"""``distplus fit|validate|test|predict``: LightningCLI with interpolation, our strategies and ``--ckpt_path auto``."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf.errors import OmegaConfBaseException

from lightning_distplus import env
from lightning_distplus.checkpoint.catalog import AUTO
from lightning_distplus.cli.refusals import Parser, print_refusal
from lightning_distplus.errors import DistplusError, ExitCode
from lightning_distplus.recipes import expand
from lightning_distplus.strategies import register_strategies
from lightning_distplus.strategies.loading import newest_checkpoint

__all__ = ["DistplusCLI", "KeepEveryConfig", "main"]


def main(argv: Sequence[str]) -> int:
    """Parses the configuration and runs the subcommand that ``argv`` begins with."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # the console script, unlike `python -m`, cannot import what lies beside the caller
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
                raise ValueError(f"{trainer.strategy!r} is an invalid strategy name.")
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
        """Resolves ``--ckpt_path auto``; nothing to resume from means a fresh start."""
        self._resolve_auto(is_required=False)

    def before_validate(self) -> None:
        """Resolves ``--ckpt_path auto``."""
        self._resolve_auto(is_required=True)

    before_test = before_predict = before_validate

    def _resolve_auto(self, *, is_required: bool) -> None:
        config = self.config_init[self.subcommand]
        if config["ckpt_path"] != AUTO:
            return
        try:
            found = newest_checkpoint(self.trainer, allow_fresh=config["allow_fresh"])
            if found is None and is_required:
                raise ValueError(f"ckpt_path auto found no checkpoint to {self.subcommand}. Name one by its path.")
        except (ValueError, OSError, DistplusError) as error:
            self._refuse(error)
        config["ckpt_path"] = None if found is None else str(found)

    def _refuse(self, error: Exception) -> None:
        """Ends the process before anything has begun; no other rank waits for this one yet."""
        code = getattr(error, "exit_code", ExitCode.FAILED)
        print_refusal(str(error))
        raise SystemExit(int(code)) from error
