"""DeepSpeed ZeRO 1 to 3, resilient, on GPUs and on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_distplus import _compat, env
from lightning_distplus.checkpoint.export import converted_beside, is_universal, num_shards
from lightning_distplus.checkpoint.tensors import pieces_of_live
from lightning_distplus.errors import CheckpointMismatch
from lightning_distplus.strategies.background import Writes
from lightning_distplus.strategies.deepspeed_saving import raising_after_the_barriers
from lightning_distplus.strategies.extension_locks import remove_abandoned_locks
from lightning_distplus.strategies.mixin import ResilientStrategy

__all__ = ["ResilientDeepSpeed"]

log = logging.getLogger(__name__)


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

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_universal(Path(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only)
        with _compat.loading_universal(self.deepspeed_engine):
            return super().load_checkpoint(checkpoint_path, weights_only)


class ResilientDeepSpeed(ResilientStrategy, _DeepSpeedOnAnyDevice):
    """``DeepSpeedStrategy`` with deadlines, a step gate and committed checkpoints.

    Args:
        convert_checkpoint: Whether rank 0 converts a checkpoint of another number of ranks before it is loaded, beside
            it, once; otherwise it is refused with the command that does so.
        **kwargs: Everything that ``ResilientStrategy`` and ``DeepSpeedStrategy`` take.
    """

    strategy_name = "resilient_deepspeed"

    def __init__(self, *, convert_checkpoint: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.convert_checkpoint = convert_checkpoint

    def _write(self, checkpoint: dict[str, Any], stage: Path, storage_options: Any, writes: Writes) -> None:
        # DeepSpeed hands flat buffers to its writers: the tensors are counted by the names that they have here.
        with (
            writes.counting_instead(lambda: pieces_of_live(self, is_first=self.is_global_zero)),
            raising_after_the_barriers(self.deepspeed_engine, writes),
        ):
            super()._write(checkpoint, stage, storage_options, writes)

    def _fitting_checkpoint(self, path: Path) -> Path:
        num_ranks = num_shards(path)
        is_fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit"
        if num_ranks in (0, self.world_size) or not (is_fitting or self.zero_stage_3):
            return path
        if self.convert_checkpoint:
            log.info("%s is of %d ranks; it is converted for %d", path, num_ranks, self.world_size)
            return converted_beside(path)
        target = path.with_name(f"{path.stem}-universal{path.suffix}")
        raise CheckpointMismatch(
            f"The checkpoint {path} holds ZeRO's shards of {num_ranks} ranks; this run has {self.world_size}, which "
            f"cannot read them. Convert it, and resume from the result: distplus export --universal {path} {target}. "
            "ResilientDeepSpeed(convert_checkpoint=True) does that by itself."
        )

    def setup_environment(self) -> None:
        """Clears what a killed start has left in DeepSpeed's way, while the other ranks wait at the rendezvous."""
        if self.local_rank == 0:
            remove_abandoned_locks()
        super().setup_environment()
