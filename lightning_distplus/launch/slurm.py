"""Slurm: a batch script in which every line is explained, and whether each of its starts ends with a requeue."""

from __future__ import annotations

import itertools
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_distplus import env
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import EventLog, read_events, told_by_rank
from lightning_distplus.launch.supervisor import (
    Culprit,
    History,
    RestartPolicy,
    find_culprit,
    is_innocent,
    read_history,
)
from lightning_distplus.report import leave_page
from lightning_distplus.world import LAUNCHER

# -- the batch script --------------------------------------------------------------------------------------------------


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
        at_least_1 = dict.fromkeys(("nodes", "ranks_per_node", "grace_s", "same_step"), 1)
        for name, least in {**at_least_1, "gpus_per_node": 0, "max_requeues": 0}.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}; it is at least {least}.")

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
            *(_directive(f"--gpus-per-node={self.gpus_per_node}", "one for each rank") if self.gpus_per_node else ()),
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


def _directive(text: str, why: str) -> list[str]:
    """Slurm reads a directive up to the end of the line, so that its comment stands above it."""
    return [f"# {why}", f"#SBATCH {text}"]


# -- the end of one start ----------------------------------------------------------------------------------------------

_TOLD_EARLY = 128 + signal.SIGUSR1  # the signal before the limit came before a rank could take it
_SLURM_ENDS_THIS_S = 60  # a requeue kills the batch script, and with it this process


def end_of_start(code: int, policy: RestartPolicy) -> int:
    """Called by the batch script, once, when all ranks have ended; returns the exit code of the job.

    Args:
        code: What srun has returned, which is the highest code of all ranks and not the culprit's.
        policy: How often the job may be requeued, and how often at one step.
    """
    home, _ = told_by_rank(env.DISTPLUS_HOME_FILE.get())
    number = env.SLURM_RESTART_COUNT.integer() or 0
    starts = _starts(home, number)
    code = int(ExitCode.PREEMPTED) if code == _TOLD_EARLY else _code_of_culprit(code, starts[-1])
    if code not in [one for one in ExitCode if one.is_retryable]:
        return _end(home, number, code, "")
    if refusal := _refusal(code, starts, policy):
        return _end(home, number, *refusal)
    # A task of an array is requeued by its own name: the job id alone would name the whole array.
    array, task = env.SLURM_ARRAY_JOB_ID.get(), env.SLURM_ARRAY_TASK_ID.get()
    job = f"{array}_{task}" if array and task else env.SLURM_JOB_ID.get() or ""
    if problem := _requeue(job):
        return _end(home, number, code, f"job {job} is not requeued ({problem}); submit it again, it continues")
    _note(home, number, "requeue", job=job, exit_code=code, global_step=starts[-1].step)
    time.sleep(_SLURM_ENDS_THIS_S)
    return code


def _starts(home: Path | None, last: int) -> list[History]:
    """What each start of this job has left; a start that numbers 0 begins a job."""
    if home is None:
        return [History()] * (last + 1)
    run_id = env.DISTPLUS_RUN_ID.get()
    of_run = read_events(home, run_id=run_id)
    began = [one["time"] for one in of_run if one["kind"] == "start" and one["attempt"] == 0]
    return [read_history(home, number, max(began, default=0.0), run_id) for number in range(last + 1)]


def _code_of_culprit(code: int, history: History) -> int:
    """That of a rank which was not ended by another, as the ledger tells it; of srun's where none has told it."""
    told = 0 if code == ExitCode.DONE else find_culprit(history.codes or {0: code}, history).code
    return told if told and not is_innocent(told) else code


def _refusal(code: int, starts: list[History], policy: RestartPolicy) -> tuple[int, str] | None:
    """A start that was stopped when asked says nothing about progress, and counts only towards the limit."""
    if len(starts) > policy.max_restarts:
        return code, f"it was requeued {policy.max_restarts} times, which is the limit"
    if code == ExitCode.PREEMPTED:
        return None
    refusal = None
    for history in starts:
        if not history.is_preempted:
            culprit = Culprit(rank=min(history.culprits, default=0), code=int(ExitCode.PEER_LOST))
            refusal = policy.refusal(culprit, replace(history, has_started=True), 0.0)
    return refusal


def _requeue(job: str) -> str:
    """Returns what went wrong, or nothing."""
    try:
        asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return "scontrol is not installed here, perhaps because this is a container"
    except subprocess.TimeoutExpired:
        return "scontrol did not answer within 60 s"
    return "" if asked.returncode == 0 else asked.stderr.strip()


def _end(home: Path | None, number: int, code: int, why: str) -> int:
    if why:
        sys.stderr.write(f"distplus launch slurm: ends with exit code {code}: {why}\n")
    _note(home, number, "launch_end", exit_code=code, reason=why)
    return code


def _note(home: Path | None, number: int, kind: str, **fields: object) -> None:
    if home is not None:
        with EventLog(home, LAUNCHER, attempt=number, run_id=env.DISTPLUS_RUN_ID.get() or "") as events:
            events.write(kind, **fields)
        leave_page(home)
