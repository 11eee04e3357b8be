"""Durable copies: committed checkpoints are copied to a URL behind the run, and fetched where a folder has none.

The folder of the run is then the fast tier (``/dev/shm``, a local disk), one for all ranks or one on each node, and the
URL the durable one: anything that fsspec knows. A copy has the layout of the folder, and its marker comes last there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lightning_distplus.checkpoint import files
from lightning_distplus.checkpoint.catalog import CheckpointState, Report, line_of_newest, look, newest_first
from lightning_distplus.checkpoint.commit import claim, publish
from lightning_distplus.checkpoint.files import MANIFEST, MARKER, META, Stage
from lightning_distplus.checkpoint.manifest import Manifest
from lightning_distplus.errors import CheckpointCorrupt, DistplusError

logger = logging.getLogger(__name__)

_KEPT = 3


@dataclass(frozen=True)
class _Copy:
    """Where the copy of one checkpoint lies."""

    root: str
    name: str
    is_directory: bool

    @property
    def meta(self) -> str:
        return f"{self.root}/{self.name}/{META}" if self.is_directory else f"{self.root}/{META}/{self.name}"

    def file(self, inner: str) -> str:
        return f"{self.root}/{self.name}/{inner}" if self.is_directory else f"{self.root}/{self.name}"


class Copies:
    """The copies of checkpoints below one URL.

    Args:
        url: Their folder; what stands before ``://`` names the file system, as fsspec does.
        kept: How many of the newest copies stay.
    """

    def __init__(self, url: str, *, kept: int = _KEPT) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        self._kept = kept
        self._fs, self._root = url_to_fs(url)

    def put(self, path: Path) -> None:
        """Copies a committed checkpoint, and lets the oldest copies go.

        Raises:
            OSError: It cannot be copied; there is no marker, and so no copy.
            CheckpointCorrupt: It is not committed.
            FileNotFoundError: It was removed or replaced meanwhile.
        """
        before, meta = look(path), files.meta_folder(path)
        if not before.ok or before.manifest is None:
            raise CheckpointCorrupt(f"{path} is {before.state.value}: nothing that is not committed is copied.")
        documents = {name: (meta / name).read_bytes() for name in (MANIFEST, MARKER)}
        copy = _Copy(self._root, path.name, path.is_dir())
        self._unmark(copy)
        for entry in before.manifest.files:
            there = copy.file(entry.path)
            self._fs.makedirs(there.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path / entry.path if path.is_dir() else path), there)
            if self._fs.size(there) != entry.size_bytes:
                raise OSError(f"{there} has {self._fs.size(there)} bytes after it was copied, not {entry.size_bytes}")
        if look(path).reference != before.reference:
            raise FileNotFoundError(f"{path} was removed or replaced while it was copied")
        self._fs.makedirs(copy.meta, exist_ok=True)
        for document, content in documents.items():  # the marker last
            self._fs.pipe_file(f"{copy.meta}/{document}", content)
        for old, _ in self._committed()[self._kept :]:
            self._unmark(old)
            for place in (old.meta, f"{self._root}/{old.name}"):
                if self._fs.exists(place):
                    self._fs.rm(place, recursive=True)

    def ensure(self, path: Path, manifest_xxh3_128: str) -> None:
        """Copies a checkpoint now where the URL has no copy of it, or raises `CheckpointCorrupt`."""
        try:
            if self._find(path.name, manifest_xxh3_128) is None:
                self.put(path)
        except Exception as error:  # whatever a file system raises
            raise CheckpointCorrupt(
                f"{path} is not on all nodes, and cannot be copied to {self.url} for the others: "
                f"{type(error).__name__}: {error}. Resume from a checkpoint that has a copy there."
            ) from error

    def fetch(self, path: Path, manifest_xxh3_128: str) -> list[str]:
        """Makes the copy of one checkpoint the committed one at ``path``; returns what went wrong, if anything."""
        try:
            if (found := self._find(path.name, manifest_xxh3_128)) is None:
                return [f"{self.url} has no copy of {path.name} with the manifest {manifest_xxh3_128}"]
            self._fetch(*found, path.parent)
        except Exception as error:  # whatever a file system raises: all ranks hear of it
            return [f"{path} cannot be fetched from {self.url}: {type(error).__name__}: {error}"]
        return []

    def fetch_newest(self, folder: Path) -> Path | None:
        """Makes the newest copy whose bytes are right a committed checkpoint in ``folder``; None: there is none."""
        for copy, report in self._committed():
            try:
                return self._fetch(copy, report, folder)
            except (CheckpointCorrupt, FileNotFoundError) as error:
                logger.warning("The copy of %s at %s is passed over: %s", copy.name, self.url, error)
        return None

    def _find(self, name: str, manifest_xxh3_128: str) -> tuple[_Copy, Report] | None:
        for copy, report in self._committed():
            if (copy.name, report.manifest_xxh3_128) == (name, manifest_xxh3_128):
                return copy, report
        return None

    def _fetch(self, copy: _Copy, report: Report, folder: Path) -> Path:
        assert report.manifest is not None
        stage = Stage(folder / copy.name)
        claim(stage)
        try:
            for entry in report.manifest.files:
                here, there = stage.payload / entry.path if copy.is_directory else stage.payload, copy.file(entry.path)
                here.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(there, str(here))
                found = files.digest_file(here, sync=os.fsync).xxh3_128
                if found != entry.xxh3_128:
                    raise CheckpointCorrupt(f"{there}: expected digest {entry.xxh3_128}, found {found}")
            manifest = self._fs.cat_file(f"{copy.meta}/{MANIFEST}")  # kept as it is: its digest names the checkpoint
            if files.bytes_digest(manifest) != report.manifest_xxh3_128:
                raise CheckpointCorrupt(f"{copy.meta} was replaced while it was fetched")
            publish(stage, manifest, sync=os.fsync)
        except BaseException:
            files.remove_tree(stage.folder)
            raise
        return stage.target

    def _committed(self) -> list[tuple[_Copy, Report]]:
        """Each copy with a marker, and what its manifest says, the newest first."""
        copies, reports = {}, []
        for copy in self._all():
            with suppress(OSError, DistplusError):  # it is not committed
                content = self._fs.cat_file(f"{copy.meta}/{MANIFEST}")
                if (digest := files.bytes_digest(content)).encode() in self._fs.cat_file(f"{copy.meta}/{MARKER}"):
                    manifest = Manifest.from_json(content, f"{copy.meta}/{MANIFEST}")
                    reports.append(Report(Path(copy.meta), CheckpointState.COMMITTED, manifest, (), digest))
                    copies[Path(copy.meta)] = copy
        return [(copies[report.path], report) for report in newest_first(reports, line_of_newest(reports))]

    def _all(self) -> Iterator[_Copy]:
        for folder, is_directory in ((self._root, True), (f"{self._root}/{META}", False)):
            with suppress(FileNotFoundError):
                for child in self._fs.ls(folder, detail=True, refresh=True):
                    name = str(child["name"]).rstrip("/").rpartition("/")[2]
                    if child["type"] == "directory" and name != META:
                        yield _Copy(self._root, name, is_directory)

    def _unmark(self, copy: _Copy) -> None:
        if self._fs.exists(f"{copy.meta}/{MARKER}"):
            self._fs.rm_file(f"{copy.meta}/{MARKER}")


class Copier:
    """Copies checkpoints in a thread as they are committed; one that waits when a newer one comes is left out.

    Args:
        copies: Where they go.
        on_result: Told, in the thread, what was copied and, where it was not, why.
    """

    def __init__(self, copies: Copies, on_result: Callable[[Path, str | None], object]) -> None:
        self._copies = copies
        self._on_result = on_result
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._thread: threading.Thread | None = None  # None: there is nothing to copy

    def submit(self, path: Path) -> None:
        """Has a checkpoint copied; returns at once."""
        with self._lock:
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="distplus-copier", daemon=True)
                self._thread.start()

    def close(self, deadline: timedelta) -> bool:
        """Waits for the last copy; whether it has ended in time."""
        if (thread := self._thread) is not None:
            thread.join(deadline.total_seconds())
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (path := self._take()) is not None:
            error = None
            try:
                self._copies.put(path)
            except Exception as caught:  # whatever a file system raises: the next commit is the retry
                error = f"{type(caught).__name__}: {caught}"
                logger.warning("%s is not copied to %s (%s); the next one is the retry", path, self._copies.url, error)
            self._on_result(path, error)

    def _take(self) -> Path | None:
        with self._lock:
            path, self._next = self._next, None
            if path is None:
                self._thread = None
            return path
