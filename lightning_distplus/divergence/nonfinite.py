"""Gradients of this rank before they meet those of the others: what is not finite is zeroed and remembered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["BucketHook", "FlaggingReduceScatter", "LocalGradients", "NonFinite", "Section", "name_at"]

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
    replayed: str | None = None
    """What the same step gave once more, where it was replayed."""

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
        replayed = "" if self.replayed is None else f"; the step {self.replayed}"
        return f"{where} is {self.value} in micro-batch {self.micro_batch}{samples}{replayed}"


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
        self._norms: list[float | Tensor] = []
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
        if loss.device.type != "cpu":
            self._wait_for(torch.isfinite(loss.detach()).all(), "loss", lambda: None)
            return
        value = float(loss.detach() if loss.numel() == 1 else loss.detach().sum())
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
        if gradient.device.type != "cpu":
            return self._look_on_device(gradient, name_of)
        if self.found is not None:
            return False
        norm = _norm(gradient)
        if not math.isfinite(norm) and not self._may_overflow:
            index = _first_non_finite(gradient)
            if index is not None:
                self._remember("gradient", float(gradient.reshape(-1)[index]), name_of(index))
                return False
        self._norms.append(norm)
        return True

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
        pending, self._pending, self._is_finite = self._pending, [], None
        if not pending or self.found is not None:
            return
        for is_finite, (_, what, name) in zip(torch.stack([one[0] for one in pending]).tolist(), pending, strict=True):
            if not is_finite:
                self._remember(what, math.nan, name())
                return

    def norm(self) -> float:
        """The norm of all gradients seen since ``reset``; of this rank alone. NaN when it had to drop some."""
        if self.found is not None or not self._norms:
            return math.nan
        here = [norm for norm in self._norms if isinstance(norm, float)]
        there = [norm for norm in self._norms if not isinstance(norm, float)]
        return math.hypot(*here, float(torch.linalg.vector_norm(torch.stack(there))) if there else 0.0)

    def reset(self) -> None:
        """A new step begins."""
        self.found = None
        self._norms.clear()
        self._pending.clear()
        self._is_finite = None

    def _look_on_device(self, gradient: Tensor, name_of: Callable[[int], str | None]) -> Tensor:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._norms.append(norm)
        if self._may_overflow:  # the loss alone decides
            return self._wait_for(torch.ones((), dtype=torch.bool, device=gradient.device), "gradient", lambda: None)
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
        self._is_retired = False

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        """Examines a ``GradBucket``, scales it by the number of ranks and starts its all-reduce."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        size = dist.get_world_size(self._group)
        if self._is_retired:
            buffer.mul_(1 / size)
        else:
            self._sent.append((buffer, parameters[0]))
            keeps: bool | Tensor = True
            for part, own in self._parts(buffer, parameters):
                looked = self._look_and_scale(part, own, size)
                keeps = looked if own else keeps
            _fill_unless(keeps, buffer, 0.0)
            _fill_unless(keeps, buffer[:1], torch.nan)
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def retire(self) -> None:
        """From now on it only reduces; DDP cannot let go of a hook."""
        self._is_retired = True

    def was_flagged(self) -> bool:
        """After a backward: whether some rank has sent the flag; the same answer on all ranks. Takes the flag away."""
        if not self._sent:
            return False
        firsts = [buffer[0] for buffer, _ in self._sent]
        values = [float(firsts[0])] if len(firsts) == 1 else torch.stack(firsts).tolist()
        flags = [value != value for value in values]
        for is_flagged, (buffer, parameter) in zip(flags, self._sent, strict=True):
            if is_flagged:
                buffer[0] = 0
                if parameter.grad is not None:
                    parameter.grad.view(-1)[:1] = 0
        self._sent.clear()
        return any(flags)

    def _look_and_scale(self, part: Tensor, own: Sequence[torch.nn.Parameter], size: int) -> bool | Tensor:
        """On a CPU block by block: what has just been read for the look is scaled out of the cache."""
        keeps: bool | Tensor = True
        blocks = torch.split(part, _BLOCK) if part.device.type == "cpu" else [part]
        for number, block in enumerate(blocks):
            if own:
                keeps = self._gradients.look_at(block, partial(self._name_at, own, number * _BLOCK))
            block.mul_(1 / size)  # as DDP does: a division gives other bits, and is slower
        return keeps

    def _parts(
        self, buffer: Tensor, parameters: Sequence[torch.nn.Parameter]
    ) -> Iterator[tuple[Tensor, Sequence[torch.nn.Parameter]]]:
        """The model's gradients in a bucket, and, without parameters, what rides along and would spoil the norm."""
        begin = 0
        for is_own, group in itertools.groupby(parameters, lambda parameter: id(parameter) in self._names):
            own = list(group)
            end = begin + sum(parameter.numel() for parameter in own)
            yield buffer[begin:end], own if is_own else []
            begin = end

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
    if gradient.is_contiguous() and gradient.dtype in (torch.float32, torch.float64):
        flat = gradient.view(-1)
        return math.sqrt(torch.dot(flat, flat))  # at twice the speed out of a cache
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
