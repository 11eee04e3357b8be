"""Saves in the background: what is to be written is copied first, and written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from lightning_distplus import _compat
from lightning_distplus.checkpoint.fingerprints import Piece, Sums, add_up, sums_of_pieces
from lightning_distplus.errors import PeerMissing
from lightning_distplus.strategies.staging import Staging
from lightning_distplus.strategies.tensors import pieces_of_saved

__all__ = ["BackgroundSave", "Writes"]


class Writes:
    """The writes of one save: done at once, or kept, with a copy of what is written, for a thread.

    Args:
        staging: Makes the copies; None: the writes are done at once.
        is_first: Whether this rank answers for what all ranks hold alike.
    """

    def __init__(self, staging: Staging | None, *, is_first: bool) -> None:
        self._staging = staging
        self._is_first = is_first
        self._kept: list[Callable[[], object]] = []
        self._states: list[dict[str, Any]] = []
        self._pieces: list[Piece] | None = None
        self._counted: Sums = {}
        if staging is not None:
            staging.begin()

    @property
    def are_kept(self) -> bool:
        """Whether they are left for `finish`."""
        return self._staging is not None

    def do(self, write: Callable[[Any], object], state: dict[str, Any]) -> None:
        """``write(state)``, now or, with the state as it is now, later."""
        if self._staging is None:
            write(state)
        else:
            state = self._staging.copy(state, len(self._states))
            self._kept.append(partial(write, state))
        self._states.append(state)

    @contextmanager
    def of_shards(self) -> Iterator[None]:
        """Here FSDP and FSDP2 write in this block."""
        group = None if self._staging is None else self._staging.group

        def do(state: dict[str, Any], path: Path) -> None:
            self.do(
                lambda kept: save_shards(kept, checkpoint_id=path, planner=_FirstCopies(), process_group=group), state
            )

        with _compat.replacing_sharded_saves(do):
            yield

    def count_instead(self, pieces: Iterable[Piece]) -> None:
        """Has these counted in the place of what was written, of which they are a part, by other names.

        Those that were copied are counted in their copies, and later; the others now.
        """
        self._pieces, others = [], []
        for piece in pieces:
            copied = None if self._staging is None else self._staging.copy_of(piece.tensor)
            if copied is not None:
                self._pieces.append(replace(piece, tensor=copied))
            elif self.are_kept:
                others.append(piece)
            else:
                self._pieces.append(piece)
        self._counted = sums_of_pieces(others)

    def finish(self) -> None:
        """Does the writes that were kept."""
        for write in self._kept:
            write()

    def count(self) -> Sums:
        """What this rank has saved of each tensor; the copies are given up."""
        pieces: Iterable[Piece] | None = self._pieces
        if pieces is None:
            pieces = (piece for state in self._states for piece in pieces_of_saved(state, is_first=self._is_first))
        counted = add_up([self._counted, sums_of_pieces(pieces)])
        self._states, self._kept, self._pieces = [], [], None
        return counted


class _FirstCopies(DefaultSavePlanner):
    """Has the lowest rank write what is not sharded: its copy is that of the fingerprints.

    Buffers may differ between the ranks of FSDP, as BatchNorm's do, and torch takes the copy of the rank that has least
    to write (torch 2.13, ``_dedup_save_plans.py`` 45).
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, written = [], set()
        for plan in all_plans:
            items = [one for one in plan.items if one.type is WriteItemType.SHARD or one.index not in written]
            written |= {one.index for one in items if one.type is not WriteItemType.SHARD}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


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
