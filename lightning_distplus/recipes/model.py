"""TinyLlama: ``transformers``' Llama as a LightningModule for DDP, FSDP, FSDP2 and DeepSpeed."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_distplus.checkpoint.formats import CONFIG, weights_for

__all__ = ["TinyLlama"]


class TinyLlama(LightningModule):
    """A Llama trained from scratch with AdamW, linear warm-up and cosine decay.

    Args:
        config: Arguments of ``transformers.LlamaConfig``: hidden_size, num_hidden_layers, vocab_size, ...
        lr: The learning rate at the end of the warm-up.
        min_lr: The learning rate at the Trainer's ``max_steps``.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Applied to matrices only, not to norms.
        betas: Those of AdamW.
        activation_checkpointing: Recompute each layer in the backward pass, which saves memory.
        compile: Compile each layer in the first step.
        init_from: Weights to start from where nothing is resumed: a folder of Hugging Face's Llama, or what ``distplus
            import`` has written.
    """

    def __init__(
        self,
        config: dict[str, Any],
        lr: float = 4e-4,
        min_lr: float = 4e-5,
        warmup_steps: int = 2000,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        activation_checkpointing: bool = False,
        compile: bool = False,  # noqa: A002 - the name of the option
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.init_from = init_from
        self._arguments_of_config = dict(config)
        self.config = LlamaConfig(**config, use_cache=False)
        self.lr = lr
        self.min_lr = min_lr
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.betas = betas
        self.activation_checkpointing = activation_checkpointing
        self.is_compiled = compile
        self.model: LlamaForCausalLM | None = None
        self._batch_began = 0.0

    def configure_model(self) -> None:
        """Builds the model inside the strategy's context. FSDP1 and DeepSpeed wrap it themselves."""
        if self.model is not None:
            return
        self.model = LlamaForCausalLM(self.config)
        _initialize_partitioned(self.model, std=self.config.initializer_range)
        if self.init_from is not None and not self.trainer.ckpt_path:
            self._start_from(Path(self.init_from))
        if self.activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.is_compiled:
            for layer in self.model.model.layers:
                layer.compile()  # in place: names of parameters stay
        if self.device_mesh is not None:
            for layer in (*self.model.model.layers, self.model):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def _start_from(self, source: Path) -> None:
        """Copies the weights of a source; those that ZeRO-3 has partitioned are gathered one by one."""
        assert self.model is not None
        weights = dict(weights_for(self.model, source))
        for name, parameter in self.model.named_parameters():
            with _gathered(parameter), torch.no_grad():
                if parameter.shape == weights[name].shape:  # under ZeRO-3 on rank 0, which hands it to the others
                    parameter.copy_(weights[name])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds how the model is configured, which ``distplus export --to hf`` needs."""
        checkpoint[CONFIG] = self._arguments_of_config

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Returns the mean loss per token of this rank."""
        loss = self._loss(batch)
        self.log("loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Logs the mean loss over all ranks."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert self.model is not None  # configure_model has built it
        # input_ids, shift_labels: (micro_batch_size, seq_len) int64
        logits = self.model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"].flatten())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Starts the clock."""
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Logs the learning rate and the speed of all ranks together."""
        num_tokens = batch["shift_labels"].numel() * self.trainer.world_size
        self.log("tokens_per_s", num_tokens / (time.perf_counter() - self._batch_began), prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, and a schedule that moves with each optimizer step."""
        # By name: FSDP1 and ZeRO-3 show flattened or empty parameters, whose shape says nothing.
        matrices = [parameter for name, parameter in self.named_parameters() if "norm" not in name]
        norms = [parameter for name, parameter in self.named_parameters() if "norm" in name]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=self.lr, betas=self.betas)
        schedule = LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decayed = (step - self.warmup_steps) / max(self.trainer.max_steps - self.warmup_steps, 1)
        floor = self.min_lr / self.lr
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(decayed, 1.0)))

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips by the norm of the whole model; only FSDP1's root knows it. DeepSpeed clips by itself."""
        if gradient_clip_val and isinstance(self.trainer.model, FullyShardedDataParallel):
            self.trainer.model.clip_grad_norm_(gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def _initialize_partitioned(model: LlamaForCausalLM, std: float) -> None:
    """Gives ZeRO-3's parameters Llama's initial values; they are partitioned, so empty, when Llama sets them."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") and "norm" not in name:
            with _gathered(parameter):
                torch.nn.init.normal_(parameter, std=std)


def _gathered(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Has rank 0's content of a parameter of ZeRO-3 on all ranks after this block; nothing where it is whole."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)
    return gathered
