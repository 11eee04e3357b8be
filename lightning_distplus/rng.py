"""The state of every random number generator of a process, as plain bytes."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, bytes]:
    """The global generators of python, numpy and torch (CPU, and the current CUDA device where there is one).

    About 20 KB; ``weights_only``-safe.
    """
    state = {
        "python": json.dumps(random.getstate()).encode(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def set_rng_state(state: dict[str, bytes]) -> None:
    """Puts back what ``rng_state`` returned; a CUDA state is put back where a CUDA device is in use."""
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = json.loads(state["numpy"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def _numpy_state() -> bytes:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    inner = state["state"]
    return json.dumps(
        [state["bit_generator"], inner["key"].tolist(), int(inner["pos"]), state["has_gauss"], state["gauss"]]
    ).encode()


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
