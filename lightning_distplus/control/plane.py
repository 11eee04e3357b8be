"""The calls of all ranks: named barriers and gathers over a key-value store, and the end of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning_distplus._compat import PrefixStore, Store
from lightning_distplus.control.line import DIRECT_RANKS, Line
from lightning_distplus.control.secret import words_of
from lightning_distplus.errors import DistplusError
from lightning_distplus.world import World

__all__ = ["MAX_MESSAGE_BYTES", "ControlPlane"]

MAX_MESSAGE_BYTES = 1 << 20

_COMBINED_BYTES = 4 << 20  # torch's store refuses values above 8 MiB


class ControlPlane(Line):
    """One process's end of the control plane. One thread at a time calls it; the first error is heard on a second one.

    The trust model is that of torch's own store: everybody who can reach the port is trusted, so the port belongs on a
    private network.

    Args:
        store: The job's store, already prefixed with job and attempt.
        world: This process.
        host_rank: The rank whose process serves the store, or None where a launcher does.
    """

    def __init__(self, store: Store, world: World, *, host_rank: int | None = 0) -> None:
        super().__init__(store, world, host_rank=host_rank)
        self.is_attended = False
        """Whether somebody sits at a rank of this job, with a terminal or a debugger."""
        self.run_id = ""
        """Names the run in events and verdicts, alike on all ranks and in all attempts."""
        self._calls: Counter[str] = Counter()

    def store_for(self, name: str) -> Store:
        """A store with keys and a connection of its own, for a process group."""
        return PrefixStore(name, self._store.clone())

    def second_line(self) -> ControlPlane:
        """The same plane over another connection, for another thread."""
        line = ControlPlane(self._store.clone(), self.world, host_rank=self.host_rank)
        line.run_id = self.run_id
        line._peers = self._peers  # what one has learnt, the others know when the store is gone
        return line

    def listen(self) -> None:
        """Starts to listen for the first error; idempotent."""
        self._listener.start()

    def stop_listening(self) -> None:
        """Ends the listening thread; idempotent."""
        self._listener.stop()

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
        self._call(what, self._store.append, f"{key}/arrived", f"{self.world.rank},")
        if self._call(what, self._store.add, f"{key}/count", 1) == self.world.size:
            self._call(what, self._store.set, f"{key}/open", b"1")
        self.wait_for([f"{key}/open"], deadline, what=what, arrived=lambda: self._ranks_in(f"{key}/arrived"))

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
        self._call(what, self._store.append, f"{key}/arrived", f"{self.world.rank},")
        if self._call(what, self._store.add, f"{key}/count", 1) == self.world.size:
            self._call(what, self._store.set, f"{key}/open", b"1")
        self.wait_for([f"{key}/open"], deadline, what=what, arrived=lambda: self._ranks_in(f"{key}/arrived"))
        self._leave(key, [f"{key}/{part}" for part in ("arrived", "count", "open")], deadline, what=what)

    def gather(self, name: str, value: bytes, deadline: timedelta) -> list[bytes]:
        """Every rank's value, in rank order, on every rank.

        Args:
            name: What is gathered; the same on all ranks.
            value: At most 1 MiB.
            deadline: How long to wait for the slowest rank.

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
        read = self._read_all if self.world.size <= DIRECT_RANKS else self._read_relayed
        values = read(key, keys, deadline, what)
        # Everything is here. A peer that draws a conclusion from it and raises is heard at the next wait: until then
        # this rank comes to the same conclusion by itself, with values and evidence of its own.
        with suppress(DistplusError):
            self._leave(key, keys, deadline, what=what)
        return values

    def gather_json(self, name: str, value: dict[str, Any], deadline: timedelta) -> list[dict[str, Any]]:
        """``gather`` for plain dictionaries."""
        return [words_of(item) for item in self.gather(name, json.dumps(value).encode(), deadline)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fresh_key(self, kind: str, name: str) -> str:
        """A new key for each call of the same name; all ranks count alike."""
        self._calls[f"{kind}/{name}"] += 1
        return f"{kind}/{name}/{self._calls[f'{kind}/{name}']}"

    def _ranks_in(self, key: str) -> set[int]:
        """The ranks that have appended themselves to a key."""
        return {int(rank) for rank in (self.read(key) or b"").split(b",") if rank}

    def _present(self, keys: Sequence[str]) -> set[int]:
        """Which of the keys, one per rank, are there; halves that are complete cost one question."""

        def present(first: int, last: int) -> set[int]:
            if self._call(f"reading {keys[first]!r}", self._store.check, list(keys[first:last])):
                return set(range(first, last))
            middle = (first + last) // 2
            return present(first, middle) | present(middle, last) if last - first > 1 else set()

        return present(0, len(keys))

    def _read_all(self, key: str, keys: Sequence[str], deadline: timedelta, what: str) -> list[bytes]:
        self.wait_for(keys, deadline, what=what, arrived=lambda: self._present(keys))
        return self.receive(keys)

    def _read_relayed(self, key: str, keys: Sequence[str], deadline: timedelta, what: str) -> list[bytes]:
        """Above 64 ranks rank 0 reads all values and the others read its collection: N messages instead of N * N."""
        if self.world.rank == 0:
            values = self._read_all(key, keys, deadline, what)
            chunks = _pack(values)
            for number, chunk in enumerate(chunks):
                self.send(f"{key}/chunk/{number}", chunk)
            self.send(f"{key}/chunks", str(len(chunks)).encode())
            return values
        self.wait_for([f"{key}/chunks"], deadline, what=what, arrived=lambda: self._relayed(keys))
        count = int(self.receive([f"{key}/chunks"])[0])
        return _unpack(self.receive([f"{key}/chunk/{number}"])[0] for number in range(count))

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
            self._call(what, self._store.append, left, f"{self.world.rank},")
            return
        self.poll(
            lambda: len(self._ranks_in(left)) == self.world.size - 1,
            deadline,
            what=what,
            arrived=lambda: {0, *self._ranks_in(left)},
        )
        chunks = range(int(self.read(f"{key}/chunks") or 0))
        for used in [*keys, *(f"{key}/chunk/{number}" for number in chunks), f"{key}/chunks", left]:
            self.delete(used)


def _pack(values: Sequence[bytes]) -> list[bytes]:
    """Length-prefixed values, cut into chunks that the store takes."""
    whole = b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return [whole[start : start + _COMBINED_BYTES] for start in range(0, len(whole), _COMBINED_BYTES)]


def _unpack(chunks: Iterable[bytes]) -> list[bytes]:
    whole = b"".join(chunks)
    values, start = [], 0
    while start < len(whole):
        size = int.from_bytes(whole[start : start + 4], "little")
        values.append(whole[start + 4 : start + 4 + size])
        start += 4 + size
    return values
