"""Where rank 0 listens: at its main address, or on all interfaces where that is none of this host's."""

from __future__ import annotations

import socket

import pytest

from lightning_distplus import env
from lightning_distplus.control.joining import listen_on

NOWHERE = "no-such-host.invalid"  # a name that RFC 2606 keeps out of every name service
ELSEWHERE = "192.0.2.1"  # an address that RFC 5737 keeps for documents
ALL_INTERFACES = ("0.0.0.0", "::")


def place_of(host: str) -> str:
    with listen_on(host, 0) as listener:
        return str(listener.getsockname()[0])


def test_rank_0_listens_at_its_main_address() -> None:
    assert place_of("127.0.0.1") == "127.0.0.1"


def test_rank_0_listens_on_all_interfaces_where_the_main_address_is_none_of_its_own() -> None:
    assert place_of(ELSEWHERE) in ALL_INTERFACES


@pytest.mark.deadline(120)  # a resolver may take its time over a name that it does not know
def test_only_in_kubernetes_may_the_main_name_not_resolve_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KUBERNETES_SERVICE_HOST.name, raising=False)
    with pytest.raises(socket.gaierror):
        listen_on(NOWHERE, 0)
    monkeypatch.setenv(env.KUBERNETES_SERVICE_HOST.name, "10.0.0.1")  # its service gets the name when this pod is ready
    assert place_of(NOWHERE) in ALL_INTERFACES
