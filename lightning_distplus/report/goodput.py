"""Goodput: what part of the wall time of a job trained the model, and what each failure cost.

Every second between the start of the first process and the last event of the job belongs to one part, over all
restarts and requeues. As in Google's "ML Productivity Goodput" and its library ml-goodput-measurement, only steps
that were kept count as training: what a restart did once more is lost. The advice on checkpoints follows J. W. Young,
"A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974, and
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (3), 2006.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_distplus.watchdog.verdict import duration_in_words

__all__ = ["PARTS", "Attempt", "Window", "best_interval", "find_attempts", "split_wall_time"]

PARTS = {
    "training": "steps that were kept",
    "data_wait": "waiting for the next batch",
    "checkpoint": "standing still for a save",
    "validation": "validation, test and prediction",
    "setup": "set-up, the first step of each attempt, and the end of a run",
    "redone": "steps that a later attempt did again",
    "detection": "from the failure until it was known",
    "restart": "from there until the processes of the next attempt began",
    "queue": "between two jobs, or after a preemption",
}
"""The parts of the wall time, and what they mean."""
_FATAL = frozenset({"hang", "peer_lost", "exception", "divergence", "preflight", "no_progress"})
_IN_PHASE = {"checkpoint": "checkpoint", "validation": "validation", "setup": "setup", "resume": "setup"}
_FEWEST_FAILURES = 3
_QUIET_S = 120.0


class Window(NamedTuple):
    """Some steps of one rank: the event ``steps``."""

    end: float
    """Unix time."""
    step: int
    """Optimizer steps that were done at its end."""
    loss: float | None
    seconds: float
    steps: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    wait_s: float
    checkpoint_s: float
    validation_s: float

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Window:
        """Reads one; a field that is missing is 0."""
        get = event.get
        return cls(
            event["time"], get("global_step", 0), get("loss"), get("seconds", 0.0), get("steps", 0),
            get("data_s", 0.0), get("forward_s", 0.0), get("backward_s", 0.0), get("optimizer_s", 0.0),
            get("wait_s", 0.0), get("checkpoint_s", 0.0), get("validation_s", 0.0),
        )  # fmt: skip

    def before(self, later: Window) -> Window:
        """Both as one window."""
        loss = self.loss if later.loss is None else later.loss
        return Window(later.end, later.step, loss, *map(operator.add, self[3:], later[3:]))

    @property
    def step_s(self) -> float:
        """Seconds of one step, without saves and validation."""
        return max(self.seconds - self.checkpoint_s - self.validation_s, 0.0) / max(self.steps, 1)

    @property
    def own_s(self) -> float:
        """The same without the backward and the gate, where a rank waits for others."""
        return max(self.step_s - (self.backward_s + self.wait_s) / max(self.steps, 1), 0.0)


@dataclass(kw_only=True)
class Attempt:
    """One start of all ranks."""

    run_id: str
    number: int
    began: float
    """Unix time at which its first process began."""
    last: float
    """Unix time of its last event."""
    world_size: int = 0
    function: str = "fit"
    first_step: int = 0
    """Where it began: the step of the checkpoint that it loaded."""
    last_step: int = 0
    windows: Sequence[Window] = ()
    """Of its lowest rank that has any."""
    end: str = "vanished"
    """How it ended: done, preempted, regrouped, running, killed, vanished, failed, or the kind of its verdict."""
    why: str = ""
    ended: float = 0.0
    """Unix time at which it stopped to train."""
    detected: float = 0.0
    """Unix time at which that was known."""
    phase: str = ""
    culprits: list[int] = field(default_factory=list)
    is_requeued: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether something ended it that nobody wanted."""
        return self.end not in ("done", "preempted", "regrouped", "running")

    @property
    def first_step_at(self) -> float | None:
        """Unix time at which its first step was done; None where none was."""
        return self.windows[0].end - self.windows[0].seconds if self.windows else None

    def steps_lost(self, follower: Attempt | None) -> int:
        """Steps that the next attempt does again."""
        return 0 if follower is None else max(self.last_step - follower.first_step, 0)


# -- attempts ----------------------------------------------------------------------------------------------------------


def find_attempts(
    events: Iterable[Mapping[str, Any]],
    windows: Mapping[tuple[str, int], Mapping[int, Sequence[Window]]],
    verdicts: Sequence[Mapping[str, Any]],
    now: float,
) -> list[Attempt]:
    """The starts of a job, in order.

    Args:
        events: Of all ranks and the launcher, without ``steps``; oldest first.
        windows: By run and attempt, and by rank; oldest first.
        verdicts: As their files hold them, each with ``at``, its unix time; oldest first.
        now: Unix time. An attempt without an end runs where it was heard of lately.
    """
    of_attempt: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    of_launcher: list[Mapping[str, Any]] = []
    for event in events:
        if event["rank"] < 0:
            of_launcher.append(event)
        else:
            of_attempt.setdefault((event["run_id"], event["attempt"]), []).append(event)
    found = []
    for key, told in of_attempt.items():
        ranks = windows.get(key, {})
        found.append(_attempt(*key, told, ranks[min(ranks)] if ranks else ()))
    found.sort(key=lambda one: one.began)
    for index, attempt in enumerate(found):
        until = found[index + 1].began if index + 1 < len(found) else math.inf
        told = of_attempt[attempt.run_id, attempt.number]
        last_window = attempt.windows[-1] if attempt.windows else None
        went_on_at = last_window.end - last_window.seconds if last_window else 0.0  # as with on_hang="report"
        since = max(attempt.began, went_on_at)
        fatal = (one for one in verdicts if one["kind"] in _FATAL and one.get("ends_run", True))
        judged = [one for one in fatal if since <= one["at"] < until]
        launcher = [one for one in of_launcher if attempt.began <= one["time"] < until + 1]
        is_heard = now - attempt.last < _QUIET_S
        _find_end(attempt, told, judged, launcher, until if math.isfinite(until) else None, is_heard=is_heard)
    return found


def _attempt(run_id: str, number: int, told: Sequence[Mapping[str, Any]], windows: Sequence[Window]) -> Attempt:
    starts = [event for event in told if event["kind"] == "start"]
    began = min((event.get("began_at", event["time"]) for event in starts), default=told[0]["time"])
    loaded = [event.get("global_step") or 0 for event in told if event["kind"] == "loaded"]
    first_step = loaded[0] if loaded else 0
    steps = [event["global_step"] for event in told if isinstance(event.get("global_step"), int)]
    return Attempt(
        run_id=run_id,
        number=number,
        began=min(began, told[0]["time"]),
        last=max(told[-1]["time"], windows[-1].end if windows else 0.0),
        world_size=max((event.get("world_size", 0) for event in starts), default=0),
        function=starts[0].get("function", "fit") if starts else "fit",
        first_step=first_step,
        last_step=max([first_step, *steps, *(window.step for window in windows[-1:])]),
        windows=windows,
    )


def _find_end(
    attempt: Attempt,
    told: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    launcher: Sequence[Mapping[str, Any]],
    until: float | None,
    *,
    is_heard: bool,
) -> None:
    failed = [event for event in told if event["kind"] == "failed"]
    preempted = [event for event in told if event["kind"] == "preempted"]
    ended_well = [event for event in told if event["kind"] == "end" and not event.get("failed")]
    grown = [event for event in launcher if event["kind"] == "regroup"]
    restart = next((event for event in launcher if event["kind"] in ("restart", "requeue", "launch_end")), None)
    attempt.is_requeued = any(event["kind"] == "requeue" for event in launcher)
    last = attempt.last
    attempt.ended = attempt.detected = last
    if preempted:
        attempt.end, attempt.why = "preempted", str(preempted[0].get("reason") or "")
        attempt.ended = attempt.detected = preempted[0]["time"]
    elif ended_well and not failed:
        attempt.end = "done"
    elif grown:
        attempt.end, attempt.why = "regrouped", f"host {grown[0].get('host')} has come or gone"
    elif verdicts:
        first = verdicts[0]
        attempt.end, attempt.why = first["kind"], first.get("headline") or first.get("cause", "")
        attempt.phase, attempt.culprits = first.get("phase", ""), list(first.get("culprits", ()))
        attempt.last_step = max(attempt.last_step, first.get("global_step") or 0)
        attempt.detected = min([first["at"], *(event["time"] for event in failed)])
        silence_s = (first.get("elapsed_s") or 0.0) if first["kind"] in ("hang", "peer_lost") else 0.0
        attempt.ended = attempt.detected - silence_s
    elif failed:
        attempt.end, attempt.why = "failed", str(failed[0].get("error", "")).partition("\n")[0]
        attempt.culprits = [failed[0]["rank"]]
        attempt.ended = attempt.detected = failed[0]["time"]
        if failed[0].get("exit_code") == 143:
            attempt.end = "preempted"
    elif until is None and restart is None and is_heard:
        attempt.end = "running"
    elif restart is not None and restart["kind"] != "launch_end":
        attempt.end, attempt.why = "killed", f"rank {restart.get('culprit', '?')}, exit code {restart.get('exit_code')}"
        attempt.detected = restart["time"]
        attempt.culprits = [restart["culprit"]] if "culprit" in restart else []
    elif until is not None:
        attempt.end, attempt.why, attempt.detected = "killed", "no rank has said why", max(last, attempt.ended)
    if attempt.windows:  # the last one is written by a rank that fails: it holds the wait for the one that did before
        last_window = attempt.windows[-1]
        earliest = last_window.end - last_window.seconds if verdicts else last_window.end
        attempt.ended = max(attempt.ended, earliest)
    attempt.detected = max(attempt.detected, attempt.ended)
    attempt.last = max(attempt.last, attempt.detected)


# -- the split ---------------------------------------------------------------------------------------------------------


def split_wall_time(
    attempts: Sequence[Attempt], saves_s: Sequence[float] = (), mtbf_s: float | None = None
) -> dict[str, Any]:
    """Gives every second of a job to one part, and names what each failure cost.

    Args:
        attempts: As ``find_attempts`` returns them.
        saves_s: How long training stood still for each save.
        mtbf_s: Mean time between failures, where it is known from elsewhere; by default that of this job, from three
            failures on.

    Returns:
        ``wall_s``; ``share``, the part of it that trained the model; ``parts``, in the order of ``PARTS``;
        ``incidents`` with the time until each was known (``detect_s``), from there until the next attempt had done a
        step (``recover_s``; None: none did), and what that did again; ``advice`` on saves.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    incidents: list[dict[str, Any]] = []
    for attempt, follower in zip(attempts, [*attempts[1:], None], strict=True):
        lost_s = _split_attempt(attempt, follower, seconds)
        known_at = attempt.detected if attempt.has_failed else attempt.ended
        seconds["detection"] += known_at - attempt.ended
        if follower is None:
            seconds["setup"] += max(attempt.last - known_at, 0.0)
        else:
            is_queue = follower.run_id != attempt.run_id or attempt.is_requeued or attempt.end == "preempted"
            seconds["queue" if is_queue else "restart"] += max(follower.began - known_at, 0.0)
        if attempt.has_failed:
            trained_at = None if follower is None else follower.first_step_at
            incidents.append({
                "attempt": attempt.number,
                "kind": attempt.end,
                "culprits": attempt.culprits,
                "global_step": attempt.last_step,
                "at": attempt.ended,
                "detect_s": known_at - attempt.ended,
                "recover_s": None if trained_at is None else max(trained_at - known_at, 0.0),
                "steps_lost": attempt.steps_lost(follower),
                "seconds_lost": lost_s,
            })  # fmt: skip
    wall_s = sum(seconds.values())
    return {
        "wall_s": wall_s,
        "share": seconds["training"] / wall_s if wall_s else 0.0,
        "parts": [{"name": name, "seconds": seconds[name], "meaning": meaning} for name, meaning in PARTS.items()],
        "incidents": incidents,
        "advice": _advise(wall_s, len(incidents), saves_s, mtbf_s),
    }


def _split_attempt(attempt: Attempt, follower: Attempt | None, seconds: dict[str, float]) -> float:
    """Adds what an attempt did until it ended; returns the seconds of its steps that the next one does again."""
    kept_until = math.inf if follower is None else follower.first_step
    cursor, lost_s = attempt.began, 0.0
    for window in attempt.windows:
        begin = max(window.end - window.seconds, cursor)
        end = min(window.end, attempt.ended)
        length = max(end - begin, 0.0)
        seconds["setup"] += begin - cursor
        apart = {"checkpoint": window.checkpoint_s, "validation": window.validation_s, "data_wait": window.data_s}
        for part in apart:
            apart[part] = min(apart[part], length)
            length -= apart[part]
        share = min(max((window.step - kept_until) / max(window.steps, 1), 0.0), 1.0)
        lost_s += share * (length + apart["data_wait"])
        seconds["training"] += (1 - share) * length
        seconds["data_wait"] += (1 - share) * apart["data_wait"]
        seconds["checkpoint"] += apart["checkpoint"]
        seconds["validation"] += apart["validation"]
        cursor = max(end, cursor)
    rest_s = max(attempt.ended - cursor, 0.0)
    part = "setup"
    if attempt.function != "fit":
        part = "validation"
    elif attempt.windows and (attempt.has_failed or attempt.end == "running"):
        part = _IN_PHASE.get(attempt.phase, "redone" if attempt.last_step > kept_until else "training")
    if part == "redone":
        lost_s += rest_s
    else:
        seconds[part] += rest_s
    seconds["redone"] += lost_s
    return lost_s


# -- advice ------------------------------------------------------------------------------------------------------------


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that cost the least, by Daly's estimate of higher order.

    Args:
        save_s: How long training stands still for a save.
        mtbf_s: Mean time between failures.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def _advise(wall_s: float, num_failures: int, saves_s: Sequence[float], mtbf_s: float | None) -> str:
    if not saves_s or sum(saves_s) <= 0 or (mtbf_s is None and num_failures < _FEWEST_FAILURES):
        return ""
    known = "as given" if mtbf_s is not None else f"{num_failures} in {duration_in_words(wall_s)}"
    mtbf_s = mtbf_s or wall_s / num_failures
    save_s = sum(saves_s) / len(saves_s)
    return (
        f"save every {duration_in_words(best_interval(save_s, mtbf_s))}: a failure each {duration_in_words(mtbf_s)} "
        f"({known}), and {save_s:.2g} s for a save (Young 1974, Daly 2006)"
    )
