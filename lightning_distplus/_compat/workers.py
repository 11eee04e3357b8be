"""The start of torch's data workers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_distplus._compat.probing import warn_once

__all__ = ["WorkerInit", "prepare_workers"]

WorkerInit = Callable[[int], None]
_HOME, _NAME = "torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"


def prepare_workers(prepare: Callable[[Any], WorkerInit | None]) -> Callable[[], None]:
    """Starts all data workers of this process with ``prepare(loader)`` as their ``worker_init_fn``.

    The loader gets its own one back at once: Lightning, which seeds workers, looks whether there is one.

    Returns:
        What undoes it.
    """
    iterator: Any = getattr(importlib.import_module(_HOME), _NAME, None)
    if iterator is None:
        warn_once(f"{_HOME}.{_NAME}", "data workers that are not forked do not show their stacks when they hang")
        return lambda: None
    original = iterator.__init__

    def start_workers(self: Any, loader: Any) -> None:
        own = loader.worker_init_fn
        loader.worker_init_fn = prepare(loader)
        try:
            original(self, loader)
        finally:
            loader.worker_init_fn = own

    def undo() -> None:
        iterator.__init__ = original

    iterator.__init__ = start_workers
    return undo
