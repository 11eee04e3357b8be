"""DistributedDataParallel, resilient."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.strategies.compression import Compression, compression_hook
from lightning_distplus.strategies.mixin import ResilientStrategy

__all__ = ["ResilientDDP"]


class _DDPOnAnyDevice(DDPStrategy):
    """Registers communication hooks on every device; Lightning does so on CUDA only, though they work on gloo."""

    def _register_ddp_hooks(self) -> None:
        if self.root_device.type == "cpu":
            assert isinstance(self.model, DistributedDataParallel)
            _compat.register_ddp_comm_hook(
                self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
            )
        else:
            super()._register_ddp_hooks()


class ResilientDDP(ResilientStrategy, _DDPOnAnyDevice):
    """``DDPStrategy`` with deadlines, a step gate and committed checkpoints.

    Args:
        gradient_compression: How gradients travel: ``"fp16"`` or ``"bf16"`` (half the bytes; the latter on NCCL),
            ``"powersgd"`` (a low-rank approximation, from step 1000 on; what it has left out is not saved, so that a
            resume is not bit-exact), or None (as they are).
        **kwargs: Everything that ``ResilientStrategy`` and ``DDPStrategy`` take.
    """

    strategy_name = "resilient_ddp"
    wrapper_class = DistributedDataParallel

    def __init__(self, *, gradient_compression: Compression | None = None, **kwargs: Any) -> None:
        if gradient_compression is not None:
            hook = compression_hook(gradient_compression)
            if taken := sorted(kwargs.keys() & {"ddp_comm_hook", "ddp_comm_state"}):
                raise ValueError(
                    f"gradient_compression is {gradient_compression!r} and {taken} are given as well; DDP has one "
                    "communication hook. Leave one of them out."
                )
            kwargs.update(hook)
        super().__init__(**kwargs)

    def _register_ddp_hooks(self) -> None:
        if self.root_device.type == "cpu" and self._ddp_comm_hook is bf16_compress_hook:
            raise ValueError(
                'gradient_compression is "bf16", which torch gives to NCCL only; this run is on gloo. Use "fp16".'
            )
        super()._register_ddp_hooks()
