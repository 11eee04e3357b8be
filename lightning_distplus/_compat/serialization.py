"""What ``torch.save`` adds to a file."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.serialization import get_crc32_options
from torch.utils.serialization import config

from lightning_distplus._compat.probing import warn_once

__all__ = ["without_crc"]

_SETTING = "save.compute_crc32"


@contextmanager
def without_crc() -> Iterator[None]:
    """In this block ``torch.save`` computes no CRC of what this thread writes; other threads go on as they are.

    torch 2.13 has the setting for each thread; where it is one for all threads, nothing is changed.
    """
    if not _is_of_one_thread():
        yield
        return
    with config.patch(_SETTING, False):  # type: ignore[attr-defined]  # torch adds it to the module
        yield


@functools.cache
def _is_of_one_thread() -> bool:
    if not hasattr(config, "patch"):
        warn_once("torch.utils.serialization.config.patch", "shards are written with a CRC that nobody reads")
        return False
    seen: list[bool] = []
    before = get_crc32_options()
    other = threading.Thread(target=lambda: seen.append(get_crc32_options()))
    with config.patch(_SETTING, not before):
        other.start()
        other.join()
    return seen == [before]
