"""A data set's state survives the checkpoint as it was, or is refused with the place of what cannot."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_distplus.data.iterable import StreamState, WorkerState, _Place, pack, unpack

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(plain)
def test_plain_values_come_back_as_they_were(state: Any) -> None:
    assert unpack(pack(state, owner="X")) == state


def test_states_of_random_generators_come_back_as_they_were() -> None:
    old, new = np.random.RandomState(1), np.random.default_rng(1)
    python, torchs = random.Random(1), torch.Generator().manual_seed(1)
    state = {
        "old": old.get_state(),
        "new": new.bit_generator.state,
        "python": python.getstate(),
        "torch": torchs.get_state(),
        "scalar": np.int64(3),
    }
    expected = [old.random(), new.random(), python.random(), torch.rand((), generator=torchs).item()]
    found = unpack(pack(state, owner="X"))
    old.set_state(found["old"])
    new.bit_generator.state = found["new"]
    python.setstate(found["python"])
    torchs.set_state(found["torch"])
    assert [old.random(), new.random(), python.random(), torch.rand((), generator=torchs).item()] == expected
    assert found["scalar"] == 3


def test_what_a_checkpoint_cannot_hold_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"state of X holds a builtins\.function at state_dict\(\)\['a'\]\[0\]\[1\]"):
        pack({"a": [(1, lambda: None)]}, owner="X")


def test_the_place_of_a_plain_loader_in_a_checkpoint_is_read() -> None:
    """Inside a pass, before a pass that goes on where the one before has left the data, and before a new one."""
    stream = {"workers": [{"data": {"done": 4}, "epoch": 1, "num_taken": 4, "is_ended": False}], "last_worker": 0}
    saved = {"epoch": 3, "batch": 2, "number": 1, "stream": stream, "num_passes": 1}
    inside = _Place.saved(saved, num_workers=0)
    assert inside.stream.opened() == stream
    assert (inside.epoch, inside.batch, inside.number, inside.num_passes) == (3, 2, 1, 1)
    before = {**saved, "batch": 0, "number": 0, "num_passes": 2}
    goes_on = _Place.saved(before, num_workers=0)
    assert [one.epoch < goes_on.num_passes for one in goes_on.stream.workers] == [True], "it reads its last batch again"
    anew = _Place.saved({**before, "stream": None}, num_workers=2)
    assert anew.stream == StreamState((WorkerState(epoch=2),) * 2)
