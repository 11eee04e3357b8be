"""Indices that take long to build: built once, kept beside the data, mapped by all ranks of a host."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["shared_index"]

_log = logging.getLogger(__name__)

_FOLDER = ".distplus-index"
_HEADER = struct.Struct("<8sQQQ")  # magic with version, key, number of entries, digest of the entries
_MAGIC = b"DPINDEX1"
_PATIENCE_S = 600.0  # how long a process waits for the one that builds
_POLL_S = 0.02


def shared_index(
    beside: Path, key: int, build: Callable[[], NDArray[np.int64]], *, patience_s: float = _PATIENCE_S
) -> NDArray[np.int64]:
    """What ``build`` returns, read from a file where it was built before, else built by one process while others wait.

    The file lies in the hidden folder ``.distplus-index`` beside the data, or in one of this user below the folder for
    temporary files where nothing can be written there. It appears as a whole. Every process verifies it, by a digest
    over all of it, before it is used; one that is damaged is built again, with a warning. A builder that dies lets the
    next one build. Where nothing can be kept, or the builder does not come to an end, each process builds for itself.

    Args:
        beside: The file of data that names the index.
        key: 64 bits that differ when what the index says could differ.
        build: Makes the index: int64 of shape (number of entries,).
        patience_s: Maximum wait for another process, in seconds.
    """
    name = f"{beside.name}-{key:016x}"
    for folder, mode in ((beside.parent / _FOLDER, 0o777), (_own_folder(), 0o700)):
        path = folder / name
        try:
            folder.mkdir(mode=mode, exist_ok=True)
            if mode == 0o700 and folder.stat().st_uid != os.getuid():
                continue  # somebody else has made the folder in which this user's indices would lie
            found = _read(path, key)
            if found is not None:
                return found
            lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # nothing can be written there
            continue
        with _locked(lock, path, patience_s) as is_ours:
            return _build_or_read(path, key, build) if is_ours else build()
    return build()


def _build_or_read(path: Path, key: int, build: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    found = _read(path, key, tells=True)
    if found is not None:
        return found
    begun = time.monotonic()
    index = build()
    try:
        _write(path, key, index)
    except OSError as error:
        _log.warning("the index %s cannot be kept (%s); every process builds its own", path, error)
        return index
    _log.info("built the index %s in %.1f s", path, time.monotonic() - begun)
    found = _read(path, key)
    return index if found is None else found  # the map is shared by all processes, the array is not


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"{_FOLDER[1:]}-{os.getuid()}"


@contextmanager
def _locked(descriptor: int, path: Path, patience_s: float) -> Iterator[bool]:
    """Whether this process may build; the kernel gives the lock back when its holder dies."""
    begun = time.monotonic()
    is_ours, tells = False, True
    try:
        while not is_ours and time.monotonic() - begun < patience_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if tells:
                    _log.info("another process builds the index %s; waiting for it", path)
                tells = False
                time.sleep(_POLL_S)
                continue
            except OSError:  # a file system without locks: several may build, and the last one to finish is seen
                pass
            is_ours = True
        if not is_ours:
            _log.warning("the index %s was not built within %.0f s by another process", path, patience_s)
        yield is_ours
    finally:
        os.close(descriptor)


def _read(path: Path, key: int, *, tells: bool = False) -> NDArray[np.int64] | None:
    """The entries, mapped; None where the file is missing or not what it should be."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError(f"its header has {len(head)} of {_HEADER.size} bytes")
        magic, found_key, count, digest = _HEADER.unpack(head)
        if (magic, found_key) != (_MAGIC, key):
            raise ValueError("it is another index, or of another version")
        expected = _HEADER.size + 8 * count
        if size != expected or not count:
            raise ValueError(f"it has {size} bytes, its header describes {expected}")
        mapped = np.asarray(np.memmap(path, dtype="<i8", mode="r", offset=_HEADER.size, shape=(count,)))
        if xxhash.xxh3_64_intdigest(mapped.data) != digest:
            raise ValueError("its digest differs")
    except OSError:
        return None
    except ValueError as error:
        if tells:
            _log.warning("the index %s is damaged: %s. It is built again", path, error)
        return None
    return mapped


def _write(path: Path, key: int, index: NDArray[np.int64]) -> None:
    """Aside, synced, then renamed. What a process that was killed here has left goes first."""
    for torn in path.parent.glob(f"{path.name}.*.part"):
        torn.unlink(missing_ok=True)
    entries = np.ascontiguousarray(index, dtype="<i8")
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as stream:
            stream.write(_HEADER.pack(_MAGIC, key, len(entries), xxhash.xxh3_64_intdigest(entries.data)))
            stream.write(entries.data)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
