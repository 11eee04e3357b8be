"""``distplus launch slurm``: prints a batch script, every line explained, or submits it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_distplus.cli.launch import resuming
from lightning_distplus.errors import ExitCode
from lightning_distplus.launch.policy import RestartPolicy
from lightning_distplus.launch.requeue import end_of_start
from lightning_distplus.launch.slurm import SlurmJob

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Prints or submits the script; ``argv`` is what follows ``slurm``."""
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
