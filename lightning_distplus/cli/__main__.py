"""The entry point of ``distplus`` and ``python -m lightning_distplus.cli``: finds the command and hands over to it."""

from __future__ import annotations

import argparse
import gc
import sys
import textwrap
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
    examples: str = ""
    """What stands at the end of its ``--help``, unless its parser has an epilog with examples."""


_AUTO = """
--ckpt_path auto: goes on from the newest valid checkpoint of this run. Where there is none, fit starts anew; where
there are only torn or damaged ones it refuses, and starts anew with --allow_fresh."""
COMMANDS = {
    "init": Command(
        "init",
        "write a starting point here: a script, or a recipe",
    ),
    "fit": Command(
        "training",
        "train, or resume with --ckpt_path auto",
        keeps_name=True,
        examples="distplus fit --config recipe:tiny_cpu_fsdp --trainer.max_steps 20\n"
        "distplus fit --config my.yaml --ckpt_path auto\n"
        f"distplus fit --config my.yaml --print_config\n{_AUTO}",
    ),
    "validate": Command(
        "training",
        "run the validation loop",
        keeps_name=True,
        examples="distplus validate --config my.yaml --ckpt_path auto",
    ),
    "test": Command(
        "training", "run the test loop", keeps_name=True, examples="distplus test --config my.yaml --ckpt_path auto"
    ),
    "predict": Command(
        "training",
        "run the prediction loop",
        keeps_name=True,
        examples="distplus predict --config my.yaml --ckpt_path auto",
    ),
    "launch": Command("launch", "start the ranks, and restart them from the newest checkpoint"),
    "prepare": Command(
        "data",
        "turn text, JSONL or Parquet into token files",
        "run_prepare",
    ),
    "audit": Command(
        "data",
        "check that every sample was trained on once",
        "run_audit",
        examples="distplus audit runs/x --json",
    ),
    "preflight": Command(
        "preflight",
        "meet all ranks, and check every host",
        "run_preflight",
        examples="srun --nodes 2 --ntasks-per-node 8 distplus preflight --json\n"
        "torchrun --nproc-per-node 8 -m lightning_distplus.cli preflight --deadline 5m",
    ),
    "rehearse": Command(
        "rehearse",
        "what a configuration would do on many ranks",
        examples="distplus rehearse --config recipe:tinyllama_1.1b_fsdp --world 64\n"
        "distplus rehearse --config my.yaml --json",
    ),
    "doctor": Command(
        "preflight",
        "what would go wrong on this host",
        "run_doctor",
        examples="distplus doctor\ndistplus doctor --devices 8 --nodes 2 --json",
    ),
    "report": Command(
        "report",
        "show a run: attempts, goodput, verdicts, checkpoints",
        examples="distplus report runs/x --html report.html\ndistplus report --dumps nccl_traces/ --json",
    ),
    "top": Command(
        "report", "show what each rank does, as the run goes on", "run_top", examples="distplus top runs/x --every 5"
    ),
    "verify": Command(
        "checkpoints",
        "check every checkpoint in a folder",
        "run_verify",
        examples="distplus verify runs/x/checkpoints\ndistplus verify --deep runs/x/checkpoints/step=300.ckpt --json",
    ),
    "import": Command(
        "importing",
        "make a checkpoint of another program one to resume from",
        "run_import",
    ),
    "export": Command(
        "checkpoints",
        "write a checkpoint as one file, or for another program",
        "run_export",
    ),
    "completion": Command(
        "completion",
        "print what completes commands and options in a shell",
        "run_completion",
        examples='eval "$(distplus completion bash)"\ndistplus completion fish | source',
    ),
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
    except SystemExit as end:
        if not end.code and command.examples and {"-h", "--help"} & set(arguments):
            print("\nexamples:\n" + textwrap.indent(command.examples, "  "))
        raise


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
