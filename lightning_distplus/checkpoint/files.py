"""Files of checkpoints: where each part lies; written, digested, moved and removed so that it is there or not at all.

```text
checkpoints/
|-- step=10.ckpt/                        a directory checkpoint
|   |-- __0_0.distcp ...
|   `-- .distplus/{manifest.json,commit}
|-- step=20.ckpt                         a single-file checkpoint
`-- .distplus/
    |-- step=20.ckpt/{manifest.json,commit}
    |-- step=30.ckpt.stage-1f0c22d9/     a save in progress: the payload under its own name, with its meta folder
    |-- step=10.ckpt.aside-77aa01be/     a save that replaces its target: the new checkpoint, complete; then the old one
    |-- step=10.ckpt.draft-77aa01be/     the same save: what it moves to the target, and what was there
    |-- step=5.ckpt.removed-0be1d3f2/    on its way out
    |-- step=10.ckpt.universal-5e0f1a2b/ the same for another number of ranks (DeepSpeed); goes when step=10.ckpt goes
    `-- step=30.ckpt.torn-93c5d001/      in quarantine: a save that was killed, or a damaged checkpoint; never loaded
```

Nothing of ours lies outside ``.distplus``, so that no pattern that looks for checkpoints by name can find it.
The stage, the aside and the target lie on one file system: every move is a rename.

A file and its manifest are two names, which cannot change in one step. So a new file that replaces one is linked twice,
at its target and in the aside: of a file that lies in an aside as well, the manifest there is the true one.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

logger = logging.getLogger(__name__)
Sync: TypeAlias = Callable[[int], None]
"""Forces what an open file or folder holds to the disk, given its descriptor: ``os.fsync``, or a seam of a test."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux, linux/fcntl.h and linux/fs.h

# -- where the parts of a checkpoint lie -------------------------------------------------------------------------------

META = ".distplus"
MANIFEST = "manifest.json"
MARKER = "commit"
_WORK_FOLDER = re.compile(r"(?P<name>.+)\.(?P<role>stage|aside|draft|removed|torn|universal)-[0-9a-f]{8}")


class Stage:
    """The places that one save of ``target`` uses; ``nonce`` tells it from other saves of the same target.

    ``folder`` holds ``payload``, the file or folder that the save writes under the target's own name. ``aside`` is what
    it is called from just before it replaces what is at the target: ``aside_payload`` is the new checkpoint, loadable
    until it is at the target; a folder gives way to the old one then. ``draft`` holds a second name of a file that is
    to be moved to the target, and what was there before.
    """

    def __init__(self, target: Path, nonce: str | None = None) -> None:
        self.target = target.absolute()
        self.nonce = nonce or _new_nonce()
        roles = ("stage", "aside", "draft")
        self.folder, self.aside, self.draft = (beside(self.target, role, self.nonce) for role in roles)
        self.payload, self.aside_payload = self.folder / target.name, self.aside / target.name


def beside(target: Path, role: str, nonce: str | None = None) -> Path:
    """A folder of ours for what belongs to ``target``, in one of the roles above; a new one without a ``nonce``."""
    return target.parent / META / f"{target.name}.{role}-{nonce or _new_nonce()}"


def _new_nonce() -> str:
    return secrets.token_hex(4)


def meta_folder(path: Path, *, is_directory: bool | None = None) -> Path:
    """The folder of manifest and marker of the checkpoint at ``path``, of what lies there now or of a kind to come."""
    if path.is_dir() if is_directory is None else is_directory:
        return path / META
    if is_directory is None:
        for folder in leftovers_of(path, "aside"):
            meta = folder / META / path.name
            with suppress(OSError):
                if meta.is_dir() and path.samefile(folder / path.name):
                    return meta
    return path.parent / META / path.name


def asides_in(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Pairs of a checkpoint that was moved aside and the target that it was moved from."""
    for folder, name, role in _work_folders(directory):
        if role == "aside":
            yield folder / name, directory / name


def is_aside(path: Path) -> bool:
    """Whether ``path`` is a checkpoint that was moved aside."""
    match = _WORK_FOLDER.fullmatch(path.parent.name)
    return path.parent.parent.name == META and match is not None and match["role"] == "aside"


def leftovers_of(target: Path, *roles: str) -> list[Path]:
    """What lies beside ``target`` in these roles."""
    return [folder for folder, name, role in _work_folders(target.parent) if name == target.name and role in roles]


def in_role(directory: Path, role: str) -> list[Path]:
    """Everything in ``directory`` in one role: "torn" is in quarantine, "removed" is what somebody began to delete."""
    return [folder for folder, _, found in _work_folders(directory) if found == role]


def _work_folders(directory: Path) -> Iterator[tuple[Path, str, str]]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for folder in sorted((directory / META).iterdir()):
            if match := _WORK_FOLDER.fullmatch(folder.name):
                yield folder, match["name"], match["role"]


# -- reading, writing and moving ---------------------------------------------------------------------------------------


def list_files(payload: Path) -> dict[str, int]:
    """Sizes in bytes by posix path relative to the payload, sorted by path; a single file stands under its own name."""
    if payload.is_file():
        return {payload.name: payload.stat().st_size}
    files = [Path(folder, name) for folder, _, names in os.walk(payload, onerror=_raise) for name in names]
    return dict(sorted((file.relative_to(payload).as_posix(), file.stat().st_size) for file in files))


def list_folders(payload: Path) -> list[Path]:
    """The payload's folders, itself included; none for a single file."""
    return [Path(folder) for folder, _, _ in os.walk(payload, onerror=_raise)] if payload.is_dir() else []


def _raise(error: OSError) -> None:
    raise error


def write_file(path: Path, content: bytes, *, sync: Sync | None) -> None:
    """Writes a whole new file; it is not atomic, so the caller writes where nobody looks yet."""
    with path.open("wb") as file:
        file.write(content)
        if sync is not None:
            file.flush()
            sync(file.fileno())


def sync_folder(folder: Path, *, sync: Sync | None) -> None:
    """Forces the names in ``folder`` to the disk, where its file system can do that."""
    if sync is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two names in one step: at no instant is there nothing at either of them.

    Raises:
        OSError: EINVAL, ENOSYS or ENOTSUP where the system or the file system cannot do that (NFS, Lustre, macOS).
    """
    sys.audit("distplus.exchange", str(one), str(other))
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    if rename is None or rename(*names, _RENAME_EXCHANGE) != 0:
        number = errno.ENOSYS if rename is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


def put_in_place(new: Path, target: Path, old: Path) -> Path | None:
    """Puts a file, a folder or a link at ``target``, in one step and whatever is there, where the file system can.

    Where it cannot exchange names, a folder leaves ``target`` before the new one takes its place.

    Returns:
        Where that lies now which was there: at ``old``, or at ``new``; None where there was nothing.

    Raises:
        OSError: What was at ``target`` is there.
    """
    if not os.path.lexists(target):
        new.rename(target)
        return None
    try:
        _exchange(new, target)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        return _replace(new, target, old)
    return new


def _replace(new: Path, target: Path, old: Path) -> Path | None:
    """What `put_in_place` does on a file system that does not exchange names."""
    if not any(path.is_dir() and not path.is_symlink() for path in (new, target)):
        if not target.is_symlink():
            second_name(target, old, sync=None)
        new.replace(target)
        return old if os.path.lexists(old) else None
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    return old


def second_name(source: Path, destination: Path, *, sync: Sync | None) -> None:
    """Gives a file a second name: a hard link, or a copy where the file system has none."""
    try:
        destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copyfile(source, destination)
        if sync is not None:
            with destination.open("rb") as copied:
                sync(copied.fileno())


def remove_tree(path: Path) -> None:
    """Deletes a file or a folder as far as possible; says so when something stays. Never raises."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
            return
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.warning("%s cannot be deleted completely. Delete it by hand.", path)
    except OSError as error:  # it cannot even be looked at
        logger.warning("%s cannot be deleted (%s). Delete it by hand.", path, error)


# -- digests, of files that are read or written ------------------------------------------------------------------------

BLOCK_BYTES = 64 << 20
"""Larger files have a digest of each such block as well, so that several ranks can share the reading."""

_CHUNK_BYTES = 256 << 10  # stays in the second cache from the read to the digest


def bytes_digest(content: bytes) -> str:
    """XXH3 128-bit digest in hex."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(content)


@dataclass(frozen=True)
class FileDigest:
    """Size of a file, XXH3 128-bit digest of its content, and of its blocks where it has more than one."""

    size_bytes: int
    xxh3_128: str
    blocks: tuple[str, ...] = ()


class _Running:
    """The digests of what has come so far, with those of its blocks on request."""

    def __init__(self, *, with_blocks: bool) -> None:
        import xxhash

        self.size_bytes = 0
        self._new = xxhash.xxh3_128
        self._whole = self._new()
        self._block = self._whole  # the first block has the digest that the whole has until then
        self._blocks: list[str] = []
        self._with_blocks = with_blocks

    def update(self, part: memoryview) -> None:
        """More of it: at most a chunk, so that it stays in the cache from one digest to the next."""
        while part:
            piece = part[: BLOCK_BYTES - self.size_bytes % BLOCK_BYTES]
            self._whole.update(piece)
            if self._block is not self._whole:
                self._block.update(piece)
            self.size_bytes += len(piece)
            part = part[len(piece) :]
            if self._with_blocks and self.size_bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._block.hexdigest())
                self._block = self._new()

    def result(self) -> FileDigest:
        """Of all of it."""
        blocks = self._blocks if self.size_bytes > BLOCK_BYTES else []
        if blocks and self.size_bytes % BLOCK_BYTES:
            blocks = [*blocks, self._block.hexdigest()]
        return FileDigest(self.size_bytes, self._whole.hexdigest(), tuple(blocks))


def digest_file(
    path: Path,
    *,
    block: int | None = None,
    sync: Sync | None = None,
    on_bytes: Callable[[int], object] | None = None,
    with_blocks: bool = False,
) -> FileDigest:
    """The digest of what can be read at ``path``, or of one block of it, with those of its blocks on request.

    ``sync`` forces it to the disk; ``on_bytes`` is told how many bytes were read, after each part.
    """
    digest, view = _Running(with_blocks=with_blocks), memoryview(bytearray(_CHUNK_BYTES))
    left_bytes = sys.maxsize if block is None else BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # it is read from its begin to its end: more of it at once
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        file.seek((block or 0) * BLOCK_BYTES)
        while num_bytes := file.readinto(view[: min(_CHUNK_BYTES, left_bytes)]):
            digest.update(view[:num_bytes])
            left_bytes -= num_bytes
            if on_bytes is not None:
                on_bytes(num_bytes)
        if sync is not None:
            sync(file.fileno())
    return digest.result()


class DigestedStream:
    """A new file that is written from its begin to its end. It has no descriptor, so that nobody writes past it."""

    def __init__(self, file: IO[bytes], digest: _Running, sync: Sync | None) -> None:
        self._file = file
        self._digest = digest
        self._sync = sync

    def write(self, data: Any) -> int:
        """Writes any buffer; the bytes that are digested are those that are handed to the system."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            part = view[start : start + _CHUNK_BYTES]
            self._digest.update(part)
            self._file.write(part)
        return len(view)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._digest.size_bytes

    def flush(self) -> None:
        """Hands what was written to the system."""
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Forces what was written to the disk, and closes the file."""
        if not self._file.closed:
            self._file.flush()
            if self._sync is not None:
                self._sync(self._file.fileno())
            self._file.close()


class DigestedWrites:
    """Digests of the files of one save, taken while this rank writes them and forces them to the disk."""

    def __init__(self, sync: Sync | None) -> None:
        self.sync = sync
        self._found: dict[Path, FileDigest] = {}

    @contextmanager
    def open(self, path: Path) -> Iterator[DigestedStream]:
        """Opens a new file for writing; its digest counts once this block has ended without an error."""
        self._found.pop(path, None)
        digest = _Running(with_blocks=True)
        with path.open("wb") as file:
            stream = DigestedStream(file, digest, self.sync)
            yield stream
            stream.close()
        self._found[path] = digest.result()

    def found(self, root: Path) -> dict[str, dict[str, Any]]:
        """By path below a folder the digests of what is there and has the size that was written."""
        return {
            path.relative_to(root).as_posix(): asdict(digest)
            for path, digest in self._found.items()
            if path.is_relative_to(root) and path.is_file() and path.stat().st_size == digest.size_bytes
        }
