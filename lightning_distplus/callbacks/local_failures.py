"""The check of batches that fail on some ranks only: out of memory, or no loss; all ranks leave the step out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy

from lightning_distplus import _compat
from lightning_distplus.callbacks.check import Check, MonitoredRun
from lightning_distplus.divergence.agreement import disagreement
from lightning_distplus.divergence.moments import Flag, Moment, flags_of
from lightning_distplus.divergence.skips import drop_gradients
from lightning_distplus.errors import DivergenceError

__all__ = ["LocalFailureCheck"]

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
