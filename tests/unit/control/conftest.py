from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from lightning_distplus.control import ControlPlane
from lightning_distplus.control.secret import Secret
from lightning_distplus.world import World

JOIN_S = 20.0


class Ranks:
    """The ranks of one job as threads over a store in memory; ``num_nodes`` hosts."""

    def __init__(
        self,
        size: int,
        prefix: str = "distplus/job/0",
        store: HashStore | None = None,
        num_nodes: int = 1,
        secret: str = "",
    ) -> None:
        self.store = store or HashStore()
        worlds = [
            World(rank=rank, size=size, num_nodes=num_nodes, host=f"host{rank * num_nodes // size}", pid=1000 + rank)
            for rank in range(size)
        ]
        self.planes = [ControlPlane(PrefixStore(prefix, self.store), world, secret=Secret(secret)) for world in worlds]

    def start(self, function: Callable[[ControlPlane], Any], ranks: Iterable[int] | None = None) -> list[Future[Any]]:
        """Starts the function on some ranks; the futures hold what it returns or raises."""
        futures = []
        for rank in range(len(self.planes)) if ranks is None else ranks:
            future: Future[Any] = Future()
            thread = threading.Thread(target=_call, args=(function, self.planes[rank], future), daemon=True)
            thread.start()
            futures.append(future)
        return futures

    def run(self, function: Callable[[ControlPlane], Any], ranks: Iterable[int] | None = None) -> list[Any]:
        """What the function returns, or raises, on each rank."""
        futures = self.start(function, ranks)
        return [future.exception(JOIN_S) or future.result() for future in futures]

    def num_keys(self) -> int:
        return int(self.store.num_keys())

    def close(self) -> None:
        for plane in self.planes:
            plane.stop_listening()


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(size: int, **arguments: Any) -> Ranks:
        made.append(Ranks(size, **arguments))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def soon() -> timedelta:
    """A deadline that a test can wait for."""
    return timedelta(seconds=0.2)


@pytest.fixture
def later() -> timedelta:
    """A deadline that passes only when something is wrong."""
    return timedelta(seconds=15)


def _call(function: Callable[[ControlPlane], Any], plane: ControlPlane, future: Future[Any]) -> None:
    try:
        future.set_result(function(plane))
    except BaseException as error:
        future.set_exception(error)
