"""DistributedDataParallel, resilient."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
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
    """``DDPStrategy`` with deadlines, a step gate and committed checkpoints."""

    strategy_name = "resilient_ddp"
    wrapper_class = DistributedDataParallel
