"""A few numbers of each rank that ride in DDP's gradient bucket: they tell which steps were averaged with each other.

A rank that leaves out one sum of same-shaped gradients is one step off from then on. Step k is averaged with step k + 1
on all ranks alike, and nothing that compares weights, shapes or sequence numbers can see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

__all__ = ["Letter", "Mailbox", "TieToLoss"]

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
        slots = torch.zeros_like(self.parameter, requires_grad=False)
        for chunk in range(_CHUNKS):  # filled one by one: a copy from the host would wait for a device
            slots[self._rank * _CHUNKS + chunk].fill_((self._sent >> (_BITS * chunk)) % (1 << _BITS))
        tied: torch.Tensor = _Tie.apply(loss, self.parameter, slots)  # type: ignore[no-untyped-call]
        return tied

    @property
    def expected(self) -> int:
        """What all ranks must have put in."""
        return self._sent

    def take(self) -> torch.Tensor | None:
        """The content after the backward, on its way to the CPU; None where nothing came."""
        gradient = self.parameter.grad
        return None if gradient is None else gradient.detach().to("cpu", torch.float32, non_blocking=True)

    def read(self, content: torch.Tensor) -> Letter:
        """Decodes what ``take`` returned, once it has arrived; DDP has divided the sum by the number of ranks."""
        found = content.tolist()
        values = [value * self._size for value in found]
        numbers = [self._decode(values[slot : slot + _CHUNKS]) for slot in range(0, len(values), _CHUNKS)]
        first, last = self._rank * _CHUNKS, (self._rank + 1) * _CHUNKS
        has_others = any(values[:first]) or any(values[last:])
        is_local = self._sent > 0 and not has_others and self._decode(found[first:last]) == self._sent
        return Letter(numbers, is_summed=not is_local)

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
