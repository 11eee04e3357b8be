"""What a process that cannot reach the store sends to rank 0 beside it: a datagram to the store's port, unanswered.

A filter often closes TCP only, or drops the answers only, which a datagram does not need. Where everything is dropped
that goes from one host to another, nothing can tell: a host that is late looks the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import time

from lightning_distplus.control.secret import words_of

__all__ = ["Post"]

log = logging.getLogger(__name__)

_VERSION = 1
_COPIES = 3  # a datagram may be lost
_BETWEEN_COPIES_S = 0.05
_MAX_CHARACTERS = 1000  # a packet is 1,500 bytes
_MAX_BYTES = 4096
_MAX_MESSAGES = 1000  # read at once


class Post:
    """Rank 0's open letter box while the ranks meet; what the others send there.

    Args:
        host: Where the store is.
        port: Its port there; the datagrams go to the UDP port of that number.
        meeting: Job and attempt, so that no other run's word is taken.
        rank: Rank of this process.
    """

    def __init__(self, host: str, port: int, meeting: str, rank: int) -> None:
        self._host, self._port, self._rank = host, port, rank
        self._meeting = hashlib.sha256(meeting.encode()).hexdigest()[:16]
        self._texts: dict[int, str] = {}
        self._inbox = _listening(host, port) if rank == 0 else None

    def send(self, text: str) -> None:
        """Tells rank 0 why this rank does not come. Whether it is heard is not known."""
        note = {"version": _VERSION, "meeting": self._meeting, "rank": self._rank, "text": text[:_MAX_CHARACTERS]}
        with contextlib.suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sender:
                for _ in range(_COPIES):
                    sender.sendto(json.dumps(note).encode(), place)
                    time.sleep(_BETWEEN_COPIES_S)

    def read(self) -> dict[int, str]:
        """What has come so far, by rank; never waits."""
        if self._inbox is not None:
            with contextlib.suppress(OSError):  # nothing more has come
                for _ in range(_MAX_MESSAGES):
                    self._take(self._inbox.recv(_MAX_BYTES))
        return self._texts

    def close(self) -> None:
        """Takes the letter box away; idempotent."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    def _take(self, message: bytes) -> None:
        try:
            note = words_of(message)
            if (note["version"], note["meeting"]) == (_VERSION, self._meeting):
                self._texts[int(note["rank"])] = str(note["text"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:  # a stranger's
            log.debug("what came to UDP port %s is no note: %s", self._port, error)


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket at that address; None where this host does not have it, or the port is taken."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        inbox = socket.socket(family, kind)
    except OSError:
        return None
    try:
        inbox.bind(place)
    except OSError as error:
        log.info("rank 0: no datagrams can be taken at %s:%s: %s", host, port, error)
        inbox.close()
        return None
    inbox.setblocking(False)
    return inbox
