"""Where torchrun's agents meet: nowhere on one host, over a signed state between hosts.

torch's own c10d rendezvous listens on all interfaces and unpickles what it finds, whoever has put it there.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from lightning_distplus._compat import HashStore, TCPStore
from lightning_distplus.control.rendezvous import listen_on
from lightning_distplus.control.secret import Secret, SignedStore

__all__ = ["BETWEEN_HOSTS", "ON_ONE_HOST", "OneHost", "SignedState"]

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
        self._server = TCPStore(
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
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    return create_handler(store, SignedState(store, parameters.run_id, Secret.from_environment()), parameters)


rendezvous_handler_registry.register(ON_ONE_HOST, _one_host)
rendezvous_handler_registry.register(BETWEEN_HOSTS, _between_hosts)
