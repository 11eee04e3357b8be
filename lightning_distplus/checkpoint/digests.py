"""Digests of bytes, of files that are read, and of files while they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lightning_distplus.checkpoint.files import Sync, read_ahead

__all__ = [
    "BLOCK_BYTES",
    "DigestedStream",
    "DigestedWrites",
    "FileDigest",
    "bytes_digest",
    "digest_block",
    "digest_file",
]

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
    """The digests of what has come so far.

    Args:
        with_blocks: Whether blocks get digests of their own.
    """

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
        blocks = list(self._blocks) if self.size_bytes > BLOCK_BYTES else []
        if blocks and self.size_bytes % BLOCK_BYTES:
            blocks.append(self._block.hexdigest())
        return FileDigest(self.size_bytes, self._whole.hexdigest(), tuple(blocks))


def digest_file(
    path: Path,
    *,
    sync: Sync | None = None,
    on_bytes: Callable[[int], object] | None = None,
    with_blocks: bool = False,
) -> FileDigest:
    """The digest of what can be read at ``path``.

    Args:
        path: The file.
        sync: Forces its content to the disk as well; None: nobody does.
        on_bytes: Told how many bytes were read, after each part.
        with_blocks: Whether the blocks of a large file get digests of their own.
    """
    view = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        read_ahead(file)
        digest = _Running(with_blocks=with_blocks)
        while num_bytes := file.readinto(view):
            digest.update(view[:num_bytes])
            if on_bytes is not None:
                on_bytes(num_bytes)
        if sync is not None:
            sync(file.fileno())
    return digest.result()


def digest_block(path: Path, number: int) -> str:
    """The digest of one block of a file, as far as it can be read."""
    digest = _Running(with_blocks=False)
    view = memoryview(bytearray(_CHUNK_BYTES))
    left_bytes = BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        read_ahead(file)
        file.seek(number * BLOCK_BYTES)
        while num_bytes := file.readinto(view[: min(_CHUNK_BYTES, left_bytes)]):
            digest.update(view[:num_bytes])
            left_bytes -= num_bytes
    return digest.result().xxh3_128


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
    """Digests of the files of one save, taken while this rank writes them, or where it cannot, when it reads them.

    Args:
        sync: Forces each of them to the disk; None is for tests.
    """

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

    def read(self, path: Path) -> FileDigest:
        """Reads what something else has written, and forces it to the disk."""
        return digest_file(path, sync=self.sync, with_blocks=True)

    def found(self, root: Path) -> dict[str, dict[str, Any]]:
        """By path below a folder the digests of what is there and has the size that was written."""
        return {
            path.relative_to(root).as_posix(): asdict(digest)
            for path, digest in self._found.items()
            if path.is_relative_to(root) and path.is_file() and path.stat().st_size == digest.size_bytes
        }
