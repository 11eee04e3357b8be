"""Saves in the background: what is to be written is copied first, and written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_distplus import _compat
from lightning_distplus.checkpoint.digests import DigestedWrites
from lightning_distplus.checkpoint.fingerprints import Piece, Sums, add_up, sums_of_pieces
from lightning_distplus.checkpoint.tensors import pieces_of_saved
from lightning_distplus.errors import PeerMissing
from lightning_distplus.strategies.shards import save_shards
from lightning_distplus.strategies.staging import Staging

__all__ = ["BackgroundSave", "Writes"]


class Writes:
    """The writes of one save: done at once, or kept, with a copy of what is written, for a thread.

    What is written at once is counted by another thread meanwhile.

    Args:
        staging: Makes the copies; None: the writes are done at once.
        is_first: Whether this rank answers for what all ranks hold alike.
    """

    def __init__(self, staging: Staging | None, *, is_first: bool) -> None:
        self.digested: DigestedWrites | None = None
        """Takes digests of the files while they are written; None where nothing is committed."""
        self._staging = staging
        self._is_first = is_first
        self._kept: list[Callable[[], object]] = []
        self._states: list[dict[str, Any]] = []
        self._counts_others = False
        self._pieces: list[Piece] = []
        self._counts: list[Callable[[], Sums]] = []
        if staging is not None:
            staging.begin()

    @property
    def are_kept(self) -> bool:
        """Whether they are left for `finish`."""
        return self._staging is not None

    def do(self, write: Callable[[Any], object], state: dict[str, Any]) -> None:
        """``write(state)``, now or, with the state as it is now, later."""
        if self._staging is not None:
            state = self._staging.copy(state, len(self._states))
            self._kept.append(partial(write, state))
            self._states.append(state)
            return
        if not self._counts_others:
            self._count_meanwhile(lambda: pieces_of_saved(state, is_first=self._is_first))
        write(state)

    def save_file(self, state: dict[str, Any], path: Path) -> None:
        """``torch.save(state, path)``, now or later."""

        def save(kept: dict[str, Any]) -> None:
            with self.open(path) as file:
                torch.save(kept, file)

        self.do(save, state)

    @contextmanager
    def open(self, path: Path) -> Iterator[Any]:
        """What ``torch.save`` takes for a new file in this block; its digest is taken while it is written."""
        if self.digested is None:
            yield path
        else:
            with self.digested.open(path) as stream:
                yield stream

    @contextmanager
    def of_shards(self) -> Iterator[None]:
        """Here FSDP and FSDP2 write in this block."""
        group = None if self._staging is None else self._staging.group

        def do(state: dict[str, Any], path: Path) -> None:
            self.do(lambda kept: save_shards(kept, path, self.digested, group), state)

        with _compat.replacing_sharded_saves(do):
            yield

    @contextmanager
    def counting_instead(self, pieces: Callable[[], Iterable[Piece]]) -> Iterator[None]:
        """Has these counted in the place of what is written in this block, of which they are a part, by other names.

        Those that are copied are counted in their copies, and later; the others now.
        """
        self._counts_others = True
        if self._staging is None:
            self._count_meanwhile(pieces)
            yield
            return
        yield
        others = []
        for piece in pieces():
            copied = self._staging.copy_of(piece.tensor)
            if copied is None:
                others.append(piece)
            else:
                self._pieces.append(replace(piece, tensor=copied))
        counted = sums_of_pieces(others)  # before training changes them
        self._counts.append(lambda: counted)

    def finish(self) -> None:
        """Does the writes that were kept."""
        for write in self._kept:
            write()

    def count(self) -> Sums:
        """What this rank has saved of each tensor; the copies are given up."""
        pieces: Iterable[Piece] = self._pieces
        if not self._counts_others:
            pieces = (piece for state in self._states for piece in pieces_of_saved(state, is_first=self._is_first))
        counted = add_up([*(count() for count in self._counts), sums_of_pieces(pieces)])
        self._states, self._kept, self._pieces, self._counts = [], [], [], []
        return counted

    def _count_meanwhile(self, pieces: Callable[[], Iterable[Piece]]) -> None:
        thread = ThreadPoolExecutor(1, "distplus-counter")
        self._counts.append(thread.submit(lambda: sums_of_pieces(pieces())).result)
        thread.shutdown(wait=False)


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
