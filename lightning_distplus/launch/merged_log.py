"""The logs of all ranks of this host as one: each line with its rank, and a line that several ranks write only once."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["MergedLog"]

_POLL_S = 0.1
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before each line of an uncaught error
_REMEMBERED_LINES = 50_000


class MergedLog:
    """Follows files on a thread of its own.

    What rank 0 and rank 1 write alike appears once; what one rank writes twice appears twice. So an error that all
    ranks show stands there once, and every file keeps all of it.

    Args:
        files: Path and rank of each file; one that is not there yet is waited for.
        write: Gets each line, with its rank before it.
    """

    def __init__(self, files: Mapping[Path, int], write: Callable[[str], object]) -> None:
        self._files = dict(files)
        self._write = write
        self._offsets: dict[Path, int] = defaultdict(int)
        self._seen: dict[int, Counter[str]] = defaultdict(Counter)
        self._written: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="distplus-logs", daemon=True)

    def start(self) -> None:
        """Starts to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Writes what is left and ends."""
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopping.wait(_POLL_S):
            self._look()
        self._look(to_the_end=True)

    def _look(self, *, to_the_end: bool = False) -> None:
        for path, rank in self._files.items():
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets[path])
                    text = file.read()
            except FileNotFoundError:
                continue
            complete = len(text) if to_the_end else text.rfind(b"\n") + 1
            self._offsets[path] += complete
            for line in text[:complete].decode(errors="replace").splitlines():
                self._tell(rank, line)

    def _tell(self, rank: int, line: str) -> None:
        line = _TORCHS_PREFIX.sub("", line)
        if len(self._written) > _REMEMBERED_LINES:
            self._written.clear()
            self._seen.clear()
        self._seen[rank][line] += 1
        if self._seen[rank][line] > self._written[line]:
            self._written[line] += 1
            self._write(f"[{rank}] {line}\n")
