"""Ranks as threads, and small checkpoints of both kinds."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import Manifest
from lightning_distplus.checkpoint.commit import StagedSave, commit, gather_alone
from lightning_distplus.checkpoint.files import DigestedWrites

DEADLINE_S = 20.0


class ThreadGather:
    """A gather between threads; a rank that does not come breaks the barrier for all."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._values: list[Any] = [None] * world_size
        self._names: list[Any] = [None] * world_size

    def of(self, rank: int) -> Callable[[str, dict[str, Any]], list[dict[str, Any]]]:
        def gather(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
            self._values[rank], self._names[rank] = value, name
            self._barrier.wait(DEADLINE_S)
            values, names = list(self._values), set(self._names)
            self._barrier.wait(DEADLINE_S)
            assert names == {name}
            return values

        return gather


@dataclass
class Ranks:
    """What each rank returned or raised."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)


@pytest.fixture
def as_ranks() -> Callable[..., Ranks]:
    """Runs ``fn(rank, gather)`` on one thread per rank."""

    def run(world_size: int, fn: Callable[[int, Any], Any]) -> Ranks:
        outcome, gathers = Ranks(), ThreadGather(world_size)

        def body(rank: int) -> None:
            try:
                outcome.results[rank] = fn(rank, gathers.of(rank))
            except BaseException as error:
                outcome.errors[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return outcome

    return run


def write_file(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def write_directory(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "optimizer").mkdir(parents=True)
        (path / "model.bin").write_bytes(content)
        (path / "optimizer" / "state.bin").write_bytes(content[::-1])

    return write


WRITERS = {"file": write_file, "directory": write_directory}


@pytest.fixture
def save() -> Callable[..., Any]:
    """Commits a small checkpoint of one process."""

    def run(
        target: Path,
        step: int,
        content: bytes = b"weights",
        kind: str = "file",
        not_before: float = 0.0,
        **fields: Any,
    ) -> Any:
        info = Manifest(global_step=step, epoch=0, strategy="resilient_ddp", packages={}, **fields)
        write = WRITERS[kind](content)
        save = StagedSave(target, 0, gather_alone, DigestedWrites(None))
        save.fill(write)
        return save.commit(info, not_before=not_before)

    return run


@pytest.fixture
def content_of() -> Callable[[Path], bytes]:
    """The content that `save` wrote, after a check that its files belong together."""

    def read(path: Path) -> bytes:
        if path.is_file():
            return path.read_bytes()
        content = (path / "model.bin").read_bytes()
        assert (path / "optimizer" / "state.bin").read_bytes() == content[::-1]
        return content

    return read


def saved(path: Path, step: int) -> Path:
    """Commits a small file; its folder is made when it is missing."""
    info = Manifest(global_step=step, epoch=0, strategy="test", packages={})
    commit(path, write_file(b"weights"), info, sync=None)
    return path


CHANGES = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "open", "distplus.exchange")


@pytest.fixture
def in_child() -> Iterator[Callable[..., int]]:
    """Runs a function in a forked process and returns its exit status (negative: the signal)."""
    children: list[int] = []

    def run(fn: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                signal.alarm(int(DEADLINE_S))
                fn()
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
        _, wait_status = os.waitpid(pid, 0)
        children.remove(pid)
        return os.waitstatus_to_exitcode(wait_status)

    yield run
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def at_change() -> Callable[[int, Callable[[str], None]], None]:
    """In a forked child: calls ``fault(event)`` just before the n-th change of the file system (from 0)."""

    def arm(index: int, fault: Callable[[str], None]) -> None:
        seen = 0

        def hook(event: str, _: Any) -> None:
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if seen == index + 1:
                    fault(event)

        sys.addaudithook(hook)

    return arm
