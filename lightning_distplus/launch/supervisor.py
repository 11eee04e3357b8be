"""Runs the attempts of a job one after the other, and decides from what each has left behind whether it goes on."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_distplus import env
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.catalog import JobSaves
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, ExitCode
from lightning_distplus.events import EventLog, InHand, read_events, told_by_rank
from lightning_distplus.launch.agent import Hosts, HostsApart, Meeting, run_attempt, say
from lightning_distplus.launch.warm import Warm
from lightning_distplus.process import HANDLED, Signals, Stop
from lightning_distplus.report import after_verdict, leave_page
from lightning_distplus.watchdog import Verdict, find_verdicts, name_incident
from lightning_distplus.watchdog.verdict import describe_next, duration_in_words, print_block
from lightning_distplus.world import LAUNCHER

# -- policy ------------------------------------------------------------------------------------------------------------

_NEEDS_A_PERSON = (ExitCode.DIVERGENCE, ExitCode.PREFLIGHT, ExitCode.NO_PROGRESS)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The rank that ended an attempt."""

    rank: int
    code: int
    """Its exit code; a signal is a negative number."""

    @property
    def exit_code(self) -> int:
        """As a shell shows it: 128 and the number of the signal."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank}, killed by {signal.Signals(-self.code).name}"
        try:
            return f"rank {self.rank}, exit code {self.code} ({ExitCode(self.code).name.lower()})"
        except ValueError:
            return f"rank {self.rank}, exit code {self.code}"


@dataclass(frozen=True, kw_only=True)
class History:
    """One attempt, as the ledger and the verdict tell it."""

    has_started: bool = False
    has_saved: bool = False
    is_preempted: bool = False
    step: int | None = None
    """Completed optimizer steps when it ended; None where no rank could tell."""
    began_at: float | None = None
    """Unix time at which its first rank had met the others."""
    ended_at: float | None = None
    """Unix time at which its first rank failed, or stopped when asked; None where none has lived to say so."""
    loaded: Path | None = None
    """The checkpoint that it has begun with."""
    errors: dict[int, str] = field(default_factory=dict)
    """The error of each rank, in one line."""
    codes: dict[int, int] = field(default_factory=dict)
    """The exit code that goes with each error."""
    samples: dict[int, Sequence[Any]] = field(default_factory=dict)
    """The samples that a failing rank had in hand."""
    culprits: list[int] = field(default_factory=list)
    """The ranks that the verdict names."""
    is_hang: bool = False

    @property
    def where(self) -> str:
        """The step, in words."""
        return "before the first step" if self.step is None else f"at step {self.step}"


def find_culprit(failures: Mapping[int, int], history: History | None = None) -> Culprit:
    """Chooses the rank whose exit code is that of the attempt, from the exit codes of those that failed.

    A hang ends with 170, however the rank that hung was ended. A rank that ended because of a peer (171), or by the
    agent's SIGTERM, is to blame only where nobody else is. Those that the verdict names come first; where one of them
    ended by the agent's SIGTERM, because its peers were quicker to end, the code that goes with its error counts.
    """
    history = history or History()
    if history.is_hang and history.culprits:
        return Culprit(rank=history.culprits[0], code=int(ExitCode.HANG))
    suspects = [rank for rank in sorted(history.culprits) if rank in failures]
    rank = min(suspects or sorted(failures), key=lambda one: (is_innocent(failures[one]), one))
    code = failures[rank]
    return Culprit(rank=rank, code=history.codes.get(rank, code) if suspects and is_innocent(code) else code)


def is_innocent(code: int) -> bool:
    """Whether a rank that ends with this code was ended by another: it lost a peer, or its agent terminated it."""
    return code in (ExitCode.PEER_LOST, -signal.SIGTERM)


@dataclass
class RestartPolicy:
    """Decides after each failed attempt.

    Args:
        max_restarts: So many restarts are made within ``window``.
        window: The time in which they count; None: the whole job.
        same_step: So many attempts in a row may end without the step having moved; then a person has to look.
    """

    max_restarts: int
    window: timedelta | None = None
    same_step: int = 3
    _restarts: list[float] = field(default_factory=list, init=False)
    _best_step: int = field(default=-1, init=False)
    _in_vain: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.same_step < 1:
            raise ValueError(
                f"max_restarts is {self.max_restarts} and same_step is {self.same_step}; at least 0 and 1 are needed."
            )

    def refusal(self, culprit: Culprit, history: History, now: float) -> tuple[int, str] | None:
        """Why there is no further attempt, with the exit code of the job; None: there is one.

        ``now`` is ``time.monotonic()``.
        """
        code = culprit.exit_code
        if code == ExitCode.PREEMPTED:
            return code, "the ranks stopped when asked to"
        if code in _NEEDS_A_PERSON:
            return code, "another attempt would end the same way; read the error above"
        if not history.has_started and culprit.code > 0:  # the command itself is wrong
            return code, "the ranks ended before they had met; read the error above"
        if self._is_stuck(history.step):
            return int(ExitCode.NO_PROGRESS), f"{self._in_vain} attempts in a row ended {history.where}"
        if not self._has_budget(now):
            within = "" if self.window is None else f" within {self.window}"
            return code, f"no restart is left of the {self.max_restarts} allowed{within}"
        self._restarts.append(now)
        return None

    def place_of_next(self) -> str:
        """Which attempt the next one is, of how many, once another one is granted."""
        if self.window is None:
            return f"attempt {len(self._restarts) + 1} of {self.max_restarts + 1}"
        return f"restart {len(self._restarts)} of {self.max_restarts} within {self.window}"

    def begin_anew(self) -> None:
        """Counts the attempts at one step from the beginning: what has ended them is out of the way."""
        self._in_vain = 0

    def _is_stuck(self, step: int | None) -> bool:
        step = -1 if step is None else step
        self._in_vain = 1 if step > self._best_step else self._in_vain + 1
        self._best_step = max(step, self._best_step)
        return self._in_vain >= self.same_step

    def _has_budget(self, now: float) -> bool:
        if self.window is not None:
            self._restarts = [at for at in self._restarts if now - at <= self.window.total_seconds()]
        return len(self._restarts) < self.max_restarts


# -- what an attempt has left behind -----------------------------------------------------------------------------------


def read_history(home: Path | None, attempt: int, since: float, run_id: str | None) -> History:
    """Reads what an attempt has written into the folder of artefacts, where a rank came so far as to name it.

    What is older than its beginning, ``since``, is of earlier attempts. The folder may hold other runs.
    """
    if home is None:
        return History()
    of_run = read_events(home, run_id=run_id)
    events = [event for event in of_run if event["attempt"] == attempt and event["time"] >= since]
    failed = [event for event in events if event["kind"] == "failed"]
    started = [event["time"] for event in events if event["kind"] == "start"]
    loaded = [Path(event["path"]) for event in events if event["kind"] == "loaded"]
    steps = [event["global_step"] for event in events if event.get("global_step") is not None]
    verdict: dict[str, Any] = next(iter(find_verdicts(home, run_id=run_id, since=since, of_end=True)), {})
    if verdict:
        steps.append(verdict["global_step"])
    return History(
        has_started=bool(started),
        has_saved=any(event["kind"] in ("saved", "preempted") for event in events),
        is_preempted=any(event["kind"] == "preempted" for event in events),
        step=max(steps, default=None),
        began_at=min(started, default=None),
        ended_at=min((event["time"] for event in events if event["kind"] in ("failed", "preempted")), default=None),
        loaded=next(iter(loaded), None),
        errors={event["rank"]: event["error"].partition("\n")[0] for event in failed},
        codes={event["rank"]: event.get("exit_code", 1) for event in failed},
        samples={event["rank"]: event["samples"] for event in failed if event.get("samples")},
        culprits=verdict.get("culprits", []),
        is_hang=verdict.get("kind") == "hang",
    )


# -- samples that end attempts -----------------------------------------------------------------------------------------

_SHOWN_SAMPLES = 16


class Poison:
    """The samples in hand at the end of each attempt.

    A rank that raised has named its samples in the ledger. What a killed one had in hand stands in the launcher's
    memory, where its peers, which ended because of it, have theirs: so of these only the culprit's count. Attempts in a
    row that ended at one step, with the same samples in the same culprit's hands, are evidence enough.
    """

    def __init__(self, num_ranks: int, *, same_step: int, sets_apart: bool) -> None:
        self.in_hand = InHand(num_ranks)
        self._same_step = same_step
        self._sets_apart = sets_apart
        self._ends: list[tuple[int | None, int, list[Any]]] = []
        self._tried: set[int | None] = set()
        self.apart: list[Any] = []
        """The ids that are set apart."""

    def samples(self, culprit: int, history: History) -> Mapping[int, Sequence[Any]]:
        """By rank: of those that raised, and of the culprit."""
        killed = {rank: ids for rank, ids in self.in_hand.read().items() if rank == culprit}
        return {**killed, **history.samples}

    def note(self, culprit: int, history: History) -> None:
        """Keeps the end of an attempt."""
        self._ends.append((history.step, culprit, list(self.samples(culprit, history).get(culprit, []))))

    def set_apart(self) -> list[Any]:
        """Sets samples apart for the attempts that follow; called where the step has not moved.

        Returns:
            The samples; empty where that is not asked for, or would not help: the attempts ended with different
            samples in hand, or this step did not move after its samples had been set apart.
        """
        ends = self._ends[-self._same_step :]
        step, _, samples = ends[-1]
        if not self._sets_apart or not samples or any(one != ends[-1] for one in ends) or step in self._tried:
            return []
        self._tried.add(step)
        self.apart += samples
        env.DISTPLUS_QUARANTINE.set(json.dumps(self.apart))
        return samples


def shown(samples: Sequence[Any]) -> str:
    """The ids in one line."""
    return ", ".join(map(str, samples[:_SHOWN_SAMPLES])) + (", ..." if len(samples) > _SHOWN_SAMPLES else "")


# -- attempts ----------------------------------------------------------------------------------------------------------

_STOPPED = {ExitCode.PREEMPTED, ExitCode.PEER_LOST, *(-signum for signum in HANDLED)}


@dataclass(kw_only=True)
class Supervisor:
    """Runs the attempts of a job: what ``distplus launch`` starts."""

    signals: Signals
    command: Sequence[str]
    """What follows the interpreter."""
    command_after_save: Sequence[str]
    """The same, once this job has committed a checkpoint."""
    warm: Warm | None
    """From which the ranks are forked; None: an interpreter for each."""
    hosts: Hosts
    policy: RestartPolicy
    log_dir: Path
    job_id: str
    """Empty: a name is made."""
    resumes: bool
    """Whether each attempt goes on from the newest checkpoint that it finds."""
    quarantine: bool
    """Whether the samples of a batch that ends every attempt are set apart."""

    def run(self) -> int:
        """Runs attempts until one succeeds or the policy refuses another; returns the exit code of the job."""
        self._meeting: Meeting | None = None
        self._has_saved = False
        self._attempt_began_at = 0.0
        self._poison = Poison(self.hosts.nproc, same_step=self.policy.same_step, sets_apart=self.quarantine)
        self._name_run(self.job_id or uuid.uuid4().hex[:8])
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._give_secret()
        number = 0
        try:
            if self.hosts.max_nodes > 1:
                with self.signals.interrupting():
                    self._meeting = Meeting(self.hosts.rdzv, self.job_id)
                    self._name_run(self._meeting.job)
                    number = self._meeting.join()
            while True:
                began_at, began = time.time(), time.monotonic()
                failures = self._run_attempt(number)
                # By the wall clock of then or of now: the earlier one, where it was set back since.
                self._attempt_began_at = min(began_at, time.time() - (time.monotonic() - began))
                if (code := self._end_after(number, failures)) is not None:
                    return code
                number = number + 1 if self._meeting is None else self._meeting.next(number)
        except Stop:
            return self._end(number, ExitCode.PREEMPTED, f"{self.signals.asked} came while no rank was there")
        except HostsApart as error:
            return self._end(number, ExitCode.PEER_LOST, f"the hosts are apart: {error}")
        finally:
            self._poison.in_hand.close()

    def _name_run(self, run_id: str) -> None:
        self._run_id = run_id
        self._home_file = self.log_dir / f"home-{run_id}"
        env.DISTPLUS_HOME_FILE.set(str(self._home_file))
        env.DISTPLUS_RUN_ID.set(run_id)

    def _give_secret(self) -> None:
        """Makes one for the ranks of one host; between hosts only the user can give all launchers the same one."""
        if env.DISTPLUS_SECRET.get() is not None:
            return
        if self.hosts.max_nodes == 1:
            env.DISTPLUS_SECRET.set(secrets.token_hex(32))
        else:
            say(
                f"DISTPLUS_SECRET is not set: who can reach {self.hosts.rdzv} can end or stop this job. Set it to "
                "the same random text on all hosts (openssl rand -hex 32), a new one for each job"
            )

    def _end_after(self, number: int, failures: dict[int, int]) -> int | None:
        """The exit code of the job where an attempt was its last; None: another one follows."""
        history = read_history(self._home, number, self._attempt_began_at, self._run_id)
        self._has_saved = self._has_saved or history.has_saved
        asked = self.signals.asked if self.signals.has_reached_ranks else None
        newcomer = None if asked else self._newcomer(number)
        if newcomer is not None and set(failures.values()) <= _STOPPED:
            say(f"attempt {number} ended at step {history.step} to let {newcomer} in; the next one begins")
            self._note("regroup", number, host=newcomer, global_step=history.step)
            return None
        if not failures:
            if asked is not None:
                return self._end(number, ExitCode.PREEMPTED, f"stopped by {asked}, without a PreemptionHandler")
            return self._part(number, ExitCode.DONE)
        culprit = find_culprit(self._of_all_hosts(number, failures), history)
        if asked is not None:
            return self._end_as_asked(number, failures, culprit, asked)
        self._poison.note(culprit.rank, history)
        refusal = self.policy.refusal(culprit, history, time.monotonic())
        if refusal is not None and refusal[0] == ExitCode.NO_PROGRESS and (samples := self._poison.set_apart()):
            say(f"step {history.step} does not move: sets apart samples {shown(samples)}, in hand of {culprit}")
            self._note("quarantine", number + 1, culprit=culprit.rank, samples=samples, global_step=history.step)
            self.policy.begin_anew()
            refusal = self.policy.refusal(culprit, history, time.monotonic())
        if refusal is not None:
            code, why = refusal
            if code == ExitCode.NO_PROGRESS:
                why = self._explain_no_progress(why, culprit, history)
            return self._end(number, code, f"{culprit}; {why}")
        if self.signals.asked is not None:  # by the next attempt at the latest
            raise Stop
        verdict = self._show_verdict()
        place = self.policy.place_of_next()
        say(f"{culprit}, {history.where}: restarting from {self._describe_resume(history)}, {place}")
        self._note("restart", number + 1, culprit=culprit.rank, exit_code=culprit.exit_code, global_step=history.step)
        self._leave_page(verdict, waits=False)
        return None

    def _newcomer(self, number: int) -> str | None:
        """The host for which the attempt was ended: where the number of hosts may change, and there was room."""
        with contextlib.suppress(HostsApart):  # the others have ended already, and so did the job
            if self._meeting is not None and self.hosts.min_nodes < self.hosts.max_nodes:
                return self._meeting.newcomer(number)
        return None

    def _of_all_hosts(self, number: int, failures: dict[int, int]) -> dict[int, int]:
        """Whose exit code counts may be known on another host only."""
        with contextlib.suppress(HostsApart):
            if self._meeting is not None:
                return self._meeting.share(number, failures, waits=is_innocent(find_culprit(failures).code))
        return failures

    def _run_attempt(self, number: int) -> dict[int, int]:
        env.DISTPLUS_ATTEMPT.set(number)
        self._poison.in_hand.forget()
        command = self.command_after_save if self._has_saved else self.command
        return run_attempt(
            command if self.warm is None else self.warm.command(command),
            number,
            self.hosts,
            run_id=self._run_id,
            log_dir=self.log_dir,
            signals=self.signals,
            meeting=self._meeting,
        )

    def _describe_resume(self, history: History) -> str:
        """Where the next attempt goes on, and what of this one is lost."""
        if not self.resumes:
            return "what the script chooses"
        found = self._newest_checkpoint(history)
        step, committed_at = 0, 0.0
        if found is not None:
            with contextlib.suppress(CheckpointCorrupt, CheckpointMismatch):
                manifest = read_manifest(found)
                step, committed_at = manifest.global_step, manifest.committed_at
        losses = [] if history.step is None else [f"{max(0, history.step - step)} steps"]
        if history.began_at is not None:
            ended_at = history.ended_at or time.time()
            losses.append(duration_in_words(ended_at - max(committed_at, history.began_at)))
        name = "the beginning" if found is None else found.name
        return f"{name} ({', '.join(losses)} of work lost)" if losses else name

    def _newest_checkpoint(self, history: History) -> Path | None:
        """The newest one of this job; before it has saved any, the one that it has begun with."""
        if self._home is None:
            return None
        with contextlib.suppress(CheckpointCorrupt):  # the ranks will say so
            return JobSaves.of_fit(self._home, self._run_id).newest_valid() or history.loaded
        return None

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end_as_asked(self, number: int, failures: Mapping[int, int], culprit: Culprit, asked: str) -> int:
        """143, unless a rank failed on its own, or a second Ctrl-C ended it on the spot."""
        is_interrupted = asked == "SIGINT" and -int(signal.SIGINT) in failures.values()
        if set(failures.values()) <= _STOPPED and not is_interrupted:
            return self._end(number, ExitCode.PREEMPTED, f"stopped by {asked}")
        return self._end(number, culprit.exit_code, f"{culprit}; no further attempt after {asked}")

    def _end(self, number: int, code: int, why: str) -> int:
        say(f"ends with exit code {int(code)} after attempt {number}: {why}")
        if code == ExitCode.PREEMPTED and self._home is not None:
            history = read_history(self._home, number, self._attempt_began_at, self._run_id)
            ended_at = history.ended_at or time.time()
            say(f"next: {describe_next(self._home, self._run_id, history.step or 0, ended_at)}")
        say(f"the logs of all ranks are in {self.log_dir}")
        return self._part(number, code, self._show_verdict(), reason=why)

    def _part(self, number: int, code: int, verdict: Path | None = None, **why: str) -> int:
        self._note("launch_end", number, exit_code=int(code), **why)
        self._leave_page(verdict)
        if self._meeting is not None:
            self._meeting.leave(number)
        return int(code)

    def _explain_no_progress(self, why: str, culprit: Culprit, history: History) -> str:
        """Names step, error and samples, and leaves a verdict."""
        causes = {rank: error for rank, error in history.errors.items() if not error.startswith("Peer")}
        lines = [f"rank {rank}: {error}" for rank, error in sorted((causes or history.errors).items())]
        for rank, samples in sorted(self._poison.samples(culprit.rank, history).items()):
            lines.append(f"rank {rank}: the samples in hand were {shown(samples)}")
        verdict = Verdict(
            incident=name_incident("no-progress", self._run_id),
            run_id=self._run_id,
            kind="no_progress",
            culprits=[culprit.rank],
            waiting=sorted(set(history.errors) - {culprit.rank}),
            phase="step",
            operation=history.errors.get(culprit.rank, str(culprit)),
            location=None,
            global_step=history.step or 0,
            elapsed_s=0.0,
            cause=f"{why}; the last one by {culprit}",
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
        return told_by_rank(self._home_file)[0]

    def _show_verdict(self) -> Path | None:
        """Prints the verdict on the last attempt, as a rank of this host has written it; the last word is its own."""
        if self._home is None:
            return None
        since, host = self._attempt_began_at, socket.gethostname()
        for told in find_verdicts(self._home, run_id=self._run_id, host=host, since=since, of_end=True)[:1]:
            path: Path = told["path"]
            print_block(Verdict.from_json(path.read_bytes()), path)
            return path
        return None

    def _leave_page(self, verdict: Path | None = None, *, waits: bool = True) -> None:
        if verdict is not None:
            _, on_verdict = told_by_rank(self._home_file)
            after_verdict(verdict, on_verdict or env.DISTPLUS_ON_VERDICT.get(), waits=waits)
        elif self._home is not None:
            leave_page(self._home, waits=waits)

    def _note(self, kind: str, attempt: int, **fields: object) -> None:
        if self._home is not None:
            with EventLog(self._home, LAUNCHER, attempt=attempt, run_id=self._run_id) as events:
                events.write(kind, **fields)
