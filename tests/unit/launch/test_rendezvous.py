"""Where agents meet: a pickle that no agent of the job has signed is never unpickled, and does not keep them apart."""

from __future__ import annotations

import base64
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from lightning_distplus.control.secret import Secret
from lightning_distplus.launch.agent import SignedState

KEY = "distplus-rendezvous/run"


class Strike:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("secret", [Secret("only we know"), Secret()])
def test_agents_meet_although_a_stranger_writes_pickles_over_their_state(secret: Secret, tmp_path: Path) -> None:
    store, marker = HashStore(), tmp_path / "struck"
    strike = pickle.dumps(Strike(marker))
    store.set(KEY, Secret().seal(KEY, strike))  # as somebody would who knows the format
    parameters = RendezvousParameters(
        "distplus-signed", "host:1", "run", 2, 2, local_addr="127.0.0.1", join_timeout=60, last_call_timeout=1
    )
    states = [SignedState(store, "run", secret) for _ in range(2)]
    handlers = [create_handler(store, state, parameters) for state in states]
    try:
        with ThreadPoolExecutor() as pool:
            met = [pool.submit(handler.next_rendezvous) for handler in handlers]
            assert sorted(one.result(60).rank for one in met) == [0, 1]
    finally:
        for handler in handlers:
            handler.shutdown()
            handler._shared_tcp_store_server = None
    agreed = states[0].get_state()
    assert agreed is not None
    for junk in (strike, base64.b64encode(strike), b"", Secret("another").seal(KEY, strike)):
        store.set(KEY, junk)
        state, token = states[0].get_state() or (b"", None)
        assert state == agreed[0]
        assert states[0].set_state(state, token) == (state, store.get(KEY), True)  # written over
    store.delete_key(KEY)
    assert states[0].get_state() == (agreed[0], b"")
    assert not marker.exists()
