"""``distplus launch``: starts the ranks, starts them again from the newest valid checkpoint, tells who ended them."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_distplus import env
from lightning_distplus.errors import ExitCode
from lightning_distplus.launch.signals import Signals
from lightning_distplus.timeouts import parse_duration

__all__ = ["main"]

_AUTO = ["--ckpt_path", "auto"]
_CKPT_PATH_IN_FILE = re.compile(r"^ckpt_path:\s*(?!null\b|~)\S", re.MULTILINE)
_EPILOG = """What follows `--` is a command of distplus:
  distplus launch --nproc 8 --max-restarts 10 --window 1d -- fit --config recipe:tiny_cpu_fsdp

exit codes: 0 done, 143 stopped when asked, 174 no progress over restarts (do not requeue); else that of the rank
that ended the last attempt, a signal as 128 and its number.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the job; ``argv`` is what follows ``launch``."""
    if argv[:1] == ["slurm"]:
        return _run_slurm(argv[1:])
    arguments, command = parse(argv)
    if env.OMP_NUM_THREADS.get() is None and arguments.nproc > 1:
        env.OMP_NUM_THREADS.set(1)  # as torchrun does: the ranks of a host share its cores

    if min(arguments.nnodes) < max(arguments.nnodes):
        env.DISTPLUS_ELASTIC.set(1)
    with Signals() as signals:  # before torch is imported, which takes seconds
        if arguments.start == "cold":
            return _supervise(arguments, resuming(command), signals)

        from lightning_distplus.launch.warm import Warm

        with Warm(arguments.preload) as warm:  # it imports while this process does
            following = resuming(command)
            return _supervise(arguments, lambda has_saved: warm.command(following(has_saved)), signals)


def _supervise(arguments: Any, command: Callable[[bool], list[str]], signals: Signals) -> int:
    from lightning_distplus.launch.agent import Hosts
    from lightning_distplus.launch.supervisor import Job, RestartPolicy, supervise

    min_nodes, max_nodes = arguments.nnodes
    return supervise(
        Job(
            command=command,
            hosts=Hosts(
                min_nodes=min_nodes,
                max_nodes=max_nodes,
                nproc=arguments.nproc,
                rdzv=arguments.rdzv,
                join_s=max(1, round(arguments.join.total_seconds())),
            ),
            policy=RestartPolicy(
                max_restarts=arguments.max_restarts, window=arguments.window, same_step=arguments.same_step
            ),
            log_dir=arguments.log_dir.absolute(),
            run_id=arguments.job_id,
            quarantine=arguments.quarantine,
        ),
        signals,
    )


def parse(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """The options, and the command behind ``--``; ends the process with 2 where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="distplus launch",
        usage="distplus launch [options] -- fit|validate|test|predict ...",
        description="Start the ranks of this host under torchrun's agent, and restart them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=int, default=1, help="ranks on this host")
    add("--nnodes", type=_nodes, default=(1, 1), metavar="N|MIN:MAX", help="hosts; run this command on each of them")
    add("--rdzv", default="", metavar="HOST:PORT", help="where the hosts meet; one of them has this name")
    add("--join", type=_duration, default="30s", help="how long to wait for more hosts than MIN (default: 30s)")
    add("--job-id", default="", help="the same on all hosts, another one for each job (needed with several hosts)")
    add("--max-restarts", type=int, default=3, help="restarts within the window (default: 3)")
    add("--window", type=_duration, help="time in which restarts count, such as 1d (default: the whole job)")
    add("--same-step", type=int, default=3, help="give up after so many attempts at one step (default: 3)")
    add("--quarantine", action="store_true", help="set the samples of a batch apart that ends --same-step attempts")
    add(
        "--start", choices=("warm", "cold"), default="warm",
        help="warm: fork the ranks from a process that has imported torch and Lightning; cold: an interpreter for each",
    )  # fmt: skip
    add("--preload", action="append", default=[], metavar="MODULE", help="import it too before the fork; repeatable")
    add("--log-dir", type=Path, default=Path("distplus-logs"), help="one file per rank and attempt")
    split = list(argv).index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(list(argv[:split]))
    command = list(argv[split + 1 :])
    if not command:
        parser.error("there is no command; write it behind `--`: distplus launch --nproc 2 -- fit --config x.yaml")
    if arguments.nnodes[1] > 1 and not (arguments.rdzv and arguments.job_id):
        parser.error("several hosts meet somewhere: give --rdzv HOST:PORT and --job-id, the same on all of them")
    if arguments.quarantine and arguments.nnodes[1] > 1:
        parser.error("--quarantine works on one host: the samples in hand are known to the launcher of their rank")
    if min(arguments.nproc, arguments.max_restarts + 1, arguments.same_step) < 1:
        parser.error("--nproc and --same-step are at least 1, --max-restarts is at least 0")
    return arguments, command


def resuming(command: Sequence[str]) -> Callable[[bool], list[str]]:
    """The command of each attempt: ``fit`` continues from what this job has committed.

    A checkpoint that the user names is where the job begins; once it has committed one of its own, that one counts.
    """
    module = ["-m", "lightning_distplus.cli"]
    if command[0] != "fit":
        return lambda has_saved: [*module, *command]
    rest, named = _without_ckpt_path(command)
    if not named and not _is_named_in_file(command):
        print("distplus launch: adds --ckpt_path auto", file=sys.stderr)
        return lambda has_saved: [*module, *rest, *_AUTO]
    return lambda has_saved: [*module, *rest, *_AUTO] if has_saved else [*module, *command]


def _without_ckpt_path(command: Sequence[str]) -> tuple[list[str], bool]:
    rest: list[str] = []
    words = iter(command)
    for word in words:
        if word == "--ckpt_path":
            next(words, None)
        elif not word.startswith("--ckpt_path="):
            rest.append(word)
    return rest, len(rest) < len(command)


def _is_named_in_file(command: Sequence[str]) -> bool:
    files = [value for word, value in itertools.pairwise(command) if word in ("--config", "-c")]
    files += [word.partition("=")[2] for word in command if word.startswith("--config=")]
    return any(Path(file).is_file() and _CKPT_PATH_IN_FILE.search(Path(file).read_text()) for file in files)


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    nodes = (int(low), int(high or low))
    if not 1 <= nodes[0] <= nodes[1]:
        raise ValueError
    return nodes


def _duration(text: str) -> timedelta:
    return parse_duration(text)


# -- distplus launch slurm ---------------------------------------------------------------------------------------------


def _run_slurm(argv: Sequence[str]) -> int:
    """Prints or submits the script, or ends one of its starts; ``argv`` is what follows ``slurm``."""
    from lightning_distplus.launch.slurm import SlurmJob, end_of_start
    from lightning_distplus.launch.supervisor import RestartPolicy

    parser = argparse.ArgumentParser(
        prog="distplus launch slurm",
        usage="distplus launch slurm [--submit] [options] -- fit ...",
        description="Print a batch script that starts one task per rank and is requeued after a committed save; "
        "or submit it.",
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="hosts (default: 1)")
    add("--ranks-per-node", type=int, help="tasks on each host (default: its GPUs, else 1)")
    add("--gpus-per-node", type=int, default=0, help="GPUs of each host (default: 0)")
    add("--time", default="1-00:00:00", help="limit of one start, as Slurm writes it (default: 1-00:00:00)")
    add(
        "--grace", type=int, default=300, metavar="SECONDS", help="how long before it the ranks are told (default: 300)"
    )
    add("--name", default="distplus", help="name of the job")
    add("--max-requeues", type=int, default=100, help="so often at most (default: 100)")
    add("--same-step", type=int, default=3, help="give up after so many starts that end at one step (default: 3)")
    add("--ended", type=int, metavar="CODE", help="used by the script itself, when srun has returned this code")
    add("--srun", action="append", default=[], metavar="ARGUMENT", help="further argument of srun; may be repeated")
    add("--sbatch", action="append", default=[], metavar="ARGUMENT", help="further argument of sbatch; may be repeated")
    add("--submit", action="store_true", help="hand the script to sbatch instead of printing it")
    split = list(argv).index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(list(argv[:split]))
    if arguments.ended is not None:
        policy = RestartPolicy(max_restarts=arguments.max_requeues, same_step=arguments.same_step)
        return end_of_start(arguments.ended, policy)
    command = list(argv[split + 1 :])
    if not command:
        parser.error("there is no command; write it behind `--`: ... -- fit --config x.yaml")
    job = SlurmJob(
        command=resuming(command)(False)[2:],
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node or arguments.gpus_per_node or 1,
        gpus_per_node=arguments.gpus_per_node,
        time=arguments.time,
        grace_s=arguments.grace,
        name=arguments.name,
        max_requeues=arguments.max_requeues,
        same_step=arguments.same_step,
        srun=arguments.srun,
        sbatch=arguments.sbatch,
    )
    if not arguments.submit:
        sys.stdout.write(job.script())
        return 0
    try:
        number = job.submit()
    except OSError as error:
        print(f"distplus launch slurm: {error}", file=sys.stderr)
        return int(ExitCode.FAILED)
    print(f"distplus launch slurm: submitted job {number}; its log is {arguments.name}-{number}.log")
    return 0
