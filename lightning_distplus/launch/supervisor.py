"""The attempts of a job, one after the other: what was started, what ended it, and why it goes on or stops."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_distplus import env
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import EventLog
from lightning_distplus.launch.agent import Hosts, run_attempt
from lightning_distplus.launch.history import History, read_history
from lightning_distplus.launch.meeting import HostsApart, Meeting
from lightning_distplus.launch.poison import Poison, shown
from lightning_distplus.launch.policy import Attempt, Culprit, RestartPolicy, find_culprit, is_innocent
from lightning_distplus.launch.signals import HANDLED, Signals, Stop
from lightning_distplus.launcher_link import told_home
from lightning_distplus.watchdog import Verdict, name_incident
from lightning_distplus.world import LAUNCHER

__all__ = ["Job", "supervise"]

log = logging.getLogger(__name__)

_STOPPED = {ExitCode.PREEMPTED, ExitCode.PEER_LOST, *(-signum for signum in HANDLED)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ``distplus launch`` starts."""

    command: Callable[[bool], Sequence[str]]
    """What follows the interpreter; told whether this job has committed a checkpoint already."""
    hosts: Hosts
    policy: RestartPolicy
    log_dir: Path
    run_id: str = ""
    quarantine: bool = False
    """Whether the samples of a batch that ends every attempt are set apart."""


def supervise(job: Job, signals: Signals) -> int:
    """Runs attempts until one succeeds or the policy refuses another; returns the exit code of the job."""
    return _Supervisor(job, signals).run()


class _Clock:
    """Remembers when it was made, by a clock that nobody sets."""

    def __init__(self) -> None:
        self._began_at, self._began = time.time(), time.monotonic()

    def began_at(self) -> float:
        """The Unix time then, by the wall clock of then or of now: the earlier one, where it was set back since."""
        return min(self._began_at, time.time() - (time.monotonic() - self._began))


class _Supervisor:
    def __init__(self, job: Job, signals: Signals) -> None:
        self._job = job
        self._signals = signals
        self._run_id = job.run_id or uuid.uuid4().hex[:8]
        self._home_file = job.log_dir / f"home-{self._run_id}"
        self._meeting: Meeting | None = None
        self._has_saved = False
        self._poison = Poison(job.hosts.nproc, same_step=job.policy.same_step, sets_apart=job.quarantine)

    def run(self) -> int:
        self._job.log_dir.mkdir(parents=True, exist_ok=True)
        env.DISTPLUS_HOME_FILE.set(str(self._home_file))
        env.DISTPLUS_RUN_ID.set(self._run_id)
        self._ask_for_secret()
        hosts, number = self._job.hosts, 0
        try:
            if hosts.max_nodes > 1:
                with self._signals.interrupting():
                    self._meeting = Meeting(hosts.rdzv, self._run_id)
                    number = self._meeting.join(
                        lambda number: self._say(
                            f"attempt {number} is under way; this host asks to be let in, and waits"
                        )
                    )
            while True:
                clock = _Clock()
                failures = self._run_attempt(number)
                code = self._end_after(number, failures, clock.began_at())
                if code is not None:
                    return code
                number = self._next(number)
        except Stop:
            return self._end(number, ExitCode.PREEMPTED, f"{self._signals.asked} came while no rank was there")
        except HostsApart as error:
            return self._end(number, ExitCode.PEER_LOST, f"the hosts are apart: {error}")
        finally:
            self._poison.close()

    def _ask_for_secret(self) -> None:
        """Between hosts only the user can give all launchers the same one."""
        if self._job.hosts.max_nodes > 1 and env.DISTPLUS_SECRET.get() is None:
            self._say(
                f"DISTPLUS_SECRET is not set: who can reach {self._job.hosts.rdzv} can end or stop this job. Set it to "
                "the same random text on all hosts (openssl rand -hex 32), a new one for each job"
            )

    def _end_after(self, number: int, failures: dict[int, int], began_at: float) -> int | None:
        """The exit code of the job where an attempt was its last; None: another one follows."""
        history = read_history(self._home, number, began_at, self._run_id)
        self._has_saved = self._has_saved or history.has_saved
        asked = self._signals.asked if self._signals.has_reached_ranks else None
        newcomer = None if asked else self._newcomer(number)
        if newcomer is not None and set(failures.values()) <= _STOPPED:
            self._say(f"attempt {number} ended at step {history.step} to let {newcomer} in; the next one begins")
            self._note("regroup", number, host=newcomer, global_step=history.step)
            return None
        if not failures:
            return self._end_well(number, asked)
        culprit = self._culprit(self._of_all_hosts(number, failures), history)
        if asked is not None:
            return self._end_as_asked(number, failures, culprit, asked)
        attempt = Attempt(
            number=number,
            culprit=culprit,
            ended_at=time.monotonic(),
            has_started=history.has_started,
            step=history.step,
        )
        self._poison.note(attempt, history)
        refusal = self._job.policy.refusal(attempt)
        if refusal is not None and refusal[0] == ExitCode.NO_PROGRESS and (samples := self._poison.set_apart()):
            self._say(f"step {attempt.step} does not move: sets apart samples {shown(samples)}, in hand of {culprit}")
            self._note("quarantine", number + 1, culprit=culprit.rank, samples=samples, global_step=attempt.step)
            self._job.policy.begin_anew()
            refusal = self._job.policy.refusal(attempt)
        if refusal is not None:
            code, why = refusal
            if code == ExitCode.NO_PROGRESS:
                why = self._explain_no_progress(why, attempt, history)
            return self._end(number, code, f"{culprit}; {why}")
        if self._signals.asked is not None:  # by the next attempt at the latest
            raise Stop
        self._say(f"attempt {number} ended at step {attempt.step} ({culprit}); attempt {number + 1} begins")
        self._note("restart", number + 1, culprit=culprit.rank, exit_code=culprit.exit_code, global_step=attempt.step)
        return None

    def _newcomer(self, number: int) -> str | None:
        """The host for which the attempt was ended: where the number of hosts may change, and there was room."""
        if self._meeting is None or self._job.hosts.min_nodes == self._job.hosts.max_nodes:
            return None
        with contextlib.suppress(HostsApart):  # the others have ended already, and so did the job
            return self._meeting.newcomer(number)
        return None

    def _of_all_hosts(self, number: int, failures: dict[int, int]) -> dict[int, int]:
        """Whose exit code counts may be known on another host only."""
        if self._meeting is None:
            return failures
        with contextlib.suppress(HostsApart):
            return self._meeting.share(number, failures, waits=is_innocent(find_culprit(failures).code))
        return failures

    def _next(self, number: int) -> int:
        return number + 1 if self._meeting is None else self._meeting.next(number)

    def _run_attempt(self, number: int) -> dict[int, int]:
        env.DISTPLUS_ATTEMPT.set(number)
        self._poison.begin_attempt()
        with contextlib.ExitStack() as stack:

            def on_start(num_nodes: int) -> None:
                if self._meeting is not None:
                    self._meeting.begin(number, num_nodes)
                    if num_nodes < self._job.hosts.max_nodes:
                        stack.enter_context(self._meeting.watched(number, self._signals.stop_ranks))

            return run_attempt(
                self._job.command(self._has_saved),
                self._job.hosts,
                run_id=f"{self._run_id}-{number}",
                log_dir=self._job.log_dir / f"attempt-{number}",
                write=sys.stderr.write,
                signals=self._signals,
                on_start=on_start,
            )

    def _culprit(self, failures: dict[int, int], history: History) -> Culprit:
        """A hang ends with 170, however the rank that hung was ended; an error with its code, also after a SIGTERM."""
        culprit = find_culprit(failures, history.culprits, history.codes)
        if history.is_hang and history.culprits:
            return Culprit(rank=history.culprits[0], code=int(ExitCode.HANG))
        return culprit

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_well(self, number: int, asked: str | None) -> int:
        if asked is not None:
            return self._end(number, ExitCode.PREEMPTED, f"stopped by {asked}, without a PreemptionHandler")
        self._note("launch_end", number, exit_code=0)
        self._leave(number)
        return int(ExitCode.DONE)

    def _end_as_asked(self, number: int, failures: Mapping[int, int], culprit: Culprit, asked: str) -> int:
        """143, unless a rank failed on its own, or a second Ctrl-C ended it on the spot."""
        is_interrupted = asked == "SIGINT" and -int(signal.SIGINT) in failures.values()
        if set(failures.values()) <= _STOPPED and not is_interrupted:
            return self._end(number, ExitCode.PREEMPTED, f"stopped by {asked}")
        return self._end(number, culprit.exit_code, f"{culprit}; no further attempt after {asked}")

    def _end(self, number: int, code: int, why: str) -> int:
        self._say(f"ends with exit code {int(code)} after attempt {number}: {why}")
        self._say(f"the logs of all ranks are in {self._job.log_dir}")
        self._note("launch_end", number, exit_code=int(code), reason=why)
        self._leave(number)
        return int(code)

    def _leave(self, number: int) -> None:
        if self._meeting is not None:
            self._meeting.leave(number)

    def _explain_no_progress(self, why: str, attempt: Attempt, history: History) -> str:
        """Names step, error and samples, and leaves a verdict."""
        causes = {rank: error for rank, error in history.errors.items() if not error.startswith("Peer")}
        lines = [f"rank {rank}: {error}" for rank, error in sorted((causes or history.errors).items())]
        for rank, samples in sorted(self._poison.samples(attempt, history).items()):
            lines.append(f"rank {rank}: the samples in hand were {shown(samples)}")
        culprit = attempt.culprit.rank
        verdict = Verdict(
            incident=name_incident("no-progress", self._run_id),
            run_id=self._run_id,
            kind="no_progress",
            culprits=[culprit],
            waiting=sorted(set(history.errors) - {culprit}),
            phase="step",
            operation=history.errors.get(culprit, str(attempt.culprit)),
            location=None,
            global_step=attempt.step or 0,
            elapsed_s=0.0,
            cause=f"{why}; the last one by {attempt.culprit}",
            remedy="look at the samples and the error; a restart meets them again",
            lines=lines,
        )
        if self._home is not None:
            verdict.write(self._home, socket.gethostname())
        return "\n  ".join([why, *lines, "do not requeue: a restart meets the same step again"])

    # -- telling -------------------------------------------------------------------------------------------------------

    @property
    def _home(self) -> Path | None:
        """Where the ranks write their artefacts; a rank tells it when it sets up."""
        return told_home(self._home_file)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stderr.write(f"distplus launch: {text}\n")
            sys.stderr.flush()

    def _note(self, kind: str, attempt: int, **fields: object) -> None:
        if self._home is not None:
            with EventLog(self._home, LAUNCHER, attempt=attempt, run_id=self._run_id) as events:
                events.write(kind, **fields)
