"""What a kind of data defines for its data module: identity, order, requests, and who fetches them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_distplus.data.plan import EpochPlan, Geometry, Order, SequentialPlan
from lightning_distplus.data.position import Position
from lightning_distplus.data.request import Request
from lightning_distplus.world import DataParallel

__all__ = ["KindOfData"]


class KindOfData:
    """The seam between ``ExactDataModule``, which knows the Trainer, and the data that it reads."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What must be equal for the same order; compared when a state is loaded."""

    @abstractmethod
    def _num_global_batches(self, geometry: Geometry) -> int:
        """Optimizer steps of an epoch."""

    @abstractmethod
    def _order(self, position: Position) -> tuple[Order, int]:
        """The order of the epoch at ``position``, and the place of the next sample in that order."""

    @abstractmethod
    def _requests(self, plan: EpochPlan, epoch: int) -> Iterator[Request]:
        """The requests of a plan."""

    @abstractmethod
    def _fetcher(self, stage: str) -> Any:
        """Fetches a request of the stage, "train", "val", or "val/..." where there are several."""

    @abstractmethod
    def _validation_plan(self, ranks: DataParallel, stage: str) -> SequentialPlan | None:
        """The validation batches, or None where there is no validation data."""

    @abstractmethod
    def _validation_request(self, plan: SequentialPlan, positions: Any) -> Request:
        """One validation request."""

    def accumulation(self, trainer: Any, ranks: DataParallel) -> int:
        """Micro-batches of an optimizer step.

        Raises:
            ValueError: The batch sizes that were asked for contradict each other, or do not fit the number of ranks.
        """
        return int(trainer.accumulate_grad_batches)

    def _end_of_data(self) -> Callable[[int], bool] | None:
        """For ``Cursor``: whether iterable data ended before a micro-batch."""
        return None

    def uneven_end(self) -> str:
        """What happens to samples that fill no global batch, for the line at the start; empty where there are none."""
        return ""

    def _begin_anew(self) -> None:
        """Forgets what an earlier Trainer's position depended on."""

    def _adopt(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes over what in a saved state the identity depends on; returns the state as it is compared."""
        return state

    def _require_reachable(self, position: Position, global_batch: int) -> None:
        """Raises when the position lies past the data; data without an end need not override this."""

    def source_names(self) -> list[str]:
        """What messages call the sources, where there are some."""
        return []

    def _explain(self, place: int) -> str:
        """What differs first between source ``place`` and that of the checkpoint; empty where that is not known."""
        return ""

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what is saved beside the state; called on all ranks of a save."""

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes what ``extend_checkpoint`` has added."""
