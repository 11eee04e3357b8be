"""The secret of a job: signs what its launchers agree on between hosts, and shows what peers say without obeying it.

torch's store takes every connection, and gives everybody all keys. So each value of the launchers carries a signature,
made with the secret, over the value and its key. What is not signed is ignored. What ranks write is not signed.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from typing import Any

from lightning_distplus import env
from lightning_distplus._compat import Store

__all__ = ["Entries", "Secret", "SignedStore", "escaped", "words_of"]

_MAC_BYTES = 16
_MARKER_BYTES = 4  # where an entry begins: found again behind what a stranger has written
_ENTRY = struct.Struct(f"<{_MARKER_BYTES}sH{_MAC_BYTES}s")  # marker, length, signature
_MAX_ENTRY_BYTES = (1 << 16) - 1
_NOTHING = b"\0nothing"
_CLAIMS = 100  # against a stranger who writes all the time; one try suffices otherwise


class Secret:
    """Signs values, each together with its key, and tells those of others from them.

    Without a secret everybody can sign: the format is the same, and a stranger who knows it is believed.

    Args:
        text: What only the processes of the job know; empty: nothing.
    """

    def __init__(self, text: str = "") -> None:
        self.is_given = bool(text)
        self._key = hashlib.blake2b(text.encode()).digest() if text else b""
        self.name = hashlib.blake2b(self._key, digest_size=8).hexdigest() if text else ""
        """Tells secrets apart without telling them; empty without one."""
        self.num_ignored = 0
        """Messages that nobody of this job has signed."""

    @classmethod
    def from_environment(cls) -> Secret:
        """That of ``DISTPLUS_SECRET``."""
        return cls(env.DISTPLUS_SECRET.get() or "")

    def seal(self, key: str, value: bytes) -> bytes:
        """A value with its signature."""
        return _signature(self._hasher(key), value) + value

    def open(self, key: str, sealed: bytes | None) -> bytes | None:
        """What somebody of this job has sealed; None, and counted, for anything else that is there."""
        if sealed is None:
            return None
        value = sealed[_MAC_BYTES:]
        if sealed[:_MAC_BYTES] == _signature(self._hasher(key), value):
            return value
        self.num_ignored += 1
        return None

    def entries(self, key: str) -> Entries:
        """How entries of a key are written and read."""
        return Entries(self, self._hasher(f"{key} entries"))

    def _hasher(self, key: str) -> hashlib.blake2b:
        name = key.encode()
        hasher = hashlib.blake2b(key=self._key, digest_size=_MAC_BYTES)
        hasher.update(b"%d:%s" % (len(name), name))  # a signature holds for one key only
        return hasher


class Entries:
    """The signed entries of one key, to which every process appends its own; each is checked once.

    Args:
        secret: Counts what is ignored.
        hasher: Signs them, copied each time.
    """

    def __init__(self, secret: Secret, hasher: hashlib.blake2b) -> None:
        self._secret = secret
        self._hasher = hasher
        self._marker = _signature(hasher, b"marker")[:_MARKER_BYTES]
        self._own = b""
        self._data = b""
        self._end = 0
        self._found: list[bytes] = []

    def entry(self, value: bytes) -> bytes:
        """This process's entry, to be appended.

        Raises:
            ValueError: The value is longer than 64 KiB.
        """
        if len(value) > _MAX_ENTRY_BYTES:
            raise ValueError(f"An entry has {len(value)} bytes; it takes at most {_MAX_ENTRY_BYTES}.")
        self._own = _ENTRY.pack(self._marker, len(value), _signature(self._hasher, value)) + value
        return self._own

    def read(self, data: bytes) -> list[bytes]:
        """What the entries say, in their order; what a stranger has written between them is skipped, and counted."""
        if not data.startswith(self._data):
            self._end, self._found = 0, []
        self._data = data
        while self._end < len(data):
            start = data.find(self._marker, self._end)
            self._secret.num_ignored += start != self._end
            if start < 0 or start + _ENTRY.size > len(data):
                self._end = len(data)
                break
            _, length, signature = _ENTRY.unpack_from(data, start)
            end = start + _ENTRY.size + length
            value = data[end - length : end]
            if data[start:end] == self._own or signature == _signature(self._hasher, value):
                self._found.append(value)
                self._end = end
            else:  # a copy of the marker
                self._secret.num_ignored += 1
                self._end = start + 1
        return self._found


def _signature(hasher: hashlib.blake2b, value: bytes) -> bytes:
    signing = hasher.copy()
    signing.update(value)
    return signing.digest()


class SignedStore:
    """A store in which only signed values count.

    Args:
        store: Holds the values of strangers too.
        secret: Of this job.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        self._store = store
        self._secret = secret

    def set(self, key: str, value: bytes) -> None:
        """Sets one key; never waits."""
        self._store.set(key, self._secret.seal(key, value))

    def read(self, key: str) -> bytes | None:
        """The value of a key; None where nobody of this job has set it."""
        return self._secret.open(key, self.read_raw(key))

    def read_raw(self, key: str) -> bytes | None:
        """What lies under a key, whoever has put it there; never waits.

        An exchange that cannot succeed answers with what is there, in one round trip; ``check`` and ``get`` take three.
        """
        value = bytes(self._store.compare_set(key, _NOTHING, _NOTHING))
        return None if value == _NOTHING else value

    def claim(self, key: str, value: bytes) -> bytes:
        """Sets a key that nobody of this job has set, and returns what is there now."""
        sealed, there = self._secret.seal(key, value), b""
        for _ in range(_CLAIMS):
            found = bytes(self._store.compare_set(key, there, sealed))
            if (signed := self._secret.open(key, found)) is not None:
                return signed
            there = b"" if found == there else found  # a stranger's is written over; unless it has gone meanwhile
        return value


# All that moves a terminal's cursor, colours it or turns the direction of its text; a line's end and a tab do no harm.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """A text as it can be printed on a terminal: control characters are shown, not obeyed."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def words_of(message: bytes | str) -> Any:
    """What a peer says in JSON, its texts escaped, since they are printed.

    Raises:
        ValueError: It is no JSON.
    """
    return _escaped_within(json.loads(message))


def _escaped_within(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(name): _escaped_within(one) for name, one in value.items()}
    return [_escaped_within(one) for one in value] if isinstance(value, list) else value
