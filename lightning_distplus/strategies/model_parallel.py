"""FSDP2 and tensor parallelism, resilient."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_distplus import _compat
from lightning_distplus.strategies.base import ResilientStrategy

__all__ = ["ResilientModelParallel"]


class _LoadsWhatItSaves(ModelParallelStrategy):
    """The parent saves a model of which nothing is sharded, and an optimizer without state, and cannot load them."""

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        with _compat.loading_unsharded_models(), _compat.loading_empty_optimizers_of_fsdp2():
            return super().load_checkpoint(checkpoint_path, weights_only)


class ResilientModelParallel(ResilientStrategy, _LoadsWhatItSaves):
    """``ModelParallelStrategy`` with deadlines, a step gate and committed checkpoints.

    Args:
        data_parallel_size: Number of data-parallel ranks; ``"auto"``: all ranks divided by ``tensor_parallel_size``.
        tensor_parallel_size: Number of ranks that share each layer. 1 by default, unlike the parent, whose ``"auto"``
            makes all ranks of a node tensor-parallel.
        **kwargs: Everything that ``ResilientStrategy`` and ``ModelParallelStrategy`` take.
    """

    strategy_name = "resilient_model_parallel"

    def __init__(
        self,
        *,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size, **kwargs)

    def setup_environment(self) -> None:
        """Spreads the data over all ranks that tensor parallelism leaves; then the parent's part."""
        if self._data_parallel_size == "auto" and isinstance(self._tensor_parallel_size, int):
            self._data_parallel_size = max(1, self.num_processes * self.num_nodes // self._tensor_parallel_size)
        super().setup_environment()
