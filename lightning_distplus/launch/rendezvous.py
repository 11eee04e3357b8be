"""Rendezvous of several hosts: the launchers agree on the attempt, torchrun's agents on the ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pickle
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from lightning_distplus._compat import HashStore, PrefixStore, Store, TCPStore, open_tcp_store
from lightning_distplus.control.rendezvous import is_local, listen_on
from lightning_distplus.control.secret import Secret, SignedStore, escaped

__all__ = ["BETWEEN_HOSTS", "ON_ONE_HOST", "HostsApart", "Meeting", "OneHost", "SignedState"]

# -- of the launchers --------------------------------------------------------------------------------------------------

_HOSTS_COME = timedelta(minutes=5)
_LOOK_EVERY_S = 1.0
_POLL_S = 0.1
_CHOSEN_NAME = re.compile("[0-9a-f]{8}")  # a part of file names
_OTHERS_END_S = 10.0  # as long as an agent gives the ranks that outlive a peer


class HostsApart(Exception):
    """The hosts have not met, or the one that serves the store has left."""


class Meeting:
    """The launchers' own store, over all attempts of a job; the host that ``--rdzv`` names serves it.

    Attempts are numbered for the whole job, so that a host that comes late, or in the place of another, does not begin
    with the first. It waits while an attempt is under way, and asks for the next one.

    Args:
        endpoint: ``host:port``.
        job: The name of the job, the same on all hosts; "" lets the first of them choose one.

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
        self.job = job or self._choose_name()
        """The name of the job."""

    def _choose_name(self) -> str:
        with self._names_the_store():
            name = self._signed.claim("job", uuid.uuid4().hex[:8].encode()).decode(errors="replace")
        if not _CHOSEN_NAME.fullmatch(name):
            raise HostsApart(f"somebody at {self._endpoint} calls the job {escaped(name)!r}; set DISTPLUS_SECRET")
        return name

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
            return open_tcp_store(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            ), True
    return open_tcp_store(host, port, is_master=False, timeout=_HOSTS_COME), False


# -- of torchrun's agents ----------------------------------------------------------------------------------------------

ON_ONE_HOST, BETWEEN_HOSTS = "distplus-one-host", "distplus-signed"
"""The names of both, as ``LaunchConfig.rdzv_backend`` takes them."""
_LOOPBACK = "127.0.0.1"
_STATE_OF = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
# What torch keeps in its state (2.13: dynamic_rendezvous.py, class _RendezvousState).
_ALLOWED = {
    (_STATE_OF, "_RendezvousState"), (_STATE_OF, "_NodeDesc"),
    ("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta"), ("builtins", "set"),
}  # fmt: skip


class OneHost(RendezvousHandler):
    """The rendezvous of the only agent of a job: it meets nobody, and serves the ranks' store on loopback."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._is_closed = False
        self._server: TCPStore | None = None

    def get_backend(self) -> str:
        """See base class."""
        return ON_ONE_HOST

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        listener = listen_on(_LOOPBACK, 0)
        port = listener.getsockname()[1]
        self._server = open_tcp_store(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def is_closed(self) -> bool:
        """See base class."""
        return self._is_closed

    def set_closed(self) -> None:
        """See base class."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        self._is_closed, self._server = True, None
        return True


class SignedState(RendezvousBackend):
    """The state of a rendezvous in a store: torch unpickles it, and so only what an agent of this job has signed.

    Without a secret everybody can sign; even then a pickle that does more than hold such a state is no state.

    Args:
        store: The launchers' own.
        run_id: Names the rendezvous.
        secret: Of this job.
    """

    def __init__(self, store: Any, run_id: str, secret: Secret) -> None:
        self._store = store
        self._signed = SignedStore(store, secret)
        self._secret = secret
        self._key = f"distplus-rendezvous/{run_id}"
        self._last: bytes | None = None

    @property
    def name(self) -> str:
        """See base class."""
        return BETWEEN_HOSTS

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class; where a stranger has written over it, the last state that was seen here stands."""
        raw = self._signed.read_raw(self._key)
        return None if raw is None and self._last is None else self._state(raw)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        sealed = self._secret.seal(self._key, state)
        found = bytes(self._store.compare_set(self._key, token if isinstance(token, bytes) else b"", sealed))
        if not self._is_signed(found):  # a stranger's is written over
            found = bytes(self._store.compare_set(self._key, found, sealed))
        if found != sealed and self._signed.read_raw(self._key) is None:  # somebody has deleted it
            found = bytes(self._store.compare_set(self._key, b"", sealed))
        known = self._state(found)
        return None if known is None else (*known, found == sealed)

    def _state(self, raw: bytes | None) -> tuple[bytes, Token] | None:
        if raw is not None and self._is_signed(raw):
            self._last = self._secret.open(self._key, raw)
        return None if self._last is None else (self._last, raw or b"")

    def _is_signed(self, raw: bytes) -> bool:
        state = self._secret.open(self._key, raw)
        return state is not None and _is_state(state)


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous")


def _is_state(data: bytes) -> bool:
    try:
        _Restricted(io.BytesIO(data)).load()
    except Exception:  # a stranger's bytes raise whatever they like
        return False
    return True


def _one_host(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.run_id)


def _between_hosts(parameters: RendezvousParameters) -> RendezvousHandler:
    host, _, port = parameters.endpoint.rpartition(":")
    store = open_tcp_store(host, int(port), is_master=False, wait_for_workers=False)
    return create_handler(store, SignedState(store, parameters.run_id, Secret.from_environment()), parameters)


rendezvous_handler_registry.register(ON_ONE_HOST, _one_host)
rendezvous_handler_registry.register(BETWEEN_HOSTS, _between_hosts)
