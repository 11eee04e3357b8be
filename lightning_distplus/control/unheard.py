"""What a process that cannot reach the store leaves beside it, for those who wait for it there.

Whoever cannot reach the store cannot say so in it. Most clusters share the folder of the run between hosts, so that the
reason is heard there; and a datagram may come through where a connection does not. Where neither does, the deadline of
the rendezvous ends the wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_distplus.control.post import Post
from lightning_distplus.control.secret import words_of

__all__ = ["Unheard"]

log = logging.getLogger(__name__)

_EVERY_S = 0.25
_EVERY_S_OF_MANY = 1.0  # every rank but 0 asks the file system while rank 0 is late
_VERSION = 1


@dataclass(frozen=True)
class _Note:
    text: str
    id: str


class Unheard:
    """The notes of one meeting, one file a rank.

    A note that was there before this rank began may be that of an earlier start: it counts at the deadline only. The
    rank that has left it takes it away when it starts again.

    Args:
        folder: Where the run writes; None: nowhere.
        meeting: Job, attempt and address, so that no other run's note is read.
        rank: Rank of this process. Rank 0 looks for the notes of all others, and each of them for that of rank 0.
        post: Datagrams to rank 0; None: the ranks share a host.
    """

    def __init__(self, folder: Path | None, meeting: str, rank: int, post: Post | None = None) -> None:
        self._folder = folder
        self._post = post
        self._stem = f"unmet-{hashlib.sha256(meeting.encode()).hexdigest()[:12]}-rank"
        self._mine = f"{self._stem}{rank:05d}.json"
        self._awaited = f"{self._stem}*.json" if rank == 0 else f"{self._stem}00000.json"
        self._every_s = _EVERY_S if rank == 0 else _EVERY_S_OF_MANY
        self._look_at_s = 0.0
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / self._mine).unlink(missing_ok=True)
        self._old = {note.id for note in self._read(self._awaited).values()}

    def leave(self, text: str, *, knows_address: bool = True) -> None:
        """Leaves why this rank does not come; a folder that takes no file is no further trouble.

        Args:
            text: Why.
            knows_address: Whether the main address resolves here; asking again may take seconds.
        """
        if self._post is not None and knows_address:
            self._post.send(text)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            aside = self._folder / f".{self._mine}"
            aside.write_text(json.dumps({"version": _VERSION, "text": text, "id": uuid.uuid4().hex}))
            aside.rename(self._folder / self._mine)
        except OSError as error:
            log.info("no note could be left in %s: %s", self._folder, error)

    def look(self, elapsed_s: float, has_come: Callable[[int], bool] = lambda rank: False) -> str | None:
        """Called while this rank waits: what a rank that has not come says since this one began."""
        if elapsed_s < self._look_at_s:
            return None
        self._look_at_s = elapsed_s + self._every_s
        notes = self._read(self._awaited)
        texts = {rank: note.text for rank, note in notes.items() if note.id not in self._old}
        return _first(texts | self._sent(), has_come)

    def last_word(self, has_come: Callable[[int], bool]) -> str | None:
        """Called at the deadline: what a rank that has not come has said at any time."""
        texts = {rank: note.text for rank, note in self._read(f"{self._stem}*.json").items()}
        return _first(texts | self._sent(), has_come)

    def close(self) -> None:
        """The ranks have met, or never will."""
        if self._post is not None:
            self._post.close()

    def _sent(self) -> dict[int, str]:
        return {} if self._post is None else self._post.read()

    def _read(self, pattern: str) -> dict[int, _Note]:
        """By rank; what cannot be read is no note."""
        found: dict[int, _Note] = {}
        for path in [] if self._folder is None else sorted(self._folder.glob(pattern)):
            try:
                note = words_of(path.read_text())
                if note["version"] == _VERSION:
                    found[int(path.stem.removeprefix(self._stem))] = _Note(str(note["text"]), str(note["id"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.debug("%s is no note: %s", path, error)
        return found


def _first(texts: dict[int, str], has_come: Callable[[int], bool]) -> str | None:
    return next((texts[rank] for rank in sorted(texts) if not has_come(rank)), None)
