"""Stands in for a rank that is forked elsewhere, towards the agent: passes signals on, and ends as the rank ends.

Run by its path, isolated, on the standard library alone, so that it is there within some 20 ms. Where no rank can be
forked, it becomes the interpreter that the agent takes it for.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
from types import FrameType

__all__ = ["END", "FORKED", "HERE", "PASSED_ON", "peer_of", "receive"]

HERE = b"?"
"""What the server says when it has imported its modules and waits for the question."""
FORKED = b"+"
"""What it says when there is a rank; anything else means that there is none."""
END = struct.Struct("i")
"""How a rank has ended, as ``subprocess`` writes it: its exit code, or a signal as a negative number."""
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that are meant for a rank. The server, which is to outlive it, holds them back."""
_IMPORTS_S = 600.0
_PEER = struct.Struct("3i")


def peer_of(link: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def receive(link: socket.socket, size: int) -> bytes:
    """What has come from the other end; nothing where it has gone, also with words of ours unread."""
    try:
        return link.recv(size)
    except ConnectionResetError:
        return b""


def _main(name: str, *command: str) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        if _ask(link, name):
            for number in PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, _PassOn(link))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            _end_like(receive(link, END.size))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - as the agent has been told


def _ask(link: socket.socket, name: str) -> bool:
    """Asks for a rank with the standard streams of this process; the server reads all else from /proc.

    From the question on, signals wait until it is known whom they are for.
    """
    link.settimeout(_IMPORTS_S)
    try:
        link.connect(f"\0{name}")
        if peer_of(link)[1] != os.getuid() or link.recv(len(HERE)) != HERE:
            return False
        link.settimeout(None)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        socket.send_fds(link, [FORKED], [0, 1, 2])
        return receive(link, len(FORKED)) == FORKED
    except TimeoutError:
        sys.stderr.write(
            f"distplus launch: what is imported beforehand has taken {_IMPORTS_S:g} s and goes on; this rank starts as "
            "an interpreter of its own\n"
        )
    except OSError:  # the server has ended: out of memory, or a module that crashed it
        pass
    return False


class _PassOn:
    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def __call__(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            self._link.send(bytes([number]))


def _end_like(end: bytes) -> None:
    code = END.unpack(end)[0] if end else -signal.SIGKILL  # the server was killed, and its ranks with it
    if code >= 0:
        os._exit(code)
    if code != -signal.SIGKILL:  # whose action is not to be chosen
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left a core file already, if any
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pause()


if __name__ == "__main__":
    _main(*sys.argv[1:])
