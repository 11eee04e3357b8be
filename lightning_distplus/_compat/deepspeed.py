"""DeepSpeed's engine and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_distplus._compat.probing import warn_once

__all__ = ["calls_torch_save", "discard_next_deepspeed_step", "end_deepspeed_save", "loading_universal"]


def calls_torch_save(engine: Any) -> bool:
    """Whether a checkpoint engine of DeepSpeed hands the path that it is given to ``torch.save``, and no more."""
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine

    return type(engine) is getattr(torch_checkpoint_engine, "TorchCheckpointEngine", None)


def end_deepspeed_save(engine: Any) -> None:
    """Meets the other ranks where they end a save: in the optimizer's epilogue, and at the engine's last barrier.

    deepspeed 0.19.8, ``engine.py`` 4953-4964.
    """
    from deepspeed import comm

    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()
    comm.barrier()


@contextmanager
def loading_universal(engine: Any) -> Iterator[None]:
    """Lets a DeepSpeed engine load a universal checkpoint in this block, whatever its configuration says.

    Raises:
        RuntimeError: This version of DeepSpeed keeps the setting elsewhere; nothing can be loaded without it.
    """
    settings = getattr(engine, "_config", None)
    name = "load_universal_checkpoint"
    if not hasattr(settings, name):
        raise RuntimeError(
            f"DeepSpeedEngine._config.{name} is not in this version of DeepSpeed. Set "
            '{"checkpoint": {"load_universal": true}} in its configuration.'
        )
    before = getattr(settings, name)
    setattr(settings, name, True)
    try:
        yield
    finally:
        setattr(settings, name, before)


def discard_next_deepspeed_step(engine: Any) -> bool:
    """Lets the next step of a ZeRO optimizer drop its gradients, as it does after an overflow; weights stay.

    DeepSpeed keeps reduced gradients in buffers of its own, where clearing ``.grad`` does not reach them (0.19.8).

    Returns:
        Whether it will.
    """
    optimizer = engine.optimizer
    inner = optimizer.step
    own = vars(optimizer).get("step")
    if not callable(getattr(optimizer, "_update_scale", None)):
        warn_once(f"{type(optimizer).__name__}._update_scale", "a step cannot be left out, so that it raises instead")
        return False

    def step(*arguments: Any, **named: Any) -> Any:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own
        # Called once in a step, before ``overflow`` is read; the scale itself stays.
        optimizer._update_scale = lambda has_overflow=False: setattr(optimizer, "overflow", True)
        try:
            return inner(*arguments, **named)
        finally:
            del optimizer._update_scale
            optimizer.overflow = False

    optimizer.step = step
    return True
