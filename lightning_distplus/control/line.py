"""One process's end of the job's store: keys, the first error of a peer, and waits that name who is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_distplus._compat import Store
from lightning_distplus.control.first_error import FirstError, Listener
from lightning_distplus.control.peers import Peer
from lightning_distplus.errors import PeerLost, PeerMissing
from lightning_distplus.process import ProcessState, running_time
from lightning_distplus.world import LAUNCHER, World

__all__ = ["DIRECT_RANKS", "Line"]

T = TypeVar("T")

DIRECT_RANKS = 64
"""So many ranks all read what all others say; of more, a few do."""

# A wait polls, because torch's store writes a warning to stderr for every wait that times out, and because Ctrl-C and a
# peer's error must end it. The pause grows with the time already waited: the overshoot stays below a tenth.
_PAUSE_FLOOR_S = 5e-6
_PAUSE_SHARE = 0.1
_PAUSE_CEILING_S = 0.1
# Many ranks ask less often: one store answers them all, some 50,000 questions in a second.
_FEW_RANKS = 16
_PAUSE_FLOOR_PER_RANK_S = 50e-6
_PAUSE_CEILING_PER_RANK_S = 0.5e-3
_LONGEST_PAUSE_S = 0.5

_NOTHING = b"\0nothing"
# One who waits looks whether the others' processes are still there: a look takes some 30 microseconds a process.
_FIRST_LOOK_S = 0.2
_LOOK_SHARE = 0.1  # a longer wait looks less often
_LOOK_AT_LEAST_EVERY_S = 1.0
_READ_AT_ONCE = 256  # so many small values make a message of some 100 KiB
_NAMED_RANKS = 16


class Line:
    """Messages of one rank, and its waits for the others. One thread at a time uses it.

    Args:
        store: The job's store, already prefixed with job and attempt.
        world: This process.
        host_rank: The rank whose process serves the store, or None where a launcher does.
    """

    def __init__(self, store: Store, world: World, *, host_rank: int | None = 0) -> None:
        self.world = world
        self._store = store
        self.host_rank = host_rank
        self._parent = os.getppid()
        self._peers: dict[int, Peer] = {}
        self.on_wait: Callable[[float], None] | None = None
        """Called between two looks of every wait, with the seconds that it has lasted."""
        self.place_of: Callable[[BaseException], dict[str, Any]] = lambda error: {}
        """Tells where this rank was when it failed: ``FirstError.place``; never raises."""
        # A store serves one call at a time, so that the listener has a connection of its own.
        self._listener = Listener(store, world)

    # -- keys --------------------------------------------------------------------------------------------------------

    def send(self, key: str, value: bytes) -> None:
        """Sets one key; never waits."""
        self._call(f"sending {key!r}", self._store.set, key, value)

    def append(self, key: str, value: bytes) -> None:
        """Adds to the value of one key; never waits."""
        self._call(f"sending {key!r}", self._store.append, key, value)

    def add(self, key: str, number: int) -> int:
        """Adds to the counter of one key and returns the sum."""
        return int(self._call(f"counting {key!r}", self._store.add, key, number))

    def claim(self, key: str, value: bytes) -> bytes:
        """Writes a key that nobody has written yet, and returns what stands there then: the first one wins."""
        written: bytes = self._call("write", self._store.compare_set, key, "", value.decode())
        return written

    def delete(self, key: str) -> None:
        """Deletes a key, where it is."""
        self._call(f"deleting {key!r}", self._store.delete_key, key)

    def receive(self, keys: Sequence[str]) -> list[bytes]:
        """Reads keys that are known to be there."""
        return [bytes(value) for value in self._call(f"reading {keys[0]!r}", self._store.multi_get, list(keys))]

    def read(self, key: str) -> bytes | None:
        """One key's value, or None where nobody has sent it; never waits.

        An exchange that cannot succeed answers with what is there, in one round trip; ``check`` and ``get`` take three.
        """
        value = bytes(self._call(f"reading {key!r}", self._store.compare_set, key, _NOTHING, _NOTHING))
        return None if value == _NOTHING else value

    def read_each(self, keys: Sequence[str]) -> list[bytes | None]:
        """What ``read`` finds under each key; one or two round trips for hundreds of keys that are there."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), _READ_AT_ONCE):
            some = list(keys[start : start + _READ_AT_ONCE])
            if len(some) > 1 and self._call(f"reading {some[0]!r}", self._store.check, some):
                found += self.receive(some)
            else:  # a read of many waits for the one that is not there
                found += [self.read(key) for key in some]
        return found

    def _call(self, what: str, method: Callable[..., T], *arguments: Any) -> T:
        """Calls the store; a broken connection is the loss of the rank that serves it.

        Raises:
            PeerLost: The connection broke.
        """
        try:
            return method(*arguments)
        except dist.DistNetworkError as error:
            self.raise_if_peer_failed()  # the store may have gone because of what we have heard
            ranks = [LAUNCHER] if self.host_rank is None else [self.host_rank]
            who = "the launcher's agent" if self.host_rank is None else f"rank {self.host_rank}"
            raise PeerLost(
                f"Rank {self.world.rank} lost the connection to {who}, which serves the job's store, during {what}. "
                "Its process or its host is gone; look at the last lines of its log.",
                ranks,
            ) from error

    # -- the first error ---------------------------------------------------------------------------------------------

    @property
    def first_error(self) -> FirstError | None:
        """The first error of the job, as far as this process has heard; never waits."""
        return self._listener.heard

    def report_failure(self, error: BaseException) -> FirstError | None:
        """Tells all ranks that this one failed; the first report of a job wins. Never raises.

        Returns:
            The error that won, or None when the store is out of reach.
        """
        with suppress(RuntimeError):
            return self._listener.report(self.own_error(error), is_host=self.world.rank == self.host_rank)
        return self.first_error

    def own_error(self, error: BaseException) -> FirstError:
        """This rank's error, as it would tell it."""
        return FirstError.of(error, self.world, self.place_of(error))

    def raise_if_peer_failed(self) -> None:
        """Raises when a peer has reported an error.

        Raises:
            PeerFailed: With the peer's traceback in the message.
            PeerMissing, PeerLost, HangDetected, DivergenceError: What the peer has found out about others.
        """
        error = self.first_error
        if error is not None and error.rank != self.world.rank:
            raise error.as_heard()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_for(self, keys: Sequence[str], deadline: timedelta, *, what: str, arrived: Callable[[], set[int]]) -> None:
        """Waits until all keys are there.

        Args:
            keys: What must be there.
            deadline: How long to wait.
            what: What is waited for, for the message.
            arrived: Called once the deadline has passed: the ranks that did come.

        Raises:
            PeerMissing, PeerFailed, PeerLost: As for a barrier.
        """
        self.poll(lambda: self._call(what, self._store.check, list(keys)), deadline, what=what, arrived=arrived)

    def poll(
        self, is_complete: Callable[[], bool], deadline: timedelta, *, what: str, arrived: Callable[[], set[int]]
    ) -> None:
        """Asks until the answer is yes; the arguments and errors are those of ``wait_for``."""
        size = self.world.size
        floor = max(_PAUSE_FLOOR_S, _PAUSE_FLOOR_PER_RANK_S * (size - _FEW_RANKS))
        ceiling = min(max(_PAUSE_CEILING_S, _PAUSE_CEILING_PER_RANK_S * size), _LONGEST_PAUSE_S)
        start = running_time()
        look_at_s = _FIRST_LOOK_S
        while not is_complete():
            if self.first_error is not None and not is_complete():  # a peer may have failed over what all have sent
                self.raise_if_peer_failed()
            elapsed = running_time() - start
            if self.on_wait is not None:
                self.on_wait(elapsed)
            if elapsed >= look_at_s:
                look_at_s = elapsed + min(max(_FIRST_LOOK_S, _LOOK_SHARE * elapsed), _LOOK_AT_LEAST_EVERY_S)
                self.raise_if_gone(what, arrived)
            left = deadline.total_seconds() - elapsed
            if left <= 0:
                missing = set(self.world.ranks) - arrived()
                if is_complete():  # the last one came while we looked for it
                    return
                raise self._missing(missing, deadline, what)
            time.sleep(min(max(floor, _PAUSE_SHARE * elapsed), ceiling, left))

    def raise_if_gone(self, what: str, arrived: Callable[[], set[int]] = set) -> None:
        """Raises when the process of a rank for which we wait is gone, as far as this host can tell.

        Args:
            what: What we wait for, for the message.
            arrived: Asked where a process is gone: the ranks for which we do not wait.

        Raises:
            PeerLost: ``.ranks`` names them.
        """
        gone = {rank for rank, peer in self.peers_nearby().items() if peer.state() is ProcessState.GONE}
        gone -= {self.world.rank, *(arrived() if gone else ())}
        if gone:
            names = ", ".join(self.describe_rank(rank) for rank in sorted(gone))
            if self.host_rank is None and os.getppid() != self._parent:
                raise PeerLost(
                    f"Rank {self.world.rank} waits for {what}. The launcher's process, pid {self._parent}, which has "
                    f"started this rank and served the job's store, is gone, and {names} with it. Look at the last "
                    "lines of the launcher's log and at dmesg.",
                    [LAUNCHER],
                )
            signals = sorted({name for rank in gone if (name := self._peers[rank].ended_by())})
            by = f"by {', '.join(signals)}" if signals else "(out of memory, a signal, a scheduler)"
            raise PeerLost(
                f"Rank {self.world.rank} waits for {what}, and the process of {names} is gone without an error of its "
                f"own: it was killed {by}. Look at the last lines of its log and at dmesg.",
                gone,
            )

    def peers_nearby(self) -> dict[int, Peer]:
        """The ranks of whose processes this host may know; among more than 64 those of this node."""
        return self.peers_of(self.world.ranks if self.world.size <= DIRECT_RANKS else self.world.node_ranks)

    def peers_of(self, ranks: Iterable[int]) -> dict[int, Peer]:
        """How these ranks have introduced themselves, of those that have; each is asked for once."""
        unknown = [rank for rank in ranks if rank not in self._peers]
        hellos = zip(unknown, self.read_each([f"hello/{rank}" for rank in unknown]), strict=True)
        self._peers |= {rank: Peer.from_json(hello) for rank, hello in hellos if hello is not None}
        return {rank: self._peers[rank] for rank in ranks if rank in self._peers}

    def _missing(self, missing: set[int], deadline: timedelta, what: str) -> PeerMissing:
        names = ", ".join(self.describe_rank(rank) for rank in sorted(missing)[:_NAMED_RANKS])
        more = f" and {len(missing) - _NAMED_RANKS} more" if len(missing) > _NAMED_RANKS else ""
        return PeerMissing(
            f"Rank {self.world.rank} waited {deadline.total_seconds():g} s for {what}: "
            f"{len(missing)} of {self.world.size} ranks did not come: {names}{more}. Look at the last lines of their "
            "logs; if they are only slow, raise this phase's deadline (timeout=Timeouts(...)).",
            missing,
        )

    def describe_rank(self, rank: int) -> str:
        """A rank with host and pid, where it has introduced itself."""
        peer = self.peers_of([rank]).get(rank)
        if peer is None:
            return f"rank {rank} (never seen, node {rank * self.world.num_nodes // self.world.size})"
        return f"rank {rank} ({peer})"
