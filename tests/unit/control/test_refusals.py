from __future__ import annotations

import errno
import socket

import pytest
from torch.distributed import HashStore

from lightning_distplus.control.reach import explain_silence, is_local
from lightning_distplus.control.refusals import Refusals
from lightning_distplus.errors import RendezvousError
from lightning_distplus.world import World


def test_a_refusal_is_heard_by_who_still_waits_a_while_later_and_last_by_who_serves_the_store() -> None:
    store = HashStore()
    waiting, serving = (Refusals(store, "refused", serves_store=serves) for serves in (False, True))
    for second in range(10):
        waiting.raise_if_any(float(second))
    waiting.leave("rank 1 twice")
    waiting.leave("something later")
    waiting.raise_if_any(10.0)
    serving.raise_if_any(10.0)
    waiting.raise_if_any(11.4)
    with pytest.raises(RendezvousError, match=r"was refused\. rank 1 twice"):
        waiting.raise_if_any(11.7)
    serving.raise_if_any(11.7)
    with pytest.raises(RendezvousError, match="rank 1 twice"):
        serving.raise_if_any(12.6)


def test_an_address_is_local_where_it_can_be_bound() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # reserved for documentation
    assert not is_local("no-such-host.invalid")


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
OF_TWO = World(rank=1, size=2, num_nodes=2, node_rank=1, host="b")


@pytest.mark.parametrize(
    ("error", "host", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "nowhere", "cannot resolve MASTER_ADDR=nowhere"),
        (TimeoutError("timed out"), "192.0.2.1", "gets no answer from 192.0.2.1:29500, not even a refusal"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "192.0.2.1", "or that host is down"),
    ],
)  # fmt: skip
def test_an_address_that_leads_nowhere_is_explained(error: OSError, host: str, words: str) -> None:
    assert words in str(explain_silence(OF_TWO, host, 29500, error))


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_a_refusal_to_connect_is_no_reason_to_give_up(host: str) -> None:
    assert explain_silence(OF_TWO, host, 29500, REFUSED) is None


def test_in_kubernetes_and_on_one_host_waiting_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TimeoutError("timed out")
    assert explain_silence(World(rank=1, size=2), "192.0.2.1", 29500, error) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert explain_silence(OF_TWO, "192.0.2.1", 29500, error) is None
