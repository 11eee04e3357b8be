"""How a verdict gets out: its file, its text on stderr, and the word to the other ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lightning_distplus.control import ControlPlane
from lightning_distplus.control.first_error import FirstError
from lightning_distplus.control.peers import Peer
from lightning_distplus.errors import HangDetected, PeerError, PeerLost
from lightning_distplus.liveness import ProcessState, running_time
from lightning_distplus.watchdog.board import NUM_READERS, Board
from lightning_distplus.watchdog.failure import leave_verdict
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts

__all__ = ["JUDGED", "Telling"]

log = logging.getLogger(__name__)

JUDGED = "the watchdogs have judged:\n"
_LOOK_S = 0.025
_TOLD_S = 1.0
_SPOKEN_S = 3.0  # how long the rank that speaks for a host may take longer than another one there
_STORE_S = 0.3
_SETTLED = "watchdog/together/settled"


class Telling:
    """Tells verdicts for one rank: one rank of each host writes and prints.

    Args:
        plane: The control plane.
        board: Who is there.
        folder: Where verdicts are written.
    """

    def __init__(self, plane: ControlPlane, board: Board, folder: Path) -> None:
        self._plane = plane
        self._line = plane.second_line()
        self._world = plane.world
        self._board = board
        self._folder = folder
        self._began_at = time.time()
        self._found: tuple[Verdict, Path] | None = None
        self.has_judged = False
        """Whether this rank gives a verdict of the watchdogs: what it raises from then on follows from that."""

    def speaks_for_host(self, silent: Iterable[int] = ()) -> bool:
        """Whether this is the lowest rank of its host whose process is there and whose Python runs."""
        here = {rank for rank, peer in self._peers_here() if peer.state() is not ProcessState.GONE}
        return self._world.rank == min(here - set(silent) | {self._world.rank})

    def _peers_here(self) -> list[tuple[int, Peer]]:
        return [(rank, peer) for rank, peer in self._board.peers.items() if peer.host == self._world.host]

    def await_others(self, silent: Iterable[int] = ()) -> None:
        """Waits until the other ranks of this host have ended, and so said what they have to say; a few seconds."""
        others = [peer for rank, peer in self._peers_here() if rank != self._world.rank and rank not in set(silent)]
        end = running_time() + _SPOKEN_S
        while any(peer.state() is not ProcessState.GONE for peer in others) and running_time() < end:
            time.sleep(_LOOK_S)

    def find_verdict(self) -> tuple[Verdict, Path] | None:
        """The verdict on this run, by whichever rank of this host has written it; None where there is none."""
        if self._found is None:
            told = find_verdicts(self._folder, run_id=self._plane.run_id, since=self._began_at)
            here = [one["path"] for one in told if one["path"].stem.endswith(f"-{self._world.host}")]
            self._found = (Verdict.from_json(here[0].read_bytes()), here[0]) if here else None
        return self._found

    def leave_traceback(self, text: str) -> Path | None:
        """Writes the whole traceback of this rank; None where that fails."""
        path = self._folder / f"rank{self._world.rank:05d}.traceback"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path
        return None

    def tell(self, verdict: Verdict) -> None:
        """Writes it; it is printed when this process ends."""
        with suppress(OSError):
            self._found = (verdict, verdict.write(self._folder, self._world.host))

    def is_done(self, verdict: Verdict) -> bool:
        """Waits for the rank that speaks for this host: the end of other processes would tear it out of its verdict."""
        end = running_time() + _SPOKEN_S
        while not (is_written := verdict.is_written(self._folder, self._world.host)) and running_time() < end:
            time.sleep(_LOOK_S)
        return is_written

    def tell_failure(self, error: FirstError, *, is_told: bool) -> None:
        """``leave_verdict``; it is printed when this process ends. Never raises."""
        if self.has_judged:
            return
        try:
            left = leave_verdict(
                error,
                is_told=is_told,
                world=self._world,
                run_id=self._plane.run_id,
                peers=self._board.peers,
                last_seen=self._board.last_seen,
                folder=self._folder,
            )
        except Exception:  # on the way out: the error itself must be seen
            log.exception("rank %d: the verdict cannot be written", self._world.rank)
            return
        self._found = left or self._found

    def tell_peers(self, verdict: Verdict) -> None:
        """Makes the verdict the job's first error: the end of this process must not look like the cause elsewhere."""
        kind = PeerLost if verdict.kind == "peer_lost" else HangDetected
        error = kind(f"{JUDGED}{verdict.render()}", verdict.culprits)
        error.has_verdict = True
        told = verdict if self._board.is_few else verdict.shortened()

        def tell() -> None:
            with suppress(PeerError):
                self._line.send(f"watchdog/verdict/{self._world.rank}", told.to_json().encode())
                self._plane.report_failure(error)

        _within(_STORE_S, tell)

    def settle(self, verdict: Verdict) -> Verdict:
        """Makes all ranks that judge together give one verdict, the first: whoever has judged may end at once."""
        told: list[bytes] = []

        def claim() -> None:
            with suppress(PeerError, RuntimeError):
                told.append(self._line.claim("watchdog/together", verdict.to_json().encode()))
                self._line.append(_SETTLED, f"{self._world.rank},".encode())

        _within(_TOLD_S, claim)
        return Verdict.from_json(told[0]) if told else verdict

    def await_settled(self, ranks: set[int]) -> None:
        """Keeps the process that serves the store until these ranks have the verdict that all give."""
        if self._world.rank != self._plane.host_rank:
            return
        others = {rank for rank in ranks if self._board.is_few or rank < NUM_READERS} - {self._world.rank}
        end = running_time() + _SPOKEN_S
        with suppress(PeerError, RuntimeError):
            while running_time() < end:
                told = (self._line.read(_SETTLED) or b"").split(b",")
                if others <= {int(rank) for rank in told if rank}:
                    return
                time.sleep(_LOOK_S)

    def told_by(self, rank: int) -> Verdict | None:
        """The verdict that a rank has told; None where it cannot be had in time."""
        told: list[bytes | None] = []

        def read() -> None:
            with suppress(PeerError, RuntimeError):
                told.append(self._line.read(f"watchdog/verdict/{rank}"))

        _within(_TOLD_S, read)
        return Verdict.from_json(told[0]) if told and told[0] is not None else None


def _within(seconds: float, asks: Callable[[], None]) -> None:
    """Asks on a thread of its own: where the process that served the store has ended, nobody may answer."""
    asker = threading.Thread(target=asks, daemon=True)
    asker.start()
    asker.join(timeout=seconds)
