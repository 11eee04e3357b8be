"""Lightning's CombinedLoader, taken apart: the data sets of its loaders, and how each of them reads."""

from __future__ import annotations

import math
from typing import Any, cast

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lightning_distplus import _compat
from lightning_distplus.data.combined import Combine, Combined, Part

__all__ = ["CombinedLoader", "side_by_side"]

_REMEDY = (
    "Pass a dict of their data sets: ResumableDataModule({name: loader.dataset, ...}, batch_size=..., combine=...)."
)


def side_by_side(dataset: Any, mode: Combine, batch_size: int, *, shuffle: bool) -> Any:
    """One data set for the several in a dict or a ``CombinedLoader``; any other is returned as it is.

    Args:
        dataset: A dict of map-style data sets; or a ``CombinedLoader`` over a dict, list or tuple of stock
            ``DataLoader`` s of such, of which batches have the structure and the sizes.
        mode: How long an epoch is, for a dict; a ``CombinedLoader`` has its own.
        batch_size: Of the data module; each loader's is a multiple of it.
        shuffle: False reads every part from its beginning to its end.

    Raises:
        ValueError: Mode, structure or a loader of the ``CombinedLoader`` cannot be followed exactly.
    """
    if isinstance(dataset, CombinedLoader):
        return _taken_apart(dataset, batch_size, shuffle)
    if type(dataset) is dict:
        return Combined({name: Part(dataset=one) for name, one in dataset.items()}, mode)
    return dataset


def _taken_apart(loader: CombinedLoader, batch_size: int, shuffle: bool) -> Combined:
    mode = _compat.mode_of_combined_loader(loader)
    if mode not in ("max_size_cycle", "min_size"):
        remedy = "ConcatDataset joins data sets that are read one after the other. " if mode == "sequential" else ""
        raise ValueError(
            f"The training data is a CombinedLoader of mode {mode!r}; what can be resumed exactly is "
            f'"max_size_cycle" and "min_size". {remedy}{_REMEDY}'
        )
    loaders = loader.iterables
    if type(loaders) not in (dict, list, tuple) or not loaders:
        raise ValueError(
            f"The training data is a CombinedLoader over a {type(loaders).__name__}; it is a dict, list or tuple of "
            f"loaders, without others inside. {_REMEDY}"
        )
    named = loaders if isinstance(loaders, dict) else {str(place): one for place, one in enumerate(loaders)}
    for name, one in named.items():
        _require_stock(name, one)
    sizes = [one.batch_size for one in named.values()]
    if any(size % batch_size for size in sizes):
        raise ValueError(
            f"The loaders of the CombinedLoader make batches of {', '.join(map(str, sizes))}, and batch_size is "
            f"{batch_size}. Each is a multiple of it: pass batch_size={math.gcd(*sizes)}."
        )
    parts = {
        name: Part(
            dataset=one.dataset,
            ratio=one.batch_size // batch_size,
            shuffle=shuffle and type(one.sampler) is RandomSampler,
            collate=one.collate_fn,
        )
        for name, one in named.items()
    }
    return Combined(parts, cast(Combine, mode), structure=type(loaders))


def _require_stock(name: Any, loader: Any) -> None:
    """Checks that everything which a loader does is known.

    Raises:
        ValueError: It is no stock loader, or draws in a way that only it knows.
    """
    if type(loader) is not DataLoader or loader.batch_size is None:
        what = "DataLoader without a batch size" if type(loader) is DataLoader else type(loader).__name__
        raise ValueError(
            f"Part {name!r} of the CombinedLoader is a {what}; it is a torch.utils.data.DataLoader with a batch size. "
            f"{_REMEDY}"
        )
    sampler = loader.sampler
    is_whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    if not is_whole and type(sampler) is not SequentialSampler:
        raise ValueError(
            f"Part {name!r} of the CombinedLoader draws by a {type(sampler).__name__}, whose place only it knows. "
            f"{_REMEDY}"
        )
