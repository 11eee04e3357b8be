"""Waiting for the rank that prepares data: with a deadline, with its name, and told what it is doing."""

from __future__ import annotations

import itertools
import json
import logging
import time
from types import TracebackType

from lightning_distplus.control import ControlPlane, connected
from lightning_distplus.control.secret import words_of
from lightning_distplus.phases import Phases
from lightning_distplus.process import running_time
from lightning_distplus.timeouts import Phase

__all__ = ["PreparationBarrier", "report_progress"]

log = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0

# Keeps the barriers of one process apart, whatever Trainers they belong to; all ranks count alike.
_barriers = itertools.count(1)


def report_progress(text: str) -> None:
    """Tells the ranks that wait for this one's ``prepare_data`` what it is doing; call it as often as you like.

    Args:
        text: For example ``"tokenized 3 of 40 files"``; cut after 500 characters.
    """
    plane = connected()
    if plane is None:
        return
    plane.send(_progress_key(plane.world.rank), json.dumps({"text": text[:500], "at": time.time()}).encode())


class PreparationBarrier:
    """Takes the place of the barrier of 10,000 days that Lightning puts around ``prepare_data``.

    A rank that prepares nothing comes here at once and waits. An error inside reaches all ranks without a wait.

    Args:
        plane: The control plane.
        phases: The deadlines; the wait has that of the data phase.
    """

    def __init__(self, plane: ControlPlane, phases: Phases) -> None:
        self._plane = plane
        self._phases = phases
        self._key = f"preparing/{next(_barriers)}/arrived"

    def __enter__(self) -> PreparationBarrier:
        self._phases.enter(Phase.DATA)
        self._since = running_time()
        self._say_at = self._since + _SAY_EVERY_S
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Meets the others.

        Raises:
            PeerMissing: Some ranks are still in ``prepare_data`` after the deadline and its margin (the watchdog's
                verdict comes first); ``.ranks`` names them.
            PeerFailed: ``prepare_data`` raised on a peer.
            PeerLost: A peer's process is gone.
        """
        if error is not None:
            self._plane.report_failure(error)
            return
        self._plane.raise_if_peer_failed()  # those who have given up waiting have left their names here
        deadline = self._phases.patience_in(Phase.DATA)
        self._plane.sign_in(self._key)
        self._signed = self._plane.secret.entries(self._key)
        what = "prepare_data on another rank"
        try:
            self._plane.poll(self._is_complete, deadline, what=what, arrived=self._arrived)
        except BaseException as failure:
            self._plane.report_failure(failure)
            raise
        self._phases.enter_after_meeting(Phase.SETUP)

    def _arrived(self) -> set[int]:
        return self._plane.signed_in(self._key, self._signed)

    def _is_complete(self) -> bool:
        missing = sorted(set(self._plane.world.ranks) - self._arrived())
        now = running_time()
        if missing and now >= self._say_at:
            self._say_at = now + _SAY_EVERY_S
            self._say(missing[0], len(missing) - 1, now - self._since)
        return not missing

    def _say(self, rank: int, num_more: int, elapsed_s: float) -> None:
        plane, deadline = self._plane, self._phases.deadline
        log.info(
            "rank %d waits for prepare_data on %s%s, for %.0f s%s; %s",
            plane.world.rank,
            plane.describe_rank(rank),
            f" and {num_more} more" if num_more else "",
            elapsed_s,
            "" if deadline is None else f" of at most {deadline.total_seconds():g} s",
            self._progress_of(rank),
        )

    def _progress_of(self, rank: int) -> str:
        found = self._plane.read(_progress_key(rank))
        if found is None:
            return "it has reported no progress (lightning_distplus.preparing.report_progress does)"
        progress = words_of(found)
        return f"it reported {max(0.0, time.time() - progress['at']):.0f} s ago: {progress['text']}"


def _progress_key(rank: int) -> str:
    return f"preparing/progress/{rank}"
