"""Iterable training data of one rank: its loader, its place in a checkpoint, and when that place cannot be taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_distplus.data.loader import WorkerOptions
from lightning_distplus.data.order import derive_key
from lightning_distplus.data.plain_state import pack, unpack
from lightning_distplus.data.stateful import stateful
from lightning_distplus.data.stream_loader import StreamLoader, StreamState
from lightning_distplus.data.stream_worker import StreamReader, WorkerState
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

__all__ = ["IterableOptions", "IterableTraining"]

_log = logging.getLogger(__name__)
_VERSION = 1
_STREAM = -5  # separates the keys of iterable data from those of map-style data


@dataclass(frozen=True, kw_only=True)
class IterableOptions:
    """How a rank reads iterable data; the names are those of ``ResumableDataModule``."""

    batch_size: int
    batched: bool
    uneven: str
    collate_fn: Callable[[list[Any]], Any] | None
    seed: int | None
    allow_stateless: bool
    workers: WorkerOptions

    def __post_init__(self) -> None:
        if self.uneven == "error":
            raise ValueError(
                'uneven is "error" and the training data is iterable: where it ends is known only when it does. Use '
                '"drop" or "pad".'
            )
        if self.uneven == "pad" and self.batched:
            raise ValueError('uneven is "pad" and the data yields batches, passed on as they are. Use "drop".')


class IterableTraining:
    """The training data of one rank, from its first batch to its last.

    Args:
        data: See ``stateful.stateful``.
        options: How it is read.
        ranks: The data-parallel ranks.
        before: Of an earlier Trainer in this process, which may have moved the same data on.

    Raises:
        ValueError: The data cannot be resumed exactly.
    """

    def __init__(
        self, data: Any, options: IterableOptions, ranks: DataParallel, before: IterableTraining | None = None
    ) -> None:
        self.data = data
        self._options = options
        self._ranks = ranks
        self._source, self._is_batched = stateful(
            data,
            batch_size=options.batch_size,
            num_workers=options.workers.num_workers,
            batched=options.batched,
            ranks=ranks,
            allow_stateless=options.allow_stateless,
        )
        if before is not None and before.data is data:
            self._source.begin_where(before._source)
        self._num_readers = max(1, options.workers.num_workers)
        self._state = StreamState((WorkerState(),) * self._num_readers)
        self._loader: StreamLoader | None = None

    def loader(self, number: int, **callbacks: Callable[[], Any]) -> StreamLoader:
        """The loader, from where the data stands; ``number`` is that of its first batch."""
        self._loader = StreamLoader(
            self._reader,
            check=self._pack,
            state=self._state,
            number=number,
            options=self._options.workers,
            generator_seed=derive_key(self._options.seed or 0, _STREAM),
            **callbacks,
        )
        return self._loader

    def close(self, number: int) -> None:
        """Ends the workers; a later loader goes on before batch ``number``."""
        if self._loader is not None:
            self._state = self._loader.state_before(number)
            self._loader.close()
            self._loader = None

    def is_end(self, number: int) -> bool:
        """Whether a pass over the data ended just before batch ``number``."""
        return self._loader.is_end(number) if self._loader is not None else self._state.is_ended

    def packed(self, number: int) -> bytes:
        """The state of this rank before batch ``number``.

        Raises:
            TypeError: The data's state holds something that a checkpoint does not take.
        """
        return self._pack(self._state if self._loader is None else self._loader.state_before(number))

    def _pack(self, state: StreamState) -> bytes:
        workers = [{**one._asdict(), "data": self._source.opened(one.data)} for one in state.workers]
        owner = type(self._source.data).__qualname__
        return pack({"workers": workers, "last_worker": state.last_worker}, owner=owner)

    def to_checkpoint(self, states: Sequence[bytes]) -> dict[str, Any]:
        """What a checkpoint holds, from the states of all ranks."""
        return {
            "version": _VERSION,
            "has_state": self._source.has_state,
            "num_workers": self._options.workers.num_workers,
            "batch_size": self._options.batch_size,
            "states": list(states),
        }

    def from_checkpoint(self, saved: dict[str, Any] | None, rank: int, world_size: int) -> None:
        """Takes the place of this rank over.

        Raises:
            DatasetMismatch: The checkpoint has none, or its ranks or workers are not those of this run.
        """
        if saved is None:
            raise DatasetMismatch(
                "The checkpoint holds no states of an iterable data set, and this run's training data is one. Resume "
                "with the data of the checkpoint, or load its weights into a new run."
            )
        if saved.get("version") != _VERSION:
            raise DatasetMismatch(
                f"The checkpoint's states of iterable data have version {saved.get('version')!r}; this "
                f"lightning_distplus reads {_VERSION}. Resume with the version that wrote the checkpoint."
            )
        if not (saved["has_state"] and self._source.has_state):
            if rank == 0:
                _log.warning("the training data has no state: it begins anew, because allow_stateless=True")
            return
        self._require_same_readers(saved, world_size)
        state = unpack(saved["states"][rank])
        workers = (WorkerState(**{**one, "data": self._source.closed(one["data"])}) for one in state["workers"])
        self._state = StreamState(tuple(workers), state["last_worker"])

    def _require_same_readers(self, saved: dict[str, Any], world_size: int) -> None:
        ours, theirs = self._options.workers.num_workers, saved["num_workers"]
        num_ranks = len(saved["states"])
        why = (
            "Each rank and each worker has read its own part of an iterable data set, and only the data set knows how "
            "it is divided"
        )
        remedy = "load the weights into a new run, or use a map-style data set, which resumes on any number of ranks"
        if num_ranks != world_size:
            raise DatasetMismatch(
                f"The checkpoint holds the states of iterable data of {num_ranks} ranks; this run has {world_size}. "
                f"{why}. Resume on {num_ranks} ranks, {remedy}."
            )
        if theirs != ours:
            raise DatasetMismatch(
                f"The checkpoint holds the states of iterable data of {theirs} workers on each rank; this run has "
                f"num_workers={ours}. {why}. Resume with num_workers={theirs}, {remedy}."
            )
        if saved["batch_size"] != self._options.batch_size and (theirs > 1 or self._is_batched):
            raise DatasetMismatch(
                f"The checkpoint was written with batch_size={saved['batch_size']}; this run has "
                f"{self._options.batch_size}, and workers take turns in batches, or the data makes them itself. "
                f"Resume with batch_size={saved['batch_size']}."
            )

    def _reader(self, starts: tuple[WorkerState, ...], last_worker: int) -> StreamReader:
        options, seed = self._options, self._options.seed
        return StreamReader(
            self._source,
            batch_size=None if self._is_batched else options.batch_size,
            collate=options.collate_fn,
            rest="pad" if options.uneven == "pad" else "drop",
            seed=None if seed is None else derive_key(seed, _STREAM, self._ranks.rank),
            starts=starts,
            last_worker=last_worker,
        )
