"""DeepSpeed ZeRO 1 to 3, resilient, on GPUs and on the CPU."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_distplus import env
from lightning_distplus.strategies.extension_locks import remove_abandoned_locks
from lightning_distplus.strategies.mixin import ResilientStrategy

__all__ = ["ResilientDeepSpeed"]


class _DeepSpeedOnAnyDevice(DeepSpeedStrategy):
    """Lets DeepSpeed run on the CPU; Lightning 2.6.6 refuses every accelerator but CUDA."""

    @property
    def _is_on_cpu(self) -> bool:
        return bool(super().root_device.type == "cpu")

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        # DeepSpeed takes its rank on the device from the index, which a CPU device does not have.
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        if self._is_on_cpu:
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if self._is_on_cpu:
            if env.DS_ACCELERATOR.get() is None:
                env.DS_ACCELERATOR.set("cpu")
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()


class ResilientDeepSpeed(ResilientStrategy, _DeepSpeedOnAnyDevice):
    """``DeepSpeedStrategy`` with deadlines, a step gate and committed checkpoints."""

    strategy_name = "resilient_deepspeed"

    def setup_environment(self) -> None:
        """Clears what a killed start has left in DeepSpeed's way, while the other ranks wait at the rendezvous."""
        if self.local_rank == 0:
            remove_abandoned_locks()
        super().setup_environment()
