"""Iterable training data with a state: how it is read, saved, and begun again where it was.

Workers and Lightning run ahead of the training. So each batch comes with the state after it, which is kept until the
optimizer step that it belongs to is complete. A checkpoint holds the states of all ranks, as bytes that
``torch.load(weights_only=True)`` reads. The passes of a plain loader begin as torch begins them: with ``iter()`` of the
data where they are, in workers that persist or in the training process; with the data as the training process has
them, in workers that do not.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate, get_worker_info

from lightning_distplus.data.batches import AUGMENT, WorkerOptions, as_it_is, isolated, seed_generators
from lightning_distplus.data.order import derive_key, splitmix64
from lightning_distplus.data.progress import Position, differences, is_at_end, require_version
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.world import DataParallel

if TYPE_CHECKING:
    from lightning_distplus.data.dataloader import LoaderResume
    from lightning_distplus.data.datamodule import ResumableDataModule

__all__ = [
    "STREAM",
    "IterableTraining",
    "ShownDataset",
    "Stateful",
    "StreamOrder",
    "StreamPasses",
    "StreamReader",
    "StreamState",
    "has_state",
    "is_iterable",
    "iterate_with",
    "pack",
    "require_data",
    "stateful",
    "takes_the_position",
    "unpack",
]

_log = logging.getLogger(__name__)
_VERSION = 1
STREAM = -5  # separates the keys of iterable data from those of map-style data

# -- states as plain values --------------------------------------------------------------------------------------------

_ARRAY = "__lightning_distplus_array__"
_BYTES = "__lightning_distplus_bytes__"
_PLAIN = (bool, int, float, str, type(None))


def pack(state: Any, *, owner: str) -> bytes:
    """A state as bytes: containers, numbers, strings, bytes, tensors and numpy arrays.

    Raises:
        TypeError: Something else is in it; the message names ``owner`` and the place.
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
    """Refuses what a user gives to train or to validate on, and is no data set, or none to train on."""
    name = type(dataset).__name__
    if dataset is None and stage == "train":
        raise ValueError(
            "There is no training data: pass train_dataset=... to ResumableDataModule or override train_dataset()."
        )
    if stage == "train" and (type(dataset) is dict or isinstance(dataset, CombinedLoader)):
        raise ValueError(
            f"The training data is a {name}, and training reads one data set. Pass one whose samples are dicts with a "
            "sample of each: docs/guides/data.md, Several data sets."
        )
    if isinstance(dataset, Mapping) and type(dataset) is not dict:
        parts = ", ".join(map(str, dataset))
        raise ValueError(f"The {stage} data is a {name} of {parts}. Pass one of them, or a plain dict of several.")
    if dataset is not None and not is_iterable(dataset) and not hasattr(dataset, "__len__"):
        raise ValueError(f"The {stage} data {name} has no __len__. Define it.")


class Stateful:
    """One iterable and its state, as bytes that can cross a process boundary."""

    def __init__(self, data: Any, *, allow_stateless: bool = False) -> None:
        self.data = data
        self.has_state = has_state(data)
        self.is_live = False
        """Whether a pass goes on where the one before has left the data in this process, whatever its state says."""
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
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
        if state is None and self.has_state and not isinstance(self.data, DataLoader):
            # Data of a second fit begin anew: with the state that they had at their first start in this process.
            state = self._first
            with suppress(AttributeError):  # some have a state only once they have been iterated
                self._first = state or self.state()
        if state is not None:
            self.data.load_state_dict(self.opened(state))
        return iter(self.data)

    def begin_where(self, other: Stateful) -> None:
        """Takes the beginning of the same data from an earlier reader of it."""
        self._first = other._first

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
    """Checks iterable training data, and says whether it yields batches, or is said to (``batched``).

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
    name, own_workers = _name(loader), loader.num_workers
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
    if type(loader.dataset).__name__ == "CombinedStreamingDataset" and own_workers > 1:
        raise ValueError(
            f"A litdata CombinedStreamingDataset with {own_workers} workers does not go on where it was (litdata "
            "0.2.76). Use at most one worker, or TokenDataModule over token files, which it mixes exactly."
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(loader.dataset, IterableDataset):
        if own_workers > 1 and name == "StatefulDataLoader" and ranks.rank == 0:
            _log.warning(
                "a StatefulDataLoader with %d workers asks a worker whose data has ended once more after a resume "
                "(torchdata 0.11), so that samples may repeat: pass ResumableDataModule its data set and "
                "num_workers=%d instead",
                own_workers,
                own_workers,
            )
    elif ranks.size > 1 and getattr(sampler, "num_replicas", None) != ranks.size:
        what = "reads in order" if isinstance(sampler, SequentialSampler) else "draws with no regard to ranks"
        raise ValueError(
            f"The {name} {what}, so that each of {ranks.size} ranks would see every sample. Pass its data set instead, "
            "ResumableDataModule(loader.dataset, batch_size=...), which divides it exactly; or give the loader a "
            f"StatefulDistributedSampler over {ranks.size} replicas."
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
    def at_beginning(cls, num_workers: int, epoch: int = 0) -> StreamState:
        """The beginning of a pass; without worker processes the training process counts as one."""
        return cls((WorkerState(epoch=epoch),) * max(1, num_workers))

    def after(self, item: Item) -> StreamState:
        """The state behind an item."""
        workers = (*self.workers[: item.worker], item.state, *self.workers[item.worker + 1 :])
        return StreamState(workers, item.worker if item.kind == "batch" else self.last_worker)

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
    again: WorkerState = WorkerState()  # from here the last batch is read once more


@dataclass(kw_only=True, eq=False)
class StreamReader(IterableDataset[Item]):
    """Runs in each worker, or in the training process where there is none."""

    source: Stateful
    batch_size: int | None  # samples of a batch; None: the data yields batches
    collate: Callable[[Any], Any] | None
    rest: Literal["drop", "pad", "keep"]  # the samples behind the last whole batch; repeats of weight 0 pad a batch
    seed: int | None  # of the random numbers of each sample; None leaves the generators alone
    begin: StreamState
    """Where each worker begins. DataLoader begins with worker 0: those up to the last one skip their first turn."""
    epoch: int = 0
    """The pass that begins. A worker whose state is of an earlier one has left that behind the batch that follows."""
    _own: WorkerState | None = field(default=None, init=False)  # of a worker that persists: where its last pass stands

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start = self.begin.workers[worker]
        if self._own is not None:
            start = self._own.begin_again()
        elif start.epoch < self.epoch:
            for _ in islice(self._samples(worker, start), self.batch_size or 1):
                pass
            start = WorkerState(epoch=self.epoch)
        elif not start.is_ended and worker <= self.begin.last_worker:
            yield Item("skip", worker, start, again=start)
        self._own = start
        for item in () if start.is_ended else self._read(worker, start):
            if item.state.is_ended:
                self._own = item.state
            yield item

    def _read(self, worker: int, start: WorkerState) -> Iterator[Item]:
        samples: list[Any] = []
        epoch, num_taken, again = start.epoch, start.num_taken, start
        if self.source.is_live and epoch:
            again = start._replace(data=self.source.state())
        for sample in self._samples(worker, start):
            num_taken += 1
            samples.append(sample)
            if len(samples) == (self.batch_size or 1):
                state = WorkerState(self.source.state(), epoch, num_taken)
                yield Item("batch", worker, state, self._batch(samples), again)
                samples, again = [], state
        # Data may begin anew where they end: a resume behind the rest must not ask them once more.
        end = WorkerState(self.source.state(), epoch, num_taken, is_ended=True)
        if samples and self.rest != "drop":
            yield Item("batch", worker, end, self._batch(samples))
        yield Item("end", worker, end)

    def _samples(self, worker: int, start: WorkerState) -> Iterator[Any]:
        """The samples of a pass from ``start``, each under random numbers of its own."""
        seeds = None if self.seed is None else derive_key(self.seed, AUGMENT, worker, start.epoch)
        _seed(seeds, _BEGIN)
        has_state, is_live = self.source.has_state, self.source.is_live
        iterator, index = self.source.start(start.data, start.epoch), start.num_taken if has_state else 0
        if index == 0 and start.data is not None and not is_live:
            # The state is that of the end of a pass. Some data begin anew from it, some have to find that end first.
            _seed(seeds, 0)
            first = list(islice(iterator, 1))
            if not first:
                _seed(seeds, _BEGIN)
                iterator = iter(self.source.data)
            yield from first
            index = len(first)
        while True:
            _seed(seeds, index)
            try:
                sample = next(iterator)
            except StopIteration:
                return
            if index >= start.num_taken:  # else the data have no state, and are read again up to the place
                yield sample
            index += 1

    def _batch(self, samples: list[Any]) -> Any:
        if self.batch_size is None:
            return samples[0] if self.collate is None else self.collate(samples[0])
        collate = self.collate or default_collate
        if self.rest != "pad":
            return collate(samples)
        weights = torch.zeros(self.batch_size)
        weights[: len(samples)] = 1
        return collate((samples * (self.batch_size // len(samples) + 1))[: self.batch_size]), weights


def _seed(key: int | None, index: int) -> None:
    if key is not None:
        seed_generators(splitmix64(key ^ (index & (2**64 - 1))))


# -- a plain loader over iterable data ---------------------------------------------------------------------------------


class ShownDataset(Dataset[Any]):
    """What stands in the place of the user's data set in a worker; its attributes are the user's."""

    def __init__(self, dataset: Any, **own: Any) -> None:
        vars(self).update(dataset=dataset, **own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # asked for while it is copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


def iterate_with(used: dict[str, Any], loader: Any, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Makes torch's iterator, which reads the loader's attributes once, with others than those that the user sees."""
    shown = {name: vars(loader).get(name) for name in used}
    vars(loader).update(used)
    try:
        return iterate()
    finally:
        vars(loader).update(shown)


class _ShownReader(ShownDataset):
    def __iter__(self) -> Iterator[Item]:
        return iter(vars(self)["_reader"])


class _AsItIs(Stateful):
    """Data whose pass begins with ``iter()`` and nothing else."""

    def start(self, state: bytes | None, epoch: int) -> Iterator[Any]:
        """An iterator from a state, or from where the data have been left in this process."""
        if state is not None and not self.is_live:
            self.data.load_state_dict(self.opened(state))
        self.is_live = True
        return iter(self.data)


class _Place(NamedTuple):
    """A place between two batches of one loader."""

    epoch: int  # the Trainer's
    batch: int  # of that epoch, which comes next
    stream: StreamState
    num_passes: int = 0  # complete ones: workers whose state is of an earlier pass have not begun this one
    number: int = 0  # of this pass in the epoch

    @classmethod
    def saved(cls, saved: Mapping[str, Any], num_workers: int) -> _Place:
        """The place in a checkpoint, which knows of no stream where workers begin with the data as they are."""
        stream = None if saved["stream"] is None else StreamState.closed(saved["stream"])
        stream = stream or StreamState.at_beginning(num_workers, saved["num_passes"])
        return cls(saved["epoch"], saved["batch"], stream, saved["num_passes"], saved["number"])


class StreamOrder:
    """How far a loader has come in iterable data, and what of it goes into a checkpoint."""

    is_computed = False  # no order is known before it is read
    sampler = None  # nothing draws

    def __init__(self, loader: DataLoader[Any], fit: LoaderResume) -> None:
        self.loader = loader
        self.fit = fit
        self.batch_size = loader.batch_size  # None where the data give batches
        self._source = _AsItIs(loader.dataset, allow_stateless=True)
        self._here: _Place | None = None  # None: nothing has been read
        self._again: list[WorkerState] = []  # of each worker: see Item
        self._places: dict[tuple[int, int], _Place] = {}  # that a checkpoint may stand at, by epoch and batch

    def identity(self) -> dict[str, Any]:
        """What has to be equal, because only the data know how they are divided."""
        return {
            "data": type(self.loader.dataset).__qualname__,
            "batch_size": self.batch_size,
            "drop_last": self.loader.drop_last,
            "num_workers": self.loader.num_workers,
        }

    def state(self, position: Position, left: list[Any]) -> dict[str, Any]:
        """What a resume at a position needs; ``left`` is what a checkpoint holds, where nothing has been read since."""
        epoch, batch = position.epoch, position.batches
        if is_at_end(self.fit.trainer, position):
            epoch, batch = epoch + 1, 0
        found = max((at for at in self._places if at[0] == epoch and at <= (epoch, batch)), default=None)
        place = self._next_pass(epoch) if found is None else self._places[found]
        is_fresh = place.stream == StreamState.at_beginning(self.loader.num_workers, place.num_passes)
        stream, has_begun = None if is_fresh else place.stream.opened(), found is not None
        passes = [{**place._asdict(), "stream": stream, "has_begun": has_begun}]
        if place.number:  # a ``CombinedLoader`` has to notice that an earlier pass is over
            passes.insert(0, {**passes[0], "number": -1, "stream": None})
        return {**self.identity(), "passes": left or passes}

    def place(self, state: Mapping[str, Any]) -> None:
        """Takes over from a checkpoint what lasts longer than a pass: nothing."""

    def batches(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """One pass, or the rest of one of a checkpoint; it begins with its first batch, as of map-style data."""
        starts, (epoch, _) = self.fit.begin(self), self.fit.here
        if starts and starts[0]["epoch"] > epoch:  # a resume where nothing is left of this one
            return
        saved = starts.popleft() if starts else None
        if saved is None:
            yield from self._read(self._next_pass(epoch), iterate, None)
        elif saved["number"] >= 0:
            place, has_batches = _Place.saved(saved, self.loader.num_workers), False
            for batch in self._read(place, iterate, saved):
                has_batches = True
                yield batch
            if place.number and not has_batches:  # a ``CombinedLoader`` that begins a pass again needs one
                yield from self._read(self._next_pass(epoch), iterate, None)

    def _read(
        self, here: _Place, iterate: Callable[[], Iterator[Any]], saved: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        loader, fit, begin, key = self.loader, self.fit, here.stream, self.fit.key_of(self)
        if saved is None and (loader.num_workers or self._source.is_live):  # the data stand where torch begins
            begin = StreamState.at_beginning(loader.num_workers, here.num_passes)
        reader = StreamReader(
            source=self._source,
            batch_size=self.batch_size,
            collate=loader.collate_fn,
            rest="drop" if loader.drop_last else "keep",
            seed=None if key is None else derive_key(key, fit.ranks_of(None).rank),
            begin=begin,
            epoch=here.num_passes,
        )
        used: dict[str, Any] = {
            "dataset": _ShownReader(loader.dataset, _reader=reader),
            "batch_sampler": None,
            "drop_last": False,
            "collate_fn": as_it_is,
            "_IterableDataset_len_called": None,
        }
        if saved is not None and loader.generator is None:
            if saved["has_begun"] or (loader.persistent_workers and here.num_passes):
                used["generator"] = torch.Generator()  # torch has drawn the seed of its workers in an earlier process
            else:
                fit.note_seed()
        items = isolated(iterate_with(used, loader, iterate), loader.num_workers == 0 and key is not None)
        self._here, self._again = here, list(here.stream.workers)
        self._places.setdefault((here.epoch, here.batch), here)
        for item in items:
            self._again[item.worker] = item.state if item.state.is_ended else item.again
            here = self._here = here._replace(stream=here.stream.after(item), batch=here.batch + (item.kind == "batch"))
            if item.kind == "batch":
                self._places[here.epoch, here.batch] = here
                if (position := fit.position()) is not None:
                    at = position.epoch, position.batches
                    oldest = max((one for one in self._places if one <= at), default=(here.epoch, here.batch))
                    self._places = {at: one for at, one in self._places.items() if at >= oldest}
                yield item.batch

    def _next_pass(self, epoch: int) -> _Place:
        """The place before a pass that has not begun."""
        here, num_workers = self._here, self.loader.num_workers
        if here is None:
            return _Place(epoch, 0, StreamState.at_beginning(num_workers))
        num_passes = here.num_passes + 1
        stream = StreamState.at_beginning(num_workers, num_passes)
        if num_workers == 0 or self.loader.persistent_workers:  # from where the pass before has left the data
            stream = StreamState(tuple(one.begin_again() if one.is_ended else one for one in self._again))
        batch, number = (here.batch, here.number + 1) if here.epoch == epoch and here.batch else (0, 0)
        return _Place(epoch, batch, stream, num_passes, number)


# -- the iterable training data of a data module -----------------------------------------------------------------------


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
        return (item.batch for item in isolated(items, self._workers.num_workers == 0) if item.kind == "batch")


class IterableTraining:
    """The training data of one rank, as numbered batches, from the first to the last.

    Batch b is the one before which the Trainer has processed b micro-batches, in the whole run. Each comes with the
    state after it, which is kept until the optimizer step that it belongs to is complete. A batch that was fetched and
    not trained on when an epoch ended, because Lightning looks one batch ahead, is the first of the next epoch.
    ``before`` is of an earlier Trainer in this process, which may have moved the same data on.
    """

    def __init__(
        self,
        data: Any,
        owner: ResumableDataModule,
        reader: StreamReader,
        workers: WorkerOptions,
        before: IterableTraining | None,
    ) -> None:
        self.data = data
        self._owner = owner
        self._workers, self._num_workers = workers, workers.num_workers
        self._reader = reader
        if before is not None and before.data is data:
            reader.source.begin_where(before._reader.source)
        self._state = reader.begin
        self._states: dict[int, StreamState] = {}  # before each batch that a checkpoint may stand before; while open
        self._ahead: dict[int, Any] = {}  # batches that the Trainer may have fetched and not processed
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
        self._states, self._ahead, self._items, self._inner = {}, {}, None, None

    def __iter__(self) -> Iterator[Any]:
        first = self._owner.begin_stream()
        if first is None:
            return
        number, has_begun_again = first, False
        while number in self._ahead:
            yield self._ahead[number]
            number += 1
        while True:
            if self._items is None and not self._state.is_ended:
                self._items = self._read()
            for item in self._items or ():
                self._state = self._state.after(item)
                if item.kind == "batch":
                    number, has_begun_again = number + 1, False
                    self._keep(number, item.batch)
                    yield item.batch
            self._items, self._states[number] = None, self._state
            # An epoch is never empty: where nothing is left for its first batch, the one before it ended there.
            if number > first and not self._owner.is_endless:
                return
            if has_begun_again:
                raise ValueError(
                    "The training data yields nothing on this rank, or less than one batch in each worker. Use a "
                    'smaller batch_size, fewer workers, or uneven="pad".'
                )
            self._state = StreamState(tuple(one.begin_again() for one in self._state.workers))
            if not self._workers.persistent_workers:
                self._inner = None
            has_begun_again = True

    def _read(self) -> Iterator[Item]:
        """Goes on where the data stands."""
        seed = self._owner.sample_seed
        if self._inner is None:
            reader = replace(self._reader, begin=self._state)
            self._inner = _dataloader(reader, self._workers, seed=derive_key(seed or 0, STREAM))
        # Without workers the data's random numbers are drawn in this process: the model must not notice.
        return isolated(iter(self._inner), self._num_workers == 0 and seed is not None)

    def _keep(self, number: int, batch: Any) -> None:
        """Keeps a batch, and the state behind it, with which batch ``number`` follows, while either may be needed."""
        if not self._is_checked:
            self._pack(self._state)  # raises where a checkpoint could not hold it
            self._is_checked = True
        self._states[number], self._ahead[number - 1] = self._state, batch
        oldest, num_trained = min(self._owner.position().total_batches, number), self._owner.num_trained
        self._states = {one: state for one, state in self._states.items() if one >= oldest}
        self._ahead = {one: batch for one, batch in self._ahead.items() if one >= num_trained}

    # -- what a checkpoint holds

    def packed(self, number: int) -> bytes:
        """The state of this rank before batch ``number``; a TypeError names what in it a checkpoint does not take."""
        return self._pack(self._states[number] if self._states else self._state)

    def _pack(self, state: StreamState) -> bytes:
        return pack(state.opened(), owner=_name(self._reader.source.data))

    def to_checkpoint(self, states: Sequence[bytes]) -> dict[str, Any]:
        """What a checkpoint holds, from the states of all ranks."""
        return {
            "version": _VERSION,
            "has_state": self._reader.source.has_state,
            "num_workers": self._num_workers,
            "batch_size": self._owner.micro_batch,
            "states": list(states),
        }

    def from_checkpoint(self, saved: dict[str, Any] | None, rank: int, world_size: int) -> None:
        """Takes the place of this rank over, if the checkpoint has one of as many ranks and workers."""
        if saved is None:
            raise DatasetMismatch(
                "The checkpoint holds no states of an iterable data set, and this run's training data is one. Resume "
                "with the data of the checkpoint, or load its weights into a new run."
            )
        require_version("state of iterable data", saved, _VERSION)
        if not (saved["has_state"] and self._reader.source.has_state):
            if rank == 0:
                _log.warning("the training data has no state: it begins anew, because allow_stateless=True")
            return
        before = {"ranks": len(saved["states"]), "num_workers": saved["num_workers"]}
        now = {"ranks": world_size, "num_workers": self._num_workers}
        if self._num_workers > 1 or self._reader.batch_size is None:  # workers take turns, or the data make batches
            before, now = before | {"batch_size": saved["batch_size"]}, now | {"batch_size": self._owner.micro_batch}
        if lines := "\n".join(f"  {line}" for line in differences(before, now)):
            raise DatasetMismatch(
                f"The checkpoint holds states of iterable data that was read in another way:\n{lines}\n"
                "Each rank and each worker has read its own part, and only the data set knows how it is divided. "
                "Resume with the same, load the weights into a new run, or use a map-style data set, which takes any."
            )
        self._state = StreamState.closed(unpack(saved["states"][rank]))
