"""The bell: a word of memory on which the processes of one host wait for each other (Linux's futex)."""

from __future__ import annotations

import ctypes
import mmap
import platform

__all__ = ["BELL_BYTES", "Bell"]

BELL_BYTES = 8
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_WORD = 0xFFFFFFFF


class Bell:
    """Wakes those who wait; one who waits costs no processor, and is awake sooner than the shortest sleep ends.

    Args:
        memory: Mapped by all of them.
        offset: Of ``BELL_BYTES`` in it, a multiple of 8.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._at = ctypes.byref(self._word)
        self._call = ctypes.CDLL(None).syscall

    @staticmethod
    def is_available() -> bool:
        """Whether this system has it, as far as we know its numbers."""
        return _FUTEX is not None

    @property
    def rung(self) -> int:
        """What it was last rung with."""
        return self._word.value

    def ring(self, number: int) -> None:
        """Wakes everybody.

        Args:
            number: Differs from that before, so that one who is about to wait does not.
        """
        self._word.value = number & _WORD
        self._call(_FUTEX, self._at, _WAKE, _ALL, None, None, 0)

    def wait(self, rung: int, seconds: float) -> None:
        """Waits for the next ring; returns at once if it rang since ``rung`` was read, and early for a signal."""
        at_most = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        self._call(_FUTEX, self._at, _WAIT, ctypes.c_uint32(rung), at_most, None, 0)
