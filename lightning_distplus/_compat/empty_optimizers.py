"""Optimizers without state, before their first step or for ever (SGD): Lightning saves them and cannot load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_distplus._compat.probing import wrapped

__all__ = ["loading_empty_optimizers_of_fsdp", "loading_empty_optimizers_of_fsdp2"]

_CONSEQUENCE = "the checkpoint of an optimizer without state is not loaded"


@contextmanager
def loading_empty_optimizers_of_fsdp(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Lets FSDPStrategy load in this block what it has saved of optimizers of which none has any state.

    torch's distributed checkpoint drops the empty dict, which FSDP1 wants; and in a whole checkpoint the strategy looks
    at the first parameter that has a state (lightning 2.6.6, ``fsdp.py`` 614 and 655).
    """
    whole: dict[str, Any] = {}
    left: list[dict[str, Any]] = []

    def load_with_state(load: Callable[..., Any], **arguments: Any) -> Any:
        loaded = load(**arguments)
        loaded[arguments["optimizer_key"]].setdefault("state", {})
        return loaded

    def leave_out(materialize: Callable[..., Any], checkpoint: Any) -> Any:
        nonlocal whole
        whole = materialize(checkpoint)
        if not any(one["state"] for one in whole.get("optimizer_states") or ()):
            left.extend(whole.pop("optimizer_states", None) or ())
        return whole

    shards, strategy = "torch.distributed.checkpoint.optimizer", "lightning.pytorch.strategies.fsdp"
    with (
        wrapped(shards, "load_sharded_optimizer_state_dict", load_with_state, _CONSEQUENCE),
        wrapped(strategy, "_materialize_tensors", leave_out, _CONSEQUENCE),
    ):
        yield
    if left:
        whole["optimizer_states"] = left
        for optimizer, state in zip(optimizers, left, strict=False):  # only a fit has optimizers
            _set_groups(optimizer, state)


@contextmanager
def loading_empty_optimizers_of_fsdp2() -> Iterator[None]:
    """Lets ModelParallelStrategy load in this block what it has saved as one file of an optimizer without state.

    It looks at the first parameter that has one, and torch at its device (lightning 2.6.6, fabric's
    ``model_parallel.py`` 597; torch 2.13's ``set_optimizer_state_dict``).
    """

    def rekey_state(rekey: Callable[..., Any], state: dict[str, Any], module: Any) -> Any:
        return rekey(state, module) if state["state"] else state

    def set_any_state(
        set_state: Callable[..., Any], module: Any, optimizer: Any, optim_state_dict: Any, **named: Any
    ) -> None:
        if isinstance(optimizer, Optimizer) and not optim_state_dict.get("state"):
            _set_groups(optimizer, optim_state_dict)
        else:
            set_state(module, optimizer, optim_state_dict, **named)

    strategy, states = "lightning.fabric.strategies.model_parallel", "torch.distributed.checkpoint.state_dict"
    with (
        wrapped(strategy, "_rekey_optimizer_state_if_needed", rekey_state, _CONSEQUENCE),
        wrapped(states, "set_optimizer_state_dict", set_any_state, _CONSEQUENCE),
    ):
        yield


def _set_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Sets all that a state holds beside the parameters' states, such as learning rates."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
