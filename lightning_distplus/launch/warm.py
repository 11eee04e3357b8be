"""Ranks that start warm: forked from one process of this host, which has imported what they need."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from lightning_distplus.launch.stand_in import PASSED_ON

__all__ = ["PRELOADED", "Warm"]

PRELOADED = (
    "lightning_distplus.cli.training",
    "lightning_distplus.strategies.ddp",
    "lightning_distplus.strategies.fsdp",
    "lightning_distplus.strategies.model_parallel",
)
"""With torch, Lightning and what they import; DeepSpeed only where the user names it."""
_MAX_WAITING = 1024
_END_S = 1.0


class Warm:
    """The launcher's side: starts the process, and tells how a rank comes from it.

    It imports while the launcher does, and serves all attempts; one that was killed is replaced. It ends with this
    object; without it, when the launcher and the last rank are gone.

    Args:
        modules: What it imports beside ``PRELOADED``. They must not start threads or touch a GPU.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._begin()

    def _begin(self) -> None:
        self._name = f"distplus-warm-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener, _held_back():
            listener.bind(f"\0{self._name}")  # of this host's memory and no file, so that nothing has to be removed
            listener.listen(_MAX_WAITING)
            self._server = subprocess.Popen(
                [sys.executable, "-m", "lightning_distplus.launch.warm_server", str(listener.fileno()), *PRELOADED,
                 *self._modules],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
            )  # fmt: skip

    def command(self, command: Sequence[str]) -> list[str]:
        """What follows the interpreter in the place of ``command``, for a rank that runs the same."""
        if command[0].startswith("-") and command[0] != "-m":
            return list(command)  # an option of the interpreter: it takes another one
        if (self._server.poll() or 0) < 0:  # killed, for example for memory; one that ended by itself would end again
            self._close_input()
            self._begin()
        stand_in = Path(__file__).with_name("stand_in.py")
        return ["-I", "-S", str(stand_in), self._name, *command]

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_input()
        try:
            self._server.wait(_END_S)
        except subprocess.TimeoutExpired:  # it still imports; the agent has ended the ranks
            self._server.kill()
            self._server.wait()

    def _close_input(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """The server is to outlive its ranks, which may be saving; it lets them have these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
