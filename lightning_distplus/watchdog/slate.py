"""The slate: a rank's last beat in memory that its peers on this host hold open, to be read when no store answers.

A process that is stopped says nothing, and where it serves the store nobody hears of the others' beats either. What a
peer holds open outlives the process that wrote it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Slate", "open_slate", "read_slate"]

_NAME = "distplus-slate"
_SIZE_BYTES = 16 << 10
_LOOKS = 5


class Slate:
    """This rank's own; one thread writes it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_NAME)

    def write(self, beat: dict[str, Any]) -> None:
        """Replaces what stands there; a beat that does not fit is left out."""
        text = json.dumps(beat).encode()
        if len(text) <= _SIZE_BYTES:
            os.pwrite(self._descriptor, text.ljust(_SIZE_BYTES), 0)

    def close(self) -> None:
        """Gives the memory back, once no peer holds it."""
        os.close(self._descriptor)


def open_slate(pid: int) -> int | None:
    """A descriptor of another process's slate; None where it has none yet, or may not be looked at."""
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(path.readlink()).startswith(f"/memfd:{_NAME}"):
                    return os.open(path, os.O_RDONLY)
    return None


def read_slate(descriptor: int) -> dict[str, Any] | None:
    """The last beat; None where none was written."""
    with suppress(OSError, ValueError):
        for _ in range(_LOOKS):  # two looks that differ: it is being written
            data = os.pread(descriptor, _SIZE_BYTES, 0)
            if data == os.pread(descriptor, _SIZE_BYTES, 0):
                beat: dict[str, Any] = json.loads(data)
                return beat
    return None
