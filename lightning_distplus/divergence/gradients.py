"""Gradients before they meet those of other ranks: values that are not finite, steps that do not belong together."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.divergence.check import Check, MonitoredRun, drop_gradients
from lightning_distplus.divergence.replicas import plain_name
from lightning_distplus.errors import DivergenceError
from lightning_distplus.majority import disagreement
from lightning_distplus.trainer_gate import Flag, Moment, flags_of
from lightning_distplus.world import ranges

__all__ = [
    "BucketHook",
    "FlaggingReduceScatter",
    "Letter",
    "LocalFailureCheck",
    "LocalGradients",
    "Mailbox",
    "NonFinite",
    "NonFiniteCheck",
    "PairingCheck",
    "Section",
    "TieToLoss",
    "name_at",
]

_SUMMED_AT_ONCE = frozenset({torch.float32, torch.float64})
_BLOCK = 1 << 18  # elements; a few fit into a core's second cache
# torch 2.13 gave it a new name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """What one rank has found in one of its micro-batches; plain values."""

    what: str
    """``"loss"`` or ``"gradient"``."""
    value: str
    """``"nan"``, ``"inf"`` or ``"-inf"``."""
    parameter: str | None = None
    """The first parameter found with such a gradient; gradients come last layer first."""
    micro_batch: int = 0
    sample_ids: tuple[Any, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For an exchange as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NonFinite:
        """Reads what ``to_dict`` wrote."""
        ids = values["sample_ids"]
        return cls(**{**values, "sample_ids": None if ids is None else tuple(ids)})

    def describe(self) -> str:
        """One line."""
        where = f"gradient of {self.parameter}" if self.parameter else self.what
        samples = "" if self.sample_ids is None else f", samples {_shortened(self.sample_ids)}"
        return f"{where} is {self.value} in micro-batch {self.micro_batch}{samples}"


@dataclass(frozen=True)
class Section:
    """A parameter's part of a flat gradient."""

    name: str
    numel: int


def name_at(sections: Sequence[Section], index: int) -> str | None:
    """Whose element this is."""
    for section in sections:
        if index < section.numel:
            return section.name
        index -= section.numel
    return None


class LocalGradients:
    """Looks at every gradient of this rank before the engine reduces it.

    One pass over the bytes: the norm of a gradient is finite unless an element is not, or its square is too large;
    only then a second look decides. On a CPU the answer is there at once. On another device nothing waits for it during
    the backward: the device zeroes what is not finite, and ``settle`` asks it once, afterwards.

    Args:
        describe: Called when something is found: the micro-batch and the ids of its samples.
        gradients_may_overflow: Whether a loss scaler is at work. It expects gradients that overflow and skips such
            steps by itself, so that only the loss counts then.
    """

    def __init__(
        self,
        describe: Callable[[], tuple[int, tuple[Any, ...] | None]] = lambda: (0, None),
        *,
        gradients_may_overflow: bool = False,
    ) -> None:
        self.found: NonFinite | None = None
        self._describe = describe
        self._may_overflow = gradients_may_overflow
        self._pending: list[tuple[Tensor, str, Callable[[], str | None]]] = []
        self._is_finite: Tensor | None = None

    @property
    def is_clean(self) -> bool:
        """Whether everything since ``reset`` was finite, as far as this rank knows without waiting for its device."""
        return self.found is None

    def look_at_loss(self, loss: Tensor) -> None:
        """Before the backward: a loss that is not finite makes this rank contribute nothing to the step."""
        if self.found is not None:
            return
        if not loss.is_cpu:
            self._wait_for(torch.isfinite(loss.detach()).all(), "loss", lambda: None)
            return
        value = (loss if loss.numel() == 1 else loss.detach().sum()).item()
        if not math.isfinite(value):
            self._remember("loss", value)

    def look_at(self, gradient: Tensor, name_of: Callable[[int], str | None]) -> bool | Tensor:
        """Examines a gradient of this rank alone.

        Args:
            gradient: Complete; not changed.
            name_of: The parameter to which an element belongs, by its index in the flat gradient.

        Returns:
            Whether this rank contributes it: a bool, or on another device than the CPU a 0-dim tensor there.
        """
        if not gradient.is_cpu:
            return self._look_on_device(gradient, name_of)
        if self.found is not None:
            return False
        if not self._may_overflow and not math.isfinite(_norm(gradient)):
            index = _first_non_finite(gradient)
            if index is not None:
                self._remember("gradient", float(gradient.reshape(-1)[index]), name_of(index))
                return False
        return True

    def is_plain(self, buffer: Tensor) -> bool:
        """Whether nothing was found yet, and one look at a small buffer of the CPU's finds nothing either."""
        if self.found is not None or self._may_overflow or not buffer.is_cpu or buffer.numel() > _BLOCK:
            return False
        return buffer.dtype in _SUMMED_AT_ONCE and math.isfinite(torch.dot(buffer, buffer).item())

    def filtered(self, gradient: Tensor, name_of: Callable[[int], str | None]) -> Tensor | None:
        """For ``Tensor.register_hook`` on a leaf: what takes the gradient's place, or None where it stays."""
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        keeps = self.look_at(local, name_of)
        if keeps is True:
            return None
        if keeps is False or local is not gradient:
            return torch.zeros_like(gradient)
        return gradient.masked_fill(torch.logical_not(torch.as_tensor(keeps)), 0)

    def settle(self) -> None:
        """After the backward: waits for the answer of a device other than the CPU, once."""
        if not self._pending:
            return
        pending, self._pending, self._is_finite = self._pending, [], None
        if self.found is not None:
            return
        for is_finite, (_, what, name) in zip(torch.stack([one[0] for one in pending]).tolist(), pending, strict=True):
            if not is_finite:
                self._remember(what, math.nan, name())
                return

    def reset(self) -> None:
        """A new step begins."""
        self.found = self._is_finite = None
        self._pending.clear()

    def _look_on_device(self, gradient: Tensor, name_of: Callable[[int], str | None]) -> Tensor:
        if self._may_overflow:  # the loss alone decides
            return self._wait_for(torch.ones((), dtype=torch.bool, device=gradient.device), "gradient", lambda: None)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return self._wait_for(torch.isfinite(norm), "gradient", lambda: name_of(0))

    def _wait_for(self, is_finite: Tensor, what: str, name: Callable[[], str | None]) -> Tensor:
        """Whether everything up to here is finite, as the device will know."""
        self._pending.append((is_finite, what, name))
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        return self._is_finite

    def _remember(self, what: str, value: float, parameter: str | None = None) -> None:
        micro_batch, sample_ids = self._describe()
        self.found = NonFinite(
            what=what, value=str(value), parameter=parameter, micro_batch=micro_batch, sample_ids=sample_ids
        )


_Part = tuple[int, int, Sequence[torch.nn.Parameter]]  # begin and end in a bucket, and the parameters there


class BucketHook:
    """A communication hook of ``DistributedDataParallel`` that carries the flag of this rank in the bucket itself.

    A rank with something that is not finite sends zeros, with NaN as their first element. NaN stays NaN under a sum,
    and finite gradients do not sum up to it, so that after the all-reduce the first element tells all ranks alike.
    Otherwise the result is, bit for bit, that of DDP without a hook.

    Args:
        gradients: The eyes of this rank.
        names: Of the parameters, by identity.
        group: The process group of the model.
    """

    def __init__(self, gradients: LocalGradients, names: dict[int, str], group: dist.ProcessGroup | None) -> None:
        self._gradients = gradients
        self._names = names
        self._group = group
        self._sent: list[tuple[Tensor, torch.nn.Parameter]] = []
        self._layouts: dict[tuple[int, ...], list[_Part]] = {}
        self._is_retired = False

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Examines a ``GradBucket``, scales it by the number of ranks and starts its all-reduce."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        size = dist.get_world_size(self._group)
        if self._is_retired:
            buffer.mul_(1 / size)
        else:
            self._sent.append((buffer, parameters[0]))
            if self._gradients.is_plain(buffer):
                buffer.mul_(1 / size)
            else:
                self._look_at_parts(buffer, parameters, size)
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _look_at_parts(self, buffer: Tensor, parameters: Sequence[torch.nn.Parameter], size: int) -> None:
        keeps: bool | Tensor = True
        for begin, end, own in self._parts(parameters):
            looked = self._look_and_scale(buffer[begin:end], own, size)
            keeps = looked if own else keeps
        _fill_unless(keeps, buffer, 0.0)
        _fill_unless(keeps, buffer[:1], torch.nan)

    def retire(self) -> None:
        """From now on it only reduces; DDP cannot let go of a hook."""
        self._is_retired = True

    def was_flagged(self) -> bool:
        """After a backward: whether some rank has sent the flag; the same answer on all ranks. Takes the flag away."""
        if not self._sent:
            return False
        if self._sent[0][0].is_cpu:
            values = [buffer[0].item() for buffer, _ in self._sent]
        else:
            values = torch.stack([buffer[0] for buffer, _ in self._sent]).tolist()
        flags = [value != value for value in values]
        if not any(flags):
            self._sent.clear()
            return False
        for is_flagged, (buffer, parameter) in zip(flags, self._sent, strict=True):
            if is_flagged:
                buffer[0] = 0
                if parameter.grad is not None:
                    parameter.grad.view(-1)[:1] = 0
        self._sent.clear()
        return True

    def _look_and_scale(self, part: Tensor, own: Sequence[torch.nn.Parameter], size: int) -> bool | Tensor:
        """On a CPU block by block: what has just been read for the look is scaled out of the cache."""
        keeps: bool | Tensor = True
        blocks = torch.split(part, _BLOCK) if part.numel() > _BLOCK and part.device.type == "cpu" else [part]
        for number, block in enumerate(blocks):
            if own:
                keeps = self._gradients.look_at(block, partial(self._name_at, own, number * _BLOCK))
            block.mul_(1 / size)  # as DDP does: a division gives other bits, and is slower
        return keeps

    def _parts(self, parameters: Sequence[torch.nn.Parameter]) -> Sequence[_Part]:
        """The model's gradients in a bucket, and, without parameters, what rides along and would spoil the norm."""
        known = tuple(map(id, parameters))  # DDP may lay its buckets out anew
        found = self._layouts.get(known)
        if found is None:
            found, begin = [], 0
            for is_own, group in itertools.groupby(parameters, lambda parameter: id(parameter) in self._names):
                own = list(group)
                end = begin + sum(parameter.numel() for parameter in own)
                found.append((begin, end, own if is_own else []))
                begin = end
            self._layouts[known] = found
        return found

    def _name_at(self, own: Sequence[torch.nn.Parameter], begin: int, index: int) -> str | None:
        sections = [Section(self._names[id(parameter)], parameter.numel()) for parameter in own]
        return name_at(sections, begin + index)


class FlaggingReduceScatter:
    """The reduce-scatter of one FSDP2 module, which looks at the gradients of this rank first.

    Given to ``FSDPModule.set_custom_reduce_scatter``; it allocates and reduces as torch's default does.

    Args:
        gradients: The eyes of this rank.
        parameters: Names and full shapes of the module's own parameters, in its order.
    """

    def __init__(self, gradients: LocalGradients, parameters: Sequence[tuple[str, torch.Size]]) -> None:
        self._gradients = gradients
        self._parameters = list(parameters)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Examines what this rank contributes, then reduces."""
        columns = input_tensor.numel() // group.size()
        keeps = self._gradients.look_at(
            input_tensor, lambda index: self._name_at(index % columns, columns, group.size())
        )
        _fill_unless(keeps, input_tensor, 0.0)
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return work

    def _name_at(self, column: int, columns: int, ranks: int) -> str | None:
        """Each rank's row holds its chunk of every parameter, padded to equal chunks of dimension 0."""
        sections = [
            Section(name, -(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1)
            for name, shape in self._parameters
        ]
        if sum(section.numel for section in sections) != columns:  # some had no gradient in this backward
            return " or ".join(section.name for section in sections)
        return name_at(sections, column)


def _norm(gradient: Tensor) -> float:
    """The norm of a gradient on the CPU; not finite where an element is not, or its square is too large."""
    if gradient.dtype in _SUMMED_AT_ONCE and gradient.is_contiguous():
        flat = gradient.view(-1)
        return math.sqrt(torch.dot(flat, flat).item())  # at twice the speed out of a cache
    return float(torch.linalg.vector_norm(gradient))


def _first_non_finite(gradient: Tensor) -> int | None:
    positions = torch.isfinite(gradient.reshape(-1)).logical_not_().nonzero()
    return int(positions[0]) if len(positions) else None


def _fill_unless(keeps: bool | Tensor, tensor: Tensor, value: float) -> None:
    if keeps is False:
        tensor.fill_(value)
    elif keeps is not True:
        tensor.masked_fill_(torch.logical_not(keeps), value)


def _shortened(values: Sequence[Any]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown} and {len(values) - 8} more" if len(values) > 8 else shown


# -- the check of losses and gradients that are not finite -------------------------------------------------------------

log = logging.getLogger(__name__)
_SHOWN_RANKS = 8
_WARN_EVERY = 100  # steps


class NonFiniteCheck(Check):
    """Stops a NaN on one rank before it reaches the weights of all.

    The rank that has it contributes zeros to the sum, so that nobody is left alone in a collective. Under DDP the flag
    rides in the bucket; under every other engine, beside a loss scaler, and beside a communication hook of the user's,
    the ranks meet between the backward and the step. Then all of them raise, leave the step out, or warn and step
    without that rank's contribution.

    Where every rank has found something, the ranks do not differ: all leave the step out and go on, with a warning once
    in 100 steps. A loss scaler gets its gradients back as they were, and leaves the step out by itself.
    """

    def __init__(self) -> None:
        self._gradients = LocalGradients()
        self._bucket_hook: BucketHook | None = None
        self._handles: list[Any] = []
        self._is_flagged = False
        self._engine: Any = None
        self._has_scaler = False
        self._warned_at: int | None = None
        self.is_incomplete = False
        """Whether the sum of this step's gradients lacks what some rank should have contributed."""

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A new step begins."""
        self.is_incomplete = False
        return {}

    def attach(self, run: MonitoredRun) -> None:
        """Puts eyes on the gradients, where the engine has them whole and not yet reduced."""
        super().attach(run)
        model: Any = run.trainer.strategy.model
        self._engine = model if hasattr(model, "is_gradient_accumulation_boundary") else None
        may_overflow = self._has_scaler = getattr(run.trainer.precision_plugin, "scaler", None) is not None
        if self._engine is not None:
            may_overflow = bool(self._engine.fp16_enabled())
        self._gradients = LocalGradients(self._describe, gradients_may_overflow=may_overflow)
        if not self._watch_buckets(model, may_overflow) and not self._watch_units(model):
            self._watch_each(model)

    def needs(self, hook: str) -> bool:
        """Lightning steps or goes back again right after a backward; what rode in the buckets can be read then."""
        is_manual = self._bucket_hook is not None and not self.run.module.automatic_optimization
        return super().needs(hook) and (hook != "after_backward" or is_manual)

    def before_backward(self, loss: torch.Tensor) -> None:
        """A loss that is not finite counts, whatever its gradients are."""
        self.after_backward()
        self._gradients.look_at_loss(loss)

    def after_backward(self) -> None:
        """Reads what rode in the buckets; all ranks read the same."""
        if self._bucket_hook is not None and self._bucket_hook.was_flagged():
            self._is_flagged = True

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Agrees on whether the step is made.

        Raises:
            DivergenceError: On all ranks, when it is not and the user wants to know, or too many were left out.
        """
        if self._engine is not None and not self._engine.is_gradient_accumulation_boundary():
            return
        self.after_backward()
        self._gradients.settle()
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
        mine = None if found is None else found.to_dict()
        told = self.run.gather("not-finite", mine)
        findings = {rank: NonFinite.from_dict(one) for rank, one in enumerate(told) if one is not None}
        policy = self.run.on_divergence
        if len(findings) == self.run.plane.world.size and policy != "skip":
            self._leave_out_alike(optimizer, findings)
            return
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
        if not self._leave_out(optimizer):
            raise error

    def _leave_out_alike(self, optimizer: Any, findings: dict[int, NonFinite]) -> None:
        """No rank differs from the others, so that nothing ends; a step of NaN helps nobody."""
        if self._has_scaler:
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
            return
        self._leave_out(optimizer)
        step = self.run.trainer.global_step
        if self._warned_at is not None and step - self._warned_at < _WARN_EVERY:
            return
        self._warned_at = step
        size, what = len(findings), findings[self.run.rank].describe()
        self.run.note("not_finite", global_step=step, what=what)
        if self.run.rank == 0:
            log.warning(
                "a loss or a gradient is not finite on all %d ranks in step %d; rank 0: %s. The step is left out and "
                "training goes on; said once in %d steps. Look at the learning rate, the precision and the data.",
                size,
                step,
                what,
                _WARN_EVERY,
            )

    def _leave_out(self, optimizer: Any) -> bool:
        """Whether it could."""
        if self._engine is None:
            drop_gradients(_parameters(optimizer))
            return True
        return _compat.discard_next_deepspeed_step(self._engine)


def _parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


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
        "  do: look at these samples, then at the learning rate and the precision. "
        'on_divergence="skip" leaves such steps out.',
    ]
    values = {rank: findings[rank].describe() if rank in findings else "finite" for rank in range(size)}
    error = DivergenceError("\n".join(lines), ranks=ranks, field=first.what, values=values)
    error.parameter = first.parameter  # type: ignore[attr-defined]
    return error


# -- the number of the step, in DDP's bucket ---------------------------------------------------------------------------

# A rank that leaves out one sum of same-shaped gradients is one step off from then on. Step k is averaged with step
# k + 1 on all ranks alike, and nothing that compares weights, shapes or sequence numbers can see it.

_CHUNKS = 3
_BITS = 6  # v / size in bf16 is off by at most v * 2^-9, so that chunks below 64 come back exact
_MODULUS = 1 << (_CHUNKS * _BITS)


class Letter:
    """What a rank finds in the mailbox after its gradients were summed.

    Attributes:
        numbers: The number that each rank put in; of a rank whose slots make no sense, None.
        is_summed: Whether the sum has taken place; without it only this rank's own slots are filled.
    """

    def __init__(self, numbers: list[int | None], *, is_summed: bool) -> None:
        self.numbers = numbers
        self.is_summed = is_summed


class Mailbox:
    """A parameter that DDP sums with the others; its gradient is not computed but written.

    Args:
        rank: This process.
        size: Number of ranks.
        like: A parameter whose dtype and device it takes, so that it shares a bucket.
    """

    def __init__(self, rank: int, size: int, like: torch.Tensor) -> None:
        self._rank = rank
        self._size = size
        self.parameter = torch.nn.Parameter(torch.zeros(size * _CHUNKS, dtype=like.dtype, device=like.device))
        self._sent = 0

    def tie(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        """The same loss, whose backward also puts this rank's number into the mailbox."""
        self._sent = number % _MODULUS
        self.parameter.grad = None
        chunks = self._chunks()
        first, last = self._rank * _CHUNKS, (self._rank + 1) * _CHUNKS
        if self.parameter.is_cpu:
            filled = [0] * first + chunks + [0] * (self._size * _CHUNKS - last)
            slots = torch.tensor(filled, dtype=self.parameter.dtype)
        else:
            slots = torch.zeros_like(self.parameter, requires_grad=False)
            for slot, chunk in zip(slots[first:last], chunks, strict=True):  # a copy would wait for the device
                slot.fill_(chunk)
        tied: torch.Tensor = _Tie.apply(loss, self.parameter, slots)  # type: ignore[no-untyped-call]
        return tied

    @property
    def expected(self) -> int:
        """What all ranks must have put in."""
        return self._sent

    def take(self) -> torch.Tensor | None:
        """The content after the backward, on its way to the CPU; None where nothing came."""
        gradient = self.parameter.grad
        if gradient is None or gradient.is_cpu:
            return gradient
        return gradient.detach().to("cpu", torch.float32, non_blocking=True)

    def has_met(self, content: torch.Tensor) -> bool:
        """Whether all ranks have put in this rank's number, by what ``take`` returned."""
        size = self._size
        return self._sent > 0 and size > 1 and [value * size for value in content.tolist()] == self._chunks() * size

    def read(self, content: torch.Tensor) -> Letter:
        """Decodes what ``take`` returned, once it has arrived; DDP has divided the sum by the number of ranks."""
        if self.has_met(content):
            return Letter([self._sent] * self._size, is_summed=True)
        found = content.tolist()
        values = [value * self._size for value in found]
        numbers = [self._decode(values[slot : slot + _CHUNKS]) for slot in range(0, len(values), _CHUNKS)]
        first, last = self._rank * _CHUNKS, (self._rank + 1) * _CHUNKS
        has_others = any(values[:first]) or any(values[last:])
        is_local = self._sent > 0 and not has_others and self._decode(found[first:last]) == self._sent
        return Letter(numbers, is_summed=not is_local)

    def _chunks(self) -> list[int]:
        return [(self._sent >> (_BITS * chunk)) % (1 << _BITS) for chunk in range(_CHUNKS)]

    @staticmethod
    def _decode(chunks: list[float]) -> int | None:
        whole = [round(chunk) for chunk in chunks if chunk == chunk]
        if len(whole) < _CHUNKS or any(not 0 <= chunk < 1 << _BITS for chunk in whole):
            return None
        return sum(chunk << (_BITS * place) for place, chunk in enumerate(whole))


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parameter: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.slots = slots
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], ctx.slots, None


class TieToLoss:
    """Forward hooks of one module that tie its loss to a mailbox: the loss of the outermost call, while it trains.

    A copy of the module, or a pickled one, takes hooks along that do nothing.

    Args:
        module: The module whose output is the loss, or a dictionary with a ``loss``.
        tie: Gets the loss and returns it tied.
    """

    def __init__(self, module: torch.nn.Module, tie: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._module = weakref.ref(module)
        self._tie = tie
        self._depth = 0
        self._handles = [
            module.register_forward_pre_hook(_Entering(self)),
            module.register_forward_hook(_Leaving(self)),
        ]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def reset(self) -> None:
        """A new batch begins: whatever the last one left by an exception is forgotten."""
        self._depth = 0

    def enter(self) -> None:
        """A forward begins, perhaps inside another one."""
        self._depth += 1

    def leave(self, module: torch.nn.Module, output: Any) -> Any:
        """The output, with its loss tied where this was the outermost call."""
        self._depth -= 1
        if self._depth or module is not self._module() or not module.training or not torch.is_grad_enabled():
            return output
        if isinstance(output, torch.Tensor) and output.requires_grad:
            return self._tie(output)
        if isinstance(output, MutableMapping) and getattr(output.get("loss"), "requires_grad", False):
            output["loss"] = self._tie(output["loss"])
        return output


class _Entering:
    def __init__(self, owner: TieToLoss) -> None:
        self._owner = owner

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self._owner.enter()

    def __reduce__(self) -> Any:
        return _Silent, ()


class _Leaving(_Entering):
    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any = None) -> Any:
        return self._owner.leave(module, output)


class _Silent:
    def __call__(self, *_: Any) -> None:
        return None


# -- the check that summed gradients belong to one step ----------------------------------------------------------------

_NAME = "_distplus_mailbox"
_REMEDY = (
    "look for no_sync, a loss that does not depend on all parameters, or a skipped backward; "
    "find_unused_parameters=True where parameters may go unused"
)


class PairingCheck(Check):
    """Lets the number of the step ride in DDP's gradient bucket, and compares it before the optimizer steps.

    Goes without where the bucket is not plainly averaged (a communication hook), under manual optimization, and with a
    compiled module. On a GPU the number is read one step later, so that nothing waits for the device.

    Args:
        is_incomplete: Whether a rank has kept its gradients, and with them its number, out of this step's sum.
    """

    def __init__(self, is_incomplete: Callable[[], bool]) -> None:
        self._is_incomplete = is_incomplete
        self._mailbox: Mailbox | None = None
        self._tie: TieToLoss | None = None
        self._late: torch.Tensor | None = None
        self._summed: set[int] = set()
        self._looks_for_unfrozen = False

    def before_engine(self) -> None:
        """DDP takes the mailbox for a parameter; the module, its optimizers and checkpoints never see it."""
        strategy: Any = self.run.trainer.strategy
        module = self.run.module
        if not isinstance(strategy, DDPStrategy) or not module.automatic_optimization:
            return
        if getattr(strategy, "_ddp_comm_hook", None) is not None or getattr(module, "_compiler_ctx", None) is not None:
            log.info("the pairing of gradients is not checked: a communication hook or a compiled module")
            return
        _compat.wrap_method(strategy, "configure_ddp", self._configure, "the pairing of gradients is not checked")

    def _configure(self, inner: Callable[[], None]) -> None:
        module: torch.nn.Module = self.run.module
        like = next((one for one in module.parameters() if one.requires_grad and one.is_floating_point()), None)
        if like is None:
            inner()
            return
        world = self.run.plane.world
        self._mailbox = Mailbox(world.rank, world.size, like)
        self._looks_for_unfrozen = True  # a run that goes on within an epoch does not begin it
        self._summed = {id(one) for one in module.parameters() if one.requires_grad}
        module.register_parameter(_NAME, self._mailbox.parameter)
        try:
            inner()
        finally:
            delattr(module, _NAME)
        self._tie = TieToLoss(module, self.tie)

    def tie(self, loss: torch.Tensor) -> torch.Tensor:
        """The same loss; where DDP sums the gradients of its backward, the number of the step rides along."""
        if self._mailbox is None or not self._is_due:
            return loss
        return self._mailbox.tie(loss, self.run.trainer.global_step + 1)

    @property
    def _is_due(self) -> bool:
        """Whether DDP sums the gradients of this backward."""
        model = self.run.trainer.strategy.model
        return isinstance(model, DistributedDataParallel) and bool(model.require_backward_grad_sync)

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Reads what was on its way from the device, and empties the mailbox."""
        if self._tie is not None:
            self._tie.reset()
        if self._late is not None:
            late, self._late = self._late, None
            self._judge(late)
        if self._mailbox is not None:
            self._mailbox.parameter.grad = None
        return {}

    def epoch_start(self) -> None:
        """Callbacks that unfreeze parameters do so at the begin of an epoch."""
        self._looks_for_unfrozen = True

    def before_optimizer_step(self, optimizer: Any) -> None:
        """The gradients are summed, or were to be."""
        if self._mailbox is None or self.run.skips.is_skipping or self._is_incomplete():
            return
        if _compat.skips_backward(self.run.trainer):  # on all ranks
            return
        if self._looks_for_unfrozen:
            self._looks_for_unfrozen = False
            self._require_summed(optimizer)
        content = self._mailbox.take()
        if content is None:
            self._tell_not_summed("its backward did not take part in the sum of gradients")
        elif self._mailbox.parameter.is_cpu:
            self._judge(content)
        else:
            self._late = content

    def _require_summed(self, optimizer: Any) -> None:
        trained = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
        unfrozen = trained - self._summed
        if names := [name for name, one in self.run.module.named_parameters() if id(one) in unfrozen]:
            self._tell_not_summed(
                f"DDP does not sum the gradients of what was frozen when it was built: {names[0]} (1 of {len(names)})",
                "let all parameters that are trained at some time require gradients when fit begins, and keep them "
                "still by a learning rate of 0",
            )

    def _judge(self, content: torch.Tensor) -> None:
        assert self._mailbox is not None
        if self._mailbox.has_met(content):
            return
        letter = self._mailbox.read(content)
        if letter.is_summed and len(set(letter.numbers)) == 1:
            return
        if not letter.is_summed:
            self._tell_not_summed("the sum of gradients was begun and not finished: a parameter got no gradient")
        numbers = dict(enumerate(letter.numbers))
        if None in letter.numbers or len(set(letter.numbers)) == 1:
            return
        self.run.tell(
            disagreement(
                "gradient_step",
                numbers,
                where=f"before optimizer step {self._mailbox.expected}: gradients of different steps were summed; no "
                "weight changed",
                remedy="a rank left out or repeated a sum of gradients: no_sync, a skipped backward, a second one",
            )
        )

    def _tell_not_summed(self, what: str, remedy: str = _REMEDY) -> None:
        """This rank alone knows; the others stand in the sum, and hear of it when this one ends."""
        self.run.tell(
            disagreement(
                "gradient_sum",
                {self.run.rank: what},
                wrong=[self.run.rank],
                where=f"before optimizer step {self.run.trainer.global_step + 1}; no weight has changed here",
                remedy=remedy,
            )
        )

    def detach(self) -> None:
        """Takes the hooks away."""
        _compat.restore_method(self.run.trainer.strategy, "configure_ddp")
        if self._tie is not None:
            self._tie.remove()
        self._tie = self._mailbox = self._late = None


# -- the check of batches that fail on some ranks only -----------------------------------------------------------------

_FINE, _EMPTY = "a loss", "training_step returned None"


class LocalFailureCheck(Check):
    """Meets all ranks after ``training_step``, and leaves the whole optimizer step out where one of them has no loss.

    For DDP only: its forward holds no collective in which the others could already wait for the failing rank. Costs one
    more gate per micro-batch, so that it works only when asked for.

    Args:
        tie: Adds to a loss what must ride in DDP's buckets.
    """

    def __init__(self, tie: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._tie = tie

    def before_engine(self) -> None:
        """Refuses what cannot work, and stands around ``training_step``.

        Raises:
            ValueError: The strategy shards the model, or the optimization is manual.
        """
        strategy: Any = self.run.trainer.strategy
        if not isinstance(strategy, DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
            raise ValueError(
                f'on_local_failure="skip_all" works with DDP, not with {type(strategy).__name__}: in a sharded forward '
                "the other ranks wait for the one that failed, in a collective that it never reaches. Use "
                'on_local_failure="raise".'
            )
        if not self.run.module.automatic_optimization:
            raise ValueError('on_local_failure="skip_all" needs automatic optimization. Use on_local_failure="raise".')
        _compat.wrap_method(strategy, "training_step", self._training_step, "a batch that fails ends the run")

    def attach(self, run: MonitoredRun) -> None:
        """Refuses a DDP that looks at the graph of a loss.

        Raises:
            ValueError: The graph of a failed step is not there.
        """
        super().attach(run)
        model: Any = run.trainer.strategy.model
        if model.find_unused_parameters or model.static_graph:
            raise ValueError(
                'on_local_failure="skip_all" works without find_unused_parameters and static_graph: a rank whose step '
                'failed has no graph to look at. Use on_local_failure="raise".'
            )

    def _training_step(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not self.run.gate.is_open:
            return inner(*arguments, **named)
        output, what = self._attempt(inner, *arguments, **named)
        records = self.run.gate.meet(Moment.FORWARD, Flag.BATCH_FAILED if what != _FINE else Flag.NONE)
        if not any(flags_of(record) & Flag.BATCH_FAILED for record in records):
            return output
        self._leave_out(what)
        model: Any = self.run.trainer.strategy.model
        loss = self._tie(_nothing(self.run.module))
        if what not in (_FINE, _EMPTY) and model.require_backward_grad_sync:
            model.reducer.prepare_for_backward([])  # its forward did not come to that
        return loss

    def _attempt(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, str]:
        try:
            output = inner(*arguments, **named)
        except torch.OutOfMemoryError as error:
            # The traceback holds the activations: it goes with this block, before the next batch.
            return None, f"{type(error).__name__}: {error}"[:300]
        return output, _FINE if output is not None else _EMPTY

    def _leave_out(self, what: str) -> None:
        values = dict(enumerate(self.run.gather("failed batches", what)))
        wrong = [rank for rank, text in values.items() if text != _FINE]
        ids = self.run.gather("failed samples", (self.run.sample_ids() or [])[:8])
        values = {rank: f"{text} (samples {ids[rank]})" if ids[rank] else text for rank, text in values.items()}
        error: DivergenceError = disagreement(
            "training_step",
            values,
            wrong=wrong,
            where=f"in step {self.run.trainer.global_step}; all ranks leave it out",
            remedy="shorten or split such batches; look at the samples",
        )
        self.run.note("step_skipped", global_step=self.run.trainer.global_step, ranks=wrong, values=values)
        self.run.skips.skipped(error)

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Leaves the optimizer nothing, also of earlier micro-batches of the window."""
        if self.run.skips.is_skipping:
            drop_gradients(self.run.module.parameters())
        else:
            self.run.skips.stepped()

    def detach(self) -> None:
        """Steps aside."""
        _compat.restore_method(self.run.trainer.strategy, "training_step")


def _nothing(module: torch.nn.Module) -> torch.Tensor:
    """A loss of zero whose backward reaches every parameter with zeros: DDP sums on all ranks, and is ready again."""
    trainable = [one for one in module.parameters() if one.requires_grad and one.numel()]
    return torch.stack([one.flatten()[0].float() * 0.0 for one in trainable]).sum()
