"""Iterable training data with a state: how it is read, numbered, saved, and begun again where it was.

Workers and Lightning run ahead of the training. So each batch comes with the state after it, which is kept until the
optimizer step that it belongs to is complete. A checkpoint holds the states of all ranks, as bytes that
``torch.load(weights_only=True)`` reads.

``torchdata.StatefulDataLoader`` (0.11) cannot take the place of what runs in the workers. A worker whose share has
ended is asked once more after a resume, so that data which begins anew by itself repeats samples. Workers that do not
persist begin each pass with the data as the training process has it, so that the second pass is the first one again.
"""

from __future__ import annotations

import inspect
import io
import logging
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate, get_worker_info

from lightning_distplus.data.batches import AUGMENT, WorkerOptions, as_it_is, isolated, seed_generators
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

if TYPE_CHECKING:
    from lightning_distplus.data.datamodule import ResumableDataModule

__all__ = [
    "Item",
    "IterableTraining",
    "Stateful",
    "StreamPasses",
    "StreamReader",
    "StreamState",
    "WorkerState",
    "has_state",
    "is_iterable",
    "pack",
    "require_data",
    "stateful",
    "takes_the_position",
    "unpack",
]

_log = logging.getLogger(__name__)
_VERSION = 1
_STREAM = -5  # separates the keys of iterable data from those of map-style data

# -- states as plain values --------------------------------------------------------------------------------------------

_ARRAY = "__lightning_distplus_array__"
_BYTES = "__lightning_distplus_bytes__"
_PLAIN = (bool, int, float, str, type(None))


def pack(state: Any, *, owner: str) -> bytes:
    """A state as bytes.

    Args:
        state: Containers, numbers, strings, bytes, tensors and numpy arrays.
        owner: Whose state it is, for the message.

    Raises:
        TypeError: Something else is in it; the message names the place.
    """
    stream = io.BytesIO()
    torch.save(_to_plain(state, "", owner), stream)
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """What ``pack`` was given."""
    return _from_plain(torch.load(io.BytesIO(packed), weights_only=True))


def _to_plain(value: Any, place: str, owner: str) -> Any:
    if type(value) in _PLAIN or type(value) is torch.Tensor:
        return value
    if isinstance(value, bytes | bytearray):
        return {_BYTES: _tensor(value)}  # torch does not read empty bytes back
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.hasobject is False:
        return {_ARRAY: [value.dtype.str, list(value.shape)], "data": _tensor(value.tobytes())}
    if isinstance(value, Mapping):
        return {_to_plain(key, place, owner): _to_plain(one, f"{place}[{key!r}]", owner) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        items = [_to_plain(one, f"{place}[{number}]", owner) for number, one in enumerate(value)]
        return items if isinstance(value, list) else set(items) if isinstance(value, set) else tuple(items)
    raise TypeError(
        f"The state of {owner} holds a {type(value).__module__}.{type(value).__qualname__} at state_dict(){place}; a "
        "checkpoint takes containers, numbers, strings, bytes, tensors and numpy arrays. Return those."
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            dtype, shape = value[_ARRAY]
            return np.frombuffer(value["data"].numpy().tobytes(), dtype=dtype).reshape(shape).copy()
        if _BYTES in value:
            return value[_BYTES].numpy().tobytes()
        return {_from_plain(key): _from_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_from_plain(one) for one in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# -- the data, and its state -------------------------------------------------------------------------------------------


def is_iterable(data: Any) -> bool:
    """Whether data can only be read from front to back; what has an index and a length is map-style."""
    if data is None:
        return False
    if isinstance(data, IterableDataset | DataLoader) or _is_node(data):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def require_data(dataset: Any, stage: str) -> None:
    """Checks what a user gives to train or to validate on.

    Raises:
        ValueError: It is no data set, or there is none to train on.
    """
    if stage == "train" and (type(dataset) is dict or isinstance(dataset, CombinedLoader)):
        raise ValueError(
            f"The training data is a {type(dataset).__name__}, and training reads one data set. Pass one whose samples "
            "are dicts with a sample of each: docs/guides/data.md, Several data sets."
        )
    if isinstance(dataset, Mapping) and type(dataset) is not dict:
        raise ValueError(
            f"The {stage} data is a {type(dataset).__name__} of {', '.join(map(str, dataset))}. Pass one of them, or a "
            "plain dict of several."
        )
    if dataset is None and stage == "train":
        raise ValueError(
            "There is no training data: pass train_dataset=... to ResumableDataModule or override train_dataset()."
        )
    if dataset is not None and not is_iterable(dataset) and not hasattr(dataset, "__len__"):
        raise ValueError(f"The {stage} data {type(dataset).__name__} has no __len__. Define it.")


class Stateful:
    """One iterable and its state, as bytes that can cross a process boundary."""

    def __init__(self, data: Any, *, allow_stateless: bool = False) -> None:
        self.data = data
        self.has_state = has_state(data)
        self._first: bytes | None = None
        if not self.has_state and not allow_stateless:
            raise ValueError(
                f"The training data {_name(data)} is iterable and has no state, so that a resumed run could not go on "
                "where it was. Give it state_dict() -> dict, what it has yielded so far, and load_state_dict(state), "
                "after which the next iter() goes on there; or pass a data set with __len__ and __getitem__; or, if a "
                "resumed run may begin the data again, allow_stateless=True."
            )

    def start(self, state: bytes | None, epoch: int) -> Iterator[Any]:
        """An iterator from a state, or from the beginning of the ``epoch``-th pass."""
        for owner in (self.data, getattr(self.data, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if state is None:
            state = self._of_first_start()
        if state is not None:
            self.data.load_state_dict(self.opened(state))
        return iter(self.data)

    def begin_where(self, other: Stateful) -> None:
        """Takes the beginning of the same data from an earlier reader of it."""
        self._first = other._first

    def _of_first_start(self) -> bytes | None:
        """The state at the first start in this process, for a later one: data of a second fit begins anew."""
        if self._first is not None or not self.has_state or isinstance(self.data, DataLoader):
            return self._first
        with suppress(AttributeError):  # some have a state only once they have been iterated
            self._first = self.state()
        return None

    def state(self) -> bytes | None:
        """The state after what has been yielded; None where there is none."""
        return self.closed(self.data.state_dict()) if self.has_state else None

    @staticmethod
    def closed(state: Any) -> bytes | None:
        """A state as it travels from a worker to the training process: a copy that nobody changes any more."""
        return None if state is None else pickle.dumps(state)

    @staticmethod
    def opened(state: bytes | None) -> Any:
        """What ``closed`` was given."""
        return None if state is None else pickle.loads(state)


def stateful(
    data: Any, *, batch_size: int, num_workers: int, batched: bool, ranks: DataParallel, allow_stateless: bool
) -> tuple[Stateful, bool]:
    """Checks iterable training data, and says whether it yields batches.

    Args:
        data: An iterable data set, a ``StatefulDataLoader``, a node or ``Loader`` of torchdata, a litdata data set.
        batch_size: Samples of a batch.
        num_workers: Worker processes that this package shall start.
        batched: Whether the data is said to yield batches.
        ranks: The data-parallel ranks.
        allow_stateless: Whether a resumed run may begin data anew that has no state.

    Raises:
        ValueError: It cannot be resumed exactly; the message says why and what to pass instead.
    """
    if isinstance(data, DataLoader):
        _check_loader(data, batch_size, num_workers, ranks)
        return Stateful(data, allow_stateless=allow_stateless), True
    if _is_node(data) or _is_node(data, "Loader"):
        if num_workers:
            raise ValueError(
                f"num_workers is {num_workers} and the training data {_name(data)} is of torchdata.nodes, which run "
                "workers of their own (ParallelMapper, Prefetcher). Leave num_workers at 0."
            )
        from torchdata.nodes import Loader

        # Restarting by itself would hide from us where a pass ends.
        root = data if _is_node(data) else data.root
        return Stateful(Loader(root, restart_on_stop_iteration=False)), batched
    if takes_the_position(data):
        raise ValueError(
            f"The state_dict() of {_name(data)} takes arguments: it is made by its own loader. Pass that loader, for "
            "litdata `StreamingDataLoader(dataset, batch_size=..., num_workers=...)`, in place of the data set."
        )
    return Stateful(data, allow_stateless=allow_stateless), batched


def _check_loader(loader: DataLoader[Any], batch_size: int, num_workers: int, ranks: DataParallel) -> None:
    name = _name(loader)
    if not has_state(loader):
        raise ValueError(
            f"The training data is a {name}, which has no state: it shuffles and counts where nobody can follow, and a "
            "resumed epoch would repeat and miss samples. Pass its data set instead: "
            "ResumableDataModule(loader.dataset, batch_size=..., shuffle=..., num_workers=...)."
        )
    if num_workers:
        raise ValueError(
            f"num_workers is {num_workers} and the training data is a {name}, which starts workers by itself. Leave "
            "num_workers at 0, and give the loader its own."
        )
    if loader.batch_size not in (None, batch_size):
        raise ValueError(
            f"batch_size is {batch_size} and the {name} makes batches of {loader.batch_size}. Give both the same."
        )
    is_combined = type(loader.dataset).__name__ == "CombinedStreamingDataset"
    if is_combined and loader.num_workers > 1:
        raise ValueError(
            f"A litdata CombinedStreamingDataset with {loader.num_workers} workers does not go on where it was "
            "(litdata 0.2.76 divides what was read evenly over workers). Use at most one worker, or "
            "TokenDataModule over token files, which it mixes exactly."
        )
    sampler = getattr(loader, "sampler", None)
    is_indexed = not isinstance(loader.dataset, IterableDataset)
    if not is_indexed and loader.num_workers > 1 and name == "StatefulDataLoader" and ranks.rank == 0:
        _log.warning(
            "a StatefulDataLoader with %d workers asks a worker whose data has ended once more after a resume "
            "(torchdata 0.11), so that samples may repeat: pass ResumableDataModule its data set and num_workers=%d "
            "instead",
            loader.num_workers,
            loader.num_workers,
        )
    if is_indexed and ranks.size > 1 and getattr(sampler, "num_replicas", None) != ranks.size:
        what = "reads in order" if isinstance(sampler, SequentialSampler) else "draws with no regard to ranks"
        raise ValueError(
            f"The {name} {what}, so that each of {ranks.size} ranks would see every sample. Pass its data set "
            "instead of the loader: ResumableDataModule(loader.dataset, batch_size=...) divides it exactly; or give "
            f"the loader a StatefulDistributedSampler over {ranks.size} replicas."
        )


def has_state(data: Any) -> bool:
    """Whether data can be asked for a state, and given one."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def takes_the_position(data: Any) -> bool:
    """Whether only its own loader can ask data for a state."""
    if not has_state(data):
        return False
    parameters = inspect.signature(data.state_dict).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind in kinds for one in parameters)


def _is_node(data: Any, name: str = "BaseNode") -> bool:
    nodes = sys.modules.get("torchdata.nodes")  # whoever has one has imported it
    return nodes is not None and isinstance(data, getattr(nodes, name))


def _name(data: Any) -> str:
    return type(data).__qualname__


# -- what a worker runs ------------------------------------------------------------------------------------------------

_BEGIN = -4  # separates the keys of a pass's beginning from those of its samples


class WorkerState(NamedTuple):
    """Where one process stands in its share of the data."""

    data: bytes | None = None  # the state of the data, pickled; None: at the beginning, or where it has none
    epoch: int = 0  # passes that are complete
    num_taken: int = 0  # samples (or batches, where the data yields these) taken in this pass
    is_ended: bool = False  # whether the pass is over

    def begin_again(self) -> WorkerState:
        """The beginning of the next pass: the data goes on from its own end."""
        return WorkerState(self.data, self.epoch + 1)


class StreamState(NamedTuple):
    """Where one rank stands in its data: the place of each worker, and the worker whose batch was the last."""

    workers: tuple[WorkerState, ...]
    last_worker: int = -1

    @classmethod
    def at_beginning(cls, num_workers: int) -> StreamState:
        """The beginning of the data; without worker processes the training process counts as one."""
        return cls((WorkerState(),) * max(1, num_workers))

    @property
    def is_ended(self) -> bool:
        """Whether every worker's pass is over."""
        return all(one.is_ended for one in self.workers)

    def opened(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint."""
        workers = [{**one._asdict(), "data": Stateful.opened(one.data)} for one in self.workers]
        return {"workers": workers, "last_worker": self.last_worker}

    @classmethod
    def closed(cls, opened: Mapping[str, Any]) -> StreamState:
        """The state of which a checkpoint holds plain values."""
        workers = (WorkerState(**{**one, "data": Stateful.closed(one["data"])}) for one in opened["workers"])
        return cls(tuple(workers), opened["last_worker"])


class Item(NamedTuple):
    """What a worker passes on: a batch and the state after it; ``batch`` means nothing in the other kinds."""

    kind: Literal["batch", "skip", "end"]
    worker: int
    state: WorkerState
    batch: Any = None


@dataclass(kw_only=True, eq=False)
class StreamReader(IterableDataset[Item]):
    """Runs in each worker, or in the training process where there is none."""

    source: Stateful
    batch_size: int | None
    """Samples of a batch; None: the data yields batches."""
    collate: Callable[[list[Any]], Any] | None
    rest: Literal["drop", "pad", "keep"]
    """What becomes of the samples after the last whole batch of a pass: repeats of weight 0 pad a batch."""
    seed: int | None
    """Of the random numbers of each sample; None leaves the generators alone."""
    begin: StreamState
    """Where each worker begins. DataLoader begins with worker 0: those up to the last one skip their first turn."""
    _own: WorkerState | None = field(default=None, init=False)
    """Of a worker that persists: where its last pass ended."""

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start = self.begin.workers[worker]
        if self._own is not None:
            start = self._own.begin_again()
        elif start.is_ended:
            self._own = start
            return
        elif worker <= self.begin.last_worker:
            yield Item("skip", worker, start)
        for item in self._read(worker, start):
            if item.state.is_ended:
                self._own = item.state
            yield item

    def _read(self, worker: int, start: WorkerState) -> Iterator[Item]:
        samples: list[Any] = []
        epoch, num_taken = start.epoch, start.num_taken
        for sample in self._samples(worker, start):
            num_taken += 1
            if self.batch_size is None:
                yield Item("batch", worker, WorkerState(self.source.state(), epoch, num_taken), sample)
                continue
            samples.append(sample)
            if len(samples) == self.batch_size:
                batch = self._batch(samples)
                yield Item("batch", worker, WorkerState(self.source.state(), epoch, num_taken), batch)
                samples = []
        # Data may begin anew where they end: a resume behind the rest must not ask them once more.
        end = WorkerState(self.source.state(), epoch, num_taken, is_ended=True)
        if samples and self.rest != "drop":
            yield Item("batch", worker, end, self._batch(samples))
        yield Item("end", worker, end)

    def _samples(self, worker: int, start: WorkerState) -> Iterator[Any]:
        """The samples of a pass from ``start``, each under random numbers of its own."""
        seeds = None if self.seed is None else derive_key(self.seed, AUGMENT, worker, start.epoch)
        _seed(seeds, _BEGIN)
        iterator = self.source.start(start.data, start.epoch)
        if start.num_taken == 0 and start.data is not None:
            # The state is that of the end of a pass. Some data begin anew from it, some have to find that end first.
            _seed(seeds, 0)
            first = list(islice(iterator, 1))
            if not first:
                _seed(seeds, _BEGIN)
                iterator = iter(self.source.data)
            yield from first
            start = start._replace(num_taken=len(first))
        index = start.num_taken
        while True:
            _seed(seeds, index)
            try:
                sample = next(iterator)
            except StopIteration:
                return
            yield sample
            index += 1

    def _batch(self, samples: list[Any]) -> Any:
        if self.rest != "pad":
            return (self.collate or default_collate)(samples)
        assert self.batch_size is not None
        weights = torch.zeros(self.batch_size)
        weights[: len(samples)] = 1
        repeats = (samples * (self.batch_size // len(samples) + 1))[: self.batch_size]
        return (self.collate or default_collate)(repeats), weights


def _seed(key: int | None, index: int) -> None:
    if key is not None:
        seed_generators(splitmix64(key ^ (index & (2**64 - 1))))


# -- training data of one rank -----------------------------------------------------------------------------------------


def _dataloader(reader: StreamReader, workers: WorkerOptions, *, seed: int) -> DataLoader[Item]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(reader, batch_size=None, collate_fn=as_it_is, generator=generator, **asdict(workers))


class StreamPasses:
    """Iterable data for validation: every iteration is one pass, from the beginning."""

    def __init__(self, make_reader: Callable[[], StreamReader], *, workers: WorkerOptions) -> None:
        self._make_reader = make_reader
        self._workers = replace(workers, persistent_workers=False)

    def __iter__(self) -> Iterator[Any]:
        items = iter(_dataloader(self._make_reader(), self._workers, seed=0))
        for item in isolated(items, self._workers.num_workers == 0):
            if item.kind == "batch":
                yield item.batch


class IterableTraining:
    """The training data of one rank, as numbered batches, from the first to the last.

    Batch b is the one before which the Trainer has processed b micro-batches, in the whole run. Each comes with the
    state after it, which is kept until the optimizer step that it belongs to is complete. A batch that was fetched and
    not trained on when an epoch ended, because Lightning looks one batch ahead, is the first of the next epoch.

    Args:
        data: See ``stateful``.
        owner: Knows where the training stands.
        ranks: The data-parallel ranks.
        workers: Workers and pinning.
        before: Of an earlier Trainer in this process, which may have moved the same data on.
        **settings: Of ``owner``, by the names of its arguments; ``seed`` is None where samples are not seeded.

    Raises:
        ValueError: The data cannot be resumed exactly.
    """

    def __init__(
        self,
        data: Any,
        owner: ResumableDataModule,
        *,
        ranks: DataParallel,
        workers: WorkerOptions,
        before: IterableTraining | None,
        batch_size: int,
        batched: bool,
        uneven: str,
        collate_fn: Callable[[list[Any]], Any] | None,
        seed: int | None,
        allow_stateless: bool,
    ) -> None:
        if uneven == "error":
            raise ValueError(
                'uneven is "error" and the training data is iterable: where it ends is known only when it does. Use '
                '"drop" or "pad".'
            )
        if uneven == "pad" and batched:
            raise ValueError('uneven is "pad" and the data yields batches, passed on as they are. Use "drop".')
        self.data = data
        self._owner = owner
        self._workers = workers
        self._batch_size = batch_size
        self._seed = seed
        self._source, self._is_batched = stateful(
            data,
            batch_size=batch_size,
            num_workers=workers.num_workers,
            batched=batched,
            ranks=ranks,
            allow_stateless=allow_stateless,
        )
        if before is not None and before.data is data:
            self._source.begin_where(before._source)
        self._reader: dict[str, Any] = {
            "batch_size": None if self._is_batched else batch_size,
            "collate": collate_fn,
            "rest": "pad" if uneven == "pad" else "drop",
            "seed": None if seed is None else derive_key(seed, _STREAM, ranks.rank),
        }
        self._state = StreamState.at_beginning(workers.num_workers)
        self._states: dict[int, StreamState] = {}  # before each batch that a checkpoint may stand before; while open
        self._batches: deque[tuple[int, Any]] = deque()
        self._inner: DataLoader[Item] | None = None
        self._items: Iterator[Item] | None = None
        self._is_checked = False

    def open(self, number: int) -> IterableTraining:
        """Goes on where the data stands, with batch ``number``."""
        self._states = {number: self._state}
        return self

    def close(self, number: int) -> None:
        """Ends the workers; goes on before batch ``number`` when it is opened again."""
        self._state = self._states.get(number, self._state)
        self._states, self._batches, self._items, self._inner = {}, deque(), None, None

    def __iter__(self) -> Iterator[Any]:
        first = self._owner.begin_stream()
        if first is None:
            return
        number = first
        while self._batches and self._batches[0][0] < number:
            self._batches.popleft()
        for _, batch in tuple(self._batches):
            yield batch
            number += 1
        has_begun_again = False
        while True:
            if self._state.is_ended:
                # An epoch is never empty: where nothing is left for its first batch, the one before it ended there.
                if number > first and not self._owner.is_endless:
                    return
                if has_begun_again:
                    raise ValueError(
                        "The training data yields nothing on this rank, or less than one batch in each worker. Use a "
                        'smaller batch_size, fewer workers, or uneven="pad".'
                    )
                self._begin_again()
                has_begun_again = True
            if self._pull(number):
                yield self._batches[-1][1]
                number += 1
                has_begun_again = False

    def is_end(self, number: int) -> bool:
        """Whether a pass over the data is known to have ended just before batch ``number``."""
        state = self._states.get(number) if self._states else self._state
        return state is not None and state.is_ended

    def _pull(self, number: int) -> bool:
        """Fetches batch ``number``; False: the data ends before it."""
        oldest = min(self._owner.position().total_batches, number)
        for old in [one for one in self._states if one < oldest]:
            del self._states[old]
        while self._batches and self._batches[0][0] < self._owner.num_trained:
            self._batches.popleft()
        # Without workers the data's random numbers are drawn in this process: the model must not notice.
        isolate = self._workers.num_workers == 0 and self._seed is not None
        if self._items is None:
            if self._inner is None:
                reader = StreamReader(source=self._source, begin=self._state, **self._reader)
                self._inner = _dataloader(reader, self._workers, seed=derive_key(self._seed or 0, _STREAM))
            self._items = isolated(iter(self._inner), isolate)
        for item in self._items:
            state = self._state
            workers = (*state.workers[: item.worker], item.state, *state.workers[item.worker + 1 :])
            if item.kind == "batch":
                self._state = self._states[number + 1] = StreamState(workers, item.worker)
                self._batches.append((number, item.batch))
                if not self._is_checked:
                    self._pack(self._state)  # raises where a checkpoint could not hold it
                    self._is_checked = True
                return True
            self._state = StreamState(workers, state.last_worker)
        self._items = None
        self._states[number] = self._state
        return False

    def _begin_again(self) -> None:
        self._state = StreamState(tuple(one.begin_again() for one in self._state.workers))
        self._items = None
        if not self._workers.persistent_workers:
            self._inner = None

    # -- what a checkpoint holds

    def packed(self, number: int) -> bytes:
        """The state of this rank before batch ``number``.

        Raises:
            TypeError: The data's state holds something that a checkpoint does not take.
        """
        return self._pack(self._states[number] if self._states else self._state)

    def _pack(self, state: StreamState) -> bytes:
        return pack(state.opened(), owner=type(self._source.data).__qualname__)

    def to_checkpoint(self, states: Sequence[bytes]) -> dict[str, Any]:
        """What a checkpoint holds, from the states of all ranks."""
        return {
            "version": _VERSION,
            "has_state": self._source.has_state,
            "num_workers": self._workers.num_workers,
            "batch_size": self._batch_size,
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
        self._state = StreamState.closed(unpack(saved["states"][rank]))

    def _require_same_readers(self, saved: dict[str, Any], world_size: int) -> None:
        ours, theirs, num_ranks = self._workers.num_workers, saved["num_workers"], len(saved["states"])
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
        if saved["batch_size"] != self._batch_size and (theirs > 1 or self._is_batched):
            raise DatasetMismatch(
                f"The checkpoint was written with batch_size={saved['batch_size']}; this run has {self._batch_size}, "
                "and workers take turns in batches, or the data makes them itself. Resume with "
                f"batch_size={saved['batch_size']}."
            )
