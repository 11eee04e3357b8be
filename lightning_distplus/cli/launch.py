"""``distplus launch``: starts the ranks, starts them again from the newest valid checkpoint, tells who ended them."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning_distplus import env
from lightning_distplus.cli import duration
from lightning_distplus.launch.warm import Warm
from lightning_distplus.process import Signals

__all__ = ["main"]

_DISTPLUS = ["-m", "lightning_distplus.cli"]
_COMMANDS = ("fit", "validate", "test", "predict")
_CKPT_PATH_IN_FILE = re.compile(r"^ckpt_path:\s*(?!null\b|~)\S", re.MULTILINE)
_TORCHS_PORT = 29400  # where torchrun's agents meet when nobody names a port
_EPILOG = """Behind the options stands a script with its arguments, or -m and a module, as
for torchrun; or `--` and a command of distplus. A script that is restarted
goes on from the newest valid checkpoint of this job where its trainer.fit
names none.

exit codes: 0 done, 143 stopped when asked, 174 no progress over restarts (do
not requeue); else that of the rank that ended the last attempt, a signal as
128 and its number.
"""
# Of torchrun's command line, what has no meaning here: all output is in files and shown, and ranks are numbered by who
# meets.
_WITHOUT_EFFECT = (
    "--node-rank", "--monitor-interval", "--start-method", "--role", "--rdzv-conf", "--local-addr", "--redirects",
    "--tee", "--event-log-handler", "--logs-specs", "--local-ranks-filter",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Runs the job; ``argv`` is what follows ``launch``."""
    if argv[:1] == ["slurm"]:
        return _run_slurm(argv[1:])
    arguments, command = parse(argv)
    if env.OMP_NUM_THREADS.get() is None and arguments.nproc > 1:
        env.OMP_NUM_THREADS.set(1)  # as torchrun does: the ranks of a host share its cores

    if min(arguments.nnodes) < max(arguments.nnodes):
        env.DISTPLUS_ELASTIC.set(1)
    env.DISTPLUS_RESUME.set(int(arguments.resume and not arguments.is_own))
    # Before this process imports torch, which takes seconds: the other one imports beside it.
    with Signals() as signals, nullcontext() if arguments.start == "cold" else Warm(arguments.preload) as warm:
        return _supervise(arguments, *following(arguments, command), warm, signals)


def _supervise(
    arguments: Any, command: Sequence[str], command_after_save: Sequence[str], warm: Warm | None, signals: Signals
) -> int:
    from lightning_distplus.launch.agent import Hosts
    from lightning_distplus.launch.supervisor import RestartPolicy, Supervisor

    min_nodes, max_nodes = arguments.nnodes
    join_s, same_step = max(1, round(arguments.join.total_seconds())), arguments.same_step
    return Supervisor(
        signals=signals,
        command=command,
        command_after_save=command_after_save,
        warm=warm,
        hosts=Hosts(
            min_nodes=min_nodes, max_nodes=max_nodes, nproc=arguments.nproc, rdzv=arguments.rdzv, join_s=join_s
        ),
        policy=RestartPolicy(max_restarts=arguments.max_restarts, window=arguments.window, same_step=same_step),
        log_dir=arguments.log_dir.absolute(),
        job_id=arguments.job_id,
        quarantine=arguments.quarantine,
        resumes=arguments.resume,
    ).run()


def parse(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """The options, and what follows the interpreter; ends the process with 2 where they are wrong.

    Of a command of distplus, ``arguments.is_own`` is set, and only its own words are returned.
    """
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    is_behind_dashes = arguments.command[:1] == ["--"]
    command = [*(["-m"] if arguments.module else []), *arguments.command[is_behind_dashes:]]
    if len(command) <= arguments.module:
        parser.error("there is nothing to start: distplus launch --nproc 2 train.py, or ... -- fit --config x.yaml")
    arguments.is_own = is_behind_dashes and command[0] in _COMMANDS
    if not arguments.is_own and command[0] != "-m" and not Path(command[0]).is_file():
        hint = f"; a command of distplus stands behind `--`: ... -- {command[0]}" if command[0] in _COMMANDS else ""
        parser.error(f"there is no script {command[0]!r} in {Path.cwd()}{hint}")
    _read_meeting_point(parser, arguments)
    if arguments.quarantine and arguments.nnodes[1] > 1:
        parser.error("--quarantine works on one host: the samples in hand are known to the launcher of their rank")
    if min(arguments.nproc, arguments.max_restarts + 1, arguments.same_step) < 1:
        parser.error("--nproc and --same-step are at least 1, --max-restarts is at least 0")
    if ignored := [name for name in _WITHOUT_EFFECT if getattr(arguments, name[2:].replace("-", "_")) is not None]:
        print(f"distplus launch: {', '.join(ignored)}: options of torchrun without effect here", file=sys.stderr)
    return arguments, command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus launch",
        usage="distplus launch [options] SCRIPT ... | -m MODULE ... | -- COMMAND ...",
        description="Start the ranks of this host under torchrun's agent, and restart them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", "--nproc-per-node", type=_processes, default=1, help="ranks on this host; or gpu, cpu, auto")
    add("--nnodes", type=_nodes, default=(1, 1), metavar="N|MIN:MAX", help="hosts; run this command on each of them")
    add("--rdzv", "--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="where hosts meet; one has this name")
    add("--join", type=duration, default="30s", help="how long to wait for more hosts than MIN (default: 30s)")
    add("--job-id", "--rdzv-id", default="", metavar="ID", help="the same on all hosts, another one for each job")
    add("--max-restarts", type=int, default=3, help="restarts within the window (default: 3)")
    add("--window", type=duration, help="time in which restarts count, such as 1d (default: the whole job)")
    add("--same-step", type=int, default=3, help="give up after so many attempts at one step (default: 3)")
    add("--no-resume", dest="resume", action="store_false", help="leave the checkpoint of each start to the script")
    add("--quarantine", action="store_true", help="set the samples of a batch apart that ends --same-step attempts")
    add(
        "--start", choices=("warm", "cold"), default="warm",
        help="warm: fork the ranks from a process that has imported torch and Lightning; cold: an interpreter for each",
    )  # fmt: skip
    add("--preload", action="append", default=[], metavar="MODULE", help="import it too before the fork; repeatable")
    add("--log-dir", type=Path, default=Path("distplus-logs"), help="one file per rank and attempt")
    add("--module", "-m", action="store_true", help="start a module: its name follows the options")
    add("--standalone", action="store_true", help="one host, as torchrun says it")
    add("--rdzv-backend", choices=("c10d", "static"), help=argparse.SUPPRESS)
    add("--master-addr", default="", help=argparse.SUPPRESS)
    add("--master-port", default="", help=argparse.SUPPRESS)
    for name in _WITHOUT_EFFECT:
        add(name, *{"--redirects": ["-r"], "--tee": ["-t"]}.get(name, []), help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    spellings = parser._option_string_actions  # with underscores, as torchrun's are; the help has the others
    spellings |= {f"--{name[2:].replace('-', '_')}": action for name, action in spellings.items() if name[1] == "-"}
    return parser


def _read_meeting_point(parser: argparse.ArgumentParser, arguments: Any) -> None:
    """Brings the ways in which torchrun is told where hosts meet into one, ``host:port``."""
    if arguments.standalone:
        arguments.nnodes = (1, 1)
    if arguments.nnodes[1] == 1:
        return
    if not arguments.rdzv and arguments.master_addr:
        arguments.rdzv = f"{arguments.master_addr}:{arguments.master_port or _TORCHS_PORT}"
    if not arguments.rdzv:
        parser.error("several hosts meet somewhere: give --rdzv HOST:PORT, the same on all of them")
    if ":" not in arguments.rdzv:
        arguments.rdzv = f"{arguments.rdzv}:{_TORCHS_PORT}"
    if not arguments.rdzv.rpartition(":")[2].isdecimal():
        parser.error(f"--rdzv {arguments.rdzv}: behind the colon stands a port, such as {_TORCHS_PORT}")


def following(arguments: Any, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows the interpreter: at first, and once this job has committed a checkpoint.

    A script chooses its checkpoint itself, in the rank: there its ``fit`` names one, or does not.
    """
    if not arguments.is_own:
        return list(command), list(command)
    first, after_save = resuming(command) if arguments.resume else (command, command)
    return [*_DISTPLUS, *first], [*_DISTPLUS, *after_save]


def resuming(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command of distplus, at first and once its job has committed a checkpoint: ``fit`` continues from that.

    Before, a checkpoint that the user names is where the job begins.
    """
    first, rest = list(command), list[str]()
    if command[0] != "fit":
        return first, first
    words = iter(command)
    for word in words:
        if word == "--ckpt_path":
            next(words, None)
        elif not word.startswith("--ckpt_path="):
            rest.append(word)
    after_save = [*rest, "--ckpt_path", "auto"]
    if len(rest) < len(first) or _is_named_in_file(command):
        return first, after_save
    print("distplus launch: adds --ckpt_path auto", file=sys.stderr)
    return after_save, after_save


def _is_named_in_file(command: Sequence[str]) -> bool:
    files = [value for word, value in itertools.pairwise(command) if word in ("--config", "-c")]
    files += [word.partition("=")[2] for word in command if word.startswith("--config=")]
    return any(Path(file).is_file() and _CKPT_PATH_IN_FILE.search(Path(file).read_text()) for file in files)


def _processes(text: str) -> int:
    if text.isdecimal():
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number, and none of gpu, cpu and auto")
    import torch  # only this way to count GPUs needs it

    num_gpus = 0 if text == "cpu" else torch.cuda.device_count()
    return num_gpus if text == "gpu" or num_gpus else os.cpu_count() or 1


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of hosts nor MIN:MAX, such as 2 or 1:4")
    return int(low), int(high)


# -- distplus launch slurm ---------------------------------------------------------------------------------------------


def _run_slurm(argv: Sequence[str]) -> int:
    """Prints or submits the script, or ends one of its starts; ``argv`` is what follows ``slurm``."""
    from lightning_distplus.launch.slurm import SlurmJob, end_of_start
    from lightning_distplus.launch.supervisor import RestartPolicy

    parser = argparse.ArgumentParser(
        prog="distplus launch slurm",
        usage="distplus launch slurm [--submit] [options] -- fit ...",
        description="Print a batch script that starts one task per rank and is requeued after a committed save; or "
        "submit it.",
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="hosts (default: 1)")
    add("--ranks-per-node", type=int, help="tasks on each host (default: its GPUs, else 1)")
    add("--gpus-per-node", type=int, default=0, help="GPUs of each host (default: 0)")
    add("--time", default="1-00:00:00", help="limit of one start, as Slurm writes it (default: 1-00:00:00)")
    grace = "how long before it the ranks are told (default: 300)"
    add("--grace", dest="grace_s", type=int, default=300, metavar="SECONDS", help=grace)
    add("--name", default="distplus", help="name of the job")
    add("--max-requeues", type=int, default=100, help="so often at most (default: 100)")
    add("--same-step", type=int, default=3, help="give up after so many starts that end at one step (default: 3)")
    add("--ended", type=int, metavar="CODE", help="used by the script itself, when srun has returned this code")
    add("--srun", action="append", default=[], metavar="ARGUMENT", help="further argument of srun; may be repeated")
    add("--sbatch", action="append", default=[], metavar="ARGUMENT", help="further argument of sbatch; may be repeated")
    add("--submit", action="store_true", help="hand the script to sbatch instead of printing it")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(list(argv))
    if arguments.ended is not None:
        policy = RestartPolicy(max_restarts=arguments.max_requeues, same_step=arguments.same_step)
        return end_of_start(arguments.ended, policy)
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        parser.error("there is no command; write it behind `--`: ... -- fit --config x.yaml")
    given = {name: value for name, value in vars(arguments).items() if name not in ("ended", "submit", "command")}
    given["ranks_per_node"] = given["ranks_per_node"] or given["gpus_per_node"] or 1
    try:
        job = SlurmJob(command=resuming(command)[0], **given)
    except ValueError as error:
        parser.error(str(error))
    if not arguments.submit:
        sys.stdout.write(job.script())
        return 0
    number = job.submit()
    print(f"distplus launch slurm: submitted job {number}; its log is {arguments.name}-{number}.log")
    return 0
