"""Gradients that DDP sends smaller than they are: torch's communication hooks by name."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

__all__ = ["Compression", "compression_hook"]

Compression: TypeAlias = Literal["fp16", "bf16", "powersgd"]

_POWERSGD_RANK = 2
_POWERSGD_STARTS_AT = 1000  # steps; torch's advice: the first gradients change too much to be approximated


def compression_hook(name: Compression) -> dict[str, Any]:
    """The arguments of Lightning's ``DDPStrategy`` for a name.

    Raises:
        ValueError: There is no such compression.
    """
    if name == "fp16":
        return {"ddp_comm_hook": default_hooks.fp16_compress_hook}
    if name == "bf16":
        return {"ddp_comm_hook": default_hooks.bf16_compress_hook}
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_STARTS_AT,
        )
        return {"ddp_comm_state": state, "ddp_comm_hook": powerSGD_hook.powerSGD_hook}
    raise ValueError(f'gradient_compression is {name!r}; it is "fp16", "bf16", "powersgd" or None.')
