"""Gradients before they meet those of other ranks: values that are not finite, and sums in which a rank is missing."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.divergence.check import Check
from lightning_distplus.divergence.replicas import plain_name
from lightning_distplus.errors import DivergenceError
from lightning_distplus.majority import disagreement
from lightning_distplus.trainer_gate import Flag, Moment, flags_of
from lightning_distplus.world import name_ranks

log = logging.getLogger(__name__)
_SUMMED_AT_ONCE = frozenset({torch.float32, torch.float64})
_BLOCK = 1 << 18  # elements; a few fit into a core's second cache
_SHOWN_IDS = 8
# torch 2.13 gave it a new name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NameOf = Callable[[int], str | None]
"""The parameter to which an element of a flat gradient belongs."""


class NonFinite(NamedTuple):
    """What one rank has found in one of its micro-batches."""

    what: str
    """``"loss"`` or ``"gradient"``."""
    parameter: str | None
    """The first parameter found with such a gradient; gradients come last layer first."""
    text: str
    """The whole of it in one line."""


def name_at(sections: Iterable[tuple[str, int]], index: int) -> str | None:
    """Whose element of a flat gradient this is; a section is a parameter's name and its number of elements."""
    for name, numel in sections:
        if index < numel:
            return name
        index -= numel
    return None


class LocalGradients:
    """Looks at every gradient of this rank before the engine reduces it.

    One pass over the bytes: the norm of a gradient is finite unless an element is not, or its square is too large;
    only then a second look decides. On a CPU the answer is there at once. On another device nothing waits for it during
    the backward: the device zeroes what is not finite, and ``settle`` asks it once, afterwards.

    Args:
        where: Called when something is found: the micro-batch and its samples, as text.
        gradients_may_overflow: Whether a loss scaler is at work. It expects gradients that overflow and skips such
            steps by itself, so that only the loss counts then.
    """

    def __init__(
        self, where: Callable[[], str] = lambda: "this micro-batch", *, gradients_may_overflow: bool = False
    ) -> None:
        self.found: NonFinite | None = None
        """The first thing since ``reset`` that was not finite, as far as is known without waiting for the device."""
        self._where = where
        self._may_overflow = gradients_may_overflow
        self._pending: list[tuple[Tensor, str, Callable[[], str | None]]] = []
        self._is_finite: Tensor | None = None

    def look_at_loss(self, loss: Tensor) -> None:
        """Before the backward: a loss that is not finite makes this rank contribute nothing to the step."""
        if self.found is not None:
            return
        if not loss.is_cpu:
            self._wait_for(torch.isfinite(loss.detach()).all(), "loss")
        elif not math.isfinite(value := (loss if loss.numel() == 1 else loss.detach().sum()).item()):
            self._remember("loss", value)

    def look_at(self, gradient: Tensor, name_of: _NameOf) -> bool | Tensor:
        """Examines a gradient of this rank alone.

        Args:
            gradient: Complete; not changed.
            name_of: The parameter to which an element belongs, by its index in the flat gradient.

        Returns:
            Whether this rank contributes it: a bool, or on another device than the CPU a 0-dim tensor there.
        """
        if not gradient.is_cpu:
            if self._may_overflow:  # the loss alone decides
                return self._wait_for(torch.ones((), dtype=torch.bool, device=gradient.device), "gradient")
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            return self._wait_for(torch.isfinite(norm), "gradient", lambda: name_of(0))
        if self.found is not None:
            return False
        if not self._may_overflow and not math.isfinite(_norm(gradient)):
            flat = gradient.reshape(-1)
            for index in torch.isfinite(flat).logical_not_().nonzero()[:1].flatten().tolist():
                self._remember("gradient", float(flat[index]), name_of(index))
                return False
        return True

    def filtered(self, gradient: Tensor, name_of: _NameOf) -> Tensor | None:
        """For ``Tensor.register_hook`` on a leaf: what takes the gradient's place, or None where it stays."""
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        values = local.coalesce().values() if local.is_sparse else local
        keeps = self.look_at(values, name_of)
        if isinstance(keeps, bool):
            return None if keeps else torch.zeros_like(gradient)
        values = values.masked_fill(torch.logical_not(keeps), 0)
        if local.is_sparse:
            return torch.sparse_coo_tensor(local.coalesce().indices(), values, local.shape)
        if not isinstance(gradient, DTensor):
            return values
        shape, stride = gradient.shape, gradient.stride()
        return DTensor.from_local(
            values, gradient.device_mesh, gradient.placements, run_check=False, shape=shape, stride=stride
        )

    def settle(self) -> None:
        """After the backward: waits for the answer of a device other than the CPU, once."""
        pending, self._pending, self._is_finite = self._pending, [], None
        if not pending or self.found is not None:
            return
        for is_finite, (_, what, name) in zip(torch.stack([one[0] for one in pending]).tolist(), pending, strict=True):
            if not is_finite:
                self._remember(what, math.nan, name())
                return

    def reset(self) -> None:
        """A new step begins."""
        self.found = self._is_finite = None
        self._pending.clear()

    def _wait_for(self, is_finite: Tensor, what: str, name: Callable[[], str | None] = lambda: None) -> Tensor:
        """Whether everything up to here is finite, as the device will know."""
        self._pending.append((is_finite, what, name))
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        return self._is_finite

    def _remember(self, what: str, value: float, parameter: str | None = None) -> None:
        subject = f"gradient of {parameter}" if parameter else what
        self.found = NonFinite(what, parameter, f"{subject} is {value} in {self._where()}")


def _norm(gradient: Tensor) -> float:
    """The norm of a gradient on the CPU; not finite where an element is not, or its square is too large."""
    if gradient.dtype in _SUMMED_AT_ONCE and gradient.is_contiguous():
        flat = gradient.view(-1)
        return math.sqrt(torch.dot(flat, flat).item())  # at twice the speed out of a cache
    return float(torch.linalg.vector_norm(gradient))


def _fill_unless(keeps: bool | Tensor, tensor: Tensor, value: float) -> None:
    if keeps is False:
        tensor.fill_(value)
    elif keeps is not True:
        tensor.masked_fill_(torch.logical_not(keeps), value)


class BucketHook:
    """A communication hook of ``DistributedDataParallel`` that carries the flag of this rank in the bucket itself.

    A rank with something that is not finite sends zeros, with NaN as their first element. NaN stays NaN under a sum,
    and finite gradients do not sum up to it, so that after the all-reduce the first element tells all ranks alike.
    Otherwise the result is, bit for bit, that of DDP without a hook.

    Args:
        gradients: The eyes of this rank; None: it only reduces.
        names: Of the parameters, by identity.
        group: The process group of the model.
    """

    def __init__(
        self, gradients: LocalGradients | None, names: dict[int, str], group: dist.ProcessGroup | None
    ) -> None:
        self._gradients = gradients
        self._names = names
        self._group = group
        self._sent: list[tuple[Tensor, torch.nn.Parameter]] = []
        self._of_user: Callable[[Any], Any] | None = None
        self.is_whole: bool | None = None
        """Whether the sum that this rank has begun holds all buckets; None: it has begun none since this was reset."""

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Examines a ``GradBucket``, scales it by the number of ranks and starts its all-reduce."""
        if self._of_user is not None:
            return self._of_user(bucket)  # type: ignore[no-any-return]
        buffer, parameters = bucket.buffer(), bucket.parameters()
        self.is_whole = bucket.is_last()  # DDP sends the buckets in their order
        size = dist.get_world_size(self._group)
        if buffer.is_sparse:
            buffer.div_(size)  # as DDP does
        elif self._gradients is None:
            buffer.mul_(1 / size)
        elif held := [one for one in parameters if one.numel()]:
            self._sent.append((buffer, held[0]))
            keeps = self._look_and_scale(buffer, parameters, size)
            if keeps is not True:
                _fill_unless(keeps, buffer, 0.0)
                _fill_unless(keeps, buffer[:1], torch.nan)
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def retire(self) -> None:
        """From now on it only reduces; DDP cannot let go of a hook."""
        self._gradients = None

    def make_way(self, of_user: Callable[[Any], Any]) -> None:
        """From now on it hands each bucket to this hook, and does no more."""
        self._of_user = of_user

    def forget(self) -> None:
        """What was sent until now counts for nothing."""
        self._sent.clear()
        self.is_whole = None

    def was_flagged(self) -> bool:
        """After a backward: whether some rank has sent the flag; the same answer on all ranks. Takes the flag away."""
        if not self._sent:
            return False
        sent, self._sent = self._sent, []
        if sent[0][0].is_cpu:
            values = [buffer[0].item() for buffer, _ in sent]
        else:
            values = torch.stack([buffer[0] for buffer, _ in sent]).tolist()
        flagged = [one for value, one in zip(values, sent, strict=True) if value != value]
        for buffer, parameter in flagged:
            buffer[0] = 0
            if parameter.grad is not None:
                parameter.grad[(0,) * parameter.grad.dim()] = 0  # also where its strides are those of channels_last
        return bool(flagged)

    def _look_and_scale(self, buffer: Tensor, parameters: Sequence[torch.nn.Parameter], size: int) -> bool | Tensor:
        """On a CPU block by block: what has just been read for the look is scaled out of the cache."""
        assert self._gradients is not None
        keeps: bool | Tensor = True
        blocks = torch.split(buffer, _BLOCK) if buffer.is_cpu and buffer.numel() > _BLOCK else (buffer,)
        for number, block in enumerate(blocks):
            keeps = self._gradients.look_at(block, partial(self._name_at, parameters, number * _BLOCK))
            block.mul_(1 / size)  # as DDP does: a division gives other bits, and is slower
        return keeps

    def _name_at(self, parameters: Sequence[torch.nn.Parameter], begin: int, index: int) -> str | None:
        sections = [(self._names.get(id(parameter), "?"), parameter.numel()) for parameter in parameters]
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
            (name, -(-shape[0] // ranks) * math.prod(shape[1:]) if shape else 1) for name, shape in self._parameters
        ]
        if sum(numel for _, numel in sections) != columns:  # some had no gradient in this backward
            return " or ".join(name for name, _ in sections)
        return name_at(sections, column)


# -- the check of gradients, before the sum and after it ---------------------------------------------------------------

_SHOWN_RANKS = 8
_WARN_EVERY = 100  # steps


class GradientCheck(Check):
    """Stops a NaN on one rank before it reaches the weights of all, and a rank that has left out a sum of gradients.

    The rank that has a NaN contributes zeros to the sum, so that nobody is left alone in a collective. Under DDP the
    flag rides in the bucket; under every other engine, beside a loss scaler, sparse gradients, and a communication hook
    of the user's, the ranks meet between the backward and the step. Then all of them raise, leave the step out, or warn
    and step without that rank's contribution.

    Where every rank has found something, the ranks do not differ: all leave the step out and go on, with a warning once
    in 100 steps. A loss scaler gets its gradients back as they were, and leaves the step out by itself.

    Under DDP a rank that leaves out one sum is a step off from then on: step k is averaged with step k + 1, on all
    ranks alike, and nothing that compares weights, shapes or sequence numbers sees it. So each rank looks, before it
    steps, whether its backward has sent all buckets. As the ranks meet before each step, a rank without a whole sum is
    the one that is off. This needs automatic optimization, and no communication hook of the user's.
    """

    def __init__(self) -> None:
        self._gradients = LocalGradients()
        self._hook: BucketHook | None = None
        self._handles: list[Any] = []
        self._is_flagged = False
        self._engine: Any = None
        self._has_scaler = self._meets = False
        self._warned_at: int | None = None
        self._summed: set[int] = set()
        self._looks_for_unfrozen = True  # a run that goes on within an epoch does not begin it

    def attach(self) -> None:
        """Puts eyes on the gradients, where the engine has them whole and not yet reduced."""
        model: Any = self.run.trainer.strategy.model
        self._engine = model if hasattr(model, "is_gradient_accumulation_boundary") else None
        self._has_scaler = getattr(self.run.trainer.precision_plugin, "scaler", None) is not None
        may_overflow = self._has_scaler if self._engine is None else bool(self._engine.fp16_enabled())
        self._gradients = LocalGradients(self._where, gradients_may_overflow=may_overflow)
        one_by_one = may_overflow or _has_sparse_gradients(model)
        if isinstance(model, DistributedDataParallel):
            self._watch_buckets(model, None if one_by_one else self._gradients)
        self._meets = self._hook is None or one_by_one
        if self._meets and not self._watch_units(model):
            self._watch_leaves(model)

    def _watch_buckets(self, model: DistributedDataParallel, gradients: LocalGradients | None) -> None:
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        hook = BucketHook(gradients, names, model.process_group)
        try:
            # A function without annotations: torch compares those of a hook with classes, ours are strings.
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        except RuntimeError:
            self._warn_of_hook()
            return
        self._hook = hook
        self._summed = {id(one) for one in model.parameters() if one.requires_grad}
        # A function, and no bound method: a copy of the model copies what that is bound to.
        vars(model)["register_comm_hook"] = lambda state, hook: self._make_way(state, hook)

    def _make_way(self, state: object, of_user: Callable[[Any, Any], Any]) -> None:
        """In the place of ``register_comm_hook``, which DDP allows once: a hook of the user's that comes after ours."""
        assert self._hook is not None
        model, hook = self.run.trainer.strategy.model, self._hook
        self._hook = None
        vars(model).pop("register_comm_hook")
        hook.make_way(partial(of_user, state))
        self._watch_leaves(model)
        self._meets = True
        self._warn_of_hook()

    def _warn_of_hook(self) -> None:
        if self.run.rank == 0:
            log.warning(
                "the model has a communication hook of its own: gradients are looked at one by one, and a rank that "
                "leaves out their sum is named by the verdict on a hang only"
            )

    def _watch_leaves(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # its size is not known yet where it is partitioned
                self._watch_leaf(parameter, [(plain_name(name), sys.maxsize)])

    def _watch_units(self, model: torch.nn.Module) -> bool:
        for unit in _compat.flat_units(model):
            self._watch_leaf(unit.parameter, [(plain_name(name), numel) for name, numel in unit.sections])
        is_watched = bool(self._handles)
        for prefix, module in model.named_modules():
            if isinstance(module, FSDPModule) and (own := _parameters_of(module, prefix)):
                module.set_custom_reduce_scatter(FlaggingReduceScatter(self._gradients, own))  # type: ignore[arg-type]
                is_watched = True
        return is_watched

    def _watch_leaf(self, leaf: Any, sections: Sequence[tuple[str, int]]) -> None:
        name_of = partial(name_at, sections)
        self._handles.append(leaf.register_hook(lambda gradient: self._gradients.filtered(gradient, name_of)))

    def _where(self) -> str:
        ids, text = self.run.sample_ids(), f"micro-batch {self.run.trainer.fit_loop.epoch_loop.batch_idx}"
        if ids is None:
            return text
        more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        return f"{text}, samples {', '.join(map(str, ids[:_SHOWN_IDS]))}{more}"

    def needs(self, hook: str) -> bool:
        """Lightning steps or goes back again right after a backward; what rode in the buckets can be read then."""
        return super().needs(hook) and (hook != "after_backward" or not (self._meets or self._is_automatic))

    @property
    def _is_automatic(self) -> bool:
        return bool(self.run.module.automatic_optimization)

    def forget(self) -> None:
        """Nobody has asked what the gradients of ``LearningRateFinder`` were, which may well not be finite."""
        self._gradients.reset()
        self._is_flagged = False
        if self._hook is not None:
            self._hook.forget()

    def epoch_start(self) -> None:
        """Callbacks that unfreeze parameters do so at the begin of an epoch."""
        self._looks_for_unfrozen = True

    def before_backward(self, loss: Tensor) -> None:
        """A loss that is not finite counts, whatever its gradients are."""
        self.after_backward()
        self._gradients.look_at_loss(loss)

    def after_backward(self) -> None:
        """Reads what rode in the buckets; all ranks read the same."""
        if self._hook is not None and self._hook.was_flagged():
            self._is_flagged = True

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Agrees on whether the step is made, the same on all ranks."""
        if self._engine is not None and not self._engine.is_gradient_accumulation_boundary():
            return
        if self._hook is not None and self._is_automatic:
            self._require_sum(optimizer)
        self.after_backward()
        if self._meets or self._is_flagged:  # else nobody has found anything, and the device is not asked once more
            self._gradients.settle()
        if self._meets:
            flag = Flag.NONE if self._gradients.found is None else Flag.NOT_FINITE
            records = self.run.gate.meet(Moment.GRADIENTS, flag)
            self._is_flagged = any(flags_of(record) & Flag.NOT_FINITE for record in records)
        if self._is_flagged:
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
        if self._hook is not None:
            self._hook.retire()
            vars(self.run.trainer.strategy.model).pop("register_comm_hook", None)
        self._hook = None

    # -- sums in which this rank is missing --------------------------------------------------------------------------

    def _require_sum(self, optimizer: Any) -> None:
        """This rank alone knows; the others stand in the sum, and hear of it when this one ends."""
        assert self._hook is not None
        is_whole, self._hook.is_whole = self._hook.is_whole, None
        if _compat.skips_backward(self.run.trainer):  # on all ranks
            return
        remedy = (
            "look for no_sync, a loss that does not depend on all parameters, or a skipped backward; "
            "find_unused_parameters=True where parameters may go unused"
        )
        what, field = "", "gradient_sum"
        if is_whole is None:
            what = "its backward did not take part in the sum of gradients"
        elif not is_whole:
            what = "the sum of gradients was begun and not finished: a parameter got no gradient"
        elif self._looks_for_unfrozen:
            self._looks_for_unfrozen = False
            unfrozen = {id(one) for one in _parameters(optimizer) if one.requires_grad} - self._summed
            names = [name for name, one in self.run.module.named_parameters() if id(one) in unfrozen]
            if names:
                field = "unfrozen_parameters"
                what = "DDP does not sum the gradients of what was frozen when it was built: "
                what += f"{names[0]} (1 of {len(names)})"
                remedy = "let all parameters that are trained at some time require gradients when fit begins, and keep "
                remedy += "them still by a learning rate of 0"
        if what:
            where = f"before optimizer step {self.run.trainer.global_step + 1}; no weight has changed here"
            self.run.differ(field, {self.run.rank: what}, wrong=[self.run.rank], where=where, remedy=remedy)

    # -- values that are not finite ----------------------------------------------------------------------------------

    def _act(self, optimizer: Any) -> None:
        run, size = self.run, self.run.plane.world.size
        told = run.gather("not-finite", self._gradients.found)
        findings = {rank: NonFinite(*one) for rank, one in enumerate(told) if one is not None}
        if len(findings) == size and run.on_divergence != "skip":
            self._leave_out_alike(optimizer, findings)
            return
        error = _error(findings, run.trainer.global_step, size, run.on_divergence)
        if run.on_divergence != "skip":
            run.tell(error, findings[error.ranks[0]].parameter)
            return
        try:
            run.skips.skipped(error)
        except DivergenceError as too_many:
            run.tell(too_many)
        run.note("step_skipped", field=error.field, ranks=error.ranks, values=error.values)
        log.warning("rank %d: %s", run.rank, error)
        if not self._leave_out(optimizer):
            raise error

    def _leave_out_alike(self, optimizer: Any, findings: dict[int, NonFinite]) -> None:
        """No rank differs from the others, so that nothing ends; a step of NaN helps nobody."""
        if self._has_scaler:
            _spoil(itertools.chain(_parameters(optimizer), self.run.module.parameters()))
            return
        self._leave_out(optimizer)
        step = self.run.trainer.global_step
        if self._warned_at is not None and step - self._warned_at < _WARN_EVERY:
            return
        self._warned_at = step
        what = findings[self.run.rank].text
        self.run.note("not_finite", global_step=step, what=what)
        if self.run.rank == 0:
            log.warning(
                "a loss or a gradient is not finite on all %d ranks in step %d; rank 0: %s. The step is left out and "
                "training goes on; said once in %d steps. Look at the learning rate, the precision and the data.",
                len(findings), step, what, _WARN_EVERY,
            )  # fmt: skip

    def _leave_out(self, optimizer: Any) -> bool:
        if self._engine is not None:
            return _compat.discard_next_deepspeed_step(self._engine)
        _drop_gradients(_parameters(optimizer))
        # Another optimizer may step after the same backward; a scaler refuses one that has no gradient at all.
        (_spoil if self._has_scaler else _drop_gradients)(self.run.module.parameters())
        return True


def _has_sparse_gradients(model: torch.nn.Module) -> bool:
    """As DDP asks; a sparse sum has no element that all ranks would read alike."""
    return any(one.sparse for one in model.modules() if isinstance(one, (torch.nn.Embedding, torch.nn.EmbeddingBag)))


def _parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _drop_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Leaves nothing for the optimizer: a parameter without gradient keeps its value and its optimizer state."""
    for parameter in parameters:
        parameter.grad = None


def _spoil(parameters: Iterable[torch.nn.Parameter]) -> None:
    """A loss scaler leaves out the steps of these parameters."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)


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
    what = findings[ranks[0]].what
    outcomes = {"skip": "all ranks leave the step out", "warn": "the step is made without it"}
    lines = [
        f"{name_ranks(ranks).capitalize()} {'has' if len(ranks) == 1 else 'have'} a {what} that is not finite in step "
        f"{step}; it was kept out of the sum, and {outcomes.get(policy, 'no weight has changed')}.",
        *(f"  rank {rank}: {findings[rank].text}" for rank in ranks[:_SHOWN_RANKS]),
        f"  the other {size - len(ranks)} of {size} ranks: finite",
        "  do: look at these samples, then at the learning rate and the precision. "
        'on_divergence="skip" leaves such steps out.',
    ]
    values = {rank: findings[rank].text if rank in findings else "finite" for rank in range(size)}
    return DivergenceError("\n".join(lines), ranks=ranks, field=what, values=values)


# -- the check of batches that fail on some ranks only -----------------------------------------------------------------

_FINE, _EMPTY = "a loss", "training_step returned None"


class LocalFailureCheck(Check):
    """Meets all ranks after ``training_step``, and leaves the whole optimizer step out where one of them has no loss.

    For DDP only: its forward holds no collective in which the others could already wait for the failing rank. Costs one
    more gate per micro-batch, so that it works only when asked for.
    """

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

    def attach(self) -> None:
        """Refuses a DDP that looks at the graph of a loss.

        Raises:
            ValueError: The graph of a failed step is not there.
        """
        model: Any = self.run.trainer.strategy.model
        if model.find_unused_parameters or model.static_graph:
            raise ValueError(
                'on_local_failure="skip_all" works without find_unused_parameters and static_graph: a rank whose step '
                'failed has no graph to look at. Use on_local_failure="raise".'
            )

    def _training_step(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not self.run.gate.is_open:
            return inner(*arguments, **named)
        output, what = None, _EMPTY
        try:
            output = inner(*arguments, **named)
            what = _EMPTY if output is None else _FINE
        except torch.OutOfMemoryError as error:
            # The traceback holds the activations: it goes with this block, before the next batch.
            what = f"{type(error).__name__}: {error}"[:300]
        records = self.run.gate.meet(Moment.FORWARD, Flag.NONE if what == _FINE else Flag.BATCH_FAILED)
        if not any(flags_of(record) & Flag.BATCH_FAILED for record in records):
            return output
        self._leave_out(what)
        model: Any = self.run.trainer.strategy.model
        # A loss of zero reaches every parameter with zeros: DDP sums on all ranks, and is ready again.
        trainable = [one for one in self.run.module.parameters() if one.requires_grad and one.numel()]
        loss = torch.stack([one.flatten()[0].float() * 0.0 for one in trainable]).sum()
        if what not in (_FINE, _EMPTY) and model.require_backward_grad_sync:
            model.reducer.prepare_for_backward([])  # its forward did not come to that
        return loss

    def _leave_out(self, what: str) -> None:
        run = self.run
        told = run.gather("failed batches", what)
        ids = run.gather("failed samples", (run.sample_ids() or [])[:_SHOWN_IDS])
        wrong = [rank for rank, text in enumerate(told) if text != _FINE]
        values = {rank: f"{text} (samples {ids[rank]})" if ids[rank] else text for rank, text in enumerate(told)}
        step = run.trainer.global_step
        run.note("step_skipped", global_step=step, ranks=wrong, values=values)
        run.skips.skipped(
            disagreement(
                "training_step",
                values,
                wrong=wrong,
                where=f"in step {step}; all ranks leave it out",
                remedy="shorten or split such batches; look at the samples",
            )
        )

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Leaves the optimizer nothing, also of earlier micro-batches of the window."""
        if self.run.skips.is_skipping:
            _drop_gradients(self.run.module.parameters())

    def detach(self) -> None:
        """Steps aside."""
        _compat.restore_method(self.run.trainer.strategy, "training_step")
