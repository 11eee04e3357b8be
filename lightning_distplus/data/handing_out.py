"""Which samples a data module hands out: their ids, those in hand, and those that are in quarantine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_distplus.data.kind import KindOfData
from lightning_distplus.data.plan import EpochPlan, Geometry, Order
from lightning_distplus.data.position import Position
from lightning_distplus.data.quarantine import Quarantine
from lightning_distplus.data.request import Request
from lightning_distplus.launcher_link import SampleNote

__all__ = ["HandsOut"]


class HandsOut(KindOfData):
    """The part of ``ExactDataModule`` that knows samples by their ids."""

    _loaders: dict[str, Any]
    _known_identity: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.quarantine = Quarantine()
        self._plan: EpochPlan | None = None
        self._in_hand: Request | None = None
        self._note: SampleNote | None = None

    @property
    def is_iterable(self) -> bool:
        """Whether the training data can only be read from front to back."""
        return False

    def sample_ids(self, batch_idx: int) -> list[Any]:
        """Ids of this rank's samples in a micro-batch of the present epoch: dataset indices, or (source, index).

        Raises:
            RuntimeError: No epoch has begun, or the data is iterable and its samples have no ids.
        """
        if self.is_iterable:
            raise RuntimeError("The training data is iterable: its samples have no ids that this package knows.")
        if self._plan is None:
            raise RuntimeError("No epoch has begun, so that no samples are assigned yet.")
        ids: list[Any] = self._plan.ids(batch_idx).tolist()
        return [tuple(one) if isinstance(one, list) else one for one in ids]

    def samples_in_hand(self) -> list[Any]:
        """Ids of the samples that this rank fetches, or trains on; none where it does neither, or they have none."""
        return [] if self._in_hand is None else list(self._in_hand.ids.tolist())

    @property
    def delivered(self) -> Request | None:
        """What the training batch that was delivered last was asked for as."""
        loader = self._loaders.get("train")
        return getattr(loader, "delivered", None)

    def _note_samples(self, request: Request) -> None:
        """Tells the launcher what this rank has in hand from now on."""
        self._in_hand = request
        if self._note is None:
            self._note = SampleNote()
        self._note.write(request.ids.tobytes(), request.ids.shape[1] if request.ids.ndim > 1 else 0)

    def _forget_note(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None

    def _hand_out(self, position: Position, geometry: Geometry, order: tuple[Order, int], num_batches: int) -> Any:
        """The requests from a position to the end of its epoch, with stand-ins for what is in quarantine."""
        whole, first_position = order
        first, rest = self._known_identity.get("phase", [0])[0], num_batches - position.batches
        end = first_position + rest * geometry.micro_step
        self._plan = EpochPlan(
            order=self.quarantine.around(whole, step=geometry.micro_step, first=first, end=end),
            geometry=geometry,
            first_batch=position.batches,
            first_position=first_position,
            num_batches=num_batches,
        )
        requests = self._requests(self._plan, position.epoch)
        return self.quarantine.weighted(requests, whole) if self.quarantine else requests

    def _set_apart(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint has in quarantine."""
        self.quarantine.add(state.get("quarantine", []))
