"""Sharded saves of FSDP1 that gather nothing: each rank hands over what it holds, where all find that possible."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_distplus import _compat
from lightning_distplus.checkpoint.flat_parts import FlatPart
from lightning_distplus.strategies.tensors import parameters_of
from lightning_distplus.timeouts import Phase

if TYPE_CHECKING:
    from lightning.pytorch.strategies import FSDPStrategy as _Base

    from lightning_distplus.phases import Phases
    from lightning_distplus.strategies.mixin import ResilientStrategy
else:
    _Base = object

__all__ = ["HeldState", "SavesWithoutGathering"]

log = logging.getLogger(__name__)


class SavesWithoutGathering(_Base):
    """Overrides what FSDPStrategy collects for a sharded save: it unshards every parameter, to cut it into rows.

    Whoever else asks for a state gets the parent's.
    """

    phases: Phases

    _save_begins = False
    _held: HeldState | None = None
    _told: frozenset[str] = frozenset()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """For a sharded save what this rank holds; else the parent's."""
        begins, self._save_begins = self._save_begins, False
        if begins and self._state_dict_type == "sharded" and self.world_size > 1:
            held = HeldState(self.model, self.optimizers)
            plane, deadline = cast("ResilientStrategy", self).plane, self.phases.patience_in(Phase.CHECKPOINT)
            self._tell(held.agree(plane.gather_json("what a save gathers", held.facts, deadline)))
            if held.is_enough:
                self._held = held
                return held.of_module()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """For a sharded save what this rank holds; else the parent's."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        found = None if self._held is None else self._held.of_optimizer(inner)
        return super().optimizer_state(optimizer) if found is None else found

    def _tell(self, doubts: set[str]) -> None:
        for doubt in sorted(doubts - self._told):
            log.warning("rank %d gathers the state of FSDP for each save: %s", self.global_rank, doubt)
        self._told |= doubts

    def _without_gathering(self, save: Callable[..., None]) -> Callable[..., None]:
        """``Trainer.save_checkpoint``, whose first question for each state is that of the save."""

        def save_checkpoint(*arguments: Any, **named: Any) -> None:
            self._save_begins = True
            try:
                save(*arguments, **named)
            finally:
                self._save_begins, self._held = False, None

        return save_checkpoint


@dataclass
class _Moments:
    """What one optimizer has, as far as it can be handed over."""

    optimizer: Optimizer
    state: dict[str, Any] = field(default_factory=dict)
    doubt: str | None = None
    with_state: set[int] = field(default_factory=set)
    without_state: set[int] = field(default_factory=set)
    """Units in which a parameter that is trained, and of which this rank holds something, has no state."""


class HeldState:
    """The state of an FSDP1 model and its optimizers as this rank holds it, for one save.

    The tensors are those that train on: they have to be written or copied before the next step.

    Args:
        model: The wrapped model.
        optimizers: Of the strategy, in their order.
    """

    def __init__(self, model: Any, optimizers: Iterable[Optimizer]) -> None:
        self._model = model
        self._doubt = _compat.why_gathered(model)
        self._places = _compat.flat_places(model) if self._doubt is None else []
        self._names = {id(value): name for name, value in model.named_parameters()} if self._places else {}
        self._by_owner: dict[int, list[_compat.FlatPlace]] = {}
        for place in self._places:
            self._by_owner.setdefault(id(place.owner), []).append(place)
        self._moments = [self._moments_of(optimizer) for optimizer in optimizers if self._places]
        self.is_enough = False
        """Whether the weights need not be gathered, on any rank."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the other ranks have to know, of plain values."""
        moments = [[one.doubt, sorted(one.with_state), sorted(one.without_state)] for one in self._moments]
        return {"doubt": self._doubt, "moments": moments}

    def agree(self, facts: list[dict[str, Any]]) -> set[str]:
        """Decides by the facts of all ranks, on all of them alike.

        Returns:
            Why something has to be gathered that is sharded.
        """
        doubts = [one["doubt"] for one in facts if one["doubt"] is not None]
        self.is_enough = not doubts
        for number, one in enumerate(self._moments if self.is_enough else []):
            of_ranks = [each["moments"][number] for each in facts]
            with_state, without = ({unit for each in of_ranks for unit in each[half]} for half in (1, 2))
            if with_state & without:
                one.doubt = f"optimizer {number} has moments of some parameters of a unit only"
            one.doubt = next((doubt for doubt, _, _ in of_ranks if doubt), one.doubt)
            doubts.append(one.doubt or "")
        return set(filter(None, doubts))

    def of_module(self) -> dict[str, Any]:
        """The model's state dict, its sharded parameters as `FlatPart`."""
        parts = {name: _part(one, one.local) for one in self._places for name in one.names}
        return _compat.state_in_parts(self._model, parts)

    def of_optimizer(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """The optimizer's state by the names of the parameters, as FSDP gives it; None: it has to be gathered.

        A counter of steps, or another number, is where the parameter begins. Each optimizer is handed over once.
        """
        mine = next((one for one in self._moments if one.optimizer is optimizer), None)
        if mine is None or mine.doubt is not None:
            return None
        self._moments.remove(mine)
        parameters = parameters_of(optimizer)
        groups = copy.deepcopy(mine.state["param_groups"])
        for group in groups:
            group["params"] = [name for number in group["params"] for name in self._names_of(parameters[number])]
        state: dict[str, Any] = {}
        for number, values in mine.state["state"].items():
            parameter = parameters[number]
            for place in self._by_owner.get(id(parameter), []):
                if place.local.numel():
                    state[place.names[0]] = _values_at(place, values)
            if id(parameter) not in self._by_owner:
                (name,) = self._names_of(parameter)
                state[name] = {key: _on_cpu(value) for key, value in values.items()}
        return {"state": state, "param_groups": groups}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _names_of(self, parameter: Tensor) -> list[str]:
        places = self._by_owner.get(id(parameter))
        return [place.names[0] for place in places] if places else [_compat.state_dict_name(self._names[id(parameter)])]

    def _moments_of(self, optimizer: Optimizer) -> _Moments:
        found = _Moments(optimizer)
        if type(optimizer).state_dict is not Optimizer.state_dict:
            found.doubt = f"{type(optimizer).__name__} makes its own state dict"
            return found
        found.state, parameters = optimizer.state_dict(), parameters_of(optimizer)
        if not all(isinstance(number, int) and number < len(parameters) for number in found.state["state"]):
            found.doubt = f"{type(optimizer).__name__} has a state that is not of a parameter"
            return found
        have_state = {id(parameters[number]) for number in found.state["state"]}
        for place in self._places:
            if place.local.numel() and id(place.owner) in have_state:
                found.with_state.add(place.unit)
            elif place.local.numel() and place.owner.requires_grad:
                found.without_state.add(place.unit)
        for parameter in parameters:
            is_whole = id(parameter) in self._names and not _compat.is_fsdp_shard(parameter)
            if not is_whole and id(parameter) not in self._by_owner:
                found.doubt = f"{type(optimizer).__name__} trains parameters that are not those of the model"
        for number, values in found.state["state"].items():
            if id(parameters[number]) in self._by_owner and not _fits(values, parameters[number]):
                found.doubt = f"{type(optimizer).__name__} has moments that are not shaped as the parameters"
        return found


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _fits(values: Mapping[str, Any], parameter: Tensor) -> bool:
    tensors = [value for value in values.values() if isinstance(value, Tensor) and value.dim()]
    return all(tensor.shape == parameter.shape and tensor.is_contiguous() for tensor in tensors)


def _values_at(place: _compat.FlatPlace, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Tensor):
            found[key] = value
        elif value.dim():
            found[key] = _part(place, value[place.place])
        elif place.start == 0:
            found[key] = FlatPart(value.detach().reshape(1), 0, (), is_first_copy=place.is_first_copy)
    return found


def _part(place: _compat.FlatPlace, local: Tensor) -> FlatPart:
    return FlatPart(local.detach(), place.start, place.shape, is_first_copy=place.is_first_copy)
