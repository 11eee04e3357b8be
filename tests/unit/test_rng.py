from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_distplus.run_access import rng_state, set_rng_state


@pytest.fixture(autouse=True)
def same_afterwards() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def _draw() -> list[float]:
    """Odd numbers of normal values: each generator keeps the second one of a pair for the next call."""
    return [
        random.gauss(0, 1), random.random(), np.random.normal(), float(np.random.randint(1 << 30)),
        *torch.randn(17).tolist(), torch.rand(()).item(), *torch.randperm(50).tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("num_drawn", range(4))
def test_the_streams_continue_where_the_state_was_taken(num_drawn: int) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for _ in range(num_drawn):
        _draw()
    state = rng_state()
    expected = [_draw() for _ in range(3)]

    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    set_rng_state(state)

    assert [_draw() for _ in range(3)] == expected


def test_taking_the_state_draws_nothing() -> None:
    before = rng_state()
    assert rng_state() == before


def test_the_state_survives_a_checkpoint_that_is_loaded_with_weights_only(tmp_path: Path) -> None:
    state = rng_state()
    torch.save({"rng": [state, state]}, tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["rng"][1] == state


def test_the_state_is_small() -> None:
    assert sum(map(len, rng_state().values())) < 24 << 10


def test_a_state_with_a_cuda_generator_is_put_back_where_there_is_no_cuda_device() -> None:
    set_rng_state({**rng_state(), "cuda": bytes(16)} if not torch.cuda.is_available() else rng_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_stream_of_the_cuda_device_continues() -> None:
    torch.cuda.init()
    state = rng_state()
    expected = torch.randn(5, device="cuda").tolist()
    set_rng_state(state)
    assert torch.randn(5, device="cuda").tolist() == expected
