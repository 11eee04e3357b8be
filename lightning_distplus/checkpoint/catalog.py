"""The catalog: which checkpoints in a folder are committed and sound, and which of them is the newest."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from lightning_distplus.checkpoint.digests import bytes_digest, digest_file
from lightning_distplus.checkpoint.files import discard, remove_tree
from lightning_distplus.checkpoint.layout import (
    MANIFEST,
    MARKER,
    META,
    PREPARED_MARKER,
    asides_in,
    is_aside,
    leftovers_of,
    meta_folder,
    trash_for,
    trash_in,
)
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch

__all__ = [
    "CheckpointState",
    "FileFinding",
    "Mode",
    "Report",
    "check_file",
    "committed_in",
    "is_committed",
    "newest_valid",
    "read_manifest",
    "reference",
    "remove",
    "state",
    "verify",
    "verify_or_raise",
]

logger = logging.getLogger(__name__)

Mode = Literal["full", "size"]


class CheckpointState(str, Enum):
    """How far a path is a checkpoint of ours, as told by manifest and marker alone."""

    COMMITTED = "committed"
    TORN = "torn"
    """Begun by us and not finished, or its manifest or marker was changed afterwards."""
    UNMANIFESTED = "unmanifested"
    """Written by something else: a stock strategy, an earlier release, another tool."""
    MISSING = "missing"


@dataclass(frozen=True)
class FileFinding:
    """One file that is not what the manifest says."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Report:
    """What verification found out about one checkpoint.

    Args:
        path: The checkpoint.
        state: What manifest and marker say.
        manifest: Its manifest, where that can be read.
        findings: What is wrong, in the order of the manifest.
    """

    path: Path
    state: CheckpointState
    manifest: Manifest | None
    findings: tuple[FileFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether it is committed and every checked file is as it was then."""
        return self.state is CheckpointState.COMMITTED and not self.findings


def newest_valid(directory: str | Path, *, verify: Mode = "full", but: Collection[Path] = ()) -> Path | None:
    """The newest committed checkpoint in a folder whose files are as they were when it was committed.

    Newest is by the manifest's global step, then by its time of commit; names and file times mean nothing. Checkpoints
    that a save has moved aside count until their successor is valid. One warning is logged for each checkpoint that is
    passed over. Nothing is changed.

    Args:
        directory: The folder; its direct children are looked at.
        verify: "full" reads every byte, "size" compares sizes.
        but: Checkpoints that are passed over in silence.

    Returns:
        Its path; None when the folder is missing or has none.

    Raises:
        NotADirectoryError: ``directory`` is a file.
    """
    _check_mode(verify)
    candidates = [(_inspect(path), successor) for path, successor in _children(Path(directory))]
    candidates.sort(key=lambda candidate: _age(candidate[0]), reverse=True)
    for candidate, successor in candidates:
        if candidate.state in (CheckpointState.UNMANIFESTED, CheckpointState.MISSING) or candidate.path in but:
            continue
        if successor is not None and successor not in but and _with_files(_inspect(successor), verify).ok:
            continue
        report = _with_files(candidate, verify)
        if report.ok:
            return report.path
        logger.warning("Checkpoint %s is passed over: %s", report.path, _describe(report))
    return None


def committed_in(directory: Path) -> list[Report]:
    """The committed children of a folder, the newest first; links to siblings and what lies aside are left out."""
    found = [_inspect(path) for path, moved_from in _children(directory) if moved_from is None]
    return sorted((report for report in found if report.ok), key=_age, reverse=True)


def verify(path: str | Path, mode: Mode = "full", *, on_bytes: Callable[[int], object] | None = None) -> Report:
    """Compares a checkpoint with its manifest.

    Args:
        path: A checkpoint, file or directory.
        mode: "full" reads every byte, "size" compares sizes.
        on_bytes: Told how many bytes were read, for a progress bar.
    """
    _check_mode(mode)
    return _with_files(_inspect(Path(path)), mode, on_bytes)


def verify_or_raise(path: str | Path, mode: Mode = "full") -> Manifest:
    """The manifest of a checkpoint that is committed and sound.

    Raises:
        CheckpointCorrupt: It is not; the message names the file, what was expected and what was found.
    """
    report = verify(path, mode)
    if not report.ok or report.manifest is None:
        raise CheckpointCorrupt(
            f"The checkpoint {report.path} is {report.state.value} and cannot be trusted: {_describe(report)}. "
            "Resume from another checkpoint, or restore the file from a copy."
        )
    return report.manifest


def state(path: str | Path) -> CheckpointState:
    """What manifest and marker say about a path; its other files are not looked at."""
    return _inspect(Path(path)).state


def is_committed(path: str | Path) -> bool:
    """Whether a path is a committed checkpoint; its files are not verified."""
    return state(path) is CheckpointState.COMMITTED


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a checkpoint, committed or not.

    Raises:
        CheckpointCorrupt: There is none, or it is malformed.
        CheckpointMismatch: It has another version.
    """
    file = meta_folder(_real(Path(path))) / MANIFEST
    try:
        return Manifest.from_json(file.read_bytes(), str(file))
    except OSError as error:
        raise CheckpointCorrupt(
            f"The checkpoint {path} has no readable manifest: {_reason(error)}. It was not saved through a Resilient "
            "strategy, or is damaged; `state` tells which."
        ) from error


def remove(path: str | Path) -> None:
    """Deletes a checkpoint with its manifest and what saves of it have left; that it is gone already is fine."""
    path = Path(path)
    if path.is_symlink():
        discard(path)
    elif is_aside(path):
        remove_tree(path.parent)
    else:
        _remove_payload(path)
        for folder in leftovers_of(path, "aside", "draft", "universal"):
            remove_tree(folder)
        for trash in trash_in(path.parent):
            remove_tree(trash)


def _remove_payload(path: Path) -> None:
    # The payload goes at once, by one call, so that no reader meets half a checkpoint; then what nobody looks for.
    if path.is_dir():
        trash = trash_for(path.parent, path.name)
        trash.parent.mkdir(exist_ok=True)
        try:
            path.rename(trash)
        except FileNotFoundError:
            return  # another process was faster
        remove_tree(trash)
    else:
        discard(path)
        remove_tree(meta_folder(path, is_directory=False))


def _children(directory: Path) -> Iterator[tuple[Path, Path | None]]:
    """Candidates, each with the path that it was moved aside from."""
    try:
        children = sorted(directory.iterdir())
    except FileNotFoundError:
        return
    for child in children:
        links_to_sibling = child.is_symlink() and _real(child).parent == directory.resolve()
        if child.name != META and not links_to_sibling:
            yield child, None
    yield from asides_in(directory)


def _age(report: Report) -> tuple[float, float]:
    # What cannot be read might be the newest, so it is met, and reported, first.
    if report.manifest is None:
        return (math.inf, math.inf)
    return (report.manifest.global_step, report.manifest.committed_at)


def reference(path: Path) -> dict[str, str] | None:
    """A committed checkpoint by its path and the digest of its manifest, for the manifest of one that follows it."""
    if not is_committed(path):
        return None
    return {"path": str(path.absolute()), "manifest_xxh3_128": _read_marker(meta_folder(_real(path)) / MARKER)}


def _inspect(path: Path) -> Report:
    """The report of manifest and marker alone."""
    real = _real(path)
    if not real.exists():
        finding = FileFinding(str(path), "a checkpoint", "nothing")
        return Report(path, CheckpointState.MISSING, None, (finding,))
    meta = meta_folder(real)
    if not any((meta / name).is_file() for name in (MANIFEST, MARKER, PREPARED_MARKER)):
        finding = FileFinding(str(meta / MANIFEST), "a manifest", "none (not saved through a Resilient strategy)")
        return Report(path, CheckpointState.UNMANIFESTED, None, (finding,))
    try:
        content = (meta / MANIFEST).read_bytes()
        manifest = Manifest.from_json(content, str(meta / MANIFEST))
    except OSError as error:
        return _torn(path, None, meta / MANIFEST, "a readable manifest", _reason(error))
    except (CheckpointCorrupt, CheckpointMismatch) as error:
        return _torn(path, None, meta / MANIFEST, "a manifest of a version known here", str(error))
    found, expected = _read_marker(meta / MARKER), f"a marker for the manifest {bytes_digest(content)}"
    if found != bytes_digest(content):
        return _torn(path, manifest, meta / MARKER, expected, found)
    return Report(path, CheckpointState.COMMITTED, manifest, ())


def _torn(path: Path, manifest: Manifest | None, file: Path, expected: str, found: str) -> Report:
    return Report(path, CheckpointState.TORN, manifest, (FileFinding(str(file), expected, found),))


def _read_marker(marker: Path) -> str:
    """The manifest's digest that the marker holds, or what is wrong with it."""
    try:
        document = json.loads(marker.read_bytes())
    except FileNotFoundError:
        return "none (the save did not finish)"
    except OSError as error:
        return _reason(error)
    except ValueError:
        return "a file that is not JSON"
    if not isinstance(document, dict) or document.get("version") != 1:
        return f"a marker of unknown version: {document!r:.200}"
    return str(document.get("manifest_xxh3_128"))


def _with_files(report: Report, mode: Mode, on_bytes: Callable[[int], object] | None = None) -> Report:
    """Adds the findings about the files to a report that has none yet."""
    if not report.ok or report.manifest is None:
        return report
    real = _real(report.path)
    entries = report.manifest.files
    if not real.is_dir() and len(entries) != 1:
        finding = FileFinding(str(report.path), f"a directory of {len(entries)} files", "a single file")
        return Report(report.path, report.state, report.manifest, (finding,))
    checked = (check_file(real / entry.path if real.is_dir() else real, entry, mode, on_bytes) for entry in entries)
    findings = tuple(finding for finding in checked if finding is not None)
    return Report(report.path, report.state, report.manifest, findings)


def check_file(
    file: Path, entry: FileEntry, mode: Mode, on_bytes: Callable[[int], object] | None = None
) -> FileFinding | None:
    """What is wrong with one file, if anything."""
    try:
        size_bytes = file.stat().st_size
        if size_bytes != entry.size_bytes or not file.is_file():
            return FileFinding(str(file), f"{entry.size_bytes} bytes", f"{size_bytes} bytes")
        if mode == "full":
            digest = digest_file(file, on_bytes=on_bytes, with_sha256=bool(entry.sha256))
            if digest.xxh3_128 != entry.xxh3_128:
                return FileFinding(str(file), f"XXH3 digest {entry.xxh3_128}", digest.xxh3_128)
            if digest.sha256 != entry.sha256:
                return FileFinding(str(file), f"SHA-256 digest {entry.sha256}", digest.sha256)
    except FileNotFoundError:
        return FileFinding(str(file), f"{entry.size_bytes} bytes", "no file")
    except OSError as error:
        return FileFinding(str(file), f"{entry.size_bytes} readable bytes", _reason(error))
    return None


def _describe(report: Report) -> str:
    more = len(report.findings) - 1
    return f"{report.findings[0]}" + (f" (and {more} more)" if more > 0 else "")


def _reason(error: OSError) -> str:
    return f"{type(error).__name__} ({os.strerror(error.errno) if error.errno else error})"


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path  # Path.resolve raises on a loop


def _check_mode(mode: str) -> None:
    if mode not in ("full", "size"):
        raise ValueError(f"The verification mode is {mode!r}; it is 'full' or 'size'.")
