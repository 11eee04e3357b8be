"""Saves in the background: what is to be written is copied first, and written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from lightning_distplus import _compat
from lightning_distplus.errors import PeerMissing

__all__ = ["BackgroundSave", "Staging"]


class Staging:
    """Copies what a strategy is about to write, and keeps the writes for later.

    There is one staged copy of what this rank writes. It is the memory of the next one, except in FSDP1.

    Args:
        group: A process group for the saves alone, whose collectives come from another thread; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._writes: list[Callable[[], object]] = []
        has_cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=has_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_cuda,
            )
        )

    def keep(self, write: Callable[[Any], object], state: dict[str, Any]) -> None:
        """Keeps ``write(state)`` for later, with the state as it is now."""
        # The stager that keeps its memory cannot copy the tensors of FSDP1 (torch 2.13, ``_state_dict_stager.py`` 210).
        stager = BlockingAsyncStager() if _is_of_fsdp1(state) else self._stager
        staged = stager.stage(state)
        self._writes.append(lambda: write(staged))

    @contextmanager
    def of_shards(self) -> Iterator[None]:
        """Keeps in this block what FSDP and FSDP2 would write."""

        def keep(state: dict[str, Any], path: Path) -> None:
            self.keep(lambda staged: save_shards(staged, checkpoint_id=path, process_group=self._group), state)

        with _compat.replacing_sharded_saves(keep):
            yield

    def take(self) -> Callable[[], None]:
        """What does the writes that were kept since the last call."""
        writes, self._writes = self._writes, []

        def finish() -> None:
            for write in writes:
                write()

        return finish

    def close(self) -> None:
        """Frees the copies."""
        self._stager.close()


def _is_of_fsdp1(state: dict[str, Any]) -> bool:
    weights = state.get("model")
    return isinstance(weights, dict) and any(type(tensor).__name__ == "ShardedTensor" for tensor in weights.values())


class BackgroundSave:
    """One save that a thread finishes.

    Args:
        path: The checkpoint.
        global_step: Completed optimizer steps in it.
        work: Writes and commits it.
    """

    def __init__(self, path: str, global_step: int | None, work: Callable[[], object]) -> None:
        self.path = path
        self.global_step = global_step
        self.links: list[tuple[str, str]] = []
        """Links to be made when it is committed: checkpoint and name."""
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="distplus-saver", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is written any more; never waits."""
        return not self._thread.is_alive()

    def wait(self, deadline: timedelta) -> None:
        """Waits for its end.

        Raises:
            SaveFailed: It failed on some rank; raised on all of them.
            PeerMissing: It has not ended after the deadline.
        """
        self._thread.join(deadline.total_seconds())
        if not self.has_ended:
            raise PeerMissing(
                f"The checkpoint {self.path} is still being written after {deadline.total_seconds():g} s, the deadline "
                "of a checkpoint. Raise it (Timeouts(checkpoint=...)), or look for what slows the disk down."
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the training thread raises it
            self._error = error
