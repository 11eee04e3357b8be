"""The entry point of ``distplus`` and ``python -m lightning_distplus.cli``: finds the command and hands over to it."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightning_distplus import __version__
from lightning_distplus.errors import DistplusError, ExitCode

__all__ = ["main"]

PROGRAM = "distplus"


@dataclass(frozen=True)
class Command:
    """One subcommand: the module and its function that runs it, and its line in ``--help``."""

    module: str
    summary: str
    function: str = "main"
    keeps_name: bool = False
    """Whether the module reads the command's name itself, as LightningCLI does."""


COMMANDS = {
    "init": Command("init", "write a starting point here: a script, or a recipe"),
    "fit": Command("training", "train, or resume with --ckpt_path auto", keeps_name=True),
    "validate": Command("training", "run the validation loop", keeps_name=True),
    "test": Command("training", "run the test loop", keeps_name=True),
    "predict": Command("training", "run the prediction loop", keeps_name=True),
    "launch": Command("launch", "start the ranks, and restart them from the newest checkpoint"),
    "prepare": Command("data", "turn text, JSONL or Parquet into token files", "run_prepare"),
    "audit": Command("data", "check that every sample was trained on once", "run_audit"),
    "preflight": Command("preflight", "meet all ranks, and check every host", "run_preflight"),
    "rehearse": Command("rehearse", "what a configuration would do on many ranks"),
    "doctor": Command("preflight", "what would go wrong on this host", "run_doctor"),
    "report": Command("report", "show a run: attempts, goodput, verdicts, checkpoints"),
    "top": Command("report", "show what each rank does, as the run goes on", "run_top"),
    "verify": Command("checkpoints", "check every checkpoint in a folder", "run_verify"),
    "import": Command("importing", "make a checkpoint of another program one to resume from", "run_import"),
    "export": Command("checkpoints", "write a checkpoint as one file, or for another program", "run_export"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; ``argv`` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = _parse_name(arguments[:1])
    command = COMMANDS[name]
    run = getattr(_import(f"lightning_distplus.cli.{command.module}"), command.function)
    try:
        return int(run(arguments if command.keeps_name else arguments[1:]))
    except (DistplusError, OSError) as error:
        if command.keeps_name:
            raise  # the strategy's excepthook tells the peers and ends the process with the error's code
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return int(error.exit_code if isinstance(error, DistplusError) else ExitCode.FAILED)
    except KeyboardInterrupt:
        print(f"{PROGRAM} {name}: interrupted", file=sys.stderr)
        return 130


def _import(name: str) -> Any:
    """Imports without the garbage collector, which finds nothing then, and takes a fifth of the time.

    What there is afterwards stays for good, and no later collection looks at it again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _parse_name(arguments: list[str]) -> str:
    lines = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description="Multi-rank training that survives hangs, dead ranks and torn checkpoints.",
        epilog=f"commands:\n{lines}\n\n'{PROGRAM} COMMAND --help' explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), help=argparse.SUPPRESS, metavar="COMMAND")
    return str(parser.parse_args(arguments).command)


if __name__ == "__main__":
    sys.exit(main())
