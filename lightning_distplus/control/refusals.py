"""What processes that were refused leave behind, for those who wait for the rank that they should have been."""

from __future__ import annotations

import json
import time
from typing import Any

from lightning_distplus._compat import Store
from lightning_distplus.control.secret import words_of
from lightning_distplus.errors import RendezvousError

__all__ = ["Refusals"]

_LOOK_EVERY_S = 0.25
# Whoever still waits for others this long after a refusal has met the reason. One that disturbs nobody is not seen: a
# job whose ranks have all come does not look.
_GRACE_S = 1.5
_READING_S = 4 * _LOOK_EVERY_S


class Refusals:
    """The note of the first process that was refused.

    Args:
        store: The store in which the ranks meet, with the keys of all jobs and attempts.
        key: Where the note is, for this job and attempt.
        serves_store: Whether this process may serve the store; it leaves after those who read in it.
    """

    def __init__(self, store: Store, key: str, *, serves_store: bool) -> None:
        self._store = store
        self._key = key
        self._serves_store = serves_store
        self._grace_s = _GRACE_S + (_READING_S if serves_store else 0.0)
        self._look_at_s = 0.0
        self._seen_at_s: float | None = None
        self._note: dict[str, Any] = {}

    def leave(self, text: str, *, is_certain: bool = False) -> None:
        """Leaves a note; the first one stays. Who serves the store stays too, until those who wait have read it.

        Args:
            text: Why the process was refused.
            is_certain: Whether those who wait need not see first whether the ranks come all the same.
        """
        self._store.compare_set(self._key, "", json.dumps({"text": text, "is_certain": is_certain}))
        if self._serves_store:
            time.sleep(_READING_S if is_certain else self._grace_s)

    def raise_if_any(self, elapsed_s: float) -> None:
        """Called while this rank waits: raises the text of the note, once it has been there for a while.

        Raises:
            RendezvousError: With the text.
        """
        if elapsed_s < self._look_at_s:
            return
        self._look_at_s = elapsed_s + _LOOK_EVERY_S
        if self._seen_at_s is None:
            if not self._store.check([self._key]):
                return
            self._note = words_of(self._store.get(self._key))
            self._seen_at_s = elapsed_s
        if self._note["is_certain"] or elapsed_s - self._seen_at_s >= self._grace_s:
            raise RendezvousError(f"The ranks cannot meet, because one process was refused. {self._note['text']}")
