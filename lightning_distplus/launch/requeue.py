"""The end of one start of a Slurm job: whose exit code counts, and whether Slurm is asked to start it again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightning_distplus import env
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import EventLog, read_events
from lightning_distplus.launch.history import History, read_history
from lightning_distplus.launch.policy import Attempt, Culprit, RestartPolicy
from lightning_distplus.launcher_link import told_home
from lightning_distplus.world import LAUNCHER

__all__ = ["end_of_start"]

_TOLD_EARLY = 128 + signal.SIGUSR1  # the signal before the limit came before a rank could take it
_RETRIED = (ExitCode.PREEMPTED, ExitCode.HANG, ExitCode.PEER_LOST)
_SLURM_ENDS_THIS_S = 60  # a requeue kills the batch script, and with it this process


def end_of_start(
    code: int, policy: RestartPolicy, *, home: Path | None = None, wait: Callable[[float], None] = time.sleep
) -> int:
    """Called by the batch script, once, when all ranks have ended.

    Args:
        code: What srun has returned, which is the highest code of all ranks and not the culprit's.
        policy: How often the job may be requeued, and how often at one step.
        home: Where the artefacts are; by default where the ranks have said.
        wait: Sleeps until Slurm has ended this start.

    Returns:
        The exit code of the job.
    """
    home = home or told_home(env.DISTPLUS_HOME_FILE.get())
    number = env.SLURM_RESTART_COUNT.integer() or 0
    starts = _starts(home, number)
    code = int(ExitCode.PREEMPTED) if code == _TOLD_EARLY else _code_of_culprit(code, starts[-1])
    if code not in _RETRIED:
        return _end(home, number, code, "")
    if refusal := _refusal(code, starts, policy):
        return _end(home, number, *refusal)
    # A task of an array is requeued by its own name: the job id alone would name the whole array.
    array, task = env.SLURM_ARRAY_JOB_ID.get(), env.SLURM_ARRAY_TASK_ID.get()
    job = f"{array}_{task}" if array and task else env.SLURM_JOB_ID.get() or ""
    if problem := _requeue(job):
        return _end(home, number, code, f"job {job} is not requeued ({problem}); submit it again, it continues")
    _note(home, number, "requeue", job=job, exit_code=code, global_step=starts[-1].step)
    wait(_SLURM_ENDS_THIS_S)
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
    if code == ExitCode.DONE:
        return code
    if history.is_hang:
        return int(ExitCode.HANG)
    own = [failed for _, failed in sorted(history.codes.items()) if failed != ExitCode.PEER_LOST]
    return own[0] if own else code


def _refusal(code: int, starts: list[History], policy: RestartPolicy) -> tuple[int, str] | None:
    """A start that was stopped when asked says nothing about progress, and counts only towards the limit."""
    if len(starts) > policy.max_restarts:
        return code, f"it was requeued {policy.max_restarts} times, which is the limit"
    if code == ExitCode.PREEMPTED:
        return None
    refusal = None
    for number, history in enumerate(starts):
        if not history.is_preempted:
            culprit = Culprit(rank=min(history.culprits, default=0), code=int(ExitCode.PEER_LOST))
            attempt = Attempt(number=number, culprit=culprit, ended_at=0.0, has_started=True, step=history.step)
            refusal = policy.refusal(attempt)
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
