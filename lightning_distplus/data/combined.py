"""Several training data sets side by side: a batch has one part of each, as from Lightning's CombinedLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import default_collate

from lightning_distplus.data.mixture import endless

__all__ = ["Combine", "Combined", "CombinedOrder", "collate_parts"]

Combine = Literal["max_size_cycle", "min_size"]


class Combined:
    """A map-style data set whose sample is one sample of each part.

    Args:
        parts: Map-style data sets by name.
        mode: "max_size_cycle": an epoch is as long as the longest part, and shorter ones begin again; "min_size": as
            long as the shortest one, and longer ones go on in the next epoch.

    Raises:
        ValueError: A part has no index or no sample, or the mode is unknown.
    """

    def __init__(self, parts: Mapping[str, Any], mode: Combine) -> None:
        if mode not in ("max_size_cycle", "min_size"):
            raise ValueError(f'combine is {mode!r}; it is "max_size_cycle" or "min_size".')
        self.parts = dict(parts)
        for name, part in self.parts.items():
            if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")) or not len(part):
                raise ValueError(
                    f"The training data {name!r} ({type(part).__name__}) has no index, or no sample. Data sets that "
                    "are read side by side need both; combine iterable ones into one iterable that has a state."
                )
        self.sizes = {name: len(part) for name, part in self.parts.items()}
        self._size = max(self.sizes.values()) if mode == "max_size_cycle" else min(self.sizes.values())

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Indices: one for each part."""
        return {name: part[index] for (name, part), index in zip(self.parts.items(), indices, strict=True)}

    def fingerprint(self) -> str:
        """Of the names and sizes of the parts, and of what they say about themselves."""
        told = [str(part.fingerprint()) if hasattr(part, "fingerprint") else "" for part in self.parts.values()]
        return xxhash.xxh3_64(repr([*self.sizes.items(), *told]).encode()).hexdigest()


class CombinedOrder:
    """Positions of an epoch to an index of each part: int64 of shape (num_positions, num_parts).

    Each part is drawn on and on, over the Trainer's epochs, and begins another order when it runs out. So the part
    that is as long as an epoch has the order that it would have alone, where it is the first one.

    Args:
        sizes: Samples of each part.
        length: Samples of an epoch.
        seed: Of the orders.
        epoch: The Trainer's.
        shuffle: False reads each part from its beginning to its end.
    """

    def __init__(self, sizes: Sequence[int], *, length: int, seed: int, epoch: int, shuffle: bool) -> None:
        self._sizes = list(sizes)
        self._length = length
        self._seed = seed
        self._epoch = epoch
        self._shuffle = shuffle

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """One row for each position."""
        draws = self._epoch * self._length + positions % self._length
        columns = [
            endless(draws, size, seed=self._seed, source=place, shuffle=self._shuffle)
            for place, size in enumerate(self._sizes)
        ]
        return np.stack(columns, axis=1)


def collate_parts(collate: Callable[[list[Any]], Any] | None, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of each part; ``collate`` sees the samples of one part at a time."""
    collate = collate or default_collate
    return {name: collate([sample[name] for sample in samples]) for name in samples[0]}
