"""The control plane: keys and waits over the job's store, barriers and gathers of all ranks, the end of a run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_distplus._compat import PrefixStore, Store, clone_store
from lightning_distplus.control.exchange import DIRECT_RANKS, Exchange
from lightning_distplus.control.first_error import FirstError, Listener
from lightning_distplus.control.secret import Entries, Secret, SignedStore, words_of
from lightning_distplus.errors import DistplusError, PeerLost, PeerMissing
from lightning_distplus.process import (
    ProcessState,
    address_towards,
    boot_id,
    process_state,
    running_time,
    signal_of,
    start_time,
)
from lightning_distplus.world import LAUNCHER, World

log = logging.getLogger(__name__)

T = TypeVar("T")

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

# One who waits looks whether the others' processes are still there: a look takes some 30 microseconds a process.
_FIRST_LOOK_S = 0.2
_LOOK_SHARE = 0.1  # a longer wait looks less often
_LOOK_AT_LEAST_EVERY_S = 1.0
_ASK_LAUNCHER_EVERY_S = 1.0
_READ_AT_ONCE = 256  # so many small values make a message of some 100 KiB
_NAMED_RANKS = 16

_RANK = struct.Struct("<I")

MAX_MESSAGE_BYTES = 1 << 20

_CHUNK_BYTES = 4 << 20  # torch's store refuses values above 8 MiB


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The process behind a rank."""

    host: str
    pid: int
    started: int | None = None
    """``process.start_time`` of the process."""
    boot: str = ""
    """``process.boot_id`` of its host."""
    address: str = ""
    """Of its host, on the way to the job's store."""

    @classmethod
    def of(cls, world: World, store_host: str = "") -> Peer:
        """This process."""
        return cls(
            host=world.host,
            pid=world.pid,
            started=start_time(world.pid),
            boot=boot_id(),
            address=address_towards(store_host) if store_host else "",
        )

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host."""
        return bool(self.boot) and self.boot == boot_id()

    @classmethod
    def from_json(cls, data: bytes | str) -> Peer:
        """Reads an introduction."""
        return cls(**words_of(data))

    def to_json(self) -> str:
        """The introduction."""
        return json.dumps(asdict(self))

    def state(self) -> ProcessState:
        """What this host's system says of it; UNKNOWN for a process of another host."""
        return process_state(self.pid, self.started) if self.is_here else ProcessState.UNKNOWN

    def ended_by(self) -> str:
        """The signal that has ended it, as long as its host's system knows."""
        return signal_of(self.pid, self.started) if self.is_here else ""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


class Watcher(Protocol):
    """Looks around while this rank waits for others."""

    def while_waiting(self, elapsed_s: float) -> None:
        """Called between two looks of every wait; what it raises ends the wait."""


class Pause(Protocol):
    """Waits between two looks in the place of a sleep: ``Exchange``."""

    def rest(self, seconds: float) -> None:
        """Waits for about so long, or until there is something to look at."""


class Locator(Protocol):
    """Knows where this rank is in its run."""

    def place_of(self, error: BaseException) -> dict[str, Any]:
        """Where it has failed: ``FirstError.place``; never raises."""


class ControlPlane:
    """One process's end of the control plane. One thread at a time calls it; the first error is heard on a second one.

    Everybody who can reach the port can write to torch's store. What a rank says is signed with the secret of the job,
    and what nobody of the job has signed counts as not there.

    The store is prefixed with job and attempt already; where ``host_rank`` is None, a launcher serves it.
    """

    def __init__(self, store: Store, world: World, *, host_rank: int | None = 0, secret: Secret | None = None) -> None:
        self.world = world
        self._store = store
        self.secret = secret or Secret()
        self._signed = SignedStore(store, self.secret)
        self._second: Store | None = None
        self._connecting = threading.Lock()
        self.host_rank = host_rank
        self._parent = os.getppid()
        self._ask_launcher_at = 0.0
        self._peers: dict[int, Peer] = {}
        self.watcher: Watcher | None = None
        self.locator: Locator | None = None
        # A store serves one call at a time, so that the listener has a connection of its own.
        self._listener = Listener(store, world, self.secret)
        self.is_attended = False
        """Whether somebody sits at a rank of this job, with a terminal or a debugger."""
        self.run_id = ""
        """Names the run in events and verdicts, alike on all ranks and in all attempts."""
        self.attempt = 0
        """How often the job was started before, alike on all ranks."""
        self.secret_file: Path | None = None
        """Where this process has left the secret for the others; removed at the end."""
        self._calls: Counter[str] = Counter()
        self._waits_for = ""

    def store_for(self, name: str) -> Store:
        """A store with keys and a connection of its own, for a process group."""
        return PrefixStore(name, clone_store(self._store))

    def second_line(self) -> ControlPlane:
        """The same plane over another connection, for other threads.

        A rank has four: that of its training, over which errors are reported too; this one, so that no step waits
        behind the watchdog or a save; the listener's and the default process group's, which wait in the store.
        """
        with self._connecting:
            self._second = self._second or clone_store(self._store)
        line = ControlPlane(self._second, self.world, host_rank=self.host_rank, secret=self.secret)
        line.run_id = self.run_id
        line._peers = self._peers  # what one has learnt, the others know when the store is gone
        return line

    def listen(self) -> None:
        """Starts to listen for the first error; idempotent."""
        self._listener.start()

    def stop_listening(self) -> None:
        """Ends the listening thread; idempotent."""
        self._listener.stop()
        if self.secret_file is not None:
            self.secret_file.unlink(missing_ok=True)

    # -- all ranks ---------------------------------------------------------------------------------------------------

    def barrier(self, name: str, deadline: timedelta) -> None:
        """Returns on every rank once all of them have called it.

        Raises:
            PeerMissing: Some ranks never called; ``.ranks`` names them.
            PeerFailed: A peer raised meanwhile.
            PeerLost: The process that serves the store is gone.
        """
        key = self._fresh_key("barrier", name)
        what = f"the barrier {name!r}"
        self._leave(key, self._arrive(key, deadline, what=what), deadline, what=what)

    def gather(self, name: str, value: bytes, deadline: timedelta) -> list[bytes]:
        """Every rank's value, of at most 1 MiB, in rank order, on every rank.

        Raises:
            ValueError: The value is too large.
            PeerMissing, PeerFailed, PeerLost: As for a barrier.
        """
        if len(value) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"The message {name!r} of rank {self.world.rank} has {len(value)} bytes; the control plane takes at "
                f"most {MAX_MESSAGE_BYTES}. Send tensors through a process group."
            )
        key = self._fresh_key("gather", name)
        keys = [f"{key}/{rank}" for rank in self.world.ranks]
        what = f"the gather {name!r}"
        self.send(keys[self.world.rank], value)
        relayed: list[str] = []
        if self.world.size <= DIRECT_RANKS:
            values = self._read_all(keys, deadline, what)
        else:
            values, relayed = self._read_relayed(key, keys, deadline, what)
        # Everything is here. A peer that draws a conclusion from it and raises is heard at the next wait: until then
        # this rank comes to the same conclusion by itself, with values and evidence of its own.
        with suppress(DistplusError):
            self._leave(key, [*keys, *relayed], deadline, what=what)
        return values

    def gather_json(self, name: str, value: dict[str, Any], deadline: timedelta) -> list[dict[str, Any]]:
        """``gather`` for plain dictionaries."""
        return [words_of(item) for item in self.gather(name, json.dumps(value).encode(), deadline)]

    def farewell(self, deadline: timedelta) -> None:
        """The end of a run: rank 0, whose process may serve the store, waits until nobody asks for anything any more.

        Ends the listening; rank 0 listens while it waits, because a peer may still fail.

        Raises:
            PeerMissing: Some ranks did not take leave.
            PeerFailed: A peer raised meanwhile.
        """
        if self.world.rank != 0:
            self.stop_listening()
        try:
            self._leave(self._fresh_key("farewell", "all"), [], deadline, what="the end of the run")
        finally:
            self.stop_listening()

    def await_ends(self, deadline: timedelta) -> None:
        """Says that the run has ended on this rank, and waits until it has ended, or failed, on all of them.

        Raises:
            PeerMissing: Some ranks have not ended theirs.
            PeerFailed, PeerLost: A peer raised, or was killed, in the last hooks of its run.
        """
        key, what = self._fresh_key("ended", "all"), "the end of the run on all ranks"
        self._arrive(key, deadline, what=what)

    # -- keys --------------------------------------------------------------------------------------------------------

    def send(self, key: str, value: bytes) -> None:
        """Sets one key, signed; never waits."""
        self._call(f"sending {key!r}", self._signed.set, key, value)

    def read(self, key: str) -> bytes | None:
        """One key's value, or None where no rank has sent it; never waits."""
        return self._call(f"reading {key!r}", self._signed.read, key)

    def read_each(self, keys: Sequence[str]) -> list[bytes | None]:
        """What ``read`` finds under each key. Of hundreds, halves that are all there cost one or two round trips."""
        if len(keys) <= 1:
            return [self.read(key) for key in keys]
        if len(keys) <= _READ_AT_ONCE and self._call(f"reading {keys[0]!r}", self._store.check, list(keys)):
            return self._receive(keys)
        middle = len(keys) // 2  # a read of many waits for the one that is not there
        return [*self.read_each(keys[:middle]), *self.read_each(keys[middle:])]

    def claim(self, key: str, value: bytes) -> bytes:
        """Sets a key that no rank has set yet, signed, and returns what stands there then: the first one wins."""
        return self._call(f"claiming {key!r}", self._signed.claim, key, value)

    def sign_in(self, key: str) -> None:
        """Adds this rank to those that have signed a key; never waits."""
        self.append(key, self.secret.entries(key).entry(_RANK.pack(self.world.rank)))

    def signed_in(self, key: str, entries: Entries | None = None) -> set[int]:
        """The ranks that have signed a key; with its ``entries``, where it is asked for often, each is checked once."""
        found = (entries or self.secret.entries(key)).read(self.read_unsigned(key) or b"")
        return {_RANK.unpack(entry)[0] for entry in found}

    def delete(self, key: str) -> None:
        """Deletes a key, where it is."""
        self._call(f"deleting {key!r}", self._store.delete_key, key)

    def _receive(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads keys that are known to be there; None where no rank has set them."""
        values = self._call(f"reading {keys[0]!r}", self._store.multi_get, list(keys))
        return [self.secret.open(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

    # Nothing that is read or counted by these may end, signal or name anything.

    def send_unsigned(self, key: str, value: bytes) -> None:
        """Sets one key; never waits."""
        self._call(f"sending {key!r}", self._store.set, key, value)

    def read_unsigned(self, key: str) -> bytes | None:
        """One key's value, whoever has set it, or None; never waits."""
        return self._call(f"reading {key!r}", self._signed.read_raw, key)

    def append(self, key: str, value: bytes) -> None:
        """Adds to the value of one key; never waits."""
        self._call(f"sending {key!r}", self._store.append, key, value)

    def _call(self, what: str, method: Callable[..., T], *arguments: Any) -> T:
        """Calls the store; a broken connection is the loss of the rank that serves it."""
        try:
            return method(*arguments)
        except dist.DistNetworkError as error:
            self.raise_if_peer_failed()  # the store may have gone because of what we have heard
            ranks = [LAUNCHER] if self.host_rank is None else [self.host_rank]
            who = "the launcher's agent" if self.host_rank is None else f"rank {self.host_rank}"
            raise PeerLost(
                f"Rank {self.world.rank} lost the connection to {who}, which serves the job's store, during "
                f"{self._waits_for or what}. "
                "Its process or its host is gone; look at the last lines of its log.",
                ranks,
            ) from error

    # -- the first error ---------------------------------------------------------------------------------------------

    @property
    def first_error(self) -> FirstError | None:
        """The first error of the job, as far as this process has heard; never waits."""
        return self._listener.heard

    def report_failure(self, error: BaseException, *, to: Iterable[int] | None = None) -> FirstError | None:
        """Tells all ranks that this one failed; the first report of a job wins, and is returned. Never raises.

        Where this process serves the store, it stays until those ``to`` whom it matters have heard: all, by default.
        None: the store is out of reach.
        """
        with suppress(RuntimeError):
            return self._listener.report(
                self.own_error(error), to=(to or self.world.ranks) if self.world.rank == self.host_rank else ()
            )
        return self.first_error

    def own_error(self, error: BaseException) -> FirstError:
        """This rank's error, as it would tell it."""
        return FirstError.of(error, self.world, {} if self.locator is None else self.locator.place_of(error))

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

    @property
    def longest_pause_s(self) -> float:
        """Between two looks of one who waits for other ranks."""
        return min(max(_PAUSE_CEILING_S, _PAUSE_CEILING_PER_RANK_S * self.world.size), _LONGEST_PAUSE_S)

    def poll(
        self,
        is_complete: Callable[[], bool],
        deadline: timedelta,
        *,
        what: str,
        arrived: Callable[[], set[int]],
        pause: Pause | None = None,
    ) -> None:
        """Asks until the answer is yes; ``arrived`` tells, for the message, which ranks did come.

        Raises:
            PeerMissing, PeerFailed, PeerLost: As for a barrier.
        """
        floor = max(_PAUSE_FLOOR_S, _PAUSE_FLOOR_PER_RANK_S * (self.world.size - _FEW_RANKS))
        ceiling = self.longest_pause_s
        start = running_time()
        look_at_s = _FIRST_LOOK_S
        outer, self._waits_for = self._waits_for, what
        try:
            while not is_complete():
                if self.first_error is not None and not is_complete():  # a peer may have failed over what all have sent
                    self.raise_if_peer_failed()
                elapsed = running_time() - start
                if self.watcher is not None:
                    self.watcher.while_waiting(elapsed)
                if elapsed >= look_at_s:
                    look_at_s = elapsed + min(max(_FIRST_LOOK_S, _LOOK_SHARE * elapsed), _LOOK_AT_LEAST_EVERY_S)
                    self.raise_if_gone(what, arrived)
                left = deadline.total_seconds() - elapsed
                if left <= 0:
                    missing = set(self.world.ranks) - arrived()
                    if is_complete():  # the last one came while we looked for it
                        return
                    raise self._missing(missing, deadline, what)
                seconds = min(max(floor, _PAUSE_SHARE * elapsed), ceiling, left)
                time.sleep(seconds) if pause is None else pause.rest(seconds)
        finally:
            self._waits_for = outer

    def raise_if_gone(self, what: str, arrived: Callable[[], set[int]] = set) -> None:
        """Raises when the process of a rank that has not ``arrived`` is gone, as far as this host can tell.

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

    def raise_if_launcher_gone(self) -> None:
        """Asks the store, once a second, where a launcher serves it: shared memory does not tell of its end.

        Raises:
            PeerLost: The launcher is gone.
        """
        if self.host_rank is None and (now := time.monotonic()) >= self._ask_launcher_at:
            self._ask_launcher_at = now + _ASK_LAUNCHER_EVERY_S
            self.read("launcher")

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

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fresh_key(self, kind: str, name: str) -> str:
        """A new key for each call of the same name; all ranks count alike."""
        self._calls[f"{kind}/{name}"] += 1
        return f"{kind}/{name}/{self._calls[f'{kind}/{name}']}"

    def _arrive(self, key: str, deadline: timedelta, *, what: str) -> list[str]:
        """Says that this rank has come, and waits until all have; the keys of that."""
        exchange = Exchange(self, key)
        exchange.post(b"")
        exchange.collect(deadline, what=what)
        return exchange.first_keys

    def _present(self, keys: Sequence[str]) -> set[int]:
        """Which of the keys, one per rank, are there."""
        return {rank for rank, value in enumerate(self.read_each(keys)) if value is not None}

    def _read_all(
        self, keys: Sequence[str], deadline: timedelta, what: str, arrived: Callable[[], set[int]] | None = None
    ) -> list[bytes]:
        values: list[bytes] = []

        def is_complete() -> bool:
            if not self._call(f"reading {keys[0]!r}", self._store.check, list(keys)):
                return False
            signed = [value for value in self._receive(keys) if value is not None]
            values[:] = signed
            return len(signed) == len(keys)  # else a stranger has set one: its rank is still to come

        self.poll(is_complete, deadline, what=what, arrived=arrived or (lambda: self._present(keys)))
        return values

    def _read_relayed(
        self, key: str, keys: Sequence[str], deadline: timedelta, what: str
    ) -> tuple[list[bytes], list[str]]:
        """Above 64 ranks rank 0 reads all values and the others read its collection: N messages instead of N * N.

        Returns:
            The values, and the keys of the collection.
        """
        sizes_key, arrived, values = f"{key}/sizes", partial(self._relayed, keys), list[bytes]()
        if self.world.rank == 0:
            values = self._read_all(keys, deadline, what)
            sizes = [len(value) for value in values]
        else:
            sizes = json.loads(*self._read_all([sizes_key], deadline, what, arrived))
        chunks = {f"{key}/chunk/{start}": start for start in range(0, sum(sizes), _CHUNK_BYTES)}
        if self.world.rank == 0:
            whole = b"".join(values)
            for chunk, start in chunks.items():
                self.send(chunk, whole[start : start + _CHUNK_BYTES])
            self.send(sizes_key, json.dumps(sizes).encode())
        else:
            whole = b"".join(self._read_all([*chunks], deadline, what, arrived) if chunks else ())
            values = [whole[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        return values, [*chunks, sizes_key]

    def _relayed(self, keys: Sequence[str]) -> set[int]:
        """The ranks that have done their part; where all values are there, rank 0 has not passed them on."""
        present = self._present(keys)
        return present - {0} if len(present) == len(keys) else present

    def _leave(self, key: str, keys: Iterable[str], deadline: timedelta, *, what: str) -> None:
        """Rank 0 leaves a call last and deletes its keys.

        So it can never end, and take the store with it, while another rank still reads. The last thing that the others
        do is to append, which does not wait for an answer.
        """
        left = f"{key}/left"
        if self.world.rank != 0:
            self.sign_in(left)
            return
        entries = self.secret.entries(left)
        self.poll(
            lambda: len(self.signed_in(left, entries)) == self.world.size - 1,
            deadline,
            what=what,
            arrived=lambda: {0, *self.signed_in(left, entries)},
        )
        for used in (*keys, left):
            self.delete(used)


# -- the end of a run --------------------------------------------------------------------------------------------------


def part(plane: ControlPlane, deadline: timedelta, *, has_failed: bool) -> None:
    """Takes leave of the peers, so that nobody asks a store that is gone; never raises what a peer does.

    A rank that ends with an error waits for nobody.
    """
    if num_ignored := plane.secret.num_ignored:
        log.warning(
            "rank %d: %d messages at the job's store that nobody of this job has signed were ignored",
            plane.world.rank,
            num_ignored,
        )
    if has_failed:
        plane.stop_listening()
        return
    try:
        plane.farewell(deadline)
    except DistplusError as error:
        log.warning("rank %d ends alone: %s", plane.world.rank, error)


def end_together(plane: ControlPlane, deadline: timedelta, *, have_ended: Callable[[Collection[int]], bool]) -> bool:
    """Waits until the run has ended on all ranks: one that fails in its last hooks fails the others too.

    Ranks of which all ``have_ended`` their run, as far as is known, may leave before this one.

    Returns:
        Whether the others are there to take leave of.

    Raises:
        PeerFailed, PeerLost: A peer raised, or was killed, before its run had ended.
    """
    try:
        plane.await_ends(deadline)
    except PeerMissing as error:
        log.warning("rank %d ends alone: %s", plane.world.rank, error)
    except PeerLost as error:
        if not have_ended(error.ranks):
            raise
    else:
        return True
    plane.stop_listening()
    return False
