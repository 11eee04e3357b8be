"""Committed saves: at once or behind the training, and what happens when one fails."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_distplus import _compat
from lightning_distplus.checkpoint.catalog import is_last_valid, link, remove
from lightning_distplus.checkpoint.commit import Gather, StagedSave
from lightning_distplus.checkpoint.copies import Copier, Copies
from lightning_distplus.checkpoint.files import DigestedWrites, Sync
from lightning_distplus.checkpoint.manifest import Manifest
from lightning_distplus.checkpoint.tensors import (
    Piece,
    Sums,
    add_up,
    parameters_of_optimizers,
    pieces_of_saved,
    sums_of_pieces,
)
from lightning_distplus.control import ControlPlane, Point
from lightning_distplus.errors import PeerMissing, SaveFailed, require_choice
from lightning_distplus.run_access import rng_state
from lightning_distplus.strategies.loading import KEY, VERSION, local_path, savers_of
from lightning_distplus.strategies.start import engine_of, layout_of
from lightning_distplus.timeouts import Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_distplus.strategies.base import ResilientStrategy

log = logging.getLogger(__name__)

# -- saves that fail while a fit runs ----------------------------------------------------------------------------------

OnSaveFailure = Literal["continue", "raise"]
_Books = dict[ModelCheckpoint, tuple[dict[str, Tensor], str, str]]  # scores of the best ones, the best, the last


class FailingSaves:
    """Follows the saves of one fit. All ranks call it alike: whether a save has failed is agreed before.

    What still is not saved when training ends is an error.
    """

    def __init__(self, policy: OnSaveFailure) -> None:
        require_choice("on_save_failure", policy, OnSaveFailure)
        self.policy: OnSaveFailure = policy
        self.num_failed = 0
        """Saves that have failed in this fit."""
        self.failure: SaveFailed | None = None
        """That of the last save; None: it has succeeded."""
        self.trainer: Trainer | None = None
        """While a fit runs, in which a failed save can be tried again."""
        self._books: _Books = {}
        """What each ModelCheckpoint knew when the last save was committed."""
        self._entered: _Books = {}
        """What each knew when the last save began, which it had entered by then."""

    def begin(self, trainer: Trainer) -> None:
        """A fit begins."""
        self.trainer, self.num_failed = trainer, 0
        self.enter()
        self.succeeded()

    def enter(self) -> None:
        """A save begins. ModelCheckpoint has entered it, and lets the one that is rotated out go after it."""
        savers = [] if self.trainer is None else savers_of(self.trainer)
        self._entered = {one: (dict(one.best_k_models), one.best_model_path, one.last_model_path) for one in savers}

    def succeeded(self) -> None:
        """The save that has begun last is committed."""
        self.failure = None
        self._books = self._entered

    def failed(self, path: str, error: SaveFailed, *, retry: str | None = None) -> None:
        """A save has failed on all ranks' word: who has entered it knows again what was known before.

        What a ModelCheckpoint has entered since stays, such as ``retry``, which begins next.
        """
        if self.trainer is None or self.policy == "raise":
            raise error
        self.num_failed += 1
        self.failure = error
        for saver, books in self._books.items() if path != retry else ():
            _take_back(saver, path, *books)
        goes_on = f"training goes on without the checkpoint {path}, and the next save is the retry"
        log.error("%s (failed in this run: %d): %s", goes_on, self.num_failed, error)

    def is_in_books(self, path: str) -> bool:
        """Whether a ModelCheckpoint answers for a checkpoint, and so rotates it out when it has a successor."""
        return self.trainer is not None and any(_answers_for(saver, path) for saver in self._books)

    def require_saved(self) -> None:
        """Raises where the last save has failed."""
        if self.failure is not None:
            raise SaveFailed(
                f"The training ends, but its last checkpoint is not saved ({self.num_failed} saves failed in this "
                f"run). The last failure: {self.failure}",
                self.failure.ranks,
            ) from self.failure

    def end(self) -> None:
        """The fit is over: there is no further interval that could retry."""
        self.trainer = None


def _take_back(saver: ModelCheckpoint, path: str, scores: dict[str, Tensor], best: str, last: str) -> None:
    """Takes a save back from a ModelCheckpoint, which knows the best of all others then, also those that it let go."""
    if path in saver.best_k_models:
        scores = scores | {one: score for one, score in saver.best_k_models.items() if one != path}
        ranked = sorted(scores, key=lambda one: float(scores[one]), reverse=saver.mode == "max")
        kept = ranked if saver.save_top_k == -1 else ranked[: saver.save_top_k]
        saver.best_k_models = {one: scores[one] for one in kept}
        saver.best_model_path, saver.kth_best_model_path = (kept[0], kept[-1]) if kept else (best, "")
        saver.best_model_score = scores.get(saver.best_model_path)
        saver.kth_value = scores.get(saver.kth_best_model_path, saver.kth_value)
    if saver.best_model_path == path:
        saver.best_model_path = best
    if saver.last_model_path == path:
        saver.last_model_path = last


def _answers_for(saver: ModelCheckpoint, path: str) -> bool:
    return path in (*saver.best_k_models, saver.best_model_path, saver.last_model_path)


# -- one staged copy ---------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Staging:
    """Copies states, each tensor into the memory of the copy that lay at the same place before.

    The first touch of new memory costs more than a copy into memory that is there. torch's own stager keeps the memory
    of a storage as long as the storage lives, which is no longer than the save where a strategy gathers its state, and
    copies whole storages for small parts of them (torch 2.13, ``_state_dict_stager.py`` 128).
    The collectives of these saves, which come from another thread, have a ``group`` of their own.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._kept: dict[Any, tuple[Any, Tensor]] = {}  # by their place, with the form of what they are copies of
        self._touched: set[Any] = set()
        # Of this save, by what they are copies of. Memory that was freed since may have been given to another tensor.
        self._copies: dict[Any, tuple[StorageWeakRef, Tensor]] = {}
        self._waits_for_cuda = False

    def begin(self) -> None:
        """A save begins: the copies of the one before have been written."""
        self._touched, self._copies = set(), {}

    def copy(self, state: Any, place: Any) -> Any:
        """The state as it is now, in memory of its own; ``place`` tells it from others of this save, in each save."""
        staged = self._copied(state, (place,), {})
        if self._waits_for_cuda:
            torch.cuda.synchronize()
            self._waits_for_cuda = False
        return staged

    def end(self) -> None:
        """All states of a save are copied: memory of what is not saved any more goes."""
        self._kept = {place: tensor for place, tensor in self._kept.items() if place in self._touched}

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """What was copied from this tensor in this save; None: nothing was."""
        known = self._copies.get(_identity(tensor))
        return None if known is None or known[0].expired() else known[1]  # type: ignore[no-untyped-call]

    def _copied(self, value: Any, place: tuple[Any, ...], memo: dict[Any, Any]) -> Any:
        if isinstance(value, dict):
            copied = copy(value)  # with its type and its attributes, such as those of a module's state
            for key, inner in value.items():
                copied[key] = self._copied(inner, (*place, key), memo)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copied(inner, (*place, number), memo) for number, inner in enumerate(value))
        if isinstance(value, DTensor):
            return self._copied_dtensor(value, place, memo)
        if type(value) in _PLAIN and value.layout is torch.strided and not value.is_quantized:
            return self._copied_tensor(value, place, memo)
        if hasattr(value, "local_shards"):
            return value  # FSDP1 has gathered it for this save, and nobody else has it
        return deepcopy(value, memo)

    def _copied_tensor(self, tensor: Tensor, place: tuple[Any, ...], memo: dict[Any, Any]) -> Tensor:
        identity = _identity(tensor)
        if identity in memo:  # tied weights stay tied
            return cast(Tensor, memo[identity])
        form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_cuda)
        before, kept = self._kept.get(place, (None, None))
        if kept is None or before != form:
            self._kept.pop(place, None)
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self._kept[place] = form, kept
        kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        self._waits_for_cuda |= tensor.is_cuda
        self._touched.add(place)
        if tensor.numel():
            memo[identity] = kept
            self._copies[identity] = StorageWeakRef(tensor.untyped_storage()), kept  # type: ignore[no-untyped-call]
        return kept

    def _copied_dtensor(self, tensor: DTensor, place: tuple[Any, ...], memo: dict[Any, Any]) -> Any:
        # By the protocol of tensor subclasses: ``DTensor.from_local`` moves what is not on the device of the mesh.
        names, how = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
        copied = self._copied_tensor(tensor.to_local().detach(), place, memo)
        parts = {name: copied if isinstance(part := getattr(tensor, name), Tensor) else part for name in names}
        return DTensor.__tensor_unflatten__(parts, how, tensor.size(), tensor.stride())  # type: ignore[no-untyped-call]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


# -- shards of FSDP and FSDP2 ------------------------------------------------------------------------------------------


def save_shards(
    state: dict[str, Any], path: Path, digested: DigestedWrites | None, group: dist.ProcessGroup | None
) -> None:
    """Writes this rank's part of a state into a folder. All ranks of the group call it together."""
    writer = None
    if digested is not None:
        writer = FileSystemWriter(path, sync_files=False)
        writer.fs = _DigestedFileSystem(digested)
    with _compat.without_crc():  # which takes torch longer than the writing, and which nobody compares
        save(state, checkpoint_id=path, storage_writer=writer, planner=_FirstCopies(), process_group=group)


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


class _DigestedFileSystem(FileSystem):
    def __init__(self, digested: DigestedWrites) -> None:
        self._digested = digested

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode == "wb":
            with self._digested.open(Path(path)) as stream:
                yield stream
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


# -- the writes of one save --------------------------------------------------------------------------------------------


class Writes:
    """The writes of one save: done at once, or kept, with a copy of what is written, for a thread.

    ``digested`` takes digests of the files while they are written; it is None where nothing is committed. Without a
    ``staging``, which makes the copies, the writes are done at once. The first rank answers for what all hold alike.
    """

    def __init__(self, staging: Staging | None, *, is_first: bool) -> None:
        self.digested: DigestedWrites | None = None
        self._staging = staging
        self._is_first = is_first
        self._kept: list[Callable[[], object]] = []
        self._counts_others = False
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
            state = self._staging.copy(state, len(self._kept))
            self._kept.append(partial(write, state))
        if not self._counts_others:
            self._count(lambda: pieces_of_saved(state, is_first=self._is_first))
        if self._staging is None:
            write(state)

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
            self._count(pieces)
            yield
            return
        yield
        found = [(piece, self._staging.copy_of(piece.tensor)) for piece in pieces()]
        copies = [replace(piece, tensor=copied) for piece, copied in found if copied is not None]
        others = sums_of_pieces(piece for piece, copied in found if copied is None)  # before training changes them
        self._counts += [lambda: sums_of_pieces(copies), lambda: others]

    def finish(self) -> None:
        """Does the writes that were kept."""
        for write in self._kept:
            write()

    def count(self) -> Sums:
        """What this rank has saved of each tensor; the copies are given up."""
        counted = add_up(count() for count in self._counts)
        self._kept, self._counts = [], []
        return counted

    def _count(self, pieces: Callable[[], Iterable[Piece]]) -> None:
        """Counts what is written at once in another thread meanwhile, and copies when they are written."""
        if self._staging is not None:
            self._counts.append(lambda: sums_of_pieces(pieces()))
            return
        thread = ThreadPoolExecutor(1, "distplus-counter")
        self._counts.append(thread.submit(lambda: sums_of_pieces(pieces())).result)
        thread.shutdown(wait=False)


class BackgroundSave:
    """One save that a thread finishes; ``work`` writes and commits it."""

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
        """Waits for its end."""
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


# -- single files ------------------------------------------------------------------------------------------------------


class StreamingCheckpointIO(TorchCheckpointIO):
    """``TorchCheckpointIO`` for a place where nobody looks yet, so that the file need not appear at once.

    The parent pickles into memory, writes that to ``$TMPDIR`` and moves the file, a copy wherever that is another file
    system, which may be full while the target is not (lightning 2.6.6, ``cloud_io.py`` 85-122).
    """

    writes: Writes | None = None
    """Where the writes of a save that is committed go."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes the file; a remote one, or one with options, is the parent's."""
        writes, file = self.writes, Path(path)
        if writes is None or storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        def write(state: dict[str, Any]) -> None:
            with writes.open(file) as opened:
                torch.save(state, opened)

        file.parent.mkdir(parents=True, exist_ok=True)
        writes.do(write, checkpoint)


# -- hooks -------------------------------------------------------------------------------------------------------------

_SAVE = Point(operation="barrier", name="Trainer.save_checkpoint")


class SaveHooks:
    """Saves the checkpoints of a strategy: the parent's own save in a stage, committed by all ranks."""

    _plane: ControlPlane
    _moves: Lock  # held while a save or a removal moves something; made in `begin`, as a strategy may be pickled before

    def __init__(self, strategy: ResilientStrategy, policy: OnSaveFailure) -> None:
        self._strategy = strategy
        self.failing = FailingSaves(policy)
        self.in_flight: BackgroundSave | None = None
        """The save that a thread finishes; one at most."""
        self.sync: Sync = os.fsync
        """Forces what is saved to the disk."""
        self._stall_s = 0.0  # for which training has stood still for the last save
        self._staging: Staging | None = None
        self._copier: Copier | None = None
        self._second_line: ControlPlane | None = None
        self._let_go: list[Path] = []  # on rank 0: what is to be removed once another one stands in for it

    @property
    def has_ended_behind(self) -> bool:
        """Asked at each gate: whether a save in the background has ended on this rank."""
        return self.in_flight is not None and self.in_flight.has_ended

    def begin(self, plane: ControlPlane) -> None:
        """A run begins, whose ranks have met."""
        strategy = self._strategy
        copies = None if strategy.copy_to is None else Copies(strategy.copy_to)
        self._plane, self._second_line, self._moves, self._let_go = plane, None, Lock(), []
        self._copier = None if copies is None else Copier(copies, self._note_copy)
        strategy.loads.begin(plane, copies)
        if type(strategy.checkpoint_io) is TorchCheckpointIO:  # a plugin of the user's stays
            strategy.checkpoint_io = StreamingCheckpointIO()

    def announced(self, save: Callable[..., None]) -> Callable[..., None]:
        """``Trainer.save_checkpoint``, once all ranks save: what it collects first may be a collective already."""

        def save_checkpoint(*arguments: Any, **named: Any) -> None:
            self._strategy.collectives.together(lambda: _SAVE, lambda: None)
            with self._having_its_deadline():
                save(*arguments, **named)

        return save_checkpoint

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        """The strategy's ``save_checkpoint``."""
        self.settle(retry=str(filepath))  # at most one is in flight
        self.failing.enter()
        strategy, step, began_at = self._strategy, checkpoint.get("global_step"), time.monotonic()
        strategy.marks.set(f"save {filepath}")
        try:
            with strategy.transfer.of("save"), self._having_its_deadline(), self._writing() as writes:
                self.in_flight = self._save(checkpoint, filepath, storage_options, writes)
        except SaveFailed as error:
            self._failed(str(filepath), step, error)
            return
        strategy.measured.note(Phase.CHECKPOINT, began_at)
        self._stall_s = 0.0
        if self.in_flight is None:
            self._succeeded(str(filepath), step, began_at)
        else:
            self._note_stall(began_at)

    def _save(
        self, checkpoint: dict[str, Any], target: str | Path, storage_options: Any, writes: Writes
    ) -> BackgroundSave | None:
        """Saves in a stage; returns the save that a thread finishes, or None where it is committed."""
        strategy, path = self._strategy, local_path(target)
        write = partial(strategy.write_checkpoint, checkpoint, storage_options=storage_options, writes=writes)
        if path is None:
            message = "rank %d: %s is not on a local file system; it is saved without a commit"
            log.warning(message, strategy.global_rank, target)
            write(target)
            return None
        # Every rank's generators: Lightning stores the dictionary of rank 0 only.
        mine = {name: b64encode(state).decode() for name, state in rng_state().items()}
        rng = [{name: b64decode(state) for name, state in one.items()} for one in self._gather("rng", mine)]
        checkpoint[KEY] = {"version": VERSION, "rng": rng, "parameters": parameters_of_optimizers(strategy)}
        info, not_before = self._info(checkpoint), strategy.loads.parent_committed_at
        writes.digested = DigestedWrites(self.sync)
        staged = StagedSave(path, self._plane.world.rank, self._gather, writes.digested)
        staged.fill(write)
        commit = partial(self._commit, staged, info, count=writes.count, not_before=not_before)
        if writes.are_kept:
            behind = partial(commit, finish=writes.finish, gather=self._gather_behind())
            return BackgroundSave(str(path), info.global_step, behind)
        commit()
        return None

    def _commit(self, staged: StagedSave, info: Manifest, **how: Any) -> None:
        with self._moves:
            staged.commit(info, **how)

    def settle(self, *, retry: str | None = None) -> None:
        """Waits for the save in the background, if there is one, and hears how it went. All ranks call it together.

        ``retry`` is the save that begins next.
        """
        strategy, begun, self.in_flight = self._strategy, self.in_flight, None
        if begun is None:
            return
        strategy.marks.set(f"wait until {begun.path} is saved")
        began_at = time.monotonic()
        with self._having_its_deadline():
            try:
                begun.wait(strategy.phases.patience)
            except SaveFailed as error:
                self._failed(begun.path, begun.global_step, error, retry=retry)
                return
        if strategy.is_global_zero:
            for checkpoint, name in begun.links:
                link(Path(checkpoint), Path(name))
        self._succeeded(begun.path, begun.global_step, began_at)

    @contextmanager
    def _having_its_deadline(self) -> Iterator[None]:
        """Gives this block the deadline of a save; that of the phase before it holds again then, where it is longer."""
        phases = self._strategy.phases
        before = phases.current
        phases.enter(Phase.CHECKPOINT)
        try:
            yield
        finally:  # the next gate, where all ranks meet, shrinks it
            phases.current = max(before, Phase.CHECKPOINT, key=phases.patience_in)

    def _succeeded(self, target: str, step: int | None, began_at: float) -> None:
        """A save is on the disk: what it stands in for can go."""
        self.failing.succeeded()
        if (path := local_path(target)) is not None:
            self._strategy.loads.follow(path)
            if self._copier is not None and self._strategy.is_global_zero:
                self._copier.submit(path.absolute())
            self._let_go = [old for old in self._let_go if old.absolute() != path.absolute()]
            self._remove_let_go()
        self._note_stall(began_at)
        self._strategy.note("saved", path=target, global_step=step, stall_s=round(self._stall_s, 3))

    def _failed(self, path: str, step: int | None, error: SaveFailed, *, retry: str | None = None) -> None:
        self._strategy.note("save_failed", path=path, global_step=step, error=str(error)[:1000])
        self.failing.failed(path, error, retry=retry)
        self._let_go = [old for old in self._let_go if not self.failing.is_in_books(str(old))]

    def _note_stall(self, began_at: float) -> None:
        """The training thread has stood still for the last save since a moment of the monotonic clock."""
        stall_s = time.monotonic() - began_at
        self._stall_s += stall_s
        self._strategy.times.add("checkpoint", stall_s)

    def _note_copy(self, path: Path, error: str | None) -> None:
        kind = "checkpoint_copied" if error is None else "copy_failed"
        self._strategy.note(kind, path=str(path), to=self._strategy.copy_to, error=error)

    @contextmanager
    def _writing(self) -> Iterator[Writes]:
        """In this block the parent's writes are noted; in a fit of a strategy with ``async_save`` kept for later."""
        strategy, plugin, staging = self._strategy, self._strategy.checkpoint_io, None
        if strategy.async_save and self.failing.trainer is not None:
            staging = self._staging = self._staging or Staging(strategy.loads.group())
        writes = Writes(staging, is_first=strategy.is_global_zero)
        try:
            if isinstance(plugin, StreamingCheckpointIO):
                plugin.writes = writes
            with writes.of_shards():
                yield writes
            if staging is not None:
                staging.end()
        finally:
            if isinstance(plugin, StreamingCheckpointIO):
                plugin.writes = None

    # -- removals and links ------------------------------------------------------------------------------------------

    def remove(self, filepath: str | Path) -> None:
        """Removes a checkpoint once another one stands in for it; not what a save has failed to replace."""
        if self.failing.failure is not None and self.failing.is_in_books(str(filepath)):
            return
        if self._strategy.is_global_zero:
            self._let_go.append(Path(filepath))
            self._remove_let_go()

    def _remove_let_go(self) -> None:
        """Not while a save is under way, or has failed; nor what a link leads to, nor the last valid one."""
        if self.failing.failure is not None or self.in_flight is not None:
            return
        kept = []
        for path in self._let_go:
            if self._is_linked(path) or is_last_valid(path):
                kept.append(path)
                continue
            try:
                with self._moves:
                    remove(path)
                self._strategy.note("removed", path=str(path))
            except OSError as error:
                log.warning("%s cannot be removed (%s); the next commit is the retry", path, error)
                kept.append(path)
        self._let_go = kept

    def link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """In the place of ModelCheckpoint's for ``save_last="link"``: there is a link at every moment, to what is."""
        if self.in_flight is not None and Path(self.in_flight.path) == Path(filepath).absolute():
            self.in_flight.links.append((filepath, linkpath))
        elif self._strategy.is_global_zero:
            link(Path(filepath), Path(linkpath))
            self._remove_let_go()
        self._strategy.barrier("ModelCheckpoint.link")

    def _is_linked(self, path: Path) -> bool:
        """Whether a ModelCheckpoint's last.ckpt leads to a checkpoint: it is linked to the next one in a moment."""
        module = self._strategy.lightning_module
        savers = [] if module is None else module.trainer.checkpoint_callbacks
        names = [getattr(saver, "last_model_path", "") for saver in savers]
        return any(name and Path(name).is_symlink() and Path(name).resolve() == path.resolve() for name in names)

    def end(self, *, has_failed: bool) -> None:
        """A run that ends in order waits for its save in the background; one that has failed does not. Never raises."""
        try:
            if not has_failed:
                self.settle()
        except Exception as error:  # a teardown: whatever it is, the rest of it follows
            log.error("rank %d ends without the checkpoint in the background: %s", self._strategy.global_rank, error)
        self.failing.end()
        self._staging = self.in_flight = None
        deadline = timedelta(0) if has_failed else self._strategy.phases.patience_in(Phase.CHECKPOINT)
        if self._copier is not None and not self._copier.close(deadline):
            log.error("the last checkpoint is not copied within the deadline of a checkpoint; the run ends without it")

    # -- what goes into a checkpoint ---------------------------------------------------------------------------------

    def _info(self, checkpoint: dict[str, Any]) -> Manifest:
        """What the manifest tells people of the run, and of the place in the data as far as JSON can hold it."""
        strategy, module = self._strategy, self._strategy.lightning_module
        calibration = strategy.measured.calibration
        datamodule = None if module is None else getattr(module.trainer, "datamodule", None)
        data = checkpoint.get(type(datamodule).__qualname__)
        try:
            json.dumps(data, allow_nan=False)
        except (TypeError, ValueError):
            data = None  # a state of tensors stays in the checkpoint alone, as one that is no dictionary
        return Manifest(
            global_step=checkpoint.get("global_step", 0),
            epoch=checkpoint.get("epoch", 0),
            strategy=engine_of(type(strategy)),
            data=data if isinstance(data, dict) else None,
            layout=layout_of(strategy),
            deadlines_s={} if calibration is None else dict(calibration.deadlines_s),
            parent=strategy.loads.parent,
        )

    def _gather(self, name: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        return self._plane.gather_json(name, value, self._strategy.phases.patience_in(Phase.CHECKPOINT))

    def _gather_behind(self) -> Gather:
        """``_gather`` for the thread of a save: over a connection and under names of its own."""
        plane = self._second_line = self._second_line or self._plane.second_line()
        deadline = self._strategy.phases.patience_in(Phase.CHECKPOINT)
        return lambda name, value: plane.gather_json(f"behind {name}", value, deadline)
