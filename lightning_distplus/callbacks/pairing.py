"""The check under DDP that the gradients which were summed belong to one step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check
from lightning_distplus.divergence.agreement import disagreement
from lightning_distplus.divergence.mailbox import Mailbox, TieToLoss

__all__ = ["PairingCheck"]

log = logging.getLogger(__name__)

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
            self._judge(late, self.run.trainer.global_step)
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
        elif self._mailbox.parameter.device.type == "cpu":
            self._judge(content, self.run.trainer.global_step + 1)
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

    def _judge(self, content: torch.Tensor, expected: int) -> None:
        assert self._mailbox is not None
        letter = self._mailbox.read(content)
        if not letter.is_summed:
            self._tell_not_summed("the sum of gradients was begun and not finished: a parameter got no gradient")
        numbers = dict(enumerate(letter.numbers))
        if None in numbers.values() or len(set(numbers.values())) == 1:
            return
        self.run.tell(
            disagreement(
                "gradient_step",
                numbers,
                where=f"before optimizer step {expected}: gradients of different steps were summed; no weight changed",
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
