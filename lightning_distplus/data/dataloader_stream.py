"""The place of a DataLoader in iterable data: a state of the data after each batch, in each worker.

A pass begins as torch begins it: with ``iter()`` of the data where they are, in workers that persist or in the training
process; with the data as the training process has them, in workers that do not. A resume inside a pass gives each
worker its state. A resume between two passes reads the last batch before it once more and drops it: that leaves the
data as the process had them that was ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_distplus.data.iterable import (
    Item,
    Stateful,
    StreamReader,
    StreamState,
    WorkerState,
    has_state,
    takes_the_position,
)
from lightning_distplus.data.loader import generators_kept
from lightning_distplus.data.state import Position

if TYPE_CHECKING:
    from lightning_distplus.data.dataloader import ExactLoader
    from lightning_distplus.data.dataloader_resume import LoaderResume

__all__ = ["ShownDataset", "StreamOrder", "is_stateful_loader", "why_no_place"]


def is_stateful_loader(loader: Any) -> bool:
    """Whether a loader iterates as torchdata's ``StatefulDataLoader`` does."""
    module = sys.modules.get("torchdata.stateful_dataloader")  # whoever has one has imported it
    return module is not None and type(loader).__iter__ is module.StatefulDataLoader.__iter__


def why_no_place(loader: DataLoader[Any]) -> str | None:
    """Why a loader of iterable data cannot go on inside a pass; None: it can."""
    name = type(loader.dataset).__qualname__
    if takes_the_position(loader.dataset):
        return f"The state_dict() of {name} takes arguments: only its own loader can ask for it."
    if not has_state(loader.dataset) and not is_stateful_loader(loader):
        return f"{name} is iterable and has no state_dict() with a load_state_dict()."
    return None


class ShownDataset(Dataset[Any]):
    """What stands in the place of the user's data set in a worker; its attributes are the user's."""

    def __init__(self, dataset: Any) -> None:
        vars(self)["dataset"] = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # asked for while it is copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


# -- what a worker runs ------------------------------------------------------------------------------------------------


class _AsItIs(Stateful):
    """Data whose pass begins with ``iter()`` and nothing else."""

    def start(self, state: bytes | None, epoch: int) -> Iterator[Any]:
        """An iterator from a state, or from where the data are."""
        if state is not None:
            self.data.load_state_dict(self.opened(state))
        return iter(self.data)


class _Reader(StreamReader):
    """Reads a share of the data, one pass for each ``iter()``.

    Args:
        is_over: Whether the states of ``begin`` stand before the last batch of a pass that is over.
        **arguments: Those of ``StreamReader``.
    """

    def __init__(self, *, is_over: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._is_over = is_over
        self._epoch: int | None = None  # of the latest pass in this process

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start = self._begin.workers[worker]
        if self._epoch is not None:
            start = WorkerState(epoch=self._epoch + 1)
        elif self._is_over or start.is_ended:
            num_samples = None if start.is_ended else self._batch_size or 1
            for _ in islice(self._samples(worker, start._replace(is_ended=False)), num_samples):
                pass
            if self._is_over:
                start = WorkerState(epoch=start.epoch + 1)
        elif worker <= self._begin.last_worker:
            yield Item("skip", worker, start)
        self._epoch = start.epoch
        if start.is_ended:
            return
        for item in self._read(worker, start):
            is_whole = item.kind == "batch" and self._batch_size is None
            yield item._replace(batch=self._collate(item.batch)) if is_whole else item

    def _samples(self, worker: int, start: WorkerState) -> Iterator[Any]:
        samples = super()._samples
        if self.source.has_state:
            return samples(worker, start)
        return islice(samples(worker, WorkerState(epoch=start.epoch)), start.num_taken, None)


class _ShownReader(ShownDataset):
    def __init__(self, dataset: Any, reader: _Reader) -> None:
        super().__init__(dataset)
        vars(self)["_reader"] = reader

    def __iter__(self) -> Iterator[Item]:
        return iter(vars(self)["_reader"])


# -- in the training process -------------------------------------------------------------------------------------------


class _Share(NamedTuple):
    """Of one worker: its state before the last batch, behind it, and behind all that it has read.

    ``here.is_ended`` says of the state before the last batch that only this batch is left of the pass.
    """

    before: WorkerState
    here: WorkerState
    last: WorkerState

    @classmethod
    def at(cls, state: WorkerState) -> _Share:
        return cls(state, state, state)

    def after(self, item: Item, batch_size: int | None) -> _Share:
        is_end = item.kind == "end"
        if is_end or (batch_size and item.state.num_taken % batch_size):  # data may begin anew where they end
            before = self.before if is_end else self.here
            here = self.here if self.here.is_ended else before._replace(is_ended=True)
            return _Share(before, here, item.state)
        return self if item.kind == "skip" else _Share(self.here, item.state, item.state)


class _Place(NamedTuple):
    """A place between two batches.

    Attributes:
        shares: Of the workers.
        last_worker: The worker that gave the batch before it; -1: none in this pass.
        number: Of the passes in this epoch.
    """

    shares: tuple[_Share, ...]
    last_worker: int = -1
    number: int = 0

    def state(self) -> StreamState:
        return StreamState(tuple(one.here for one in self.shares), self.last_worker)


class StreamOrder:
    """How far a loader has come in iterable data, and what of it goes into a checkpoint.

    Attributes:
        batch_size: Samples of a batch; None where the data give batches.
        is_computed: False: no order is known before it is read.
        sampler: None: nothing draws.
    """

    is_computed = False
    sampler = None

    def __init__(self, loader: ExactLoader, fit: LoaderResume) -> None:
        self.loader = loader
        self.fit = fit
        self.batch_size = loader.batch_size
        self._source = _AsItIs(loader.dataset, allow_stateless=True)
        self._here: _Place | None = None  # None: nothing has been read
        self._at = (-1, 0)  # the epoch of the next batch, and its number there
        self._places: dict[tuple[int, int], dict[str, Any]] = {}  # of the batches that a checkpoint may stand before
        self._over_epoch = -1  # of which nothing is left
        self._begins: tuple[tuple[int, int], _Place] | None = None

    def identity(self) -> dict[str, Any]:
        """What has to be equal, because only the data know how they are divided."""
        return {
            "data": type(self.loader.dataset).__qualname__,
            "batch_size": self.batch_size,
            "drop_last": self.loader.drop_last,
            "num_workers": self.loader.num_workers,
        }

    def state(self, position: Position) -> dict[str, Any]:
        """What a resume at a position needs."""
        here, passes = (position.epoch, position.batches), []
        is_over = self.fit.is_over(position)
        if is_over:
            here = (position.epoch + 1, 0)
        found = max((at for at in self._places if at[0] == here[0] and at <= here), default=None)
        saved = self._over(here[0]) if found is None else self._places[found]
        if is_over or saved["number"]:  # a ``CombinedLoader`` has to notice that an earlier pass is over
            passes.append({**saved, "epoch": position.epoch, "number": -1, "stream": None, "is_over": is_over})
        stream = None if saved["stream"] is None else saved["stream"].opened()
        return {**self.identity(), "passes": [*passes, {**saved, "stream": stream}]}

    def place(self, state: Mapping[str, Any]) -> None:
        """Takes over from a checkpoint what lasts longer than a pass: nothing."""

    def begin(self, iterate: Callable[[], Iterator[Any]], saved: Mapping[str, Any] | None) -> Iterator[Any]:
        """Begins a pass as torch does, or one of a checkpoint."""
        loader, self._begins = self.loader, None
        if saved is not None and saved["number"] < 0:
            self._over_epoch = saved["epoch"] if saved["is_over"] else -1
            return iter(())
        if self._over_epoch == self.fit.epoch:
            return iter(())
        at, place, start, is_over = self._next_pass() if saved is None else self._saved_pass(saved)
        self._begins = at, place
        seed = self.fit.stream_seed(loader)
        reader = _Reader(
            source=self._source,
            batch_size=self.batch_size,
            collate=loader.collate_fn,
            rest="drop" if loader.drop_last else "keep",
            seed=seed,
            begin=start,
            is_over=is_over,
        )
        used = {
            "dataset": _ShownReader(loader.dataset, reader),
            "batch_sampler": None,
            "drop_last": False,
            "collate_fn": _item,
            "_IterableDataset_len_called": None,
        }
        shown = {name: vars(loader).get(name) for name in used}
        is_seeded = saved is not None and saved["is_seeded"]
        if saved is not None and not is_seeded and loader.generator is None:
            self.fit.note_seed()
        with generators_kept() if is_seeded else nullcontext():
            vars(loader).update(used)  # torch reads them when it makes an iterator
            try:
                items = iterate()
            finally:
                vars(loader).update(shown)
        batches = self._batches(items, isolate=loader.num_workers == 0 and seed is not None)
        return batches if saved is None or not saved["number"] else self._or_next_pass(batches, iterate)

    def deliver(self) -> None:
        """The first batch of the latest pass is about to leave it; Lightning makes iterators that it does not use."""
        if self._begins is None:
            return
        (at, place), self._begins = self._begins, None
        if at not in self._places:
            is_first = place.last_worker < 0 and not at[1]
            saved = self._over(at[0]) if is_first else _saved(at, place.state(), place.number)
            self._places[at] = {**saved, "is_seeded": True}
        self._at, self._here = at, place

    # -- a pass

    def _next_pass(self) -> tuple[tuple[int, int], _Place, StreamState, bool]:
        loader, here, epoch = self.loader, self._here, self.fit.epoch
        num_workers = max(1, loader.num_workers)
        at = self._at if self._at[0] == epoch else (epoch, 0)
        if here is None:
            start = StreamState((WorkerState(),) * num_workers)
            return at, _Place(tuple(map(_Share.at, start.workers))), start, False
        anew = [WorkerState(epoch=one.last.epoch + 1) for one in here.shares]
        begins = [one.last.begin_again() for one in here.shares] if self._goes_on else anew
        number = here.number + 1 if at[1] else 0
        return at, _Place(tuple(map(_Share.at, begins)), number=number), StreamState(tuple(anew)), False

    def _saved_pass(self, saved: Mapping[str, Any]) -> tuple[tuple[int, int], _Place, StreamState, bool]:
        if saved["stream"] is None:
            before = WorkerState(epoch=saved["num_passes"] - 1)
            self._here = _Place((_Share.at(before),) * max(1, self.loader.num_workers)) if saved["num_passes"] else None
            return self._next_pass()
        start = StreamState.closed(saved["stream"])
        shares = tuple(map(_Share.at, start.workers))
        if saved["is_over"]:
            self._here = _Place(shares)
            at, place, _, _ = self._next_pass()
            return at, place, start, True
        return (saved["epoch"], saved["batch"]), _Place(shares, start.last_worker, saved["number"]), start, False

    @property
    def _goes_on(self) -> bool:
        """Whether a pass begins where the one before has left the data."""
        return self.loader.num_workers == 0 or self.loader.persistent_workers

    def _over(self, epoch: int) -> dict[str, Any]:
        """The place before the first batch of an epoch."""
        here, stream, num_passes = self._here, None, 0
        if here is not None:
            num_passes = here.shares[0].last.epoch + 1
            before = [one.here if one.here.is_ended else one.before for one in here.shares]
            stream = StreamState(tuple(before)) if self._goes_on else None
        persist = here is not None and self.loader.persistent_workers
        return {**_saved((epoch, 0), stream), "is_over": True, "num_passes": num_passes, "is_seeded": persist}

    def _or_next_pass(self, batches: Iterator[Any], iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A ``CombinedLoader`` that begins a pass again ends where it has nothing."""
        first = list(islice(batches, 1))
        if not first:
            batches = self.begin(iterate, None)
            self.deliver()
        yield from first
        yield from batches

    def _batches(self, items: Iterator[Item], *, isolate: bool) -> Iterator[Any]:
        while True:
            with generators_kept() if isolate else nullcontext():  # the model must not notice
                item = next(items, None)
            if item is None:
                return
            assert self._here is not None
            shares = list(self._here.shares)
            shares[item.worker] = shares[item.worker].after(item, self.batch_size)
            self._here = self._here._replace(shares=tuple(shares))
            if item.kind == "batch":
                self._here = self._here._replace(last_worker=item.worker)
                self._at = (self._at[0], self._at[1] + 1)
                self._places[self._at] = _saved(self._at, self._here.state(), self._here.number)
                self._forget()
                yield item.batch

    def _forget(self) -> None:
        position = self.fit.position()
        if position is not None:
            oldest = max((at for at in self._places if at <= (position.epoch, position.batches)), default=self._at)
            for at in [one for one in self._places if one < oldest]:
                del self._places[at]


def _saved(at: tuple[int, int], stream: StreamState | None, number: int = 0) -> dict[str, Any]:
    place = {"epoch": at[0], "batch": at[1], "number": number, "stream": stream}
    return {**place, "is_over": False, "is_seeded": True}


def _item(item: Any) -> Any:
    return item
