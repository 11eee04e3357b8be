"""DistributedDataParallel, resilient."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.strategies.base import ResilientStrategy

__all__ = ["ResilientDDP"]


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
