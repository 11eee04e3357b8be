"""Iterable data with a state: which kind it is, how it is iterated, and how its state is taken and put back."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_distplus.world import DataParallel

__all__ = ["Stateful", "is_iterable", "require_data", "stateful"]

_HOW = (
    "state_dict() -> dict, what it has yielded so far, and load_state_dict(state), after which the next iter() goes on "
    "there"
)


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
            "are dicts with a sample of each: docs/data.md, Several data sets."
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
    """One iterable and its state, as bytes that can cross a process boundary.

    Args:
        data: With ``state_dict`` and ``load_state_dict``, or without them where ``allow_stateless``.
        allow_stateless: See ``stateful``.
    """

    def __init__(self, data: Any, *, allow_stateless: bool = False) -> None:
        self.data = data
        self.has_state = _has_state(data)
        self._first: bytes | None = None
        if not self.has_state and not allow_stateless:
            raise ValueError(
                f"The training data {_name(data)} is iterable and has no state, so that a resumed run could not go on "
                f"where it was. Give it {_HOW}; or pass a data set with __len__ and __getitem__; or, if a resumed run "
                "may begin the data again, allow_stateless=True."
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
    """Checks iterable training data.

    Args:
        data: An iterable data set, a ``StatefulDataLoader``, a node or ``Loader`` of torchdata, a litdata data set.
        batch_size: Samples of a batch.
        num_workers: Worker processes that this package shall start.
        batched: Whether the data is said to yield batches.
        ranks: The data-parallel ranks.
        allow_stateless: Whether a resumed run may begin data anew that has no state.

    Returns:
        The data, and whether it yields batches.

    Raises:
        ValueError: It cannot be resumed exactly; the message says why and what to pass instead.
    """
    if isinstance(data, DataLoader):
        _check_loader(data, batch_size, num_workers, ranks)
        return Stateful(data, allow_stateless=allow_stateless), True
    if _is_node(data) or _is_node_loader(data):
        if num_workers:
            raise ValueError(
                f"num_workers is {num_workers} and the training data {_name(data)} is of torchdata.nodes, which run "
                "workers of their own (ParallelMapper, Prefetcher). Leave num_workers at 0."
            )
        from torchdata.nodes import Loader

        # Restarting by itself would hide from us where a pass ends.
        root = data if _is_node(data) else data.root
        return Stateful(Loader(root, restart_on_stop_iteration=False)), batched
    if _takes_the_position(data):
        raise ValueError(
            f"The state_dict() of {_name(data)} takes arguments: it is made by its own loader. Pass that loader, for "
            "litdata `StreamingDataLoader(dataset, batch_size=..., num_workers=...)`, in place of the data set."
        )
    return Stateful(data, allow_stateless=allow_stateless), batched


def _check_loader(loader: DataLoader[Any], batch_size: int, num_workers: int, ranks: DataParallel) -> None:
    name = _name(loader)
    if not _has_state(loader):
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
    if is_indexed and ranks.size > 1 and getattr(sampler, "num_replicas", None) != ranks.size:
        what = "reads in order" if isinstance(sampler, SequentialSampler) else "draws with no regard to ranks"
        raise ValueError(
            f"The {name} {what}, so that each of {ranks.size} ranks would see every sample. Pass its data set "
            "instead of the loader: ResumableDataModule(loader.dataset, batch_size=...) divides it exactly; or give "
            f"the loader a StatefulDistributedSampler over {ranks.size} replicas."
        )


def _has_state(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _takes_the_position(data: Any) -> bool:
    if not _has_state(data):
        return False
    parameters = inspect.signature(data.state_dict).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind in kinds for one in parameters)


def _is_node(data: Any) -> bool:
    return _is_of_torchdata(data, "BaseNode")


def _is_node_loader(data: Any) -> bool:
    return _is_of_torchdata(data, "Loader")


def _is_of_torchdata(data: Any, name: str) -> bool:
    nodes = sys.modules.get("torchdata.nodes")  # whoever has one has imported it
    return nodes is not None and isinstance(data, getattr(nodes, name))


def _name(data: Any) -> str:
    return type(data).__qualname__
