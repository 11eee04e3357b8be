"""Where the launchers of several hosts agree on the attempt, and a host that comes late asks to be let in."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from lightning_distplus._compat import PrefixStore, Store, TCPStore
from lightning_distplus.control.rendezvous import is_local, listen_on
from lightning_distplus.control.secret import Secret, SignedStore, escaped

__all__ = ["HostsApart", "Meeting"]

_HOSTS_COME = timedelta(minutes=5)
_LOOK_EVERY_S = 1.0
_POLL_S = 0.1
_OTHERS_END_S = 10.0  # as long as an agent gives the ranks that outlive a peer


class HostsApart(Exception):
    """The hosts have not met, or the one that serves the store has left."""


class Meeting:
    """The launchers' own store, over all attempts of a job; the host that ``--rdzv`` names serves it.

    Attempts are numbered for the whole job, so that a host that comes late, or in the place of another, does not begin
    with the first. It waits while an attempt is under way, and asks for the next one.

    Args:
        endpoint: ``host:port``.
        job: The name of the job, the same on all hosts.

    Raises:
        HostsApart: The host that serves the store did not come within 5 minutes.
    """

    def __init__(self, endpoint: str, job: str) -> None:
        self._endpoint = endpoint
        self._num_hosts = 1
        self._known = 0
        host, _, port = endpoint.rpartition(":")
        with self._names_the_store():
            store, self._serves = _open(host, int(port))
        self._store: Store = PrefixStore(f"distplus-launch/{job}", store)
        self._secret = Secret.from_environment()
        self._signed = SignedStore(self._store, self._secret)

    def join(self, on_wait: Callable[[int], object]) -> int:
        """The number of the attempt to take part in; waits for the next one where one is under way.

        Args:
            on_wait: Called with the number of the attempt that is under way, before the wait.
        """
        with self._names_the_store():
            number = self._number()
            if self._signed.read(f"running/{number}") is not None:
                on_wait(number)
                self._signed.set(f"wanted/{number}", socket.gethostname().encode())
                while self._number() == number:
                    time.sleep(_LOOK_EVERY_S)
            return self._number()

    def begin(self, number: int, num_hosts: int) -> None:
        """Says that the ranks of an attempt are being started: who comes now waits for the next one."""
        self._num_hosts = num_hosts
        with self._names_the_store():
            self._signed.set(f"running/{number}", b"")

    def share(self, number: int, failures: Mapping[int, int], *, waits: bool) -> dict[int, int]:
        """The exit codes of the ranks that failed on all hosts.

        Args:
            number: The attempt, which has ended here.
            failures: Those of this host.
            waits: Whether to wait for the other hosts, as long as their ranks may take to end; not every host lives.
        """
        with self._names_the_store():
            key = f"failed/{number}"
            told = self._secret.entries(key)
            self._store.append(key, told.entry(json.dumps(sorted(failures.items())).encode()))

            def read() -> list[bytes]:
                return told.read(self._signed.read_raw(key) or b"")

            if waits:
                self._wait(lambda: len(read()) >= self._num_hosts)
            return dict(itertools.chain(*map(json.loads, read())))

    def leave(self, number: int) -> None:
        """Called at the end of the job; the host that serves the store waits a while for the others."""
        with contextlib.suppress(HostsApart), self._names_the_store():
            self._store.add(f"left/{number}", 1)
            if self._serves:
                self._wait(lambda: self._store.add(f"left/{number}", 0) >= self._num_hosts)

    def next(self, number: int) -> int:
        """The attempt after this one, which has ended here."""
        with self._names_the_store():
            if self._number() == number:
                self._signed.claim(f"attempt/{number + 1}", b"")
            return self._number()

    def newcomer(self, number: int) -> str | None:
        """The host that asked, during this attempt, to be let in."""
        with self._names_the_store():
            host = self._signed.read(f"wanted/{number}")
            return None if host is None else escaped(host.decode())

    @contextmanager
    def watched(self, number: int, on_newcomer: Callable[[], object]) -> Iterator[None]:
        """Calls back, once and from a thread of its own, when a host asks to be let in during the block."""
        done = threading.Event()

        def watch() -> None:
            with contextlib.suppress(HostsApart):  # the attempt itself will hear of it
                while not done.wait(_LOOK_EVERY_S):
                    if self.newcomer(number) is not None:
                        on_newcomer()
                        return

        thread = threading.Thread(target=watch, name="distplus-newcomers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + _OTHERS_END_S
        while not is_done() and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _number(self) -> int:
        """The last attempt that was announced; each announces the one after it."""
        number = self._known
        while self._signed.read(f"attempt/{number + 1}") is not None:
            number += 1
        self._known = number
        return number

    @contextmanager
    def _names_the_store(self) -> Iterator[None]:
        try:
            yield
        except (DistNetworkError, DistStoreError) as error:
            raise HostsApart(
                f"the launcher at {self._endpoint} is not there, or has ended; the same command on all hosts "
                "continues the job"
            ) from error


def _open(host: str, port: int) -> tuple[TCPStore, bool]:
    """The store, and whether it is served here: on the host that the endpoint names, by the first launcher there."""
    if is_local(host):
        with contextlib.suppress(OSError):  # another launcher of this host serves it
            listener = listen_on(host, port)
            return TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            ), True
    return TCPStore(host, port, is_master=False, timeout=_HOSTS_COME), False
