"""The check for losses and gradients that are not finite: found on their rank, agreed before the optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.divergence.moments import Flag, Moment, flags_of
from lightning_distplus.divergence.nonfinite import (
    BucketHook,
    FlaggingReduceScatter,
    LocalGradients,
    NonFinite,
    Section,
    name_at,
)
from lightning_distplus.divergence.replicas import plain_name
from lightning_distplus.divergence.skips import drop_gradients
from lightning_distplus.errors import DivergenceError
from lightning_distplus.world import ranges

__all__ = ["NonFiniteCheck"]

log = logging.getLogger(__name__)

_SHOWN_RANKS = 8


class NonFiniteCheck(Check):
    """Stops a NaN on one rank before it reaches the weights of all.

    The rank that has it contributes zeros to the sum, so that nobody is left alone in a collective. Under DDP the flag
    rides in the bucket; under every other engine, beside a loss scaler, and beside a communication hook of the user's,
    the ranks meet between the backward and the step. Then all of them raise, leave the step out, or warn and step
    without that rank's contribution.

    Args:
        replayed: What a replay of this step has shown on this rank, if it was replayed.
    """

    def __init__(self, replayed: Callable[[], str | None] = lambda: None) -> None:
        self._replayed = replayed
        self._gradients = LocalGradients()
        self._bucket_hook: BucketHook | None = None
        self._handles: list[Any] = []
        self._is_flagged = False
        self._engine: Any = None
        self.is_incomplete = False
        """Whether the sum of this step's gradients lacks what some rank should have contributed."""
        self.local_norm = 0.0
        """The norm of this rank's own gradients in this step, as far as optimizers have been about to step."""

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A new step begins."""
        self.is_incomplete = False
        self.local_norm = 0.0
        return {}

    def attach(self, run: MonitoredRun) -> None:
        """Puts eyes on the gradients, where the engine has them whole and not yet reduced."""
        super().attach(run)
        model: Any = run.trainer.strategy.model
        self._engine = model if hasattr(model, "is_gradient_accumulation_boundary") else None
        may_overflow = getattr(run.trainer.precision_plugin, "scaler", None) is not None
        if self._engine is not None:
            may_overflow = bool(self._engine.fp16_enabled())
        self._gradients = LocalGradients(self._describe, gradients_may_overflow=may_overflow)
        if not self._watch_buckets(model, may_overflow) and not self._watch_units(model):
            self._watch_each(model)

    def before_backward(self, loss: torch.Tensor) -> None:
        """A loss that is not finite counts, whatever its gradients are."""
        self._gradients.look_at_loss(loss)

    def norm(self) -> float:
        """The norm of this rank's own gradients, after the backward; waits for the device. NaN when it dropped some."""
        self._gradients.settle()
        return self._gradients.norm()

    def after_backward(self) -> None:
        """Reads what rode in the buckets; all ranks read the same."""
        if self._bucket_hook is not None:
            self._is_flagged |= self._bucket_hook.was_flagged()

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Agrees on whether the step is made.

        Raises:
            DivergenceError: On all ranks, when it is not and the user wants to know, or too many were left out.
        """
        if self._engine is not None and not self._engine.is_gradient_accumulation_boundary():
            return
        self.local_norm = math.hypot(self.local_norm, self.norm())
        if self._agree():
            self._act(optimizer)
        else:
            self.run.skips.stepped()
        self._gradients.reset()
        self._is_flagged = False

    def detach(self) -> None:
        """Takes the hooks away; one in a DDP reducer stays and only reduces."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._bucket_hook is not None:
            self._bucket_hook.retire()
        self._bucket_hook = None

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch_buckets(self, model: Any, may_overflow: bool) -> bool:
        """DDP: one look at each bucket, and the flag in it."""
        if not isinstance(model, DistributedDataParallel) or may_overflow:
            return False
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        hook = BucketHook(self._gradients, names, model.process_group)
        try:
            # A function without annotations: torch compares those of a hook with classes, ours are strings.
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        except RuntimeError:
            log.info("rank %d: the model has a communication hook; gradients are looked at one by one", self.run.rank)
            return False
        self._bucket_hook = hook
        return True

    def _watch_units(self, model: torch.nn.Module) -> bool:
        """FSDP: one look at each unit's gradients."""
        for unit in _compat.flat_units(model):
            sections = [Section(plain_name(name), numel) for name, numel in unit.sections]
            self._watch_leaf(unit.parameter, partial(name_at, sections))
        for prefix, module in model.named_modules():
            if isinstance(module, FSDPModule):
                own = _parameters_of(module, prefix)
                if own:
                    module.set_custom_reduce_scatter(FlaggingReduceScatter(self._gradients, own))  # type: ignore[arg-type]
                    self._handles.append(_Nothing())
        return bool(self._handles)

    def _watch_each(self, model: torch.nn.Module) -> None:
        """Any other engine: one look at each parameter's gradient."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._watch_leaf(parameter, _whole(plain_name(name)))

    def _watch_leaf(self, leaf: Any, name_of: Callable[[int], str | None]) -> None:
        self._handles.append(leaf.register_hook(lambda gradient: self._gradients.filtered(gradient, name_of)))

    # -- agreeing ----------------------------------------------------------------------------------------------------

    def _describe(self) -> tuple[int, tuple[Any, ...] | None]:
        ids = self.run.sample_ids()
        batch_idx: int = self.run.trainer.fit_loop.epoch_loop.batch_idx
        return batch_idx, None if ids is None else tuple(ids)

    def _agree(self) -> bool:
        """Whether some rank has found something; the same answer on all ranks."""
        if self._bucket_hook is not None:
            return self._is_flagged
        flag = Flag.NONE if self._gradients.is_clean else Flag.NOT_FINITE
        return any(flags_of(record) & Flag.NOT_FINITE for record in self.run.gate.meet(Moment.GRADIENTS, flag))

    def _act(self, optimizer: Any) -> None:
        self.is_incomplete = True
        found = self._gradients.found
        mine = None if found is None else {**found.to_dict(), "replayed": self._replayed()}
        told = self.run.gather("not-finite", mine)
        findings = {rank: NonFinite.from_dict(one) for rank, one in enumerate(told) if one is not None}
        policy = self.run.on_divergence
        error = _error(findings, self.run.trainer.global_step, self.run.plane.world.size, policy)
        if policy != "skip":
            self.run.tell(error)
            return
        try:
            self.run.skips.skipped(error)
        except DivergenceError as too_many:
            self.run.tell(too_many)
        self.run.note("step_skipped", field=error.field, ranks=error.ranks, values=error.values)
        log.warning("rank %d: %s", self.run.rank, error)
        self._leave_out(optimizer, error)

    def _leave_out(self, optimizer: Any, error: DivergenceError) -> None:
        if self._engine is None:
            drop_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])
        elif not _compat.discard_next_deepspeed_step(self._engine):
            raise error


class _Nothing:
    """Stands for what cannot be taken away."""

    def remove(self) -> None:
        pass


def _whole(name: str) -> Callable[[int], str | None]:
    """A parameter by itself; its size is not known yet where it is partitioned."""
    return lambda index: name


def _parameters_of(module: Any, prefix: str) -> list[tuple[str, torch.Size]]:
    """The parameters that an FSDP2 module shards itself: without those of the FSDP2 modules below it."""
    below = [name for name, child in module.named_modules() if name and isinstance(child, FSDPModule)]
    return [
        (plain_name(f"{prefix}.{name}" if prefix else name), parameter.shape)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not any(name.startswith(f"{child}.") for child in below)
    ]


def _error(findings: dict[int, NonFinite], step: int, size: int, policy: str) -> DivergenceError:
    ranks = sorted(findings)
    first = findings[ranks[0]]
    who = f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {ranges(ranks)} have"
    outcome = {
        "raise": "no weight has changed",
        "skip": "all ranks leave the step out",
        "warn": "the step is made without it",
    }[policy]
    lines = [
        f"{who} a {first.what} that is not finite in step {step}; it was kept out of the sum, and {outcome}.",
        *(f"  rank {rank}: {findings[rank].describe()}" for rank in ranks[:_SHOWN_RANKS]),
        f"  the other {size - len(ranks)} of {size} ranks: finite",
        "  do: look at these samples; on all ranks alike it is rather the learning rate or the precision. "
        'on_divergence="skip" leaves such steps out.',
    ]
    values = {rank: findings[rank].describe() if rank in findings else "finite" for rank in range(size)}
    error = DivergenceError("\n".join(lines), ranks=ranks, field=first.what, values=values)
    error.parameter = first.parameter  # type: ignore[attr-defined]
    return error
