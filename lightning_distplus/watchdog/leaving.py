"""The end of processes: of this one, and of a culprit on this host that cannot end itself, with their data workers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from contextlib import suppress

from lightning_distplus.control.plane import Peer
from lightning_distplus.errors import ExitCode
from lightning_distplus.liveness import ProcessState, end_with_parent, forks

__all__ = ["end_peer", "end_process", "say", "tie_workers"]


def tie_workers(owner: object) -> None:
    """From now on, data workers that are forked from this process end when it is killed; as long as ``owner`` lives.

    A worker notices the death of its rank between two samples only. Until then its copies of the connections keep all
    peers waiting, in the collectives and, where this rank serves it, for the store.
    """
    multiprocessing.util.register_after_fork(owner, _end_with_parent)


def _end_with_parent(_: object) -> None:
    """Runs in a child. The system watches the thread that forked, so that one forked elsewhere is left alone."""
    is_of_main_thread = threading.current_thread().name == "MainThread"
    if multiprocessing.current_process().daemon and is_of_main_thread:
        end_with_parent()


def say(text: str) -> None:
    """Straight to stderr: logging may be set to swallow it, and this is what the run ends with."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def end_process(code: ExitCode) -> None:
    """Ends this process at once: its training thread may stand in a call that nothing interrupts.

    Its data workers end with it, as at an orderly exit. One that hangs in a sample would live on, and with it its
    copies of all connections: peers would wait for an answer of a store that nobody serves.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    os._exit(int(code))


def end_peer(peer: Peer) -> None:
    """Kills the process of a rank of this host, and what was forked from it; nothing where it has ended."""
    if peer.state() in (ProcessState.RUNNING, ProcessState.STOPPED):  # it is here
        for pid in (*forks(peer.pid), peer.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
