"""What each rank has for itself reaches all ranks of a save, whatever its size."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lightning_distplus import run_access
from lightning_distplus.testing import spawn


def gather_twice(rank: int) -> list[list[tuple[int, bytes]]]:
    dist.init_process_group("gloo")
    values = [bytes([rank]) * size for size in (rank, 2_500_000 * (rank + 1))]
    gathered = [run_access.gather_bytes(SimpleNamespace(), "state", value) for value in values]
    dist.destroy_process_group()
    return [[(len(value), value[-1:]) for value in one] for one in gathered]


def test_states_of_any_size_reach_all_ranks_of_a_stock_strategy_over_its_store() -> None:
    begin = time.monotonic()
    results = spawn(gather_twice, 2, deadline="30s").check().results
    assert results[0] == results[1] == [[(0, b""), (1, b"\1")], [(2_500_000, b"\0"), (5_000_000, b"\1")]]
    assert time.monotonic() - begin < 30


def test_state_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_access, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="state of this rank has 11 bytes; at most 10 are gathered"):
        run_access.gather_bytes(SimpleNamespace(), "state", b"." * 11)
    assert run_access.gather_bytes(SimpleNamespace(), "state", b"alone") == [b"alone"]
