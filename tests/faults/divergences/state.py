"""Rows D1, D2, D8 to D11: numbers, copies, settings, failed steps and sums of gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed import jobs
from tests.faults.divergences.registry import (
    DDP,
    FSDP,
    FSDP2,
    OUR_DDP,
    SHARDED,
    ZERO2,
    Run,
    Stepwise,
    diverges,
)

# -- D1: what is not finite --------------------------------------------------------------------------------------------


@diverges("D1", "loss", says="no weight has changed", number=18, blame="guilty", is_before=False)
def loss_is_nan(run: Run) -> None:
    run.module = Stepwise(run, lambda loss: loss * torch.nan)


@diverges("D1", "gradient", says="no weight has changed", blame="guilty", is_before=False)
def gradient_is_infinite(run: Run) -> None:
    def overflow(loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss

    run.module = Stepwise(run, overflow)


# -- D2: copies that differ, D10: state that changes by itself ---------------------------------------------------------


def _largest(module: Any) -> torch.Tensor:
    return max(module.parameters(), key=lambda one: one.numel()).detach()


@diverges("D2", "parameters", number=14, on=DDP + ZERO2)
def weight_is_changed(run: Run) -> None:
    run.strike(lambda trainer, module: _largest(module).add_(1e-3))


@diverges("D2", "parameters", number=30, on=DDP + ZERO2)
def bit_is_flipped(run: Run) -> None:
    run.strike(lambda trainer, module: _largest(module).view(torch.int32).view(-1)[1:2].bitwise_xor_(1 << 16))


@diverges("D2", "optimizer", number=16, on=DDP)
def moment_drifts(run: Run) -> None:
    def drift(trainer: Any, module: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg"].mul_(1.01)

    run.strike(drift)


class _WithBuffer(jobs.Model):
    def grow(self) -> None:
        self.net.register_buffer("scale", torch.ones(3))


@diverges("D2", "buffers", number=15, on=DDP + FSDP)
def buffer_drifts(run: Run) -> None:
    run.module = _WithBuffer()
    run.ddp = {"broadcast_buffers": False}

    def drift(trainer: Any, module: Any) -> None:
        module.net.scale[1] = 7.0

    run.strike(drift)


@diverges("D2", "step count of optimizer 0", number=19, on=DDP + FSDP + FSDP2)
def optimizer_step_is_left_out(run: Run) -> None:
    class Optimizer(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls != run.step + 1:
                return super().step(closure)
            loss = closure() if run.is_guilty else super().step(closure)
            run.note()
            return loss

    class Module(jobs.Model):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Optimizer(self.parameters(), lr=1e-2)

    run.module = Module()


@diverges("D10", "state_at_rest", blame="guilty", on=SHARDED)
def shard_rots(run: Run) -> None:
    run.monitor["state_at_rest"] = True

    def rot(trainer: Any, module: Any) -> None:
        optimizer = trainer.optimizers[0]
        inner = getattr(optimizer, "optimizer", optimizer)
        for state in inner.state.values():
            moment = state["exp_avg_sq"]
            local = moment.to_local() if hasattr(moment, "to_local") else moment
            if local.numel():
                local.view(-1)[:1].add_(1.0)
                return

    run.strike(rot, "on_train_batch_start")


# -- D8: what a step depends on ----------------------------------------------------------------------------------------


@diverges("D8", "learning_rate", says="scheduler", number=17)
def learning_rate_is_halved(run: Run) -> None:
    def halve(trainer: Any, module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] /= 2

    run.strike(halve)


@diverges("D8", "scheduler 0", says="steps it on some ranks only", on=OUR_DDP)
def scheduler_is_ahead(run: Run) -> None:
    """The rate does not change yet."""

    class Module(jobs.Model):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    run.module, run.monitor["parameters_every_n_steps"] = Module(), 1
    run.strike(lambda trainer, module: trainer.lr_scheduler_configs[0].scheduler.step())


@diverges("D8", "weight_decay of optimizer 0, group 0")
def weight_decay_differs(run: Run) -> None:
    def decay(trainer: Any, module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5

    run.strike(decay)


@diverges("D8", "requires_grad of", on=DDP)
def parameter_is_frozen(run: Run) -> None:
    run.strike(lambda trainer, module: next(module.parameters()).requires_grad_(False))


@diverges("D8", "step count of optimizer 0", on=DDP + FSDP + FSDP2)
def step_count_differs(run: Run) -> None:
    def count(trainer: Any, module: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["step"] += 1

    run.strike(count)


@diverges("D8", "accumulate_grad_batches", number=25, on=DDP + FSDP + FSDP2)
def accumulation_differs(run: Run) -> None:
    run.trainer["accumulate_grad_batches"] = 2 if run.is_guilty else 1


@diverges("D8", "batch", says="float64 tensor of 2 dimensions")
def batch_has_another_type(run: Run) -> None:
    class Casting(jobs.Model):
        def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
            if self.trainer.training and self.trainer.global_step == run.step:
                if not run.is_planted:
                    run.note()
                return batch.double() if run.is_guilty else batch
            return batch

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch.float(), batch_idx)

    run.module = Casting()


@diverges("D8", "batch", number=7, says="float32 tensor of shape [3, 8]")
def batch_has_another_shape(run: Run) -> None:
    class Cutting(jobs.Model):
        def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
            is_due = self.trainer.training and self.trainer.global_step == run.step
            if is_due and not run.is_planted:
                run.note()
            return batch[1:] if is_due and run.is_guilty else batch

    run.module = Cutting()
    run.monitor["batch_shapes"] = "equal"


# -- D9: a step that fails on one rank ---------------------------------------------------------------------------------


def _give_none(loss: torch.Tensor) -> None:
    return None


def _run_out_of_memory(loss: torch.Tensor) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (planted)")


@diverges("D9", "", number=3, blame="agreed", on=DDP, is_before=False)
def training_step_returns_none(run: Run) -> None:
    run.module = Stepwise(run, _give_none)
    run.monitor["on_local_failure"] = "skip_all"


@diverges("D9", "", blame="agreed", on=DDP, is_before=False)
def memory_runs_out(run: Run) -> None:
    run.module = Stepwise(run, _run_out_of_memory)
    run.monitor["on_local_failure"] = "skip_all"


# -- D11: sums of gradients --------------------------------------------------------------------------------------------


@diverges("D11", "gradient_sum", number=34, blame="guilty", on=OUR_DDP, is_before=False)
def sum_of_gradients_is_left_out(run: Run) -> None:
    def leave_out(loss: torch.Tensor) -> torch.Tensor:
        run.module.trainer.strategy.model.require_backward_grad_sync = False
        return loss

    class Module(Stepwise):
        def on_after_backward(self) -> None:
            self.trainer.strategy.model.require_backward_grad_sync = True

    run.module = Module(run, leave_out)


class _Unused(jobs.Model):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.other = torch.nn.Linear(jobs.NUM_FEATURES, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        is_unused = self.trainer.global_step == self.run.step and self.run.is_guilty
        loss = super().training_step(batch, batch_idx)
        return loss if is_unused else loss + self.other(batch).mean()


@diverges("D11", "gradient_sum", number=20, blame="guilty", on=OUR_DDP, is_before=False)
def parameter_goes_unused(run: Run) -> None:
    run.module = _Unused(run)
