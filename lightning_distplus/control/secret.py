"""The secret of a job: signs what its processes tell each other, and shows what peers say without obeying it.

torch's store takes every connection, and gives everybody all keys. So each value that ends, signals or names something
carries a signature, made with the secret, over the value and its key. What is not signed is ignored, and counted.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from lightning_distplus import env
from lightning_distplus._compat import Store

log = logging.getLogger(__name__)

_MAC_BYTES = 16
_MARKER_BYTES = 4  # where an entry begins: found again behind what a stranger has written
_ENTRY = struct.Struct(f"<{_MARKER_BYTES}sH{_MAC_BYTES}s")  # marker, length, signature
_MAX_ENTRY_BYTES = (1 << 16) - 1
ENTRY_BYTES = _ENTRY.size
"""What an entry takes beside its value."""
_NOTHING = b"\0nothing"
_CLAIMS = 100  # against a stranger who writes all the time; one try suffices otherwise
_REMEMBERED = 10_000  # keys with a stranger's message in them


@dataclass
class _Ignored:
    """The messages of strangers; each counts once, however often it is read."""

    count: int = 0
    last: dict[str, int] = field(default_factory=dict)

    def note(self, key: str, message: bytes) -> None:
        found = hash(message)
        if self.last.get(key) == found:
            return
        if len(self.last) < _REMEMBERED:
            self.last[key] = found
        self.count += 1
        if self.count == 1:
            log.warning("at %r stands what nobody of this job has signed; such messages are ignored, and counted", key)


class Secret:
    """Signs values, each together with its key, by a text that only the processes of the job know.

    Without a secret everybody can sign: the format is the same, and a stranger who knows it is believed.
    """

    def __init__(self, text: str = "") -> None:
        self.is_given = bool(text)
        self._key = hashlib.blake2b(text.encode()).digest() if text else b""
        self.name = hashlib.blake2b(self._key, digest_size=8).hexdigest() if text else ""
        """Tells secrets apart without telling them; empty without one."""
        self._ignored = _Ignored()

    @classmethod
    def from_environment(cls) -> Secret:
        """That of ``DISTPLUS_SECRET``."""
        return cls(env.DISTPLUS_SECRET.get() or "")

    @property
    def num_ignored(self) -> int:
        """Messages that nobody of this job has signed."""
        return self._ignored.count

    def within(self, scope: str) -> Secret:
        """The same for one attempt: what is signed for another one does not hold there."""
        derived = copy.copy(self)  # counts together with this one
        derived._key = hashlib.blake2b(scope.encode(), key=self._key).digest()
        return derived

    def seal(self, key: str, value: bytes) -> bytes:
        """A value with its signature."""
        return self._sign(key, value) + value

    def fits(self, key: str, sealed: bytes | None) -> bool:
        """Whether this secret has signed what stands there; counts nothing."""
        if sealed is None:
            return False
        return hmac.compare_digest(sealed[:_MAC_BYTES], self._sign(key, sealed[_MAC_BYTES:]))

    def open(self, key: str, sealed: bytes | None) -> bytes | None:
        """What somebody of this job has sealed; None, and counted, for anything else that is there."""
        if sealed is None:
            return None
        if self.fits(key, sealed):
            return sealed[_MAC_BYTES:]
        self._ignored.note(key, sealed)
        return None

    def entries(self, key: str) -> Entries:
        """How entries of a key are written and read."""
        name, ignore = f"{key} entries", partial(self._ignored.note, key)
        if not self.is_given:
            return Entries(partial(self._sign, name), ignore)
        begun = hashlib.blake2b(_prefix(name), key=self._key, digest_size=_MAC_BYTES).copy

        def sign(value: bytes) -> bytes:
            hasher = begun()  # two thirds of the time that a new one takes
            hasher.update(value)
            return hasher.digest()

        return Entries(sign, ignore)

    def _sign(self, key: str, value: bytes) -> bytes:
        if not self.is_given:  # anybody can: it tells apart what is damaged, or belongs under another key
            return xxhash.xxh3_128_digest(self._key + _prefix(key) + value)
        return hashlib.blake2b(_prefix(key) + value, key=self._key, digest_size=_MAC_BYTES).digest()


def _prefix(key: str) -> bytes:
    """What is signed before a value: a signature holds for one key only."""
    name = key.encode()
    return b"%d:%s" % (len(name), name)


class Entries:
    """The signed entries of one key, to which every process appends its own; each is checked once."""

    def __init__(self, sign: Callable[[bytes], bytes], ignore: Callable[[bytes], None]) -> None:
        self._sign = sign
        self._ignore = ignore
        self._marker = sign(b"marker")[:_MARKER_BYTES]
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
        return _ENTRY.pack(self._marker, len(value), self._sign(value)) + value

    def read(self, data: bytes) -> list[bytes]:
        """What the entries say, in their order; what a stranger has written between them is skipped, and counted."""
        if not data.startswith(self._data):
            self._end, self._found = 0, []
        self._data = data
        # Looked up once: every rank reads the entries of all at every gate between hosts.
        marker, sign, unpack, is_equal = self._marker, self._sign, _ENTRY.unpack_from, hmac.compare_digest
        end, last = self._end, len(data) - ENTRY_BYTES
        while end <= last:
            found, length, signature = unpack(data, end)
            start, end = end, end + ENTRY_BYTES + length
            value = data[start + ENTRY_BYTES : end]
            if found == marker and is_equal(signature, sign(value)):
                self._found.append(value)
            else:  # a stranger's, perhaps with a copy of the marker
                end = data.find(marker, start + 1)
                end = len(data) if end < 0 else end
                self._ignore(data[start:end])
        if end < len(data):
            self._ignore(data[end:])
            end = len(data)
        self._end = end
        return self._found


class SignedStore:
    """A store in which only values count that this job has signed."""

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


# -- handed to the ranks of one host -----------------------------------------------------------------------------------

# Where nobody has given the ranks a secret, rank 0 makes one and leaves it where only the same user of the same host
# can read it. /dev/shm does not depend on TMPDIR, which launchers may set for each rank.
_FOLDERS = ("/dev/shm", "/tmp")  # noqa: S108  # a folder of our own in it, which nobody else may enter
_FORGOTTEN_AFTER_S = 24 * 3600.0  # one that a killed job has left behind


def leave_secret() -> tuple[Secret, Path]:
    """Makes a secret, and leaves it to the other ranks of this host.

    Raises:
        OSError: No folder takes it.
    """
    text = secrets.token_hex(32)
    secret = Secret(text)
    reason: OSError | None = None
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_private(folder.lstat(), stat.S_ISDIR)
            _forget_old(folder)
            path = folder / f"secret-{secret.name}"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
            return secret, path
        except OSError as error:
            reason = error
    raise reason or OSError("there is no folder for it")


def secrets_here() -> Iterator[Secret]:
    """The secrets that this user has left on this host."""
    for folder in _folders():
        with suppress(OSError):
            _require_private(folder.lstat(), stat.S_ISDIR)
            for path in folder.glob("secret-*"):
                with suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                    _require_private(os.fstat(file.fileno()), stat.S_ISREG)
                    if text := file.read():
                        yield Secret(text)


def _folders() -> list[Path]:
    return [Path(folder, f"distplus-{os.geteuid()}") for folder in dict.fromkeys(_FOLDERS)]


def _require_private(found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if found.st_uid != os.geteuid() or not is_kind(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError("another user has made it, or may look into it")


def _forget_old(folder: Path) -> None:
    for path in folder.glob("secret-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _FORGOTTEN_AFTER_S:
                path.unlink()


# -- words of others ---------------------------------------------------------------------------------------------------

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
