from __future__ import annotations

import dataclasses
import os
import socket

import pytest

from lightning_distplus.world import DataParallel, World


def test_a_world_knows_its_host_and_its_process() -> None:
    world = World(rank=1, size=4)
    assert (world.host, world.pid) == (socket.gethostname(), os.getpid())
    assert list(world.ranks) == [0, 1, 2, 3]
    assert str(World(rank=1, size=4, host="node7", pid=9)) == "rank 1 of 4 (host node7, pid 9)"


@pytest.mark.parametrize(("rank", "size", "text"), [(-1, 2, "rank is -1"), (2, 2, "0..1"), (0, 0, "size is 0")])
def test_a_place_outside_the_job_is_refused(rank: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        World(rank=rank, size=size)


def test_a_data_parallel_place_outside_the_axis_is_refused() -> None:
    assert DataParallel() == DataParallel(rank=0, size=1)
    with pytest.raises(ValueError, match=r"rank is 2; it lies in 0\.\.1"):
        DataParallel(rank=2, size=2)


def test_a_world_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        World(rank=0, size=1).rank = 1  # type: ignore[misc]
