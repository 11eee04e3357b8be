"""The verdict on a rank that has raised, or whose process is gone: the job's first error, as a file."""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_distplus.control.first_error import FirstError
from lightning_distplus.control.plane import Peer
from lightning_distplus.errors import (
    DivergenceError,
    PeerLost,
    PeerMissing,
    PreflightError,
    RendezvousError,
    message_of,
)
from lightning_distplus.host_load import HostLoad
from lightning_distplus.liveness import ProcessState, running_time
from lightning_distplus.watchdog.board import Sighting
from lightning_distplus.watchdog.marks import Marks
from lightning_distplus.watchdog.stacks import stack_of, user_location
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts, name_incident
from lightning_distplus.world import World, name_ranks

__all__ = ["leave_verdict", "place_of_failure"]

_KINDS = {
    DivergenceError.__name__: "divergence",
    PeerLost.__name__: "peer_lost",
    PeerMissing.__name__: "peer_lost",
}
# The user or the scheduler has asked for the end; or the run has not begun, and all ranks show the same.
_NO_INCIDENT = {"KeyboardInterrupt", "SIGTERMException", "Preempted", PreflightError.__name__, RendezvousError.__name__}
_CAUSE_CHARACTERS = 1000
_REMEDY = re.compile(r"(?<=[.;:]) (?=[Ll]ook at |Nothing was exchanged)")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_WHEREABOUTS = re.compile(r"in (.+?)(?: at (\S+:\d+))?$", re.DOTALL)
_OF_WORKER = "in DataLoader worker process"
_SAME_INCIDENT_S = 20.0
_SPOKEN_S = 1.0  # how long the lowest rank of this host may take


def place_of_failure(marks: Marks, error: BaseException) -> dict[str, Any]:
    """Where this rank has failed, as ``FirstError.place``; called on the thread that has raised, or is about to."""
    mark = marks.at_failure
    return {
        "phase": mark.phase,
        "operation": mark.operation,
        "global_step": mark.global_step,
        "location": _in_worker(message_of(error)) or _in_user_code(error),
    }


def _in_user_code(error: BaseException) -> str | None:
    return user_location([*stack_of(threading.get_ident()), *traceback.extract_tb(error.__traceback__)])


def _in_worker(message: str) -> str | None:
    """The line of a data set at which a data worker has raised; its traceback comes as text."""
    if _OF_WORKER not in message:
        return None
    return user_location([traceback.FrameSummary(file, int(line), "") for file, line in _FRAME.findall(message)])


def leave_verdict(
    first: FirstError,
    *,
    is_told: bool,
    world: World,
    run_id: str,
    peers: Mapping[int, Peer],
    last_seen: Callable[[int], Sighting | None],
    folder: Path,
) -> tuple[Verdict, Path] | None:
    """Writes the verdict on an error, once on each host.

    Args:
        first: The first error of the job.
        is_told: Whether all ranks know it as the same one; else the store was lost, and each rank has found its own.
        world: This process.
        run_id: ``ControlPlane.run_id``.
        peers: How the others have introduced themselves.
        last_seen: Their last beats.
        folder: Where verdicts go.

    Returns:
        The verdict and its file; None where there is nothing to write, or another rank of this host has written it.

    Raises:
        OSError: The file cannot be written.
    """
    if first.has_verdict or first.type in _NO_INCIDENT or (first.type == "SystemExit" and first.message in ("", "0")):
        return None
    verdict = _verdict(first, world, run_id, peers, last_seen)
    if not is_told and _is_written_by_another(verdict, world, peers, folder):
        return None
    path = verdict.write_first(folder, world.host)
    return None if path is None else (verdict, path)


def _is_written_by_another(verdict: Verdict, world: World, peers: Mapping[int, Peer], folder: Path) -> bool:
    """Leaves it to the lowest rank of this host that lives; where that does not come to it, this rank writes."""
    lower = [peers[rank] for rank in peers if rank < world.rank and rank not in verdict.culprits]
    is_lowest = not any(one.is_here and one.state() is not ProcessState.GONE for one in lower)
    end = running_time() + (0.0 if is_lowest else _SPOKEN_S)
    while not (is_written := _has_recent(folder, world.host, verdict.run_id)) and running_time() < end:
        time.sleep(0.05)
    return is_written


def _has_recent(folder: Path, host: str, run_id: str) -> bool:
    recent = find_verdicts(folder, run_id=run_id, since=time.time() - _SAME_INCIDENT_S)
    return any(one["path"].name.endswith(f"-{host}.json") for one in recent)


def _verdict(
    first: FirstError, world: World, run_id: str, peers: Mapping[int, Peer], last_seen: Callable[[int], Sighting | None]
) -> Verdict:
    culprits = sorted(first.ranks) or [first.rank]
    values = {str(rank): value for rank, value in first.differs.get("values", {}).items()}
    places = {rank: first.place if rank == first.rank else _place_of(last_seen(rank)) for rank in culprits}
    places.setdefault(first.rank, first.place)
    places |= {rank: _newer(one, first.place) for rank, one in places.items() if rank != first.rank}
    places |= {int(rank): {**places.get(int(rank), {}), **_place_in(str(value))} for rank, value in values.items()}
    place = places[culprits[0]]
    kind = _KINDS.get(first.type, "exception")
    cause, remedy = _explain(first, place.get("location"))
    known = {str(rank): (peer.host, peer.pid) for rank, peer in peers.items()}
    known |= {str(first.rank): (first.host, first.pid)}
    load = HostLoad.now()
    is_here = known.get(str(culprits[0]), ("", 0))[0] == world.host
    return Verdict(
        incident=name_incident(kind.replace("_", "-"), run_id, first.at),
        run_id=run_id,
        kind=kind,
        culprits=culprits,
        waiting=sorted(set(world.ranks) - set(culprits)),
        phase=place.get("phase", ""),
        operation=place.get("operation", ""),
        location=place.get("location"),
        global_step=place.get("global_step", 0),
        elapsed_s=place.get("elapsed_s", 0.0),
        cause=cause,
        remedy=remedy,
        hosts={rank: host for rank, (host, _) in known.items()},
        pids={rank: pid for rank, (_, pid) in known.items()},
        stacks={str(first.rank): first.traceback},
        lines=[
            f"{name_ranks([rank])} (host {host}, pid {pid}): {told}"
            for rank in dict.fromkeys((*culprits, first.rank, *sorted(places)))
            for host, pid in [known.get(str(rank), ("unknown", 0))]
            for told in [values.get(str(rank)) or _state(rank, first, places[rank])]
        ],
        locations={str(rank): one.get("location") for rank, one in places.items()},
        load={world.host: load.to_plain()},
        load_of_culprit=load.describe() if is_here else "",
        field=first.differs.get("field"),
        values=values,
    )


def _place_of(seen: Sighting | None) -> dict[str, Any]:
    """Of a rank that cannot say it any more: its last beat."""
    if seen is None:
        return {}
    return {
        "phase": seen.mark.phase,
        "operation": seen.mark.operation,
        "global_step": seen.mark.global_step,
        "location": seen.place,
        "elapsed_s": seen.silence_s,
        "beat_s": running_time() - seen.changed_at,
    }


def _newer(place: dict[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The same with step and phase of the rank that has told of it, where that is further: they train in step."""
    if told.get("global_step", 0) <= place.get("global_step", -1):
        return place
    return {**place, "phase": told.get("phase", ""), "global_step": told["global_step"]}


def _place_in(value: str) -> dict[str, Any]:
    """Of a rank in another call: what stands in ``Whereabouts.describe``."""
    found = _WHEREABOUTS.match(value)
    return {"operation": found[1], "location": found[2]} if found else {}


def _state(rank: int, first: FirstError, place: Mapping[str, Any]) -> str:
    is_own = rank == first.rank
    is_gone = first.type == PeerLost.__name__
    what = f"raised {first.type}" if is_own else "its process is gone" if is_gone else f"named by rank {first.rank}"
    where = f", {'' if is_own else 'last seen '}in {place['operation']!r}" if place.get("operation") else ""
    age = f", {place['beat_s']:.1f} s before" if "beat_s" in place else ""
    return what + where + (f" at {place['location']}" if place.get("location") else "") + age


def _explain(first: FirstError, location: str | None) -> tuple[str, str]:
    """Cause and remedy, in words; our own messages end with what to do."""
    message = first.message.strip()
    if first.type in _KINDS:
        cause, _, remedy = _REMEDY.sub("\0", message, count=1).partition("\0")
        return cause[:_CAUSE_CHARACTERS], remedy or "see the cause"
    told = message.partition("\n")[0]
    if _OF_WORKER in message:
        told = f"{told} {message.splitlines()[-1]}"
    cause = f"{first.type}: {told}" if told else first.type
    if "OutOfMemory" in first.type:
        return cause[:_CAUSE_CHARACTERS], "take a smaller batch, or find out what made this one larger on this rank"
    return cause[:_CAUSE_CHARACTERS], f"look at {location or 'the stack'}; the whole traceback is in the file"
