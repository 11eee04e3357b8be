"""Which checkpoints there are, which are whole, and from which a run goes on: found, verified, removed, linked."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from lightning_distplus.checkpoint import files
from lightning_distplus.checkpoint.files import BLOCK_BYTES, MANIFEST, MARKER, META, Stage
from lightning_distplus.checkpoint.manifest import FileEntry, Manifest
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch
from lightning_distplus.events import read_events

logger = logging.getLogger(__name__)
Mode = Literal["full", "size"]
_LOOKS = 20  # at a checkpoint that a save replaces each time


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
    """What verification found out about one checkpoint."""

    path: Path
    state: CheckpointState
    manifest: Manifest | None
    """Where it can be read."""
    findings: tuple[FileFinding, ...]
    """What is wrong, in the order of the manifest."""
    manifest_xxh3_128: str | None = None
    """The digest of the manifest, where it is committed."""

    @property
    def ok(self) -> bool:
        """Whether it is committed and every checked file is as it was then."""
        return self.state is CheckpointState.COMMITTED and not self.findings

    @property
    def reference(self) -> dict[str, str] | None:
        """What the manifest of a checkpoint that follows it says of it, where it is committed."""
        digest = self.manifest_xxh3_128
        return None if digest is None else {"path": str(self.path.absolute()), "manifest_xxh3_128": digest}


# -- the newest one of a folder ----------------------------------------------------------------------------------------


def newest_valid(directory: str | Path, *, verify: Mode = "full", but: Collection[Path] = ()) -> Path | None:
    """The newest committed checkpoint in a folder whose files are as they were when it was committed.

    The newest commit and those before it in its run come first, then those of other lines: a run that went back to an
    earlier step on purpose goes on from where it is now, and one warning names the higher step that it has left. Among
    equals the manifest's global step counts, then the time of commit; names and file times mean nothing. Checkpoints
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
    successors = dict(_children(Path(directory)))
    looked = [look(path) for path in successors]
    line = line_of_newest(looked)
    for candidate in newest_first(looked, line):
        if candidate.state in (CheckpointState.UNMANIFESTED, CheckpointState.MISSING) or candidate.path in but:
            continue
        successor = successors[candidate.path]
        if successor is not None and successor not in but and look(successor, verify).ok:
            continue
        report = look(candidate.path, verify)
        if report.ok:
            if not but:
                _warn_of_line_left(report, looked, line)
            return report.path
        logger.warning("Checkpoint %s is passed over: %s", report.path, _describe(report))
    return None


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
    yield from files.asides_in(directory)


def line_of_newest(reports: Iterable[Report]) -> frozenset[str]:
    """The digests of the newest commit's manifest and, as far as they are there, of those before it in its run.

    Empty where none says what was before it: early releases did not. Else one that does not is the first of a run.
    """
    found = {one.manifest_xxh3_128: one.manifest for one in reports if one.manifest_xxh3_128 and one.manifest}
    if all(manifest.parent is None for manifest in found.values()):
        return frozenset()
    line: set[str] = set()
    digest: str | None = max(found, key=lambda one: (found[one].committed_at, found[one].global_step))
    while digest is not None and digest in found and digest not in line:
        line.add(digest)
        parent = found[digest].parent
        digest = None if parent is None else parent["manifest_xxh3_128"]
    return frozenset(line)


def newest_first(reports: Iterable[Report], line: Collection[str]) -> list[Report]:
    """In the order in which a run goes on from them: those of the line, then by step, then by time of commit.

    What cannot be read, or is not committed, might be the newest: it is met, and reported, first.
    """

    def age(report: Report) -> tuple[bool, float, float]:
        if report.manifest is None:
            return True, math.inf, math.inf
        is_on_line = report.manifest_xxh3_128 in line or not report.ok
        return is_on_line, report.manifest.global_step, report.manifest.committed_at

    return sorted(reports, key=age, reverse=True)


def _warn_of_line_left(chosen: Report, others: Iterable[Report], line: Collection[str]) -> None:
    left = [other for other in others if other.ok and other.manifest_xxh3_128 not in line]
    highest = newest_first([chosen, *left], ())[0]
    if chosen.manifest_xxh3_128 in line and highest is not chosen:
        logger.warning(
            "Checkpoint %s (step %d) is on the line of the newest commit and is taken; %s (step %d) is on a line that "
            "was left. To go on from there, give its path",
            *(part for one in (chosen, highest) if one.manifest for part in (one.path, one.manifest.global_step)),
        )


def committed_in(directory: Path) -> list[Report]:
    """The committed children of a folder, the newest first; links to siblings and what lies aside are left out."""
    found = [look(path) for path, moved_from in _children(directory) if moved_from is None]
    committed = [report for report in found if report.ok]
    return newest_first(committed, line_of_newest(committed))


def whole_one_of(path: Path) -> Path:
    """The checkpoint at ``path``; where that is gone or damaged, the newest whole one that a killed save left aside."""
    report = look(path, "size")
    if report.ok or report.state is CheckpointState.UNMANIFESTED:
        return path
    asides = [look(aside, "size") for aside, target in files.asides_in(path.parent) if target.name == path.name]
    whole = [(found.manifest.committed_at, found.path) for found in asides if found.ok and found.manifest is not None]
    if not whole:
        return path
    logger.warning("Checkpoint %s is %s; %s is taken, which a save has left", path, report.state.value, max(whole)[1])
    return max(whole)[1]


def asides_without_target(directory: Path) -> list[Path]:
    """Whole checkpoints that a killed save has left aside while there is nothing at their place."""
    return [
        path for path, target in files.asides_in(directory) if not os.path.lexists(target) and look(path, "size").ok
    ]


# -- one checkpoint ----------------------------------------------------------------------------------------------------


def verify(path: str | Path, mode: Mode = "full", *, on_bytes: Callable[[int], object] | None = None) -> Report:
    """Compares a checkpoint, file or directory, with its manifest.

    Args:
        path: The checkpoint.
        mode: "full" reads every byte, "size" compares sizes.
        on_bytes: Told how many bytes were read, for a progress bar.
    """
    _check_mode(mode)
    return look(Path(path), mode, on_bytes)


def look(path: Path, mode: Mode | None = None, on_bytes: Callable[[int], object] | None = None) -> Report:
    """The report of manifest and marker, and by a mode of the files; looks again where a save has replaced it."""
    for _ in range(_LOOKS):
        before = _whereabouts(path)
        report = _inspect_once(path)
        if mode is not None and report.ok and report.manifest is not None:
            report = replace(report, findings=tuple(_findings(_real(path), report.manifest.files, mode, on_bytes)))
        if _whereabouts(path) == before:
            break
    return report


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
    return look(Path(path)).state


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a checkpoint, committed or not.

    Raises:
        CheckpointCorrupt: There is none, or it is malformed.
        CheckpointMismatch: It has another version.
    """
    if (found := look(Path(path)).manifest) is not None:
        return found
    file = files.meta_folder(_real(Path(path))) / MANIFEST
    try:
        return Manifest.from_json(file.read_bytes(), str(file))
    except OSError as error:
        raise CheckpointCorrupt(
            f"The checkpoint {path} has no readable manifest: {_reason(error)}. It was not saved through a Resilient "
            "strategy, or is damaged; `state` tells which."
        ) from error


def _whereabouts(path: Path) -> tuple[Any, ...]:
    real = _real(path)
    try:
        found = real.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_ctime_ns, files.meta_folder(real))


def _inspect_once(path: Path) -> Report:
    def report(
        state: CheckpointState, file: Path, expected: str, found: str, manifest: Manifest | None = None
    ) -> Report:
        return Report(path, state, manifest, (FileFinding(str(file), expected, found),))

    real = _real(path)
    if not real.exists():
        return report(CheckpointState.MISSING, path, "a checkpoint", "nothing")
    meta = files.meta_folder(real)
    file, marker, torn = meta / MANIFEST, meta / MARKER, CheckpointState.TORN
    if not (file.is_file() or marker.is_file()):
        stranger = "none (not saved through a Resilient strategy)"
        return report(CheckpointState.UNMANIFESTED, file, "a manifest", stranger)
    try:
        content = file.read_bytes()
        manifest = Manifest.from_json(content, str(file))
    except OSError as error:
        return report(torn, file, "a readable manifest", _reason(error))
    except (CheckpointCorrupt, CheckpointMismatch) as error:
        return report(torn, file, "a manifest of a version known here", str(error))
    found, digest = _read_marker(marker), files.bytes_digest(content)
    if found != digest:
        return report(torn, marker, f"a marker for the manifest {digest}", found, manifest)
    return Report(path, CheckpointState.COMMITTED, manifest, (), found)


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


def _findings(
    real: Path, entries: Sequence[FileEntry], mode: Mode, on_bytes: Callable[[int], object] | None
) -> Iterator[FileFinding]:
    is_folder = real.is_dir()
    if not is_folder and len(entries) != 1:
        yield FileFinding(str(real), f"a directory of {len(entries)} files", "a single file")
        return
    for entry in entries:
        if finding := _check_file(real / entry.path if is_folder else real, entry, mode, on_bytes):
            yield finding


def _check_file(
    file: Path,
    entry: FileEntry,
    mode: Mode,
    on_bytes: Callable[[int], object] | None = None,
    *,
    block: int | None = None,
) -> FileFinding | None:
    """What is wrong with one file, or with one of its blocks, if anything."""
    try:
        size_bytes = file.stat().st_size
        if size_bytes != entry.size_bytes or not file.is_file():
            return FileFinding(str(file), f"{entry.size_bytes} bytes", f"{size_bytes} bytes")
        if mode == "full":
            digest = files.digest_file(file, block=block, on_bytes=on_bytes).xxh3_128
            expected = entry.xxh3_128 if block is None else entry.blocks_64_mib[block]
            if digest != expected:
                begin = 0 if block is None else block * BLOCK_BYTES
                where = "" if block is None else f" in bytes {begin} to {begin + _size_bytes((entry, block))}"
                return FileFinding(str(file), f"XXH3 digest {expected}{where}", digest)
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


# -- checkpoints without a manifest ------------------------------------------------------------------------------------

_PICKLE = b"\x80"  # how torch's format before 1.6 begins
_DIRECTORY_SIGNS = ("meta.pt", ".metadata", "latest")  # Lightning's sharded folders, torch's, DeepSpeed's


def check_unmanifested(path: Path) -> tuple[FileFinding, ...]:
    """What is wrong with a checkpoint that nobody has committed; nothing, as far as that can be told.

    torch writes zip files with a CRC of each member and never reads it back (pytorch issue 126952): it is read here.
    A file whose members all have the CRC 0 was written without (``torch.serialization.set_crc32_options``).
    """
    if path.is_dir() and not any((path / sign).exists() for sign in _DIRECTORY_SIGNS):
        return (FileFinding(str(path), f"a folder with {' or '.join(_DIRECTORY_SIGNS)}", "none of them"),)
    archives = [path / name for name in files.list_files(path) if name.endswith(".pt")] if path.is_dir() else [path]
    return tuple(finding for finding in map(_check_archive, archives) if finding is not None)


def _check_archive(file: Path) -> FileFinding | None:
    try:
        with file.open("rb") as stream:
            head = stream.read(1)
        if not head:
            return FileFinding(str(file), "a checkpoint", "an empty file")
        if head == _PICKLE:
            return None
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip() if any(member.CRC for member in archive.infolist()) else None
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError) as error:
        return FileFinding(str(file), "a whole zip file, as torch.save writes it", f"{type(error).__name__} ({error})")
    return None if bad is None else FileFinding(str(file), f"the CRC of its member {bad}", "another CRC")


# -- verification that the ranks share ---------------------------------------------------------------------------------

_NUM_READERS = 2  # of a rank: a disk or a network gives one of them less than it has
_Part = tuple[FileEntry, int | None]  # a file, or one block of a large one


def place_of(path: Path) -> list[Any] | None:
    """Which checkpoint lies at a path, and in which folder: the digest of its manifest, and that file's inode and time.

    Ranks that share the folder say the same; those of nodes with folders of their own differ. None: there is no
    committed checkpoint whose files have the right sizes.
    """
    try:
        report = look(path, "size")
        file = (files.meta_folder(_real(path)) / MANIFEST).stat()
    except OSError:
        return None
    return [report.manifest_xxh3_128, file.st_ino, file.st_mtime_ns] if report.ok else None


def findings_in_share(path: Path, manifest: Manifest, *, rank: int, num_ranks: int) -> list[FileFinding]:
    """What is wrong with the bytes that this one of the ranks reads; the sizes have been compared before."""

    def check(part: _Part) -> FileFinding | None:
        entry, block = part
        return _check_file(path / entry.path if path.is_dir() else path, entry, "full", block=block)

    with ThreadPoolExecutor(_NUM_READERS, "distplus-reader") as readers:
        return [finding for finding in readers.map(check, _share(manifest, rank, num_ranks)) if finding is not None]


def _share(manifest: Manifest, rank: int, num_ranks: int) -> list[_Part]:
    """What this rank reads: about as many bytes as the others, one run after the other.

    Files are in the order of the numbers in their names, so that the run of a rank is more or less the shard that it
    loads then, which its host has in memory by that time.
    """
    parts: list[_Part] = []
    for entry in sorted(manifest.files, key=_by_numbers):
        parts += [(entry, number) for number in range(len(entry.blocks_64_mib))] or [(entry, None)]
    ends = list(accumulate(map(_size_bytes, parts)))
    middles = [2 * end - _size_bytes(part) for part, end in zip(parts, ends, strict=True)]  # times two, in integers
    readers = [min(middle * num_ranks // max(1, 2 * ends[-1]), num_ranks - 1) for middle in middles]
    return [part for part, reader in zip(parts, readers, strict=True) if reader == rank]


def _by_numbers(entry: FileEntry) -> list[str | int]:
    return [int(word) if word.isdigit() else word for word in re.split("([0-9]+)", entry.path)]


def _size_bytes(part: _Part) -> int:
    entry, block = part
    return entry.size_bytes if block is None else min(BLOCK_BYTES, entry.size_bytes - block * BLOCK_BYTES)


# -- removal, and links as save_last="link" wants them -----------------------------------------------------------------


def remove(path: str | Path) -> None:
    """Deletes a checkpoint with its manifest and what saves of it have left; that it is gone already is fine."""
    path = Path(path)
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if files.is_aside(path):
        files.remove_tree(path.parent)
        return
    # The payload goes at once, by one call, so that no reader meets half a checkpoint; then what nobody looks for.
    if path.is_dir():
        trash = files.beside(path, "removed")
        trash.parent.mkdir(exist_ok=True)
        try:
            path.rename(trash)
        except FileNotFoundError:
            return  # another process was faster
    else:
        path.unlink(missing_ok=True)
        files.remove_tree(files.meta_folder(path, is_directory=False))
    for folder in [*files.leftovers_of(path, "aside", "draft", "universal"), *files.in_role(path.parent, "removed")]:
        files.remove_tree(folder)


def is_last_valid(path: str | Path) -> bool:
    """Whether a folder would hold no valid checkpoint any more without this one; sizes are compared, nothing is read.

    A link, and what is not committed, is never the last valid one.
    """
    path = Path(path)
    if path.is_symlink() or not verify(path, "size").ok:
        return False
    others = (report.path for report in committed_in(path.parent) if report.path.absolute() != path.absolute())
    return not any(verify(other, "size").ok for other in others)


def link(checkpoint: Path, name: Path) -> None:
    """Makes ``name`` a relative link to ``checkpoint``, in the place of what is there. One rank calls it.

    A checkpoint that is not there, because its save has failed, leaves the older link as it is; a file system without
    links leaves it too, with a warning. What was there and is no link goes when the link is there.
    """
    if checkpoint.absolute() == name.absolute():
        return
    if not checkpoint.exists():
        logger.warning("%s is not there; %s stays as it is", checkpoint, name)
        return
    stage = Stage(name)
    fresh = stage.draft / name.name
    try:
        for folder in (stage.draft, stage.aside):
            folder.mkdir(parents=True)
        fresh.symlink_to(os.path.relpath(checkpoint, name.parent))
        files.put_in_place(fresh, name, stage.aside_payload)
    except OSError as error:
        logger.warning("%s cannot be linked to %s (%s); it stays as it is", name, checkpoint, error)
        left = [stage.draft, stage.aside]
    else:
        left = [files.meta_folder(name, is_directory=False), *files.leftovers_of(name, "aside", "draft", "universal")]
    for folder in left:
        files.remove_tree(folder)


# -- going on: the newest one of a folder, or of what a job has saved --------------------------------------------------

AUTO = "auto"
"""As ``ckpt_path``: the newest valid checkpoint, or a fresh start where there is none."""
_SUFFIX = ".ckpt"  # by which a checkpoint that is not ours is told from other files


def newest_in(folder: Path, *, verify: Mode, allow_fresh: bool) -> Path | None:
    """The newest valid checkpoint of a folder; None where there is none yet, or by ``allow_fresh`` none to trust."""
    found = newest_valid(folder, verify=verify)
    if found is not None:
        logger.info("ckpt_path auto: resuming from %s", found)
        return found
    untrusted = checkpoints_in(folder)
    if untrusted and not allow_fresh:
        raise CheckpointCorrupt(
            f"ckpt_path auto: {folder} holds {_named(untrusted)}, none of them committed and sound; "
            f"'distplus verify {folder}' says why. Name one by its path, or start anew: with --allow_fresh, or in a "
            "script without ckpt_path."
        )
    logger.info("ckpt_path auto: nothing to resume from in %s; starting anew", folder)
    return None


def _named(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return f"{len(paths)} checkpoint(s) ({names})"


def checkpoints_in(directory: Path) -> list[Path]:
    """Direct children that are checkpoints, ours or not, sound or not, by name."""

    def is_checkpoint(path: Path) -> bool:
        found = state(path)
        is_stranger = found is CheckpointState.UNMANIFESTED
        return path.suffix == _SUFFIX if is_stranger else found is not CheckpointState.MISSING

    children = sorted(directory.iterdir()) if directory.is_dir() else []
    return [path for path in children if not path.name.startswith(".") and is_checkpoint(path)]


@dataclass(frozen=True)
class JobSaves:
    """What one fit of a job has saved, in all attempts so far, as the ledger tells it.

    A script may fit more than once: its second fit goes on from what second fits have saved.
    """

    paths: tuple[Path, ...]
    """The first one first; not all of them need be there still."""
    others: frozenset[Path]
    """What other fits have saved to the same folders."""
    began_at: float
    """Unix time at which the job began."""

    @classmethod
    def of_fit(cls, home: Path, run_id: str, number: int | None = None) -> JobSaves:
        """Reads the ledger of a job; the fits of its script have numbers from 1 on, None is the last one that began."""
        events = read_events(home, run_id=run_id)
        fits = list(_with_numbers(events))
        number = max((fit for fit, _ in fits), default=0) if number is None else number
        named = [(event.get("path"), fit) for fit, event in fits if event["kind"] in ("saved", "preempted")]
        fit_of = {Path(path): fit for path, fit in named if isinstance(path, str) and "://" not in path}
        mine = tuple(path for path, fit in fit_of.items() if fit == number)
        began_at = min((event["time"] for event in events), default=0.0)
        return cls(mine, frozenset(fit_of) - frozenset(mine), began_at)

    @property
    def folders(self) -> list[Path]:
        """Where they were saved."""
        return list(dict.fromkeys(path.parent for path in self.paths))

    def newest_valid(self) -> Path | None:
        """The newest one that is valid, those included that a rank has committed and not lived to note."""
        found = [newest_valid(folder, verify="size", but=self.passed_over(folder)) for folder in self.folders]
        if valid := [path for path in found if path is not None]:
            return max(valid, key=lambda path: read_manifest(path).committed_at)
        damaged = [path for path in self.paths if state(path) is not CheckpointState.MISSING]
        if damaged:
            raise CheckpointCorrupt(
                f"This job has saved {_named(damaged)} to {damaged[0].parent}, none of them sound; 'distplus verify "
                f"{damaged[0].parent}' says why. Name one by its path, or leave the choice to the script: --no-resume."
            )
        return None

    def passed_over(self, folder: Path) -> list[Path]:
        """The committed checkpoints of a folder that are another job's, or another fit's."""
        there = [report.path for report in committed_in(folder)] + [aside for aside, _ in files.asides_in(folder)]
        return [path for path in there if path not in self.paths and self._is_of_others(path)]

    def _is_of_others(self, path: Path) -> bool:
        with suppress(CheckpointCorrupt, CheckpointMismatch):
            return path in self.others or read_manifest(path).committed_at < self.began_at
        return True


def num_fits(home: Path, run_id: str, attempt: int, rank: int) -> int:
    """How many fits a rank has begun in an attempt, as the ledger tells it."""
    numbers = _with_numbers(read_events(home, run_id=run_id))
    return max((fit for fit, event in numbers if (event["attempt"], event["rank"]) == (attempt, rank)), default=0)


def _with_numbers(events: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each event of a fit with the number of that fit within its process."""
    numbers: Counter[tuple[int, int]] = Counter()
    in_fit: set[tuple[int, int]] = set()  # processes
    for event in events:
        process = (event["attempt"], event["rank"])
        if event["kind"] == "start":
            is_fit = event.get("function") == "fit"
            numbers[process] += is_fit
            (in_fit.add if is_fit else in_fit.discard)(process)
        if process in in_fit:
            yield numbers[process], event
