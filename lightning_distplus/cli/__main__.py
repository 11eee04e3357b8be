"""The entry point of ``distplus`` and ``python -m lightning_distplus.cli``: finds the command and hands over to it.

``distplus init`` and ``distplus completion`` are here themselves.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import io
import re
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lightning_distplus import __version__, recipes
from lightning_distplus.errors import DistplusError, ExitCode

__all__ = ["main", "run_completion", "run_init"]

PROGRAM = "distplus"


class Command(NamedTuple):
    """One subcommand: the module and its function that runs it, and its line in ``--help``."""

    module: str
    function: str
    summary: str

    @property
    def keeps_name(self) -> bool:
        """Whether the module reads the command's name itself, as LightningCLI does."""
        return self.module == "training"


COMMANDS = {
    "init": Command("__main__", "run_init", "write a starting point here: a script, or a recipe"),
    "fit": Command("training", "main", "train, or resume with --ckpt_path auto"),
    "validate": Command("training", "main", "run the validation loop"),
    "test": Command("training", "main", "run the test loop"),
    "predict": Command("training", "main", "run the prediction loop"),
    "launch": Command("launch", "main", "start the ranks, and restart them from the newest checkpoint"),
    "prepare": Command("data", "run_prepare", "turn text, JSONL or Parquet into token files"),
    "audit": Command("data", "run_audit", "check that every sample was trained on once"),
    "preflight": Command("preflight", "run_preflight", "meet all ranks, and check every host"),
    "rehearse": Command("rehearse", "main", "what a configuration would do on many ranks"),
    "doctor": Command("preflight", "run_doctor", "what would go wrong on this host"),
    "report": Command("report", "main", "show a run: attempts, goodput, verdicts, checkpoints"),
    "top": Command("report", "run_top", "show what each rank does, as the run goes on"),
    "verify": Command("checkpoints", "run_verify", "check every checkpoint in a folder"),
    "import": Command("checkpoints", "run_import", "make a checkpoint of another program one to resume from"),
    "export": Command("checkpoints", "run_export", "write a checkpoint as one file, or for another program"),
    "completion": Command("__main__", "run_completion", "print what completes commands and options in a shell"),
}
_EXAMPLES = """
distplus init              # train.py: 40 lines of Lightning, two processes
distplus init tinyllama    # a small Llama on two CPU processes, under FSDP
distplus init tinyllama --size 1.1b --strategy ddp    # on 16 GPUs, under DDP
distplus fit --config recipe:tiny_cpu_fsdp --trainer.max_steps 20
distplus fit --config my.yaml --ckpt_path auto
distplus fit --config my.yaml --print_config
distplus validate --config my.yaml --ckpt_path auto
distplus test --config my.yaml --ckpt_path auto
distplus predict --config my.yaml --ckpt_path auto
distplus launch --nproc 8 --max-restarts 10 train.py --lr 1e-3
distplus launch --nproc 8 --window 1d -- fit --config recipe:tiny_cpu_fsdp
distplus launch slurm --nodes 2 --gpus-per-node 8 -- fit --config x.yaml > job
distplus launch slurm --nodes 2 --time 1-00 --submit -- fit --config x.yaml
distplus prepare notes.txt --output data/notes --vocab_size 4096
distplus prepare slimpajama/ --output sp --tokenizer llama2/ --shuffle_seed 1
distplus audit runs/x --json
srun --nodes 2 --ntasks-per-node 8 distplus preflight --json
torchrun --nproc-per-node 8 -m lightning_distplus.cli preflight --deadline 5m
distplus rehearse --config recipe:tinyllama_1.1b_fsdp --world 64
distplus rehearse --config my.yaml --json
distplus doctor
distplus doctor --devices 8 --nodes 2 --json
distplus report runs/x --html report.html
distplus report --dumps nccl_traces/ --json
distplus top runs/x --every 5
distplus verify runs/x/checkpoints
distplus verify --deep runs/x/checkpoints/step=300.ckpt --json
distplus import --from hf TinyLlama-1.1B/ --to tinyllama.ckpt
distplus import --from litgpt out/iter-100000-ckpt.pth --to x.ckpt --dry_run
distplus import --from lightning version_0/checkpoints/last.ckpt --to x.ckpt
distplus export step=10.ckpt whole.ckpt             # one file, with moments
distplus export step=10.ckpt weights.safetensors    # the weights, by name
distplus export --to hf step=10.ckpt tinyllama/     # for transformers
distplus export --to litgpt step=10.ckpt tinyllama/ # for litgpt
eval "$(distplus completion bash)"
distplus completion fish | source
"""
_AUTO = """
--ckpt_path auto: goes on from the newest valid checkpoint of this run. Where
there is none, fit starts anew; where there are only torn or damaged ones it
refuses, and starts anew with --allow_fresh."""


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
        examples = [f"  {line}" for line in _EXAMPLES.splitlines() if re.search(rf"(distplus|cli) {name}\b", line)]
        if not end.code and examples and {"-h", "--help"} & set(arguments):
            print("\nexamples:", *examples, *(_AUTO.splitlines() if name == "fit" else ()), sep="\n")
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
    lines = "\n".join(f"  {name:<12}{command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description="Multi-rank training that survives hangs, dead ranks and torn checkpoints.",
        epilog=f"commands:\n{lines}\n\n'{PROGRAM} COMMAND --help' explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS, metavar="COMMAND")
    name = parser.parse_args(arguments).command
    if name is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"{PROGRAM} --help lists the commands"
        parser.error(f"there is no command {name!r}; {hint}")
    return str(name)


# -- distplus init -----------------------------------------------------------------------------------------------------

_PREPARE_TINY = """python -m lightning_distplus.recipes.corpus data
distplus prepare data/code.jsonl --output data/code --vocab_size 4096 --append_eod
distplus prepare data/prose.jsonl --output data/prose --tokenizer data/code.tokenizer.json --append_eod"""
_PREPARE_1B = """distplus prepare slimpajama/ --output data/slimpajama --tokenizer llama2/ --append_eod
distplus prepare starcoder/ --output data/starcoder --tokenizer llama2/ --append_eod"""
# The base file of the recipe, the commands that make its data, and where it runs.
_SIZES = {
    "cpu": ("tiny_cpu", _PREPARE_TINY, "--nproc 2"),
    "1.1b": ("tinyllama_1.1b", _PREPARE_1B, "--nnodes 2 --nproc 8 --rdzv HOST:29400 --job-id tinyllama"),
}


def run_init(argv: Sequence[str]) -> int:
    """Exit code 0.

    Raises:
        FileExistsError: One of the files is there.
    """
    parser = argparse.ArgumentParser(
        prog="distplus init",
        description="Writes a starting point into the current folder: a script, or the files of a recipe.",
    )
    parser.add_argument("what", nargs="?", choices=("script", "tinyllama"), default="script", help="default: script")
    parser.add_argument("--size", choices=tuple(_SIZES), default="cpu", help="of tinyllama (default: cpu)")
    of_strategy = f"of tinyllama: {', '.join(recipes.strategies())} (default: fsdp)"
    parser.add_argument("--strategy", choices=recipes.strategies(), default="fsdp", metavar="NAME", help=of_strategy)
    parser.add_argument("--overwrite", action="store_true", help="write over files of these names")
    arguments = parser.parse_args(argv)
    if arguments.what == "script":
        sources = [Path(recipes.__file__).with_name("train.py")]
        commands = ["python train.py"]
    else:
        model, prepare, where = _SIZES[arguments.size]
        sources = recipes.files(f"{model}_{arguments.strategy}")
        configs = " ".join(f"--config {source.name}" for source in sources)
        run = [f"distplus rehearse {configs}", f"distplus launch {where} -- fit {configs}"]
        commands = [*prepare.splitlines(), *run]
    there = [source.name for source in sources if Path(source.name).exists()]
    if there and not arguments.overwrite:
        raise FileExistsError(f"{there[0]} exists here. Write over it with --overwrite.")
    for source in sources:
        shutil.copyfile(source, source.name)
        print(f"wrote {source.name}")
    print("next:", *(f"  {command}" for command in commands), sep="\n")
    return 0


# -- distplus completion -----------------------------------------------------------------------------------------------

_OPTION = re.compile(r"(?<![\w.-])--[a-zA-Z][\w.-]*")

_BASH = """\
_distplus() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} options
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W "{commands}" -- "$current"))
  elif [[ $current == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$current"))
  else COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _distplus distplus
"""


def run_completion(argv: Sequence[str]) -> int:
    """Prints the script; takes some seconds, because it asks every command for its options."""
    parser = argparse.ArgumentParser(prog="distplus completion", description="Prints completions for a shell.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell: str = parser.parse_args(argv).shell
    options = _options()
    if shell == "fish":
        print(_fish(options))
        return 0
    cases = "\n".join(f"    {name}) options='{' '.join(found)}' ;;" for name, found in options.items())
    script = _BASH.format(cases=cases, commands=" ".join(options))
    print(script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}")
    return 0


def _fish(options: Mapping[str, Sequence[str]]) -> str:
    lines = ["complete -c distplus -n __fish_use_subcommand -f -a '" + " ".join(options) + "'"]
    for name, found in options.items():
        of_command = f"complete -c distplus -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{of_command} -l '{option.removeprefix('--')}'" for option in found]
    return "\n".join(lines)


def _options() -> dict[str, list[str]]:
    """The long options of every command, as its help tells them."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        text = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(text), suppress(SystemExit):
            warnings.simplefilter("ignore")  # of LightningCLI: these are no arguments of this process
            main([name, "--help"])
        found[name] = sorted(set(_OPTION.findall(text.getvalue())))
    return found


if __name__ == "__main__":
    sys.exit(main())
