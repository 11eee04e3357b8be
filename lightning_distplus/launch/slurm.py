"""A batch script for Slurm in which every line is explained: one task per rank, requeued after a committed save."""

from __future__ import annotations

import itertools
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_distplus.errors import ExitCode

__all__ = ["SlurmJob"]


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the script asks Slurm for."""

    command: Sequence[str]
    """A command of ``distplus``."""
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    time: str = "1-00:00:00"
    """Slurm's own notation: minutes, ``H:MM:SS`` or ``D-HH``."""
    grace_s: int = 300
    """How long before the limit the ranks are told."""
    name: str = "distplus"
    max_requeues: int = 100
    same_step: int = 3
    """So many starts may end at one step, other than by being asked to."""
    srun: Sequence[str] = ()
    """Further arguments for srun: a container, a binding of cores."""
    sbatch: Sequence[str] = ()
    """Further arguments for sbatch: a partition, an account, an array."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node, self.grace_s) < 1 or min(self.gpus_per_node, self.max_requeues) < 0:
            raise ValueError(
                f"nodes is {self.nodes}, ranks_per_node is {self.ranks_per_node}, grace_s is {self.grace_s}: each is "
                f"at least 1. gpus_per_node is {self.gpus_per_node}, max_requeues is {self.max_requeues}: none is "
                "negative."
            )

    def script(self) -> str:
        """The batch script."""
        preempted, hang, lost = int(ExitCode.PREEMPTED), int(ExitCode.HANG), int(ExitCode.PEER_LOST)
        lines = [
            "#!/bin/bash",
            *_directive(f"--job-name={self.name}", "how squeue shows it"),
            *_directive(f"--nodes={self.nodes}", "Trainer(num_nodes=...) is the same number"),
            *_directive(
                f"--ntasks-per-node={self.ranks_per_node}", "one task is one rank; Trainer(devices=...) is the same"
            ),
            *self._gpus(),
            *_directive(f"--time={self.time}", "Slurm ends the job then"),
            *_directive(
                f"--signal=USR1@{self.grace_s}",
                f"{self.grace_s} s earlier every rank gets SIGUSR1; PreemptionHandler saves and ends with {preempted}",
            ),
            *_directive("--requeue", "Slurm may start this script again, and a node that fails makes it do so"),
            *_directive("--open-mode=append", "the restarted job writes behind what is there"),
            *_directive("--output=%x-%j.log", "one log for all starts: the number of the job stays"),
            *itertools.chain.from_iterable(_directive(argument, "asked for by --sbatch") for argument in self.sbatch),
            "",
            "# One port per job: two jobs on one host do not meet.",
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            "",
            "# Launchers on several hosts sign with this; srun hands it on in the environment, nobody else sees it.",
            "export DISTPLUS_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "",
            "# Here a rank writes where the ledger is, which tells at the end how far the job came and what ended it.",
            'export DISTPLUS_HOME_FILE="$PWD/.distplus-job-$SLURM_JOB_ID"',
            "# All starts of this job are one run in the ledger, also where other jobs write to the same folder.",
            'export DISTPLUS_RUN_ID="slurm-$SLURM_JOB_ID"',
            "",
            "# srun starts one process per task on all nodes; without it there would be one process in all.",
            "# --kill-on-bad-exit=0: the ranks name a lost peer and end by themselves; Slurm does not kill them first.",
            shlex.join(["srun", "--kill-on-bad-exit=0", *self.srun, "distplus", *self.command]),
            "",
            "# This script runs once, on the first node, and goes on when all ranks have ended: exactly one requeue.",
            f"# {preempted}: saved and stopped when asked. {hang}, {lost}: a rank hung or was lost. They continue from",
            "# the newest valid checkpoint, unless the step does not move. Any other code needs a person.",
            f'distplus launch slurm --ended "$?" --max-requeues {self.max_requeues} --same-step {self.same_step}',
        ]
        return "\n".join(lines) + "\n"

    def submit(self) -> str:
        """Hands the script to ``sbatch``; the job begins in the folder of the caller and gets its environment.

        Returns:
            The number of the job; with a cluster's name, ``number;cluster``, where there are several.

        Raises:
            OSError: ``sbatch`` is not here, or refuses the script; the message is what it said.
        """
        try:
            asked = subprocess.run(
                ["sbatch", "--parsable"], input=self.script(), capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise OSError(
                "sbatch is not found on this host. Run this where jobs are submitted, or leave out --submit, which "
                "prints the script."
            ) from None
        if asked.returncode:
            raise OSError(f"sbatch refuses the job: {asked.stderr.strip()}")
        return asked.stdout.strip()

    def _gpus(self) -> list[str]:
        if not self.gpus_per_node:
            return []
        return _directive(f"--gpus-per-node={self.gpus_per_node}", "one for each rank")


def _directive(text: str, why: str) -> list[str]:
    """Slurm reads a directive up to the end of the line, so that its comment stands above it."""
    return [f"# {why}", f"#SBATCH {text}"]
