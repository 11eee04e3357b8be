"""torch's engines, resilient: DDP, FSDP (FSDP1), and FSDP2 with tensor parallelism; on GPUs and on the CPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_distplus import _compat
from lightning_distplus.checkpoint.formats import is_sharded
from lightning_distplus.strategies.base import ResilientStrategy

# -- DDP ---------------------------------------------------------------------------------------------------------------


class _DDPOnAnyDevice(DDPStrategy):
    """Registers communication hooks on every device; Lightning does so on CUDA only, though they work on gloo.

    So a run with a hook has other weights on a CPU than stock, which leaves the hook out without a word.
    """

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
        rebuild_buckets: Whether DDP lays its buckets out anew after the first step of each process, by the order in
            which gradients came. The order in which a sum of three is taken depends on the layout, so that a resume on
            three or more ranks may then differ in the last bit. By default they lie as the parameters are registered,
            last first, from the first step on. True is faster for a model that registers them in another order than it
            uses them.
        **kwargs: Everything that ``ResilientStrategy`` and ``DDPStrategy`` take.
    """

    strategy_name = "resilient_ddp"
    wrapper_class = DistributedDataParallel

    def __init__(self, *, rebuild_buckets: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rebuilds_buckets = rebuild_buckets

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        if self._rebuilds_buckets:
            return super()._setup_model(model)
        with _compat.with_parameters_reversed():
            wrapped = super()._setup_model(model)
        _compat.settle_ddp_buckets(wrapped)
        return wrapped


# -- FSDP --------------------------------------------------------------------------------------------------------------


_CPU = torch.device("cpu")


class _FSDPOnAnyDevice(FSDPStrategy):
    """Lets FSDP1 run on the CPU, where Lightning 2.6.6 names CUDA outright (issues 21804, 21812, 21814)."""

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self.root_device.type == "cpu")

    def setup_environment(self) -> None:
        mesh = self.kwargs.get("device_mesh")
        if isinstance(mesh, (tuple, list)) and self._is_on_cpu:
            self.kwargs["device_mesh"] = init_device_mesh("cpu", tuple(mesh))
        super().setup_environment()

    def _setup_model(self, model: Module) -> Module:
        wrapped: Module | None = getattr(self, "_wrapped", None)
        if wrapped is None or getattr(wrapped, "module", None) is not model:
            wrapped = self._wrap(model)
        # A second fit, or a validation after it, gets the wrapper that is there: what it holds is sharded already.
        self._wrapped = wrapped
        return wrapped

    def _wrap(self, model: Module) -> Module:
        if not self._is_on_cpu or any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return super()._setup_model(model)
        model = FullyShardedDataParallel(model, **self._wrapping())
        # The parent would say that it ignores a policy which has just been followed.
        policy = self.kwargs.pop("auto_wrap_policy", None)
        try:
            return super()._setup_model(model)
        finally:
            if policy is not None:
                self.kwargs["auto_wrap_policy"] = policy

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        if self._is_on_cpu:
            with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._wrapping()):
                yield
        else:
            with super().model_sharded_context():
                yield

    def _wrapping(self) -> dict[str, Any]:
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": _CPU,
            **self.kwargs,
        }

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._full_state_dict():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._full_state_dict():
            return super().optimizer_state(optimizer)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        with (
            self._full_state_dict(),
            _compat.loading_whole_files(weights_only),
            _compat.loading_empty_optimizers_of_fsdp(self.optimizers),
        ):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        is_hybrid = "HYBRID" in self.sharding_strategy.name and is_sharded(Path(checkpoint_path))
        if is_hybrid and self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit":
            self._load_moments_of_replicas(Path(checkpoint_path))
        return checkpoint

    def _load_moments_of_replicas(self, path: Path) -> None:
        """Loads the optimizers' states again: the parent cuts them for all ranks, instead of for those of one replica.

        Each rank then holds moments of other weights (lightning 2.6.6, ``fsdp.py`` 614, with torch 2.13's
        ``load_sharded_optimizer_state_dict``).
        """
        model = cast(Module, self.model)
        for number, optimizer in enumerate(self.optimizers):
            with _compat.in_shards(model):
                moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                load_shards({f"optimizer_{number}": moments}, checkpoint_id=path)
                mine = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)
                optimizer.load_state_dict(mine)

    def _full_state_dict(self) -> AbstractContextManager[None]:
        return _compat.full_state_dict_without_offload() if self._is_on_cpu else nullcontext()

    def setup(self, trainer: Trainer) -> None:
        plugin = self.precision_plugin
        if self._is_on_cpu and type(plugin) is FSDPPrecision and plugin.scaler is None:
            self.precision_plugin = _FSDPPrecisionOnCPU(cast(Any, plugin.precision))
        super().setup(trainer)


class _FSDPPrecisionOnCPU(FSDPPrecision):
    """Casts on the CPU; Lightning names CUDA."""

    def forward_context(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16-mixed":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return super().forward_context()


class ResilientFSDP(ResilientStrategy, _FSDPOnAnyDevice):
    """``FSDPStrategy`` with deadlines, a step gate and committed checkpoints.

    Args:
        state_dict_type: ``"sharded"`` by default, unlike the parent: each rank writes its own shard.
        **kwargs: Everything that ``ResilientStrategy`` and ``FSDPStrategy`` take.
    """

    strategy_name = "resilient_fsdp"
    wrapper_class = FullyShardedDataParallel

    def __init__(self, *, state_dict_type: Literal["full", "sharded"] = "sharded", **kwargs: Any) -> None:
        super().__init__(state_dict_type=state_dict_type, **kwargs)


# -- FSDP2 and tensor parallelism --------------------------------------------------------------------------------------


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
