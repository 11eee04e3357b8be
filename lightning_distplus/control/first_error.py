"""The first error of a job: who told it, and the thread that hears of it."""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from lightning_distplus._compat import Store, clone_store
from lightning_distplus.control.secret import Secret, SignedStore, words_of
from lightning_distplus.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    DistplusError,
    DivergenceError,
    HangDetected,
    PeerError,
    PeerFailed,
    PeerLost,
    PeerMissing,
    PreflightError,
    RendezvousError,
    SaveFailed,
    message_of,
)
from lightning_distplus.process import until
from lightning_distplus.world import World

log = logging.getLogger(__name__)

_KEY = "first-error"
_HEARD_BY = "first-error/heard-by"
_TEXT_BYTES = 64 << 10
# What one rank finds out about what is no rank's own: whoever hears of it raises the same.
_SHARED_TYPES = (CheckpointCorrupt, CheckpointMismatch, PreflightError, RendezvousError)
_SHARED: dict[str, type[DistplusError]] = {error.__name__: error for error in _SHARED_TYPES}
# And about others.
_VERDICT_TYPES = (PeerMissing, PeerLost, HangDetected)
_VERDICTS: dict[str, type[PeerError]] = {error.__name__: error for error in _VERDICT_TYPES}
_NAMES_RANKS = (*_VERDICT_TYPES, SaveFailed, DivergenceError)
_FOR_EVER = timedelta(days=3650)
_JOIN_S = 2.0
_HEARD_BY_ALL_S = 2.0
_HEARD_POLL_S = 0.01
_FORGED_PAUSE_S = 0.1  # between two rings of a bell that no error follows


@dataclass(frozen=True, kw_only=True)
class FirstError:
    """The first error of the job, as its rank told it."""

    rank: int
    host: str
    pid: int
    type: str
    message: str
    traceback: str
    ranks: list[int]
    """The culprits: this rank, or those whom its error names."""
    differs: dict[str, Any] = field(default_factory=dict)
    """Of a ``DivergenceError``: ``field``, and ``values`` by rank as text."""
    at: float
    """Unix time in seconds, by the clock of that rank."""
    place: dict[str, Any] = field(default_factory=dict)
    """Where that rank was: ``phase``, ``operation``, ``global_step``, ``location``."""
    has_verdict: bool = False
    """``DistplusError.has_verdict``."""

    @classmethod
    def of(cls, error: BaseException, world: World, place: dict[str, Any] | None = None) -> FirstError:
        """This rank's error."""
        return cls(
            rank=world.rank,
            host=world.host,
            pid=world.pid,
            type=type(error).__name__,
            message=message_of(error)[:_TEXT_BYTES],
            traceback="".join(traceback.format_exception(error))[-_TEXT_BYTES:],
            ranks=error.ranks if isinstance(error, _NAMES_RANKS) else [world.rank],
            differs=_differs(error) if isinstance(error, DivergenceError) else {},
            at=time.time(),
            place=place or {},
            has_verdict=getattr(error, "has_verdict", False),
        )

    @property
    def is_shared(self) -> bool:
        """Whether all ranks raise the same: one has found it out about what is no rank's own, such as a checkpoint."""
        return self.type in _SHARED

    def describe(self) -> str:
        """The error in one line, as its peers show it."""
        return f"Rank {self.rank} (host {self.host}, pid {self.pid}) failed first: {self.type}: {self.message}"

    def as_heard(self) -> DistplusError:
        """The error that a peer raises: what this rank has found out about others, or that this rank has failed."""
        told = f"{self.message} (Told by rank {self.rank}, host {self.host}, pid {self.pid}.)"
        if verdict := _VERDICTS.get(self.type):
            return verdict(told, self.ranks)
        if shared := _SHARED.get(self.type):
            return shared(told)
        if self.type == DivergenceError.__name__:
            values = {int(rank): value for rank, value in self.differs["values"].items()}
            return DivergenceError(told, ranks=self.ranks, field=self.differs["field"], values=values)
        return PeerFailed(f"{self.describe()}\n{self.traceback}", [self.rank])


def _differs(error: DivergenceError) -> dict[str, Any]:
    """Numbers and texts stay what they are; everything else travels as text."""
    values = {rank: one if isinstance(one, (int, float, str)) else repr(one) for rank, one in error.values.items()}
    return {"field": error.field, "values": values}


class Listener:
    """Waits for the first error on a thread and a connection of its own, without traffic while nothing happens.

    The thread waits for a key of its own rank, its bell; whoever reports an error sets that key for every rank. A ring
    is believed only where an error follows that this job has signed. The connection is made when the thread starts:
    most control planes of a process never listen, and one host serves those of all ranks.
    """

    def __init__(self, store: Store, world: World, secret: Secret) -> None:
        self._store = store
        self._world = world
        self._secret = secret
        self._heard_by = secret.entries(_HEARD_BY)
        self._thread: threading.Thread | None = None
        self._rounds = 0
        self._is_stopping = False
        self.heard: FirstError | None = None

    def start(self) -> None:
        """Starts the thread; idempotent."""
        if self._thread is not None or self.heard is not None:
            return
        self._rounds += 1
        self._is_stopping = False
        self._thread = threading.Thread(
            target=self._listen, args=(clone_store(self._store),), name="distplus-control", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; idempotent, and quiet when the store is gone."""
        if self._thread is None:
            return
        self._is_stopping = True
        bell = self._bell(self._world.rank, self._rounds)
        with suppress(RuntimeError):
            listens = self._thread.is_alive()
            self._store.set(bell, b"stop")
            self._thread.join(timeout=_JOIN_S)
            if listens and not self._thread.is_alive():  # the store answers; one that is silent would hold us for ever
                self._store.delete_key(bell)
        self._thread = None

    def report(self, error: FirstError, *, to: Iterable[int]) -> FirstError:
        """Tells all ranks, and returns the error that won: the first one.

        A process that serves the store stays until those ``to`` whom it matters have heard.
        """
        winner = SignedStore(self._store, self._secret).claim(_KEY, json.dumps(asdict(error)).encode())
        self.heard = FirstError(**words_of(winner))
        if self.heard.rank == self._world.rank:
            for rank in self._world.ranks:
                for number in (self._rounds, self._rounds + 1):  # a peer may be one run ahead
                    self._store.set(self._bell(rank, number), b"error")
            self._store.check([_KEY])  # a round trip: what was set before it has arrived
        else:  # it has heard now, and may end before its thread can say so
            self._say_heard(self._store)
        culprits = () if self.heard.differs else self.heard.ranks  # they may be gone; ranks that differ are there
        self._await_listeners(set(to) - {self._world.rank, self.heard.rank, *culprits})
        return self.heard

    def _bell(self, rank: int, number: int) -> str:
        return f"bell/{rank}/{number}"

    def _listen(self, store: Store) -> None:
        bell = self._bell(self._world.rank, self._rounds)
        with suppress(RuntimeError):  # the store is gone: the calling thread finds out where it asks for something
            while self.heard is None and not self._is_stopping:
                store.wait([bell], _FOR_EVER)
                if self._is_stopping:
                    return
                store.delete_key(bell)  # before the look: an error is there before it is rung for
                word = SignedStore(store, self._secret).read(_KEY)
                if word is None:  # a stranger rings
                    time.sleep(_FORGED_PAUSE_S)
                    continue
                self.heard = FirstError(**words_of(word))
                self._say_heard(store)

    def _say_heard(self, store: Store) -> None:
        store.append(_HEARD_BY, self._secret.entries(_HEARD_BY).entry(b"%d" % self._world.rank))

    def _await_listeners(self, ranks: set[int]) -> None:
        def have_heard() -> bool:
            return ranks <= {int(rank) for rank in self._heard_by.read(bytes(self._store.get(_HEARD_BY)))}

        if ranks:
            self._store.append(_HEARD_BY, "")  # so that it is there
            until(have_heard, _HEARD_BY_ALL_S, every_s=_HEARD_POLL_S)
