"""Several training data sets side by side: a batch has one part of each, as from Lightning's CombinedLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_distplus.choices import require_choice
from lightning_distplus.data.mixture import endless

__all__ = ["Combine", "Combined", "CombinedOrder", "Part"]

Combine = Literal["max_size_cycle", "min_size"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the data sets.

    Attributes:
        dataset: Map-style.
        ratio: Its samples in one sample of the whole.
        shuffle: False reads it from its beginning to its end.
        collate: Makes a batch of it; None: what the data module has.
    """

    dataset: Any
    ratio: int = 1
    shuffle: bool = True
    collate: Callable[[list[Any]], Any] | None = None


class Combined:
    """A map-style data set whose sample is one sample, or ``ratio`` of them, of each part.

    Args:
        parts: By name.
        mode: "max_size_cycle": an epoch is as long as the longest part, and shorter ones begin again; "min_size": as
            long as the shortest one, and longer ones go on in the next epoch.
        structure: Of a batch: dict, or list or tuple in the order of the parts.

    Raises:
        ValueError: A part has no index or too few samples, or the mode is unknown.
    """

    def __init__(self, parts: Mapping[str, Part], mode: Combine, structure: type = dict) -> None:
        require_choice("combine", mode, Combine)
        self.parts = dict(parts)
        self._structure = structure
        for name, part in self.parts.items():
            dataset = part.dataset
            if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or len(dataset) < part.ratio:
                raise ValueError(
                    f"The training data {name!r} ({type(dataset).__name__}) has no index, or no sample. Data sets that "
                    "are read side by side need both; combine iterable ones into one iterable that has a state."
                )
        self.sizes = {name: len(part.dataset) for name, part in self.parts.items()}
        lengths = [self.sizes[name] // part.ratio for name, part in self.parts.items()]
        self._size = max(lengths) if mode == "max_size_cycle" else min(lengths)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """The samples of each part; indices: ``ratio`` of them for each."""
        drawn = iter(indices)
        return {name: [part.dataset[next(drawn)] for _ in range(part.ratio)] for name, part in self.parts.items()}

    def rows(self) -> list[Any]:
        """What the order of the parts depends on: the size of each; or (size, ratio, shuffle) where these are not 1."""
        parts = [(self.sizes[name], part.ratio, part.shuffle) for name, part in self.parts.items()]
        if all(row[1:] == (1, True) for row in parts):
            return [*self.sizes.values()]
        return [list(row) for row in parts]

    def collate(self, collate: Callable[[list[Any]], Any] | None, samples: list[dict[str, list[Any]]]) -> Any:
        """A batch of each part; ``collate`` sees the samples of one part at a time, where that has none of its own."""
        batches = {
            name: (part.collate or collate or default_collate)([one for sample in samples for one in sample[name]])
            for name, part in self.parts.items()
        }
        return batches if self._structure is dict else self._structure(batches.values())

    def fingerprint(self) -> str:
        """Of the names and sizes of the parts, and of what they say about themselves."""
        datasets = [part.dataset for part in self.parts.values()]
        told = [str(one.fingerprint()) if hasattr(one, "fingerprint") else "" for one in datasets]
        return xxhash.xxh3_64(repr([*self.sizes.items(), *told]).encode()).hexdigest()


class CombinedOrder:
    """Positions of an epoch to indices of each part: int64 of shape (num_positions, number of them in a sample).

    Each part is drawn on and on, over the Trainer's epochs, and begins another order when it runs out. So the part
    that is as long as an epoch has the order that it would have alone, where it is the first one.

    Args:
        rows: Of each part its size, or (size, indices in a sample, whether it is shuffled).
        length: Samples of an epoch.
        seed: Of the orders.
        epoch: The Trainer's.
        shuffle: False reads each part from its beginning to its end.
    """

    def __init__(self, rows: Sequence[Any], *, length: int, seed: int, epoch: int, shuffle: bool) -> None:
        self._rows = [(row, 1, True) if isinstance(row, int) else row for row in rows]
        self._length = length
        self._seed = seed
        self._epoch = epoch
        self._shuffle = shuffle

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """One row for each position."""
        draws = self._epoch * self._length + positions % self._length
        return np.concatenate([*self._columns(draws)], axis=1)

    def _columns(self, draws: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        for place, (size, ratio, shuffle) in enumerate(self._rows):
            own = (draws[:, None] * ratio + np.arange(ratio)).ravel()
            found = endless(own, size, seed=self._seed, source=place, shuffle=self._shuffle and shuffle)
            yield found.reshape(-1, ratio)
